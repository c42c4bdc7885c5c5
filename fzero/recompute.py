"""A function that runs again in backward, as an autograd function that `torch.func` and AOTAutograd can transform."""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar, cast

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

R = TypeVar("R")


def prepared(fn: Callable[..., R], prepare: Callable[[Any], Any], args: Any, kwargs: Any) -> R:
    """Call a function on prepared arguments."""
    args, kwargs = prepare((args, kwargs))
    return fn(*args, **kwargs)


def refuse_captured(fn: Callable[..., Any], lost: Callable[[Tensor], bool]) -> None:
    """Refuse a function that captures a tensor for which `lost` holds: its gradient would be zero without a word."""
    if isinstance(fn, FunctionType):
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if isinstance(cell.cell_contents, Tensor) and lost(cell.cell_contents):
                raise TypeError(
                    f"remat: the function captures the tensor {name!r}, whose gradient would be lost; "
                    "under torch.func and torch.compile pass it as an argument"
                )


class Recomputed:
    """A function of flat tensors that keeps its inputs and its random numbers, and runs again in backward."""

    def __init__(self, fn: Callable[..., Any], unflatten: Callable[[list[Any]], Any], leaves: list[Any]) -> None:
        self.fn, self.unflatten = fn, unflatten
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.treespec: Any = None
        self.constants: list[Any] = []
        self.outputs = 0
        self.drawn: list[list[Any]] = []
        """What random operations returned in forward: None for each tensor (they are kept apart), (value,) else."""

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
        return self.treespec.unflatten([next(tensors) if leaf is None else leaf for leaf in self.constants])

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run it under autograd; Dynamo never traces this."""
        return _apply(self, *tensors)


def _apply(call: Recomputed, *tensors: Tensor) -> tuple[Tensor, ...]:
    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
            # inside a transform, as in backward: random operations are decomposed in another way there than outside
            with _Record() as record:
                _, _, outputs = torch.func.vjp(  # type: ignore[misc]  # has_aux adds a third
                    lambda idle: (idle, call.flat(inputs)), torch.zeros(()), has_aux=True
                )
            call.outputs, call.drawn = len(outputs), record.shapes
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
                with _Replay(drawn, call.drawn):
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


def _is_random(operation: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation draws; attention does not if its dropout is 0, whatever its tag says."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    for place, argument in enumerate(operation._schema.arguments):  # noqa: SLF001
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given)
    return True


class _Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what every random operation returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[Tensor] = []
        self.shapes: list[list[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_random(func, args, kwargs or {}):
            outputs = list(result) if isinstance(result, (tuple, list)) else [result]
            # a copy: an operation in place, or a later one on its result, would change what is kept
            self.drawn += [out.clone() for out in outputs if isinstance(out, Tensor)]
            # CUDA's attention returns sizes, and nothing in place of some tensors
            self.shapes.append([None if isinstance(out, Tensor) else (out,) for out in outputs])
        return result


class _Replay(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns what was drawn in forward, in the same order, instead of drawing again."""

    def __init__(self, drawn: Sequence[Tensor], shapes: Sequence[list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # operations arrive here below every transform of torch.func
        self.drawn = iter([torch.func.debug_unwrap(tensor) for tensor in drawn])
        self.shapes = iter(shapes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_random(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        shape = next(self.shapes)
        if func._schema.is_mutable:  # noqa: SLF001  (bernoulli_ and its like write into their first argument)
            return args[0].copy_(next(self.drawn))
        values = tuple(next(self.drawn).clone() if rest is None else rest[0] for rest in shape)
        return values[0] if len(func._schema.returns) == 1 else values  # noqa: SLF001
