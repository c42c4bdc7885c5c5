"""Blocks: the parts of a model that stage 3 gathers as one, and the two wrappers that gather them."""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, cast

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE
from torch import Tensor, nn

from fzero.remat import remat as recompute
from fzero.tree import Tree

P = ParamSpec("P")
R = TypeVar("R")

SLOT = "fzero_sharded"
"""The attribute of a module that `fzero.from_module` made a block: its sharded parameters while the loss runs."""

Assemble = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Tree]


class Sharded:
    """The subtree of one block while it is sharded: this rank's shards, and how to gather them.

    Pass it to a function wrapped by `fzero.block` or `fzero.remat`, which receives the gathered subtree in its place.
    It cannot be used otherwise: any other access raises and names the block.

    `shards` are this rank's pieces (C,) of the block's buckets, `proxies` their stand-ins (N*C,) made by
    `fzero.comm.anchor`, `outside` the leaves of the subtree that are gathered once for the whole step.
    """

    def __init__(
        self,
        path: str,
        tensors: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
        assemble: Assemble,
    ) -> None:
        self.path = path
        self.tensors = tensors
        self.assemble = assemble

    def __repr__(self) -> str:
        return f"Sharded({self.path!r})"

    def refuse(self, what: str) -> NoReturn:
        """Raise what any use but gathering raises."""
        raise TypeError(
            f"{what}: the parameters of block {self.path!r} are sharded here; "
            "pass them to a function wrapped by fzero.block or fzero.remat, which gathers them"
        )

    def __getitem__(self, key: Any) -> NoReturn:
        self.refuse(f"[{key!r}]")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse(f".{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse to be an argument of any torch function."""
        everything: Any = (args, kwargs)
        leaves: list[Any] = optree.tree_leaves(everything, is_leaf=is_sharded)
        next(leaf for leaf in leaves if is_sharded(leaf)).refuse(getattr(func, "__name__", str(func)))
        raise AssertionError  # not reached: refuse raises


def _refusal(operation: str) -> Callable[..., NoReturn]:
    def refused(self: Sharded, *_: Any, **__: Any) -> NoReturn:
        self.refuse(operation)

    return refused


_OPERATIONS = {
    "iteration": "iter",
    "len": "len bool",
    "in": "contains",
    "a call": "call",
    "assignment": "setitem delitem",
    "conversion": "float int complex",
    "an operator": "neg pos abs invert lt le gt ge",
    "+": "add radd",
    "-": "sub rsub",
    "*": "mul rmul",
    "/": "truediv rtruediv",
    "@": "matmul rmatmul",
    "//": "floordiv rfloordiv",
    "%": "mod rmod",
    "**": "pow rpow",
    "&": "and rand",
    "|": "or ror",
    "^": "xor rxor",
}
for _operation, _methods in _OPERATIONS.items():
    for _method in _methods.split():
        setattr(Sharded, f"__{_method}__", _refusal(_operation))


def _flatten(node: Any) -> tuple[list[Any], Any, tuple[str, ...]]:
    return list(node.tensors), (node.path, node.assemble), ("shards", "proxies", "outside")


def _unflatten(metadata: Any, children: Any) -> Any:
    return Sharded(metadata[0], tuple(children), metadata[1])


optree.register_pytree_node(
    Sharded,
    _flatten,
    _unflatten,
    namespace=GLOBAL_NAMESPACE,
)


def is_sharded(node: Any) -> bool:
    """Return whether a node is a block's subtree while sharded."""
    return isinstance(node, Sharded)


# a sharded subtree as remat can take it apart: the tuple (mark, assemble, shards, proxies, outside)
_MARK = "fzero.Sharded"


def _replace(node: Any, change: Callable[[Sharded], Any]) -> Any:
    """Replace every `Sharded` in a tree of arguments. Dynamo traces this."""
    if isinstance(node, Sharded):
        return change(node)
    if isinstance(node, Tensor):
        return node
    if isinstance(node, dict):
        return type(node)([(key, _replace(child, change)) for key, child in node.items()])
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*[_replace(child, change) for child in node])
    if isinstance(node, (tuple, list)):
        return type(node)([_replace(child, change) for child in node])
    return node


def _handle(node: Sharded) -> Any:
    shards, proxies, outside = node.tensors
    return (_MARK, node.assemble, tuple(shards), tuple(proxies), tuple(outside))


def _assembled(node: Sharded) -> Tree:
    return node.assemble(*node.tensors)


def _is_handle(node: Any) -> bool:
    return type(node) is tuple and len(node) == 5 and isinstance(node[0], str) and node[0] == _MARK


def _gather(arguments: Any) -> Any:
    """Gather every sharded subtree in a tree of arguments that was taken apart."""
    return optree.tree_map(lambda leaf: leaf[1](*leaf[2:]) if _is_handle(leaf) else leaf, arguments, is_leaf=_is_handle)


def _has_sharded(node: Any) -> bool:
    if isinstance(node, Sharded):
        return True
    if isinstance(node, dict):
        return any(_has_sharded(child) for child in node.values())
    if isinstance(node, (tuple, list)):
        return any(_has_sharded(child) for child in node)
    return False


class remat(Generic[P, R]):  # noqa: N801  (reads as the function that it stands for)
    """Recompute a function in backward instead of keeping its activations; gather what is sharded, twice.

    Every `fzero.Sharded` among the arguments is all-gathered in forward, and again in backward; its gradient is
    scattered once. Where nothing is sharded this is activation checkpointing and communicates nothing.
    See `fzero.remat.remat` for what arguments and outputs may be. Of an `nn.Module` it works inside the forward of a
    module that `fzero.from_module` runs, ``fzero.remat(self.layer)(x)``, and in one of your own.
    """

    def __init__(self, fn: Callable[P, R]) -> None:
        if not callable(fn):
            raise TypeError(f"{type(self).__name__}: takes a function, got {type(fn).__name__}")
        self.fn = fn

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """Bind to an object, as a method does."""
        return self if owner is None else type(self)(MethodType(self.fn, owner))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function on trees of tensors and sharded subtrees."""
        if isinstance(self.fn, nn.Module) and any(hasattr(child, SLOT) for child in self.fn.modules()):
            return cast("R", self.fn(*args, **kwargs))  # blocks gather themselves, and recompute
        if not _has_sharded((args, kwargs)):
            return recompute(self.fn)(*args, **kwargs)
        return recompute(self.fn, _gather)(*_replace(args, _handle), **_replace(kwargs, _handle))


class block(remat[P, R]):  # noqa: N801
    """Gather what is sharded among the arguments of a function, in forward and again in backward.

    Every `fzero.Sharded` among the arguments is all-gathered in forward, and again in backward; its gradient is
    scattered once. All ranks must call the same blocks in the same order: the gathers are collectives. Where nothing is
    sharded it calls the function and does nothing else. Compiled it keeps the function's activations; eagerly it
    recomputes them in backward, as `fzero.remat` does.

    >>> double = block(lambda params, x: params["scale"] * x)
    >>> import torch
    >>> double({"scale": torch.tensor(2.0)}, torch.tensor(3.0))
    tensor(6.)
    """

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function on trees of tensors and sharded subtrees."""
        if not _has_sharded((args, kwargs)):
            return self.fn(*args, **kwargs)
        if torch.compiler.is_compiling():
            # fzero.ordering gathers again in the graph, in front of the first use in backward
            return self.fn(*_replace(args, _assembled), **_replace(kwargs, _assembled))
        return super().__call__(*args, **kwargs)
