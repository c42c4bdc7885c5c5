"""Calls of a module on tensors that are not its own."""

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


def call_module(
    module: nn.Module, params: dict[str, Tensor], buffers: dict[str, Tensor], args: Any, kwargs: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Call a module on parameters and buffers; return its output and what it leaves of its buffers.

    Buffers that it changes in place are changed in place.
    """
    values = {**params, **buffers}
    output = functional_call(module, values, args, kwargs)
    return output, {name: values[name] for name in buffers}
