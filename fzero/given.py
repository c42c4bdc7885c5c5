"""A tree of parameters as the user gives it: checks, ties, labels, blocks. No communication."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fzero.axis import Axis
from fzero.rule import Choice, Optimizer, choose
from fzero.tree import (
    Node,
    Outline,
    Path,
    Tree,
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
    trained: bool
    """Or carried unchanged: integers, and what the user excludes."""


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
        leaves = [
            f"{leaf.name or 'the tree'} {leaf.dtype} {leaf.shape} {repr(leaf.label) if leaf.trained else 'carried'}"
            for leaf in self.leaves
        ]
        return "; ".join([*leaves, f"blocks {[name for name, _, _ in self.blocks]}", f"tree {self.structure}"])

    def notes(self) -> dict[str, Any]:
        """Return what may differ between ranks, and all have to know."""
        return {"ties": self.ties, "meta": self.meta, "device": self.device.type}

    def on_one_kind(self, notes: Sequence[Mapping[str, Any]]) -> "Inspected":
        """Return it with shapes only put on rank 0's type of device; refuse values on different types.

        Ranks that communicate over different backends would wait for each other.
        """
        kind = notes[0]["device"]
        for rank, note in enumerate(notes):
            if note["device"] != kind and not note["meta"]:
                raise ValueError(f"params: are on {note['device']} on rank {rank}, on {kind} on rank 0; choose one")
        if self.device.type == kind:
            return self
        device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        return self._replace(device=device)


def inspect(
    params: Tree,
    opt: Optimizer,
    axis: Axis,
    block_names: Sequence[str],
    shared: frozenset[str],
    trainable: Choice = None,
) -> Inspected:
    """Check a tree of parameters and take it apart.

    Raises
    ------
    TypeError, ValueError
        Naming the leaf: not a tensor, complex, sparse, on another device than the others, partly overlapping another
        one, of the same plain path as another one, tied to one that is trained while it is not; or naming the block.
    """
    found = paths_and_leaves(params)
    for path, leaf in found:
        _check_leaf(path, leaf)
    again = duplicates(plain_path(path) for path, _ in found)
    if again:
        raise ValueError(f"params: two leaves have one plain path {again[0]!r}; rename a key")
    device, meta = _device(found, axis)
    axis.check_device(device)
    whole = outline(params)
    with_blocks, blocks = _cut_blocks(params, whole, block_names, shared)
    trained = [
        chosen and leaf.is_floating_point()
        for (_, leaf), chosen in zip(found, choose("params", "trainable", trainable, params), strict=True)
    ]
    if trainable is not None and not any(trained):
        raise ValueError("trainable: excludes every leaf of params; leave at least one to train")
    leaves = tuple(
        Leaf(plain_path(path), tuple(leaf.shape), leaf.dtype, label if trains else None, trains)
        for (path, leaf), label, trains in zip(found, _labels(params, opt), trained, strict=True)
    )
    ties = _ties(found)
    for leaf, source in zip(leaves, ties, strict=True):
        if leaf.trained != leaves[source].trained:
            raise ValueError(
                f"trainable: leaves {leaves[source].name!r} and {leaf.name!r} are tied, so both train or none does"
            )
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
    """Return the label of every leaf, decided on the full leaves."""
    return optree.tree_structure(params).flatten_up_to(opt.labels(params))


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
    blocks = list(blocks)
    for name in blocks:
        if not isinstance(name, (str, tuple)):
            raise TypeError(f"blocks: each must be a plain path such as 'layers.0' or a tuple of keys, got {name!r}")
    names = [name if isinstance(name, str) else plain_path(name) for name in blocks]
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
