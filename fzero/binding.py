"""What `init` fixes once: which leaf sits in which bucket, and how trees are put together from buckets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fzero.axis import Axis
from fzero.block import Sharded
from fzero.comm import Cuts, attach, gather, new_token
from fzero.given import Inspected
from fzero.layout import Bucket, Layout, LeafSpec, make_layout, split
from fzero.precision import Precision
from fzero.tree import Outline, Tree, build


@dataclass(frozen=True, eq=False)
class Block:
    """One block of stage 3: its buckets, the leaves of its subtree that stay outside, and how to gather it."""

    name: str
    buckets: tuple[int, ...]
    outside: tuple[int, ...]
    gather: Callable[[Sequence[Tensor]], list[Tensor]]
    """Shards to gathered buckets."""
    build: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Tree]
    """Gathered buckets, stand-ins and leaves outside to the subtree."""
    assemble: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Tree]
    """Both: shards, stand-ins and leaves outside to the subtree."""


@dataclass(frozen=True, eq=False)
class Binding:
    """The static structure that every step uses."""

    axis: Axis
    inspected: Inspected
    ties: tuple[int, ...]
    trained: tuple[int, ...]
    """Leaves that have a slot in a bucket: floating, not excluded, and the first of their tie."""
    fixed: tuple[int, ...]
    """Leaves that are carried unchanged: integers, bools, and what the user excludes."""
    layout: Layout
    blocks: tuple[Block, ...]
    plain: Outline
    """The user's tree without blocks taken out."""

    def leaves_of(
        self, fulls: Mapping[int, Tensor], fixed: Sequence[Tensor], proxies: Mapping[int, Tensor] | None = None
    ) -> dict[int, Tensor]:
        """Return the leaves, by number, of gathered buckets, with tied and unchanged leaves."""
        leaves: dict[int, Tensor] = dict(zip(self.fixed, fixed, strict=True))
        for number, full in fulls.items():
            bucket = self.layout.buckets[number]
            pieces = split(bucket, full) if proxies is None else attach(full, proxies[number], cuts_of(bucket))
            for slot, leaf in zip(bucket.slots, pieces, strict=True):
                leaves[self.trained[slot.leaf]] = leaf
        for place, source in enumerate(self.ties):
            if source in leaves:
                leaves[place] = leaves[source]
        return leaves

    def full_tree(self, buckets: Sequence[Tensor], fixed: Sequence[Tensor] | None = None) -> Tree:
        """Return the user's tree from gathered buckets, in memory of its own; tied leaves are one tensor.

        With `fixed` they are parameters, in the dtypes that were given. Without, leaves that are carried unchanged are
        None (they have no gradient and no moments), and the others stay in the dtype of the buckets.
        """
        whole = self if fixed is not None else replace(self, fixed=())
        leaves = whole.leaves_of(dict(enumerate(buckets)), fixed or ())
        copies = {}
        for source in sorted({self.ties[place] for place in leaves}):
            dtype = leaves[source].dtype if fixed is None else self.inspected.leaves[source].dtype
            copies[source] = leaves[source].to(dtype, copy=True)
        return build(
            self.plain,
            [copies[source] if place in leaves else None for place, source in enumerate(self.ties)],
        )

    def is_sharded(self, bucket: Bucket, stage: int) -> bool:
        """Return whether a bucket stays sharded outside its block."""
        return stage == 3 and bucket.block is not None


def bind(
    inspected: Inspected,
    ties: Sequence[int],
    axis: Axis,
    plain: Outline,
    bucket_bytes: int,
    precision: Precision,
    gathers: Axis | None = None,
) -> Binding:
    """Lay out a tree that all ranks agree on; blocks are gathered over `axis`, or over `gathers`, the same ranks."""
    ties = tuple(ties)
    home = _homes(inspected, ties)
    own = [place for place in range(len(inspected.leaves)) if ties[place] == place]
    trained = tuple(place for place in own if inspected.leaves[place].trained)
    fixed = tuple(place for place in own if not inspected.leaves[place].trained)
    specs = [
        LeafSpec(
            inspected.leaves[place].shape,
            precision.stored(inspected.leaves[place].dtype),
            inspected.leaves[place].label,
            home[place],
            precision.computed(inspected.leaves[place].dtype),
        )
        for place in trained
    ]
    layout = make_layout(specs, axis.size, axis.bucket_bytes(bucket_bytes, inspected.device))
    blocks = tuple(
        _block(inspected, number, ties, trained, layout, gathers or axis) for number in range(len(inspected.blocks))
    )
    return Binding(axis, inspected, ties, trained, fixed, layout, blocks, plain)


def cuts_of(bucket: Bucket) -> Cuts:
    """Return where the leaves of a bucket are."""
    return tuple((slot.offset, slot.numel, slot.shape) for slot in bucket.slots)


def _homes(inspected: Inspected, ties: Sequence[int]) -> list[int | None]:
    """Return the block of every leaf; a leaf reachable from two blocks, or also from outside, has none."""
    home: list[int | None] = [None] * len(inspected.leaves)
    for number, (_, _, members) in enumerate(inspected.blocks):
        for place in members:
            home[place] = number
    for place, source in enumerate(ties):
        if home[place] != home[source]:
            home[place] = home[source] = None
    return [home[source] for source in ties]


def _block(
    inspected: Inspected, number: int, ties: tuple[int, ...], trained: tuple[int, ...], layout: Layout, axis: Axis
) -> Block:
    name, shape, members = inspected.blocks[number]
    buckets = tuple(place for place, bucket in enumerate(layout.buckets) if bucket.block == number)
    inside = {trained[slot.leaf] for place in buckets for slot in layout.buckets[place].slots}
    outside = tuple(sorted({ties[place] for place in members} - inside))

    def gathered(shards: Sequence[Tensor]) -> list[Tensor]:
        cast = [shard.to(layout.buckets[place].compute) for place, shard in zip(buckets, shards, strict=True)]
        return [gather(shard, new_token(shard), axis)[0] for shard in cast]

    def built(fulls: Sequence[Tensor], proxies: Sequence[Tensor], others: Sequence[Tensor]) -> Tree:
        leaves: dict[int, Tensor] = dict(zip(outside, others, strict=True))
        for place, full, proxy in zip(buckets, fulls, proxies, strict=True):
            bucket = layout.buckets[place]
            for slot, leaf in zip(bucket.slots, attach(full, proxy, cuts_of(bucket)), strict=True):
                leaves[trained[slot.leaf]] = leaf
        return build(shape, {place: leaves[ties[place]] for place in members})

    def assemble(shards: Sequence[Tensor], proxies: Sequence[Tensor], others: Sequence[Tensor]) -> Tree:
        return built(gathered(shards), proxies, others)

    return Block(name, buckets, outside, gathered, built, assemble)


def sharded_entry(
    block: Block,
    shards: Sequence[Tensor],
    proxies: Mapping[int, Tensor],
    leaves: Mapping[int, Tensor],
    gather_in_turn: Callable[[], list[Tensor]] | None = None,
) -> Sharded:
    """Return what stands for a block's subtree in the tree that the loss function gets.

    With `gather_in_turn` its buckets come from there instead of a gather of its own.
    """
    tensors = (
        tuple(shards[place] for place in block.buckets),
        tuple(proxies[place] for place in block.buckets),
        tuple(leaves[place] for place in block.outside),
    )
    if gather_in_turn is None:
        return Sharded(block.name, tensors, block.assemble)
    return Sharded(block.name, tensors, lambda _, proxies, others: block.build(gather_in_turn(), proxies, others))
