"""Recomputation under Dynamo, which hands tensors and constants to a function that it does not trace, nothing else."""

import functools
import itertools
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.recompute import Recomputed, prepared, refuse_captured
from fzero.trace import constant, opaque


class _Parked(NamedTuple):
    call: Recomputed
    tokens: list[int | str]


# Dynamo hands tensors and constants to a function that it does not trace, nothing else. What is neither (the function
# to recompute, the structure of its arguments) is parked here while it traces, and travels as its number.
_parked: dict[int, _Parked] = {}
_numbers = itertools.count()


def outline_constants(tree: Any, tensors: list[Tensor]) -> Any:
    """Take a tree apart in a way that Dynamo can follow: a tuple of constants; tensors are moved into the list."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return ("tensor",)
    if isinstance(tree, dict):
        return (type(tree), tuple(tree.keys()), tuple(outline_constants(child, tensors) for child in tree.values()))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return (type(tree), None, tuple(outline_constants(child, tensors) for child in tree))
    if isinstance(tree, (tuple, list)):
        return (type(tree), None, tuple(outline_constants(child, tensors) for child in tree))
    return ("constant", tree)


def _refill(shape: Any, leaves: Any) -> Any:
    kind = shape[0]
    if kind == "tensor":
        return next(leaves)
    if kind == "constant":
        return shape[1]
    children = [_refill(child, leaves) for child in shape[2]]
    if shape[1] is not None:
        return kind(zip(shape[1], children, strict=True))
    return kind(*children) if hasattr(kind, "_fields") else kind(children)


@constant
def park_function_that_captures_no_tensor(  # the name stands in Dynamo's message if it captures one
    fn: Callable[..., Any], owner: Any, prepare: Callable[[Any], Any], shape: Any
) -> int:
    """Keep a function and the structure of its arguments; return its number."""
    refuse_captured(fn, lambda _: True)
    fn = functools.partial(prepared, fn if owner is None else MethodType(fn, owner), prepare)
    number = next(_numbers)
    count = _count(shape)
    call = Recomputed(fn, lambda leaves: _refill(shape, iter(leaves)), [torch.empty(0)] * count)
    _parked[number] = _Parked(call, [])
    return number


def _count(shape: Any) -> int:
    if shape[0] in ("tensor", "constant"):
        return int(shape[0] == "tensor")
    return sum(_count(child) for child in shape[2])


@opaque
def run_parked(number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Run a parked function under autograd; what rebuilds its outputs is kept beside it."""
    parked = _parked[number]
    outputs = parked.call(*tensors)
    places = {id(output): place for place, output in enumerate(outputs)}
    parked.tokens[:] = _encode(parked.call.rebuild(outputs), places)
    return outputs


def _encode(tree: Any, places: dict[int, int]) -> list[int | str]:
    if tree is None:
        return ["none"]
    if isinstance(tree, Tensor):
        return ["tensor", places[id(tree)]]
    if type(tree) is dict:
        parts = [part for key, child in tree.items() for part in (key, *_encode(child, places))]
        return ["dict", len(tree), *parts]
    if type(tree) in (tuple, list):
        return [type(tree).__name__, len(tree), *(part for child in tree for part in _encode(child, places))]
    raise TypeError(
        f"remat: under torch.compile the function may return tensors, None, and tuples, lists and dicts of them; "
        f"got {type(tree).__name__}"
    )


@constant
def token_count(number: int) -> int:
    """Return how many tokens describe the outputs of a parked function."""
    return len(_parked[number].tokens)


@constant
def _token(number: int, place: int) -> int | str:
    return _parked[number].tokens[place]


def decode(number: int, places: Any, outputs: Any) -> Any:
    """Rebuild the outputs of a parked function, token by token. Dynamo traces this."""
    kind = _token(number, next(places))
    if kind == "none":
        return None
    if kind == "tensor":
        return outputs[_token(number, next(places))]
    length = int(_token(number, next(places)))
    if kind == "dict":
        return {_token(number, next(places)): decode(number, places, outputs) for _ in range(length)}
    children = [decode(number, places, outputs) for _ in range(length)]
    return tuple(children) if kind == "tuple" else children
