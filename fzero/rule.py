"""What every optimizer shares: the rule of one leaf, with labels and a learning rate, lifted to trees."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import optree
import torch
from torch import Tensor

from fzero.schedule import Schedule, number
from fzero.trace import once
from fzero.tree import show_path

# a tree of bools or floats, or a function of (path, leaf); None stands for the same on every leaf
Choice = Any


class Update(Protocol):
    """The type of ``Optimizer.update``."""

    def __call__(self, grads: Any, state: Any, params: Any, *, labels: Any = None) -> tuple[Any, Any]:
        """Return new parameters and the new state; `labels` defaults to ``labels(params)``."""


class Optimizer(NamedTuple):
    """Three pure functions: ``init(params)``, ``update(grads, state, params, labels=None)``, ``labels(params)``.

    ``labels`` gives a tree with one hashable at each leaf, decided from the path and the **full** leaf. A caller that
    holds only slices of the leaves computes it once from full leaves and hands it to every ``update``.

    Examples
    --------
    >>> from fzero.optim import sgd
    >>> optimizer = sgd(0.5)
    >>> params = {"w": torch.ones(2)}
    >>> state = optimizer.init(params)
    >>> params, state = optimizer.update({"w": torch.tensor([1.0, 2.0])}, state, params)
    >>> params["w"], state.step
    (tensor([0.5000, 0.0000]), tensor(1))
    """

    init: Callable[[Any], Any]
    update: Update
    labels: Callable[[Any], Any]


class Label(NamedTuple):
    """What sets a leaf apart from others: whether weight decay applies, and the factor on its learning rate."""

    decay: bool
    rate: float


class At(NamedTuple):
    """What a rule sees of one leaf; `grad` has the dtype of `param`, `rate` is a 0-d float64 tensor."""

    param: Tensor
    grad: Tensor
    rate: Tensor
    decay: bool


class Rule(NamedTuple):
    """What tells optimizers apart: `leaf` on the scalars that `shared` makes from the step count, 1 at the first."""

    name: str
    state: Callable[..., Any]
    slots: int
    shared: Callable[[Tensor], Sequence[Tensor]]
    leaf: Callable[[At, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch computes on a leaf of `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def scale(tensor: Tensor, factor: Tensor) -> Tensor:
    """Return tensor * factor, rounded once, for a 0-d float64 factor (which would promote a 0-d leaf)."""
    own = wide(tensor.dtype)
    return (tensor.to(own) * once(factor.to(tensor.device, own))).to(tensor.dtype)


def add(tensor: Tensor, other: Tensor, alpha: float | Tensor) -> Tensor:
    """Return tensor + alpha * other as the vector loop of ``torch.add(..., alpha=)`` does.

    That is: alpha rounded to the dtype of the leaf, then one fused multiply-add, rounded once. torch.add itself waits
    for a tensor alpha, and at the end of a half-precision run it rounds alpha * other too.
    """
    own = wide(tensor.dtype)
    if not isinstance(alpha, Tensor):
        alpha = torch.full((), alpha, dtype=torch.float64, device=tensor.device)
    factor = once(alpha.to(tensor.device, tensor.dtype).to(own))
    return torch.addcmul(tensor.to(own), other.to(own), factor).to(tensor.dtype)


def lift(rule: Rule, learning_rate: Any, decay_mask: Choice, rate_factor: Choice) -> Optimizer:
    """Lift the rule of one leaf to trees."""
    name, rate_at = rule.name, _reader(rule.name, learning_rate)

    def choose(spec: Any, leaves: list[Any]) -> list[Label]:
        decays = _choose(name, "decay_mask", decay_mask, spec, leaves)
        factors = _choose(name, "rate_factor", rate_factor, spec, leaves)
        return [Label(*pair) for pair in zip(decays, factors, strict=True)]

    def labels(params: Any) -> Any:
        leaves, spec = _flatten(params)
        return _unflatten(spec, choose(spec, leaves))

    def init(params: Any) -> Any:
        leaves, spec = _flatten(params)
        _check(f"{name}.init: parameter", spec, leaves, leaves)
        step = torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else "cpu")
        slots = ([torch.zeros_like(leaf, requires_grad=False) for leaf in leaves] for _ in range(rule.slots))
        return rule.state(step, *(_unflatten(spec, slot) for slot in slots))

    def update(grads: Any, state: Any, params: Any, *, labels: Any = None) -> tuple[Any, Any]:
        with torch.no_grad():
            leaves, spec = _flatten(params)
            _check(f"{name}.update: parameter", spec, leaves, leaves)
            gradients = _match(f"{name}.update: grads", spec, grads)
            _check(f"{name}.update: gradient", spec, gradients, leaves)
            slots = [_match(f"{name}.update: state", spec, slot) for slot in state[1 : 1 + rule.slots]]
            for slot in slots:
                _check(f"{name}.update: state", spec, slot, leaves)
            # labels(params) would build a tree of non-tensors, which Dynamo does not trace
            chosen = choose(spec, leaves) if labels is None else _match(f"{name}.update: labels", spec, labels)
            if not all(isinstance(label, Label) for label in chosen):
                raise TypeError(
                    f"{name}.update: labels must hold a Label at each leaf, got {chosen}. Use labels(params)."
                )
            step = state.step + 1
            rate, shared = rate_at(state.step), rule.shared(step)
            results = [
                rule.leaf(At(leaf, grad.to(leaf.dtype), rate * label.rate, label.decay), moments, shared)
                for leaf, grad, label, *moments in zip(leaves, gradients, chosen, *slots, strict=True)
            ]
            trees = [_unflatten(spec, [result[at] for result in results]) for at in range(1 + rule.slots)]
            return trees[0], rule.state(step, *trees[1:])

    return Optimizer(init, update, labels)


def _reader(name: str, learning_rate: Any) -> Schedule:
    """Return what gives the 0-d float64 rate at a count, whatever way the learning rate is given."""
    if isinstance(learning_rate, Tensor):
        if learning_rate.ndim or not learning_rate.is_floating_point():
            raise ValueError(
                f"{name}: learning_rate must be a 0-d floating tensor, got shape {tuple(learning_rate.shape)} and "
                f"{learning_rate.dtype}. Use torch.tensor(1e-3), or rate_factor for other rates by leaf."
            )
        number(name, "learning_rate", float(learning_rate.detach()))
        return lambda count: learning_rate.to(count.device, torch.float64)
    if not callable(learning_rate):
        value = number(name, "learning_rate", learning_rate)
        return lambda count: torch.full_like(count, value, dtype=torch.float64)

    def read(count: Tensor) -> Tensor:
        rate = learning_rate(count)
        if not isinstance(rate, Tensor) or rate.ndim or rate.is_complex():
            got = f"shape {tuple(rate.shape)}" if isinstance(rate, Tensor) else repr(rate)
            raise ValueError(
                f"{name}.update: learning_rate must return a real 0-d tensor, got {got}. "
                "Compute it from the count by torch operations, as fzero.constant does."
            )
        return rate.to(count.device, torch.float64)

    return read


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return leaves and structure. A lone tensor has structure None and meets no optree call: Dynamo traces it."""
    return ([tree], None) if isinstance(tree, Tensor) else optree.tree_flatten(tree)[:2]


