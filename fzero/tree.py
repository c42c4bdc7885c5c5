"""Trees of tensors: paths, and rebuilding a tree from its leaves where optree cannot be traced.

Leaves are always taken in optree's order (dict keys sorted, `OrderedDict` and sequences as they stand). What optree
cannot do is to rebuild a tree from a stored structure while Dynamo traces; an `Outline` can, because it is made of
plain tuples and functions.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import optree

Tree: TypeAlias = Any
Path: TypeAlias = tuple[Any, ...]


class Node(NamedTuple):
    """An inner node of an outline: `make` turns the list of rebuilt children into the container."""

    make: Callable[[list[Any]], Any]
    children: "tuple[Outline, ...]"


Outline: TypeAlias = int | Node
"""The structure of a tree: a leaf is its index in the list of leaves."""


def plain_path(path: Path) -> str:
    """Return the keys of a path joined by dots; the empty path (a tree that is one leaf) gives ``""``."""
    return ".".join(str(key) for key in path)


def show_path(path: Path) -> str:
    """Return a path as error messages print it."""
    return repr(plain_path(path)) if path else "the tree itself"


def paths_and_leaves(tree: Tree) -> list[tuple[Path, Any]]:
    """Return the pair (path, leaf) of every leaf, in tree order."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    return list(zip(paths, leaves, strict=True))


def structure(tree: Tree) -> str:
    """Return a text that two trees share exactly if their containers, keys and key orders are equal."""
    return str(optree.tree_structure(tree))


def container(node: Any) -> tuple[list[Any], list[Any], Callable[[list[Any]], Any]] | None:
    """Take one level of a tree apart: its keys, its children and how to put it together; None for a leaf."""
    if node is None:
        return [], [], lambda _: None
    if optree.tree_is_leaf(node):
        return None
    level = optree.tree_flatten_one_level(node)
    children, keys = list(level.children), list(level.entries)
    kind = type(node)
    if kind in (dict, OrderedDict, defaultdict):
        given, place = list(node), {key: at for at, key in enumerate(keys)}
        return keys, children, _dict_maker(node, [(key, place[key]) for key in given])
    if kind in (list, tuple):
        return keys, children, kind
    if optree.is_namedtuple(node):
        return keys, children, lambda parts: kind(*parts)
    unflatten, metadata = level.unflatten_func, level.metadata
    return keys, children, lambda parts: unflatten(metadata, parts)


def _dict_maker(node: Any, order: list[tuple[Hashable, int]]) -> Callable[[list[Any]], Any]:
    """Return what fills a dict of the same type as `node`, keys in the order in which they were given."""
    if isinstance(node, defaultdict):
        factory = node.default_factory
        return lambda parts: defaultdict(factory, [(key, parts[at]) for key, at in order])
    if isinstance(node, OrderedDict):
        return lambda parts: OrderedDict([(key, parts[at]) for key, at in order])
    return lambda parts: {key: parts[at] for key, at in order}


def outline(tree: Tree) -> Outline:
    """Return the structure of a tree; leaves are numbered in tree order."""
    counter = iter(range(optree.tree_structure(tree).num_leaves))

    def walk(node: Any) -> Outline:
        parts = container(node)
        if parts is None:
            return next(counter)
        _, children, make = parts
        return Node(make, tuple(walk(child) for child in children))

    return walk(tree)


def build(shape: Outline, leaves: Sequence[Any] | Mapping[int, Any]) -> Tree:
    """Put a tree together: the inverse of taking its leaves. Dynamo traces this."""
    if isinstance(shape, int):
        return leaves[shape]
    return shape.make([build(child, leaves) for child in shape.children])


def duplicates(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once, each once."""
    seen: set[str] = set()
    again: dict[str, None] = {}
    for name in names:
        if name in seen:
            again[name] = None
        seen.add(name)
    return list(again)
