"""Recompute a function in backward: activation checkpointing in every way of differentiating."""

import functools
import itertools
from collections.abc import Callable
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar, cast

import optree
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fzero.called import call_on_copies, write_back
from fzero.parked import decode, outline_constants, park_function_that_captures_no_tensor, run_parked, token_count
from fzero.recompute import Recomputed, prepared, refuse_captured

P = ParamSpec("P")
R = TypeVar("R")


class remat(Generic[P, R]):  # noqa: N801  (reads as the function that it stands for)
    """Recompute a function in backward instead of keeping its activations.

    ``remat(fn)(*args, **kwargs)`` equals ``fn(*args, **kwargs)`` in value and gradient; arguments and outputs are trees
    of tensors, ``None`` and constants. Random numbers of torch's default generators (dropout) are the same in the
    recomputation; those of a generator of your own are not. Eagerly this is
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

    def __init__(
        self, fn: Callable[P, R], prepare: Callable[[Any], Any] = lambda arguments: arguments, owner: Any = None
    ) -> None:
        if not callable(fn):
            raise TypeError(f"remat: takes a function, got {type(fn).__name__}")
        self.fn, self.prepare, self.owner = fn, prepare, owner

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function on trees of tensors."""
        if isinstance(self.fn, nn.Module) and _has_tensors(self.fn):
            return cast("R", _recompute_module(self.fn, self.prepare, args, kwargs))
        # Dynamo makes no module of a method: there, pass what it uses as arguments
        owner = self.fn.__self__ if isinstance(self.fn, MethodType) and not torch.compiler.is_compiling() else None
        if isinstance(owner, nn.Module) and _has_tensors(owner) and _is_borrowed(owner):
            return cast("R", _recompute_module(_Method(self.fn), self.prepare, args, kwargs))
        return self.recompute(*args, **kwargs)

    def recompute(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function on trees of tensors, all of which are arguments."""
        if torch.compiler.is_compiling():
            tensors: list[Tensor] = []
            shape = outline_constants((args, kwargs), tensors)
            # a method comes in two parts, because Dynamo does not take it for a constant
            if isinstance(self.fn, MethodType):
                key = park_function_that_captures_no_tensor(self.fn.__func__, self.fn.__self__, self.prepare, shape)
            else:
                key = park_function_that_captures_no_tensor(self.fn, self.owner, self.prepare, shape)
            outputs = run_parked(key, *tensors)
            return cast("R", decode(key, iter(range(token_count(key))), outputs))
        fn = self.fn if self.owner is None else MethodType(self.fn, self.owner)
        if torch._C._functorch.peek_interpreter_stack() is None:  # noqa: SLF001  (no public way to ask)
            # tensors go in flat: checkpoint must see them to notice one that the function changes in place
            leaves, treespec = optree.tree_flatten(cast("Any", (args, kwargs)))

            def call(*leaves: Any) -> R:
                return cast("R", prepared(fn, self.prepare, *treespec.unflatten(leaves)))

            return checkpoint(call, *leaves, use_reentrant=False)
        refuse_captured(self.fn, torch._C._functorch.is_gradtrackingtensor)  # noqa: SLF001
        leaves, treespec = optree.tree_flatten(cast("Any", (args, kwargs)))
        parked = Recomputed(functools.partial(prepared, fn, self.prepare), treespec.unflatten, leaves)
        outputs = parked(*[leaf for leaf in leaves if isinstance(leaf, Tensor)])
        return cast("R", parked.rebuild(outputs))


class _Method(nn.Module):
    """A module's method as a module."""

    def __init__(self, method: Any) -> None:
        super().__init__()
        self.owner, self.function = method.__self__, method.__func__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.owner, *args, **kwargs)


def _is_borrowed(module: nn.Module) -> bool:
    """Return whether a module's parameters may be gone, or others, when it runs again in backward."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
        return True
    return any(not isinstance(parameter, nn.Parameter) for parameter in module.parameters())


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in itertools.chain(module.parameters(), module.buffers()))


def _recompute_module(module: nn.Module, prepare: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
    """Recompute a module on the parameters and buffers that it has now; what it does to its buffers is done once."""
    params = dict(module.named_parameters()) if _is_borrowed(module) else {}
    buffers = dict(module.named_buffers())
    run: Any = remat(_run_module, prepare, module)
    # copies: the recomputation must see the buffers as they were
    copies = {name: buffer.clone() for name, buffer in buffers.items()}
    output, seen, rest = run.recompute(params, copies, args, kwargs)
    for name, buffer in buffers.items():
        write_back(buffer, (seen if name in seen else rest)[name], seen=name in seen)
    return output


def _run_module(module: nn.Module, params: Any, buffers: Any, args: Any, kwargs: Any) -> Any:
    return call_on_copies(module, params, buffers, args, kwargs)
