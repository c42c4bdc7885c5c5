"""What `init` fixes once: the tree, its ties, its blocks and the layout of its buckets. No communication."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fzero.block import Sharded
from fzero.comm import Axis, attach, gather, new_token
from fzero.layout import Bucket, Layout, LeafSpec, make_layout, split
from fzero.rule import Optimizer
from fzero.tree import (
    Node,
    Outline,
    Path,
    Tree,
    build,
    container,
    duplicates,
    outline,
    paths_and_leaves,
    plain_path,
    show_path,
    structure,
)


class Leaf(NamedTuple):
    """What is known of one leaf of the user's tree."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    label: Any


class Inspected(NamedTuple):
    """A tree of parameters as one rank sees it, checked."""

    outline: Outline
    structure: str
    leaves: tuple[Leaf, ...]
    ties: tuple[int, ...]
    """For every leaf the first leaf of the same memory (itself, if it is not tied)."""
    blocks: tuple[tuple[str, Outline, frozenset[int]], ...]
    """Of every block: its name, the outline of its subtree, its leaves."""
    device: torch.device
    meta: bool
    """Whether this rank has shapes only."""

    def digest(self) -> str:
        """Return what all ranks must agree on (ties are rank 0's to say)."""
        leaves = [f"{leaf.name or 'the tree'} {leaf.dtype} {leaf.shape} {leaf.label!r}" for leaf in self.leaves]
        return "; ".join([*leaves, f"blocks {[name for name, _, _ in self.blocks]}", f"tree {self.structure}"])


def inspect(params: Tree, opt: Optimizer, axis: Axis, block_names: Sequence[str], shared: frozenset[str]) -> Inspected:
    """Check a tree of parameters and take it apart.

    Raises
    ------
    TypeError, ValueError
        Naming the leaf: not a tensor, complex, sparse, on another device than the others, partly overlapping another
        one, of the same plain path as another one; or naming the block.
    """
    found = paths_and_leaves(params)
    for path, leaf in found:
        _check_leaf(path, leaf)
    again = duplicates(plain_path(path) for path, _ in found)
    if again:
        raise ValueError(f"params: two leaves have one plain path {again[0]!r}; rename a key")
    device, meta = _device(found, axis)
    whole = outline(params)
    with_blocks, blocks = _cut_blocks(params, whole, block_names, shared)
    labels = _labels(params, opt)
    leaves = tuple(
        Leaf(plain_path(path), tuple(leaf.shape), leaf.dtype, label)
        for (path, leaf), label in zip(found, labels, strict=True)
    )
    ties = _ties(found)
    return Inspected(with_blocks, structure(params), leaves, ties, blocks, device, meta)


def _check_leaf(path: Path, leaf: Any) -> None:
    where = f"params: leaf {show_path(path)}"
    if not isinstance(leaf, Tensor):
        raise TypeError(f"{where} must be a tensor, got {type(leaf).__name__}")
    if leaf.is_complex():
        raise TypeError(
            f"{where} is complex ({leaf.dtype}), which is not supported yet; store its real and imaginary part"
        )
    if leaf.layout != torch.strided:
        raise TypeError(f"{where} must be a dense tensor, got layout {leaf.layout}")


def _device(found: Sequence[tuple[Path, Tensor]], axis: Axis) -> tuple[torch.device, bool]:
    real = [(path, leaf) for path, leaf in found if leaf.device.type != "meta"]
    for path, leaf in real:
        if leaf.device != real[0][1].device:
            raise ValueError(
                f"params: leaf {show_path(path)} is on {leaf.device} but leaf {show_path(real[0][0])} is on "
                f"{real[0][1].device}; move all leaves to one device"
            )
    if real and len(real) < len(found):
        path = next(path for path, leaf in found if leaf.device.type == "meta")
        raise ValueError(
            f"params: leaf {show_path(path)} is on meta but others are not; give all leaves values, or none"
        )
    return (real[0][1].device if real else axis.device), bool(found) and not real


def _labels(params: Tree, opt: Optimizer) -> list[Any]:
    """Return the label of every leaf, decided on the full leaves; None for leaves that are carried unchanged."""
    leaves, treespec = optree.tree_flatten(params)
    labels = treespec.flatten_up_to(opt.labels(params))
    return [label if leaf.is_floating_point() else None for leaf, label in zip(leaves, labels, strict=True)]


