"""The first state: rank 0's values, cut into shards."""

from collections.abc import Sequence

import optree
import torch
from torch import Tensor

from fzero.binding import Binding
from fzero.collectives import from_rank0
from fzero.layout import Bucket, pack, shard
from fzero.stages import Program
from fzero.state import State
from fzero.tree import Tree


def first_state(program: Program, params: Tree, buffers: Tree, *, meta: bool = False) -> State:
    """Return rank 0's parameters and buffers as a state, with fresh optimizer state; with `meta` only their kinds.

    Communicates every bucket, and every buffer and unchanged leaf, from rank 0 (broadcast), one after the other: no
    rank needs more memory than its state and one bucket.
    """
    binding = program.binding
    if meta:
        return _shapes(program, params, buffers)
    device, leaves = binding.inspected.device, optree.tree_leaves(params)

    def own(tensor: Tensor) -> Tensor:
        empty = tensor.device.type == "meta"
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if empty else tensor.detach().clone()
        return from_rank0(copy.contiguous(), binding.axis)

    shards = tuple(_first_shard(binding, bucket, leaves, program.stage) for bucket in binding.layout.buckets)
    return State(
        shards,
        program.opt.init(shards),
        optree.tree_map(own, buffers),
        tuple(own(leaves[place]) for place in binding.fixed),
        torch.zeros((), dtype=torch.int64, device=device),
    )


def _shapes(program: Program, params: Tree, buffers: Tree) -> State:
    """Return a state of tensors on meta: no rank has values, and there will be some only from a checkpoint."""

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    binding, leaves = program.binding, optree.tree_leaves(params)
    parts = 1 if program.stage == 0 else binding.axis.size
    shards = tuple(
        torch.empty(bucket.length // parts, dtype=bucket.dtype, device="meta") for bucket in binding.layout.buckets
    )
    return State(
        shards,
        program.opt.init(shards),
        optree.tree_map(empty, buffers),
        tuple(empty(leaves[place]) for place in binding.fixed),
        torch.zeros((), dtype=torch.int64, device="meta"),
    )


def _first_shard(binding: Binding, bucket: Bucket, leaves: Sequence[Tensor], stage: int) -> Tensor:
    if binding.inspected.meta:
        full = torch.zeros(bucket.length, dtype=bucket.dtype, device=binding.inspected.device)
    else:
        full = pack(bucket, [leaves[binding.trained[slot.leaf]].detach() for slot in bucket.slots])
    full = from_rank0(full, binding.axis)
    return full if stage == 0 else shard(full, binding.axis.size, binding.axis.rank).clone()
