"""How an engine updates one bucket: in pieces, into memory that is there, and not at all if the step is skipped."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PIECE = 2**16
"""Elements that one eager update takes at a time on CPU: what the optimizer makes on the way is as many a tensor, and
stays in the cache. 64 times as many on other devices, where each operation is a launch."""

Update = Callable[[Tensor, list[Tensor], Tensor], tuple[Tensor, list[Tensor]]]
"""The optimizer on one bucket: (gradient, leaves of its state, parameters) to (parameters, leaves of its state)."""


def update_bucket(
    update: Update,
    gradient: Tensor,
    mean: Callable[[Tensor], Tensor],
    old: tuple[Tensor, Sequence[Tensor]],
    skipped: Tensor,
    *,
    donate: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Return the parameters (C,) and the leaves of the optimizer's state after a step, accepted or not.

    The optimizer is element-wise, so pieces give the bits of the whole. Compiled, its loops are fused and there is one.

    Parameters
    ----------
    update
        Called once a piece.
    gradient, mean
        The sum of the gradient (C,), and what makes the mean of a piece of it.
    old
        The parameters, and the leaves of the state: (C,), or shared by all buckets, such as the step count. The latter
        come back as the optimizer gave them, since other buckets read the old ones.
    skipped
        0-d bool: keep the old values.
    donate
        Write into `old`, or leave it as it is.
    """
    param, leaves = old
    like = [leaf.shape == param.shape for leaf in leaves]
    own = [param, *(leaf for leaf, is_like in zip(leaves, like, strict=True) if is_like)]
    into = own if donate else [torch.empty_like(leaf) for leaf in own]
    given: list[Tensor] = []
    for piece in _pieces(param):
        parts = [_cut(leaf, piece) if is_like else leaf for leaf, is_like in zip(leaves, like, strict=True)]
        new, given = update(mean(_cut(gradient, piece)), parts, _cut(param, piece))
        values = [new, *(leaf for leaf, is_like in zip(given, like, strict=True) if is_like)]
        for target, before, value in zip(into, own, values, strict=True):
            accept(skipped, _cut(before, piece), value, _cut(target, piece))
    moments = iter(into[1:])
    return into[0], [next(moments) if is_like else leaf for leaf, is_like in zip(given, like, strict=True)]


def accept(skipped: Tensor, old: Tensor, new: Tensor, into: Tensor | None = None) -> Tensor:
    """Return the new value, or in a skipped step the old one, written into a tensor if one is given."""
    value = torch.where(skipped, old, new)
    return value if into is None else into.copy_(value)


def _pieces(tensor: Tensor) -> list[slice]:
    size = PIECE if tensor.device.type == "cpu" else 64 * PIECE
    if torch.compiler.is_compiling() or tensor.numel() <= size:
        return [slice(None)]
    return [slice(start, start + size) for start in range(0, tensor.numel(), size)]


def _cut(tensor: Tensor, piece: slice) -> Tensor:
    return tensor if piece.start is None else tensor[piece]
