"""Which leaf sits where in which bucket: arithmetic only, no communication.

A *bucket* is one flat buffer that holds leaves of one dtype (stored, and computed with), one label and one block.
Inside it every leaf starts at a multiple of `ALIGN` elements; its end is padded to a multiple of the number of ranks,
and padding is zero. Rank r of N owns the r-th of N equal contiguous pieces of every bucket, its *shard*: flat shards
balance to the element, whatever the shapes of the leaves (ZeRO, arXiv:1910.02054, sec. 5).
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGN = 64
"""Elements: every leaf starts at a multiple of this, so that its view is aligned for vector and tensor cores."""

FIRST_BYTES = 2**20
"""Bytes: cap of the bucket whose gradient is complete first, so that communication starts early."""


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """What the layout has to know of one leaf."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    label: Hashable = None
    block: int | None = None
    compute: torch.dtype | None = None
    """In which dtype it is computed with; None: in its own."""

    @property
    def numel(self) -> int:
        """Elements, as a Python int (leaves above 2**31 elements are planned exactly)."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one leaf sits in its bucket: elements ``offset`` to ``offset + numel``."""

    leaf: int
    offset: int
    numel: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """One flat buffer of ``length`` elements, a multiple of the number of ranks."""

    dtype: torch.dtype
    label: Hashable
    block: int | None
    slots: tuple[Slot, ...]
    length: int
    compute: torch.dtype
    """In which dtype it is gathered and its gradient comes."""

    @property
    def used(self) -> int:
        """Elements that belong to leaves; the rest of the bucket is padding."""
        return sum(slot.numel for slot in self.slots)


@dataclass(frozen=True, slots=True)
class Layout:
    """All buckets, ordered by their first leaf: backward completes them from the last to the first."""

    ranks: int
    buckets: tuple[Bucket, ...]

    def shard_length(self, bucket: Bucket) -> int:
        """Elements of one rank's shard of a bucket."""
        return bucket.length // self.ranks

    def owned(self, bucket: Bucket, rank: int) -> list[tuple[int, int, int]]:
        """Return (leaf, start, length) in elements of the leaf for every piece that `rank` owns of a bucket."""
        size = self.shard_length(bucket)
        low, high = rank * size, (rank + 1) * size
        pieces = []
        for slot in bucket.slots:
            start, stop = max(low, slot.offset), min(high, slot.offset + slot.numel)
            if start < stop:
                pieces.append((slot.leaf, start - slot.offset, stop - start))
        return pieces


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def make_layout(leaves: Sequence[LeafSpec], ranks: int, bucket_bytes: int = 25 * 2**20) -> Layout:
    """Plan the buckets of a list of leaves (in registration order) for a number of ranks.

    Buckets are filled from the last leaf backwards, because that is the order in which backward completes gradients.
    One is closed when the next leaf of its kind would take it past `bucket_bytes` bytes (the very first one past
    `FIRST_BYTES`); a leaf larger than the cap gets a bucket of its own. Leaves of different dtype, label or block
    never share one.

    >>> layout = make_layout([LeafSpec((3,), torch.float32), LeafSpec((2, 5), torch.float32)], ranks=4)
    >>> [(slot.leaf, slot.offset) for slot in layout.buckets[0].slots], layout.buckets[0].length
    ([(0, 0), (1, 64)], 76)
    """
    if ranks < 1 or bucket_bytes < 1:
        raise ValueError(f"make_layout: ranks and bucket_bytes must be at least 1, got {ranks} and {bucket_bytes}")
    filling: dict[tuple[Hashable, ...], list[int]] = {}
    room: dict[tuple[Hashable, ...], int] = {}
    groups: list[list[int]] = []
    for index in reversed(range(len(leaves))):
        leaf = leaves[index]
        kind = (leaf.dtype, leaf.compute or leaf.dtype, leaf.label, leaf.block)
        size = _round_up(leaf.numel, ALIGN) * leaf.dtype.itemsize
        if kind not in filling or size > room[kind]:
            cap = bucket_bytes if groups else min(FIRST_BYTES, bucket_bytes)
            filling[kind], room[kind] = [], cap
            groups.append(filling[kind])
        filling[kind].append(index)
        room[kind] -= size
    groups.sort(key=min)
    return Layout(ranks, tuple(_bucket(leaves, sorted(group), ranks) for group in groups))


def _bucket(leaves: Sequence[LeafSpec], group: list[int], ranks: int) -> Bucket:
    slots, end = [], 0
    for index in group:
        leaf = leaves[index]
        offset = _round_up(end, ALIGN)
        slots.append(Slot(index, offset, leaf.numel, leaf.shape))
        end = offset + leaf.numel
    first = leaves[group[0]]
    # a bucket of zero-size leaves still has one element a rank: no collective ever sees an empty message
    length = _round_up(max(end, 1), ranks)
    return Bucket(first.dtype, first.label, first.block, tuple(slots), length, first.compute or first.dtype)


def pack(bucket: Bucket, leaves: Sequence[Tensor]) -> Tensor:
    """Copy leaves, one a slot and by logical order whatever their strides, into a flat (length,) buffer."""
    device = leaves[0].device if leaves else torch.device("cpu")
    flat = torch.zeros(bucket.length, dtype=bucket.dtype, device=device)
    for slot, leaf in zip(bucket.slots, leaves, strict=True):
        flat[slot.offset : slot.offset + slot.numel].view(slot.shape).copy_(leaf)
    return flat


def split(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    """Return the leaves of a flat (length,) buffer as views, one a slot.

    This is one `split` and one `view` a leaf, so the transpose is one `cat`; slices would make a zero-filled
    full-size gradient a leaf.
    """
    sizes, end = [], 0
    for slot in bucket.slots:
        sizes += [slot.offset - end, slot.numel]
        end = slot.offset + slot.numel
    pieces = torch.split(flat, [*sizes, bucket.length - end])
    return [piece.view(slot.shape) for piece, slot in zip(pieces[1::2], bucket.slots, strict=True)]


def shard(flat: Tensor, ranks: int, rank: int) -> Tensor:
    """Return a rank's piece of a flat buffer as a view of (length / ranks,) elements."""
    size = flat.numel() // ranks
    return flat[rank * size : (rank + 1) * size]