def _unflatten(spec: Any, leaves: list[Any]) -> Any:
    return leaves[0] if spec is None else optree.tree_unflatten(spec, leaves)


def _match(what: str, spec: Any, tree: Any) -> list[Any]:
    """Return what `tree` has at each leaf of `spec`, be it a leaf or not."""
    if spec is None:
        return [tree]
    try:
        return list(spec.flatten_up_to(tree))
    except ValueError as error:
        ours, theirs = set(spec.paths()), set(optree.tree_paths(tree, is_leaf=lambda node: isinstance(node, Label)))
        at = " and ".join(show_path(path) for path in sorted(ours ^ theirs, key=str)) or "a container"
        raise ValueError(
            f"{what} must have the structure of the parameters, but differs at {at} ({error}). "
            "Build it with optree.tree_map over the parameters."
        ) from error


def _check(what: str, spec: Any, tensors: list[Any], params: list[Any]) -> None:
    for at, (tensor, param) in enumerate(zip(tensors, params, strict=True)):
        if not (isinstance(tensor, Tensor) and tensor.is_floating_point()):
            got = tensor.dtype if isinstance(tensor, Tensor) else f"{type(tensor).__name__} {tensor!r}"
            raise TypeError(
                f"{what} {_show_at(spec, at)} must be a real floating tensor, got {got}. "
                "Keep other leaves out of the optimizer; give zeros where there is no gradient."
            )
        if tensor.shape != param.shape:
            raise ValueError(
                f"{what} {_show_at(spec, at)} must have the shape of its parameter, {tuple(param.shape)}, got "
                f"{tuple(tensor.shape)}. Compute it from these parameters."
            )


def _choose(name: str, argument: str, choice: Choice, spec: Any, leaves: list[Any]) -> list[Any]:
    """Return the bool (a mask) or float (rate_factor) of each leaf."""
    masks = argument != "rate_factor"
    if choice is None:
        return [True if masks else 1.0] * len(leaves)
    if callable(choice):
        values = [choice(path, leaf) for path, leaf in zip([()] if spec is None else spec.paths(), leaves, strict=True)]
    else:
        values = _match(f"{name}: {argument}", spec, choice)
    for at, value in enumerate(values):
        if masks and not isinstance(value, bool):
            raise TypeError(
                f"{name}: {argument} must give a bool at {_show_at(spec, at)}, got {value!r}. "
                "Convert it with bool(), and give it the structure of the parameters."
            )
        if not masks:
            values[at] = number(name, f"rate_factor at {_show_at(spec, at)}", value)
    return values


def choose(name: str, argument: str, mask: Choice, params: Any) -> list[Any]:
    """Return the bool of each leaf of a tree that a mask gives; None stands for True."""
    leaves, spec = _flatten(params)
    return _choose(name, argument, mask, spec, leaves)


def _show_at(spec: Any, at: int) -> str:
    return show_path(() if spec is None else spec.paths()[at])


def described(opt: Optimizer, labels: Iterable[Hashable]) -> str:
    """Return what an optimizer makes of a few numbers: settings that differ between ranks show there."""
    found = []
    for label in sorted({label for label in labels if label is not None}, key=repr):
        # on CPU, wherever the parameters are: the digits are compared
        param, gradient = torch.tensor([[0.5, -2.0, 3.0], [0.1, 0.2, -0.3]], device="cpu").unbind()
        state = opt.init(param)
        for _ in range(2):
            param, state = opt.update(gradient, state, param, labels=label)
        found.append(f"{type(state).__name__} {[f'{value:.5g}' for value in param.tolist()]}")
    return ", ".join(found)