def _ties(found: Sequence[tuple[Path, Tensor]]) -> tuple[int, ...]:
    first: dict[Any, int] = {}
    ties = []
    storages: dict[int, list[int]] = {}
    for place, (_, leaf) in enumerate(found):
        if leaf.numel() == 0:
            ties.append(place)
            continue
        storage = leaf.untyped_storage()._cdata  # noqa: SLF001  (identity of a storage, on meta too)
        key = (storage, leaf.storage_offset(), tuple(leaf.shape), leaf.stride(), leaf.dtype)
        ties.append(first.setdefault(key, place))
        if ties[-1] == place:
            storages.setdefault(storage, []).append(place)
    for group in storages.values():
        _check_overlap([found[place] for place in group])
    return tuple(ties)


def _check_overlap(group: Sequence[tuple[Path, Tensor]]) -> None:
    """Refuse leaves that share some memory but are not the same leaf."""
    if len(group) < 2:
        return
    size = group[0][1].untyped_storage().nbytes()
    owner = torch.full((size,), -1, dtype=torch.int32)
    for place, (path, leaf) in enumerate(group):
        step = leaf.element_size()
        strides = [stride * step for stride in leaf.stride()]
        touched = owner.as_strided((*leaf.shape, step), (*strides, 1), leaf.storage_offset() * step)
        others = touched[touched >= 0]
        if others.numel():
            raise ValueError(
                f"params: leaf {show_path(path)} overlaps leaf {show_path(group[int(others[0])][0])} in memory without "
                "being the same; clone one of them (a tie is the same memory, shape and strides)"
            )
        touched.fill_(place)


# --- blocks ----------------------------------------------------------------------------------------------------------


def _cut_blocks(
    params: Tree, whole: Outline, names: Sequence[str], shared: frozenset[str]
) -> tuple[Outline, tuple[tuple[str, Outline, frozenset[int]], ...]]:
    """Replace the subtree of every block in an outline by one entry, numbered from the number of leaves on."""
    total = len(paths_and_leaves(params))
    cut: dict[str, Outline] = {}

    def entry(name: str, shape: Outline) -> int:
        cut[name] = shape
        return total + names.index(name)

    def walk(node: Any, shape: Outline, path: Path) -> Outline:
        here = plain_path(path)
        if path and here in names:
            return entry(here, shape)
        parts = container(node)
        if parts is None or isinstance(shape, int):
            return shape
        keys, children, _ = parts
        below = [walk(child, sub, (*path, key)) for key, child, sub in zip(keys, children, shape.children, strict=True)]
        if isinstance(node, dict):
            prefix = f"{here}." if path else ""
            return _group(shape, keys, below, prefix, [name for name in names if name not in cut], shared, entry)
        return Node(shape.make, tuple(below))

    result = walk(params, whole, ())
    for name in names:
        if name not in cut:
            raise ValueError(f"blocks: {name!r} is not the path of a subtree of params (and no key starts with it)")
    return result, tuple((name, cut[name], frozenset(_indices(cut[name]))) for name in names)


def _group(
    shape: Node,
    keys: Sequence[Any],
    below: list[Outline],
    prefix: str,
    names: Sequence[str],
    shared: frozenset[str],
    entry: Callable[[str, Outline], int],
) -> Node:
    """In a flat dict, put the keys that start with a block's name into one entry under that name."""
    home: dict[int, str] = {}
    for place, key in enumerate(keys):
        for name in names:
            if isinstance(key, str) and f"{prefix}{key}".startswith(f"{name}.") and f"{prefix}{key}" not in shared:
                home[place] = name
    if not home:
        return Node(shape.make, tuple(below))
    order = list(shape.make(list(range(len(keys)))).items())
    kept: list[tuple[Any, Outline]] = []
    groups: dict[str, list[tuple[str, Outline]]] = {}
    for key, place in order:
        if place not in home:
            kept.append((key, below[place]))
            continue
        name = home[place]
        if name not in groups:
            groups[name] = []
            kept.append((name[len(prefix) :], -1))
        groups[name].append((f"{prefix}{key}"[len(name) + 1 :], below[place]))
    numbers = {name[len(prefix) :]: entry(name, _dict_node(members)) for name, members in groups.items()}
    return _dict_node([(key, numbers[key] if child == -1 else child) for key, child in kept])


def _dict_node(members: Sequence[tuple[Any, Outline]]) -> Node:
    keys = tuple(key for key, _ in members)
    return Node(lambda parts: dict(zip(keys, parts, strict=True)), tuple(child for _, child in members))


def _indices(shape: Outline) -> Iterable[int]:
    if isinstance(shape, int):
        yield shape
    else:
        for child in shape.children:
            yield from _indices(child)


