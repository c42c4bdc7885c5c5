"""What an engine has in a checkpoint: every leaf under its plain path, with this rank's part of it.

======================= ===============================================================================================
params.<path>           parameters as stored (masters), and leaves that are carried unchanged
opt_state.<name>.<path> the optimizer's state of a parameter, such as ``opt_state.exp_avg.<path>``
opt_state.<name>        what all parameters share, such as ``opt_state.step``
buffers.<path>          buffers
step                    applied updates
ranks.<rank>....        what one rank has of its own: random state, tensors of `extra`, buffers that differ
======================= ===============================================================================================
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fzero.axis import Axis
from fzero.layout import Layout
from fzero.pieces import Entry, dtype_name
from fzero.rule import Optimizer
from fzero.tree import duplicates, paths_and_leaves, plain_path


class Contents(NamedTuple):
    """A state seen as leaves of a checkpoint: views, to write from or to read into."""

    entries: tuple[Entry, ...]
    """Everything but buffers."""
    buffers: dict[str, Tensor]
    """By plain path; on every rank its own."""
    ties: dict[str, str]
    step: Tensor

    def digest(self) -> str:
        """Return what all ranks must agree on."""
        leaves = [(entry.name, entry.shape, entry.dtype) for entry in self.entries]
        kinds = [(name, tuple(buffer.shape), buffer.dtype) for name, buffer in self.buffers.items()]
        return f"step {int(self.step)}; {leaves}; buffers {kinds}; ties {self.ties}"


class Held(NamedTuple):
    """A state as every engine can give it."""

    shards: Sequence[Tensor]
    """Of every bucket this rank's shard (C,), or in stage 0 the bucket (N*C,)."""
    opt_leaves: Sequence[Sequence[Tensor] | Tensor]
    """For every leaf of the optimizer's state of one parameter: one tensor a bucket, or one that all share."""
    fixed: Mapping[str, Tensor]
    """Leaves of the parameters that are carried unchanged, by plain path."""
    buffers: Any
    step: Tensor


class Static(NamedTuple):
    """What an engine knows from the start."""

    axis: Axis
    layout: Layout
    names: tuple[str, ...]
    """Plain paths of the leaves in the layout."""
    opt_names: tuple[str, ...]
    ties: dict[str, str]
    whole: bool
    """Whether this rank has all of every bucket."""
    device: torch.device


def contents(held: Held, static: Static, *, writing: bool) -> Contents:
    """Return a state as leaves of a checkpoint.

    With `writing` every element is some rank's alone: the owner's in the layout, so that stage 0 writes what stage 1
    does; of replicated leaves every rank has an equal part, and scalars are the last rank's. Without, each rank has
    everything that it holds.
    """
    rank, ranks = static.axis.rank, static.axis.size

    def replicated(path: tuple[str, ...], tensor: Tensor) -> Entry:
        low, high = (tensor.numel() * at // ranks for at in (rank, rank + 1))
        if not writing:
            low, high = 0, tensor.numel()
        parts = ((low, tensor.detach().contiguous().view(-1)[low:high]),) if low < high else ()
        return Entry(path, tuple(tensor.shape), dtype_name(tensor), parts)

    entries = _sharded(("params",), held.shards, static, writing=writing)
    for name, leaf in zip(static.opt_names, held.opt_leaves, strict=True):
        path = ("opt_state", name) if name else ("opt_state",)
        entries += (
            [replicated(path, leaf)] if isinstance(leaf, Tensor) else _sharded(path, leaf, static, writing=writing)
        )
    entries += [replicated(_path(("params",), name), leaf) for name, leaf in held.fixed.items()]
    entries.append(replicated(("step",), held.step))
    again = duplicates(entry.name for entry in entries)
    if again:
        raise ValueError(f"params: two leaves have one name {again[0]!r} in a checkpoint; rename a key")
    return Contents(tuple(entries), _named_buffers(held.buffers), static.ties, held.step)


def _sharded(prefix: tuple[str, ...], buckets: Sequence[Tensor], static: Static, *, writing: bool) -> list[Entry]:
    """Return the leaves of buckets, in the order of the layout."""
    axis, found = static.axis, []
    for bucket, tensor in zip(static.layout.buckets, buckets, strict=True):
        begin = 0 if static.whole else axis.rank * static.layout.shard_length(bucket)
        whole = [(slot.leaf, 0, slot.numel) for slot in bucket.slots if slot.numel]
        pieces = whole if static.whole and not writing else static.layout.owned(bucket, axis.rank)
        ranges = {leaf: (start, count) for leaf, start, count in pieces}
        for slot in bucket.slots:
            start, count = ranges.get(slot.leaf, (0, 0))
            at = slot.offset + start - begin
            parts = ((start, tensor[at : at + count]),) if count else ()
            found.append(Entry(_path(prefix, static.names[slot.leaf]), slot.shape, dtype_name(tensor), parts))
    return found


def buffer_entries(buffers: Mapping[str, Tensor], *, mine: bool, prefix: tuple[str, ...] = ()) -> list[Entry]:
    """Return buffers as leaves, each whole where it is `mine`."""
    return [
        Entry(
            _path((*prefix, "buffers"), name),
            tuple(buffer.shape),
            dtype_name(buffer),
            ((0, buffer.detach().contiguous().view(-1)),) if mine and buffer.numel() else (),
        )
        for name, buffer in buffers.items()
    ]


def _path(prefix: tuple[str, ...], name: str) -> tuple[str, ...]:
    return (*prefix, name) if name else prefix


def unwrapped_name(name: str) -> str:
    """Return a plain path without what torch.compile puts into the names of a module that it wraps."""
    return ".".join(key for key in name.split(".") if key != "_orig_mod")


def _named_buffers(buffers: Any) -> dict[str, Tensor]:
    found = [(unwrapped_name(plain_path(path)), buffer) for path, buffer in paths_and_leaves(buffers)]
    again = duplicates(name for name, _ in found)
    if again:
        raise ValueError(f"buffers: two of them have one plain path {again[0]!r}; rename a key")
    return dict(found)


def opt_outline(opt: Optimizer) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """Return for every leaf of an optimizer's state of one parameter its name, and if it has the parameter's shape."""
    probe = torch.empty(7)  # a shape that no scalar of an optimizer has
    example = opt.init(probe)
    names = [".".join(_key(entry) for entry in accessor) for accessor in optree.tree_accessors(example)]
    return tuple(names), tuple(leaf.shape == probe.shape for leaf in optree.tree_leaves(example))


def _key(entry: Any) -> str:
    return str(getattr(entry, "field", entry.entry))
