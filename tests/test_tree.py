from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, cast

import optree
import torch
from hypothesis import given
from hypothesis import strategies as st
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE
from trees import Point, nested

from fzero.tree import build, container, duplicates, outline, paths_and_leaves, plain_path, show_path, structure

TREES = nested(st.integers(0, 9))


def same(ours: Any, theirs: Any) -> bool:
    """Compare two trees by the types of their containers and the order of their keys too."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(same(left, right) for left, right in zip(ours, theirs, strict=True))
    return bool(ours == theirs)


def turned(tree: Any) -> Any:
    """Return the same tree with the keys of every plain dict inserted in reverse."""
    if isinstance(tree, OrderedDict):
        return OrderedDict((key, turned(child)) for key, child in tree.items())
    if isinstance(tree, dict):
        return {key: turned(child) for key, child in reversed(list(tree.items()))}
    if isinstance(tree, Point):
        return Point(*map(turned, tree))
    return type(tree)(map(turned, tree)) if isinstance(tree, (list, tuple)) else tree


@given(TREES)
def test_build_undoes_outline(tree: Any) -> None:
    leaves = optree.tree_leaves(tree)
    assert same(build(outline(tree), leaves), tree)
    assert same(build(outline(tree), dict(enumerate(leaves))), tree)


@given(TREES)
def test_an_outline_numbers_leaves_as_optree_does(tree: Any) -> None:
    count = optree.tree_structure(tree).num_leaves
    numbers = build(outline(tree), range(count))
    assert optree.tree_leaves(numbers) == list(range(count))
    assert [leaf for _, leaf in paths_and_leaves(tree)] == optree.tree_leaves(tree)


@given(TREES)
def test_the_order_of_dict_keys_changes_neither_leaves_nor_structure(tree: Any) -> None:
    """B30."""
    other = turned(tree)
    assert structure(other) == structure(tree)
    assert optree.tree_leaves(other) == optree.tree_leaves(tree)
    assert same(build(outline(other), optree.tree_leaves(tree)), other)


@given(TREES, TREES)
def test_structures_are_equal_exactly_if_trees_fit(tree: Any, other: Any) -> None:
    equal = optree.tree_structure(tree) == optree.tree_structure(other)
    assert (structure(tree) == structure(other)) is equal


@given(TREES)
def test_paths_lead_to_their_leaves(tree: Any) -> None:
    for path, leaf in paths_and_leaves(tree):
        node = tree
        for key in path:
            node = getattr(node, key) if isinstance(key, str) and isinstance(node, tuple) else node[key]
        assert node is leaf


def test_names_with_numbers_and_dots_are_not_split() -> None:
    """B30."""
    tree = {"layers.2": 1, "layers.10": 2, "layers": {"2": 3}}
    found = paths_and_leaves(tree)
    assert [(plain_path(path), leaf) for path, leaf in found] == [("layers.2", 3), ("layers.10", 2), ("layers.2", 1)]
    assert duplicates(plain_path(path) for path, _ in found) == ["layers.2"]


def test_ordered_dicts_of_another_order_have_another_structure() -> None:
    """B30."""
    assert structure(OrderedDict([("w", 1), ("b", 2)])) != structure(OrderedDict([("b", 2), ("w", 1)]))
    assert structure({"w": 1, "b": 2}) != structure(OrderedDict([("w", 1), ("b", 2)]))


def test_one_leaf_is_a_tree() -> None:
    leaf = torch.ones(2)
    assert outline(leaf) == 0
    assert build(outline(leaf), [leaf]) is leaf
    assert show_path(()) == "the tree itself"
    assert show_path(("a", 0, "b")) == "'a.0.b'"
    assert container(leaf) is None


def test_a_default_dict_keeps_its_factory() -> None:
    tree = defaultdict(int, {"b": 1, "a": 2})
    back = build(outline(tree), [10, 20])
    assert isinstance(back, defaultdict)
    assert (back.default_factory, list(back.items())) == (int, [("b", 20), ("a", 10)])


@dataclass
class Registered:
    w: Any
    b: Any


optree.register_pytree_node(
    cast("Any", Registered),  # optree's types want a collection
    lambda node: ((cast("Any", node).w, cast("Any", node).b), None, ("w", "b")),
    lambda _, children: cast("Any", Registered(*children)),
    namespace=GLOBAL_NAMESPACE,
)


@dataclass
class Plain:
    w: Any


def test_a_registered_dataclass_is_a_container() -> None:
    tree = Registered({"x": 1}, 2)
    assert [(plain_path(path), leaf) for path, leaf in paths_and_leaves(tree)] == [("w.x", 1), ("b", 2)]
    assert build(outline(tree), [10, 20]) == Registered({"x": 10}, 20)


def test_an_unregistered_object_is_a_leaf() -> None:
    node = Plain(1)
    assert outline({"a": node}).children == (0,)  # type: ignore[union-attr]
    assert paths_and_leaves({"a": node}) == [(("a",), node)]