def block_names(blocks: Any) -> tuple[str, ...]:
    """Return path prefixes (plain paths or tuples of keys) as plain paths; refuse nested and repeated ones."""
    if isinstance(blocks, str) or not isinstance(blocks, Iterable):
        raise TypeError(f"blocks: must be a sequence of path prefixes, got {blocks!r}")
    names = [name if isinstance(name, str) else plain_path(tuple(name)) for name in blocks]
    for name in names:
        if not name:
            raise ValueError("blocks: the empty path (the whole tree) cannot be a block; name parts of it")
        for other in names:
            if name.startswith(f"{other}."):
                raise ValueError(f"blocks: {name!r} lies inside {other!r}; pass one of them")
    again = duplicates(names)
    if again:
        raise ValueError(f"blocks: {again[0]!r} is named twice")
    return tuple(names)


# --- the binding -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Block:
    """One block of stage 3: its buckets, the leaves of its subtree that stay outside, and how to gather it."""

    name: str
    buckets: tuple[int, ...]
    outside: tuple[int, ...]
    assemble: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Tree]


@dataclass(frozen=True, eq=False)
class Binding:
    """The static structure that every step uses."""

    axis: Axis
    inspected: Inspected
    ties: tuple[int, ...]
    trained: tuple[int, ...]
    """Leaves that have a slot in a bucket: floating, and the first of their tie."""
    fixed: tuple[int, ...]
    """Integer and bool leaves, carried unchanged."""
    layout: Layout
    blocks: tuple[Block, ...]
    plain: Outline
    """The user's tree without blocks taken out."""

    def leaves_of(self, fulls: Mapping[int, Tensor], fixed: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the leaves, by number, of gathered buckets, with tied and unchanged leaves."""
        leaves: dict[int, Tensor] = dict(zip(self.fixed, fixed, strict=True))
        for number, full in fulls.items():
            bucket = self.layout.buckets[number]
            for slot, leaf in zip(bucket.slots, split(bucket, full), strict=True):
                leaves[self.trained[slot.leaf]] = leaf
        for place, source in enumerate(self.ties):
            if source in leaves:
                leaves[place] = leaves[source]
        return leaves

    def tree(self, leaves: dict[int, Any]) -> Tree:
        """Put the user's tree together; leaves that are not given are None."""
        return build(self.plain, [leaves.get(place) for place in range(len(self.inspected.leaves))])

    def is_sharded(self, bucket: Bucket, stage: int) -> bool:
        """Return whether a bucket stays sharded outside its block."""
        return stage == 3 and bucket.block is not None


def bind(inspected: Inspected, ties: Sequence[int], axis: Axis, plain: Outline, bucket_bytes: int) -> Binding:
    """Lay out a tree that all ranks agree on."""
    ties = tuple(ties)
    home = _homes(inspected, ties)
    trained = tuple(
        place for place, leaf in enumerate(inspected.leaves) if ties[place] == place and leaf.dtype.is_floating_point
    )
    fixed = tuple(
        place
        for place, leaf in enumerate(inspected.leaves)
        if ties[place] == place and not leaf.dtype.is_floating_point
    )
    specs = [
        LeafSpec(
            inspected.leaves[place].shape, inspected.leaves[place].dtype, inspected.leaves[place].label, home[place]
        )
        for place in trained
    ]
    layout = make_layout(specs, axis.size, bucket_bytes)
    blocks = tuple(_block(inspected, number, ties, trained, layout, axis) for number in range(len(inspected.blocks)))
    return Binding(axis, inspected, ties, trained, fixed, layout, blocks, plain)


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

    def assemble(shards: Sequence[Tensor], proxies: Sequence[Tensor], others: Sequence[Tensor]) -> Tree:
        leaves: dict[int, Tensor] = dict(zip(outside, others, strict=True))
        for place, shard, proxy in zip(buckets, shards, proxies, strict=True):
            bucket = layout.buckets[place]
            full = attach(gather(shard, new_token(shard), axis)[0], proxy)
            for slot, leaf in zip(bucket.slots, split(bucket, full), strict=True):
                leaves[trained[slot.leaf]] = leaf
        return build(shape, {place: leaves[ties[place]] for place in members})

    return Block(name, buckets, outside, assemble)


def sharded_entry(
    block: Block, shards: Sequence[Tensor], proxies: Mapping[int, Tensor], leaves: Mapping[int, Tensor]
) -> Sharded:
    """Return what stands for a block's subtree in the tree that the loss function gets."""
    tensors = (
        tuple(shards[place] for place in block.buckets),
        tuple(proxies[place] for place in block.buckets),
        tuple(leaves[place] for place in block.outside),
    )
    return Sharded(block.name, tensors, block.assemble)
