"""Two ways to keep Dynamo out of a function, typed."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def opaque(function: Function) -> Function:
    """Put a call of the function into the graph as it is; AOTAutograd traces it, with its own backward."""
    return cast("Function", torch.compiler.allow_in_graph(function))  # type: ignore[no-untyped-call]


def constant(function: Function) -> Function:
    """Call the function with constants while tracing, and take its result for a constant."""
    return cast("Function", torch.compiler.assume_constant_result(function))  # type: ignore[no-untyped-call]
