"""Calls of a module on tensors that are not its own."""

from typing import Any

import torch
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
    for child in module.modules():
        if isinstance(child, nn.RNNBase):  # its list of weights would keep those of this call
            child._flat_weights = [getattr(child, name) for name in child._flat_weights_names]  # noqa: SLF001
    return output, {name: values[name] for name in buffers}


def call_on_copies(
    module: nn.Module, params: dict[str, Tensor], buffers: dict[str, Tensor], args: Any, kwargs: Any
) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """Call a module on parameters and copies of buffers; return its output, and the copies in two parts.

    The first are those that it changed as autograd sees it; in the second are the others, and those that BatchNorm's
    kernels update without a word. `write_back` takes both.
    """
    copies = {name: buffer.clone() for name, buffer in buffers.items()}
    if torch.compiler.is_compiling():
        return (*call_module(module, params, copies, args, kwargs), {})
    versions = {name: copy._version for name, copy in copies.items()}  # noqa: SLF001
    output, after = call_module(module, params, copies, args, kwargs)
    seen = [
        name
        for name, buffer in after.items()
        if buffer is not copies[name] or buffer._version != versions[name]  # noqa: SLF001
    ]
    others = {name: buffer for name, buffer in after.items() if name not in seen}
    return output, {name: after[name] for name in seen}, others


def write_back(buffer: Tensor, value: Tensor, *, seen: bool) -> None:
    """Give a buffer what a call on a copy left there; `seen` says in which part it was."""
    if seen or torch.compiler.is_compiling():  # (what is recomputed there tells nothing)
        buffer.copy_(value)
    else:
        # what autograd has saved of it counts as unchanged, as if the module had been called on the buffer itself
        buffer.data.copy_(value)
