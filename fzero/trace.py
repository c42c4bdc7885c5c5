"""Two ways to keep Dynamo out of a function, typed; what the compiled graph is told beside the numbers."""

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


@torch.library.custom_op("fzero::forward_done", mutates_args=())
def _forward_done(loss: torch.Tensor) -> torch.Tensor:
    return loss.clone()


@_forward_done.register_fake
def _(loss: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(loss)


class _Done(torch.autograd.Function):
    @staticmethod
    def forward(loss: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", _forward_done(loss))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # noqa: ARG004
        return gradient


@opaque
def forward_done(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss, as an operation that says in the graph: forward ends here, what follows is backward."""
    return _Done.apply(loss)  # type: ignore[no-any-return]


def once(scalar: torch.Tensor) -> torch.Tensor:
    """Return a 0-d tensor, which a compiled graph computes once, before the loops that use it.

    Inductor would put what makes it into each of these loops, and compute a power for every vector of elements. It
    gives memory of its own to whatever `as_strided` is taken of; nothing else comes of that.
    """
    return scalar.as_strided((), ()) if torch.compiler.is_compiling() else scalar
