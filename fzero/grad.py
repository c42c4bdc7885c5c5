"""Gradients of pure functions, and recomputation: on `torch.func` and `torch.autograd`; knows nothing of ranks."""

import functools
import itertools
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, cast

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fzero.trace import constant, opaque

P = ParamSpec("P")
R = TypeVar("R")


def value_and_grad(
    objective: Callable[[list[Tensor]], tuple[Tensor, Any]], variables: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, Any]:
    """Return (gradients, value, aux) of an objective that returns (0-d value, tree of tensors).

    Under `torch.compile` the transform is `torch.func.grad_and_value`. Eagerly it is `torch.autograd.grad` on detached
    variables: as pure, the same bits (but for operations whose backward takes another formula under ``create_graph``,
    which `torch.func` implies: GroupNorm differs by 2e-8), without the memory of a graph of the backward pass.
    Variables that the value does not depend on have a zero gradient.
    """
    if torch.compiler.is_compiling():
        treespecs: list[Any] = []

        def flat(free: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            # torch.func takes None for a leaf, and its aux may hold tensors only
            value, aux = objective(free)
            leaves, treespec = optree.tree_flatten(aux)
            treespecs.append(treespec)
            return value, leaves

        gradients, (value, leaves) = torch.func.grad_and_value(flat, has_aux=True)(list(variables))
        return gradients, value, optree.tree_unflatten(treespecs[0], leaves)
    with torch.enable_grad():
        leaves = [variable.detach().requires_grad_() for variable in variables]
        value, aux = objective(leaves)
        if leaves and value.requires_grad:
            gradients = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        else:
            gradients = [torch.zeros_like(leaf) for leaf in leaves]
    aux = optree.tree_map(lambda leaf: leaf.detach(), aux)
    return [gradient.detach() for gradient in gradients], value.detach(), aux


class remat(Generic[P, R]):  # noqa: N801  (reads as the function that it stands for)
    """Recompute a function in backward instead of keeping its activations.

    ``remat(fn)(*args, **kwargs)`` equals ``fn(*args, **kwargs)`` in value and gradient; arguments and outputs are trees
    of tensors, ``None`` and constants. Random numbers (dropout) are the same in the recomputation. Eagerly this is
    `torch.utils.checkpoint` (non-reentrant); under `torch.func` and `torch.compile`, where that cannot run, an autograd
    function that replays what was drawn in forward.

    Under `torch.func` and `torch.compile` the gradient flows to what is passed in, not to tensors that `fn` captures,
    which are refused where they can be seen: pass them as arguments. What a compiled function wraps, and captures, must
    not have been made while it is traced (but for constants); it returns tensors, ``None``, tuples, lists and dicts of
    them.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.

    >>> square = remat(lambda tree, power: tree["x"] ** power)
    >>> torch.func.grad(lambda x: square({"x": x}, 2))(torch.tensor(3.0))
    tensor(6.)
    """

    def __init__(self, fn: Callable[P, R], prepare: Callable[[Any], Any] = lambda arguments: arguments) -> None:
        if not callable(fn):
            raise TypeError(f"remat: takes a function, got {type(fn).__name__}")
        self.fn = fn
        self.prepare = prepare

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function on trees of tensors."""
        if torch.compiler.is_compiling():
            tensors: list[Tensor] = []
            shape = _outline((args, kwargs), tensors)
            _check_captured(self.fn)
            if isinstance(self.fn, MethodType):
                key = _park(self.fn.__func__, self.fn.__self__, self.prepare, shape)
            else:
                key = _park(self.fn, None, self.prepare, shape)
            outputs = _run_parked(key, *tensors)
            return cast("R", _decode(key, iter(range(_token_count(key))), outputs))
        if torch._C._functorch.peek_interpreter_stack() is None:  # noqa: SLF001  (no public way to ask)
            return checkpoint(functools.partial(_prepared, self.fn, self.prepare), args, kwargs, use_reentrant=False)
        _check_captured(self.fn)
        leaves, treespec = optree.tree_flatten(cast("Any", (args, kwargs)))
        parked = _Recomputed(functools.partial(_prepared, self.fn, self.prepare), treespec.unflatten, leaves)
        outputs = parked(*[leaf for leaf in leaves if isinstance(leaf, Tensor)])
        return cast("R", parked.rebuild(outputs))


def _prepared(fn: Callable[..., R], prepare: Callable[[Any], Any], args: Any, kwargs: Any) -> R:
    args, kwargs = prepare((args, kwargs))
    return fn(*args, **kwargs)


def _check_captured(fn: Callable[..., Any]) -> None:
    """Refuse a function that captures a tensor, whose gradient would be zero without a word. Dynamo traces this."""
    if isinstance(fn, FunctionType) and (_READS_CLOSURES or not torch.compiler.is_compiling()):
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if _is_captured(cell.cell_contents):
                raise TypeError(
                    f"remat: the function captures the tensor {name!r}, whose gradient would be lost; "
                    "under torch.func and torch.compile pass it as an argument"
                )


def _is_captured(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return False
    # Dynamo could not hand any tensor over; without it one that is not differentiated is a constant
    return torch.compiler.is_compiling() or torch._C._functorch.is_gradtrackingtensor(value)  # noqa: SLF001


# --- recomputation as an autograd function ---------------------------------------------------------------------------


class _Recomputed:
    """A function of flat tensors that keeps its inputs and its random numbers, and runs again in backward."""

    def __init__(self, fn: Callable[..., Any], unflatten: Callable[[list[Any]], Any], leaves: list[Any]) -> None:
        self.fn, self.unflatten = fn, unflatten
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.treespec: Any = None
        self.constants: list[Any] = []
        self.outputs = 0

    def flat(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the function; its output tensors, with what rebuilds the output tree kept aside."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        returned, self.treespec = optree.tree_flatten(self.fn(*self.unflatten(leaves)))
        self.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in returned]
        # an input that comes back as it is would make the output an alias that autograd refuses
        outputs = [leaf for leaf in returned if isinstance(leaf, Tensor)]
        return [out.clone() if any(out is tensor for tensor in tensors) else out for out in outputs]

    def rebuild(self, outputs: Sequence[Tensor]) -> Any:
        """Put the output tree together."""
        tensors = iter(outputs)
        where = [next(tensors) if is_tensor else leaf for is_tensor, leaf in self._kinds()]
        return self.treespec.unflatten(where)

    def _kinds(self) -> list[tuple[bool, Any]]:
        return [(leaf is None, leaf) for leaf in self.constants]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run it under autograd; Dynamo never traces this."""
        return _apply(self, *tensors)


def _apply(call: _Recomputed, *tensors: Tensor) -> tuple[Tensor, ...]:
    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
            # inside a transform, as in backward: random operations are decomposed in another way there than outside
            with _Record() as record:
                _, _, outputs = torch.func.vjp(  # type: ignore[misc]  # has_aux adds a third
                    lambda idle: (idle, call.flat(inputs)), torch.zeros(()), has_aux=True
                )
            call.outputs = len(outputs)
            return (*outputs, *record.drawn)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
            drawn = output[call.outputs :]
            ctx.mark_non_differentiable(*drawn, *(out for out in output[: call.outputs] if not _differentiable(out)))
            ctx.save_for_backward(*inputs, *drawn)
            ctx.inputs = len(inputs)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            inputs, drawn = ctx.saved_tensors[: ctx.inputs], ctx.saved_tensors[ctx.inputs :]
            # only what is differentiated: a buffer that is updated in place must not become part of a graph
            places = [place for place in range(ctx.inputs) if ctx.needs_input_grad[place]]

            wanted = [gradient for gradient in gradients[: call.outputs] if _differentiable(gradient)]

            # not torch.func.vjp: its pullback runs after its level has ended, where a nested remat cannot run
            def weighted(*variables: Tensor) -> Tensor:
                filled = list(inputs)
                for place, variable in zip(places, variables, strict=True):
                    filled[place] = variable
                with _Replay(drawn):
                    outputs = [out for out in call.flat(filled) if _differentiable(out)]
                return _weighted_sum(outputs, wanted)

            argnums = tuple(range(len(places)))
            found = torch.func.grad(weighted, argnums)(*(inputs[place] for place in places))
            pulled = dict(zip(places, found, strict=True))
            return tuple(pulled.get(place) for place in range(ctx.inputs))

    return cast("tuple[Tensor, ...]", Recompute.apply(*tensors))[: call.outputs]


def _weighted_sum(outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the real scalar whose gradient with respect to each output is exactly its weight."""
    total = torch.zeros((), dtype=torch.float64, device=weights[0].device)
    for output, weight in zip(outputs, weights, strict=True):
        product = (output * weight.conj()).sum()
        total = total + (product.real if product.is_complex() else product).to(torch.float64)
    return total


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_random(operation: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operation.tags


class _Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what every random operation returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_random(func):
            # a copy: an operation in place, or a later one on its result, would change what is kept
            self.drawn += [out.clone() for out in _tensors(result)]
        return result


class _Replay(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns what was drawn in forward, in the same order, instead of drawing again."""

    def __init__(self, drawn: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # operations arrive here below every transform of torch.func
        self.drawn = iter([torch.func.debug_unwrap(tensor) for tensor in drawn])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_random(func):
            return func(*args, **(kwargs or {}))
        if func._schema.is_mutable:  # noqa: SLF001  (bernoulli_ and its like write into their first argument)
            return args[0].copy_(next(self.drawn))
        returns = func._schema.returns  # noqa: SLF001
        values = tuple(next(self.drawn).clone() for _ in returns)
        return values[0] if len(returns) == 1 else values


def _tensors(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


# --- the same under Dynamo -------------------------------------------------------------------------------------------


class _Parked(NamedTuple):
    call: _Recomputed
    tokens: list[int | str]


# Dynamo hands tensors and constants to a function that it does not trace, nothing else. What is neither (the function
# to recompute, the structure of its arguments) is parked here while it traces, and travels as its number.
_parked: dict[int, _Parked] = {}
_numbers = itertools.count()

_READS_CLOSURES = torch.__version__ >= "2.14"
"""Whether Dynamo can look at what a function captures; the versions before may not."""


def _outline(tree: Any, tensors: list[Tensor]) -> Any:
    """Take a tree apart in a way that Dynamo can follow: a tuple of constants; tensors are moved into the list."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return ("tensor",)
    if isinstance(tree, dict):
        return (type(tree), tuple(tree.keys()), tuple(_outline(child, tensors) for child in tree.values()))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return (type(tree), None, tuple(_outline(child, tensors) for child in tree))
    if isinstance(tree, (tuple, list)):
        return (type(tree), None, tuple(_outline(child, tensors) for child in tree))
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
def _park(fn: Callable[..., Any], owner: Any, prepare: Callable[[Any], Any], shape: Any) -> int:
    # a method comes in two parts, because Dynamo does not take it for a constant
    fn = functools.partial(_prepared, fn if owner is None else MethodType(fn, owner), prepare)
    number = next(_numbers)
    count = _count(shape)
    call = _Recomputed(fn, lambda leaves: _refill(shape, iter(leaves)), [torch.empty(0)] * count)
    _parked[number] = _Parked(call, [])
    return number


def _count(shape: Any) -> int:
    if shape[0] in ("tensor", "constant"):
        return int(shape[0] == "tensor")
    return sum(_count(child) for child in shape[2])


@opaque
def _run_parked(number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
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
def _token_count(number: int) -> int:
    return len(_parked[number].tokens)


@constant
def _token(number: int, place: int) -> int | str:
    return _parked[number].tokens[place]


def _decode(number: int, places: Any, outputs: Any) -> Any:
    kind = _token(number, next(places))
    if kind == "none":
        return None
    if kind == "tensor":
        return outputs[_token(number, next(places))]
    length = int(_token(number, next(places)))
    if kind == "dict":
        return {_token(number, next(places)): _decode(number, places, outputs) for _ in range(length)}
    children = [_decode(number, places, outputs) for _ in range(length)]
    return tuple(children) if kind == "tuple" else children
