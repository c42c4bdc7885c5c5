"""From a loss to sums, and from sums over ranks to means: loss, gradient norm, gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fzero.axis import Axis
from fzero.collectives import sum_over_ranks
from fzero.rule import wide
from fzero.state import Mean, counted_by


def control(
    reduced: Sequence[Tensor], totals: tuple[Tensor, Tensor], axis: Axis, *, stop: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Agree over all ranks on (mean loss, norm of the mean gradient, number of faults, count, requests to stop).

    `reduced` are this rank's shards (C,) of the summed gradient of every bucket, `totals` its loss and count, float64,
    `stop` whether it was asked to stop. A fault is a shard that is not finite. The squares are summed in float64, shard
    by shard.

    Communicates 40 bytes from every rank to every other (all-gather).
    """
    total, count = totals
    square, bad = torch.zeros_like(total), torch.zeros_like(total)
    for gradient in reduced:
        square = square + torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        bad = bad + (~torch.isfinite(gradient).all()).to(torch.float64)
    mine = torch.stack([total, count, square, bad, torch.full_like(total, stop)])
    total, count, square, bad, asked = sum_over_ranks(mine, axis).unbind()
    count = torch.where(count > 0, count, torch.ones_like(count))
    return total / count, square.sqrt() / count, bad, count, asked


def clip_factor(norm: Tensor, limit: float | None) -> Tensor | None:
    """Return min(1, limit / (norm + 1e-6)), or None without a limit."""
    return None if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)


def divided(gradient: Tensor, count: Tensor, clip: Tensor | None = None) -> Tensor:
    """Return the mean gradient from a sum and its count, clipped; 16-bit floats are rounded once, at the end."""
    own = wide(gradient.dtype)
    mean = gradient.to(own) / count.to(own)
    if clip is not None:
        mean = mean * clip.to(own)
    return mean.to(gradient.dtype)


def read_loss(loss: Tensor | Mean, before: type | None) -> tuple[Tensor, Tensor]:
    """Return (total, float64 count) of a loss that is like those before it, or refuse it."""
    total, count = (loss.total, loss.count) if isinstance(loss, Mean) else (loss, 1.0)
    if not isinstance(total, Tensor):
        raise TypeError(f"loss: must be a 0-d floating tensor or fzero.Mean, got {type(total).__name__}")
    if not total.is_floating_point():
        raise TypeError(f"loss: must be floating, got {total.dtype}; it has no gradient")
    if total.ndim:
        raise ValueError(f"loss: must be 0-d, got shape {tuple(total.shape)}; take its mean")
    if not total.requires_grad:
        raise ValueError(
            "loss: has no graph that reaches a parameter; was forward run under no_grad, or the loss detached?"
        )
    if before is not None and (before is Mean) != isinstance(loss, Mean):
        raise ValueError("loss: fzero.Mean and plain losses in one step do not add up; use one of them")
    counted = counted_by(count, total.device)
    if counted.ndim:
        raise ValueError(f"loss: Mean.count must be 0-d, got shape {tuple(counted.shape)}")
    return total, counted
