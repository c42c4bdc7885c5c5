"""The only module that runs collectives, none of which is differentiable; `fzero.comm` makes them so.

Legend: N ranks, C elements of a shard, N*C elements of a bucket.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from fzero import direct
from fzero.axis import MESSAGE_BYTES, Axis

_ops = torch.ops._c10d_functional  # noqa: SLF001  (the ops are stable; their Python wrappers were renamed in 2.14)

Pending = tuple[Tensor, ...]
"""What a scatter is waited for by: one tensor a message."""


def all_gather(shard: Tensor, axis: Axis) -> Tensor:
    """Return what all ranks' (C,) are after each other, (N*C,), rank 0's first."""
    if shard.device.type == "cpu" and axis.backend("cpu") == "gloo" and direct.AVAILABLE:
        full = direct.all_gather(shard, axis.size, axis.group)
    else:
        full = _ops.all_gather_into_tensor(shard.contiguous(), axis.size, axis.group)
    return _ops.wait_tensor(full)  # type: ignore[no-any-return]


def start_scatter(full: Tensor, axis: Axis, dtype: torch.dtype | None = None) -> Pending:
    """Launch the reduce-scatter of (N*C,), summed in `dtype` (its own), and return what `finish_scatter` waits for.

    Until then `full` must not change. In a world of one it is what is returned. On gloo a rank sends another one a
    piece of more than three times `MESSAGE_BYTES` in several messages: a large one each way does not use both at once.
    They are copied for it, so that as much memory as `full` takes is used until all are sent.
    """
    if axis.size == 1:
        return (full,)
    if axis.scatters_natively(full.device):
        full = full.contiguous() if dtype is None else full.to(dtype).contiguous()
        return (_ops.reduce_scatter_tensor(full, "sum", axis.size, axis.group),)
    length = full.numel() // axis.size
    messages = -(-length * full.itemsize // MESSAGE_BYTES)
    if messages <= 3:
        return (_exchange(full.contiguous(), axis),)
    columns = torch.split(full.reshape(axis.size, length), -(-length // messages), 1)
    return tuple(_exchange(column.reshape(-1), axis) for column in columns)


def _exchange(pieces: Tensor, axis: Axis) -> Tensor:
    lengths = [pieces.numel() // axis.size] * axis.size
    return _ops.all_to_all_single(pieces, lengths, lengths, axis.group)  # type: ignore[no-any-return]


def finish_scatter(pending: Pending, axis: Axis, dtype: torch.dtype | None = None) -> Tensor:
    """Wait for what `start_scatter` launched and return this rank's (C,) of the sum over ranks, in `dtype`."""
    pieces = pieces_of(pending, axis)
    dtype = pieces[0].dtype if dtype is None else dtype
    return pieces[0][0].to(dtype) if pieces[0].shape[0] == 1 else sum_pieces(pieces, dtype)


def pieces_of(pending: Pending, axis: Axis) -> list[Tensor]:
    """Wait for what `start_scatter` launched: parts of the shard, (N, part) still to be summed, or (1, part)."""
    if axis.size == 1:
        return [part.view(1, -1) for part in pending]
    arrived = [_ops.wait_tensor(part) for part in pending]
    return [part.view(1 if axis.scatters_natively(part.device) else axis.size, -1) for part in arrived]


def sum_in_order(pieces: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum (N, ...) over dim 0 in rank order, in `dtype`; 16-bit floats are summed in float32 and rounded once."""
    dtype = pieces.dtype if dtype is None else dtype
    first, *others = pieces.unbind(0)
    total = first.to(torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype)
    if others:
        total = total + others[0]  # memory of its own
    for piece in others[1:]:
        total += piece
    return total.to(dtype)


@torch.library.custom_op("fzero::sum_pieces", mutates_args=())
def sum_pieces(pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Sum parts of a shard in rank order, as one operation: inductor would fuse the sum into each of its uses.

    The pieces, N times as large as their sum, would then live from the scatter to the update of the last bucket.
    """
    sums = [sum_in_order(part, dtype) for part in pieces]
    return torch.cat(sums) if len(sums) > 1 else sums[0]


@sum_pieces.register_fake
def _(pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
    return pieces[0].new_empty(sum(part.shape[1] for part in pieces), dtype=dtype)


@torch.library.custom_op("fzero::add_pieces", mutates_args=("sums",))
def add_pieces(sums: Tensor, pieces: list[Tensor]) -> None:
    """Add the sum of the pieces in place, as one operation: inductor would put it off to the end of the graph.

    Every bucket's shard would then live until there.
    """
    start = 0
    for part in pieces:
        sums[start : start + part.shape[1]].add_(sum_in_order(part, sums.dtype))
        start += part.shape[1]


@add_pieces.register_fake
def _(sums: Tensor, pieces: list[Tensor]) -> None:
    pass


def sum_over_ranks(vector: Tensor, axis: Axis) -> Tensor:
    """Sum a small vector over ranks, in rank order, with one all-gather of it; equal bits on every rank."""
    if axis.size == 1:
        return vector
    return all_gather(vector, axis).view(axis.size, -1).sum(0)


def share_buffers(flat: Tensor, policy: str, axis: Axis) -> Tensor:
    """Return rank 0's values of a flat buffer ("rank0", a broadcast) or their mean ("mean", an all-gather)."""
    if axis.size == 1:
        return flat
    if policy == "rank0":
        return _ops.wait_tensor(_ops.broadcast(flat.contiguous(), 0, axis.group))  # type: ignore[no-any-return]
    gathered = all_gather(flat, axis).view(axis.size, -1)
    return sum_in_order(gathered) / axis.size


def from_rank0(tensor: Tensor, axis: Axis) -> Tensor:
    """Return rank 0's values of a tensor; the others pass one of the same shape, dtype and device. Not traced."""
    if axis.size > 1 and tensor.numel():
        flat = tensor.contiguous().view(-1).view(torch.uint8)  # bytes: every dtype travels on every backend
        dist.broadcast(flat, group=axis.process_group, group_src=0)
        return flat.view(tensor.dtype).view(tensor.shape)
    return tensor
