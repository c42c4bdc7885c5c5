"""Optimizers as pairs of pure functions on any tree of floating tensors.

``init(params)`` gives a state, ``update(grads, state, params)`` gives new parameters and a new state and changes
none of its arguments; what it returns shares no memory with them and has no ``grad_fn``. Everything but the label of
a leaf is element-wise, so that a flat bucket, a shard and a whole leaf give the same bits.

Scalars (learning rate, bias corrections) are 0-d float64 tensors made by torch operations: nothing waits for a device
and a compiled update compiles once, whatever the step (Dynamo traces no tree without leaves). They are rounded once, to
the dtype in which torch computes on the leaf (float32 for bfloat16 and float16), as torch rounds the Python numbers of
``torch.optim``. The moments have the dtype of their parameter; float32 moments need float32 parameters (masters).

A gradient of zeros is a gradient: decay and old momentum keep moving that leaf, and the step counts.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import optree
import torch
from torch import Tensor

from .schedule import Schedule, number

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


class AdamWState(NamedTuple):
    """State of `adamw` and `adam`: applied steps (0-d int64), first and second moments (trees like the parameters)."""

    step: Tensor
    exp_avg: Any
    exp_avg_sq: Any


class SGDState(NamedTuple):
    """State of `sgd`: applied steps (0-d int64) and momentum (a tree like the parameters; None without momentum)."""

    step: Tensor
    momentum: Any = None


class LionState(NamedTuple):
    """State of `lion`: applied steps (0-d int64) and momentum (a tree like the parameters)."""

    step: Tensor
    exp_avg: Any


def adamw(
    learning_rate: float | Tensor | Schedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    *,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    decay_mask: Choice = None,
    rate_factor: Choice = None,
) -> Optimizer:
    """Return AdamW: Adam with decoupled weight decay.

    With g the gradient, t = step + 1 and a the rate of the leaf::

        p <- p - a weight_decay p
        m <- m + (1 - b1) (g - m)
        v <- b2 v + (1 - b2) g g
        p <- p - a / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)

    Equal to ``torch.optim.AdamW(foreach=False, fused=False)``, bit for bit in eager mode on CPU, in float64, float32,
    bfloat16 and float16. (A ``learning_rate`` tensor is taken to float64 first; torch stays in the tensor's dtype. An
    `eps` below 3e-8 is 0 in float16, in torch too.)

    Parameters
    ----------
    learning_rate : float, 0-d tensor, or schedule
        A tensor is read at every update, so it may be written in place; a schedule maps the 0-d int64 count of steps
        already applied (0 at the first) to the 0-d rate. Neither is checked for sign: that would wait for the device.
    betas : tuple of float
        Decay of the two moments, each in [0, 1).
    eps, weight_decay : float
        At least 0.
    decay_mask : None, tree of bool, or Callable[[path, leaf], bool]
        Where weight decay applies (None: everywhere). `path` is the leaf's tuple of keys, as in ``optree.tree_paths``.
    rate_factor : None, tree of float, or Callable[[path, leaf], float]
        Factor on the learning rate of a leaf (None: 1).

    Returns
    -------
    Optimizer
        With state ``AdamWState``. ``init`` allocates two tensors of the size and dtype of each leaf; ``step`` lies on
        the device of the first leaf. ``update`` raises on a tree, shape or dtype that does not fit, naming the path.

    Raises
    ------
    ValueError, TypeError
        When an argument breaks these rules.

    Notes
    -----
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101, algorithm 2. As in torch,
    the decay is multiplied by the learning rate, and the moments are corrected before `eps` is added.

    Examples
    --------
    >>> optimizer = adamw(0.1, weight_decay=0.1)
    >>> w = torch.tensor(1.0)
    >>> state = optimizer.init(w)
    >>> for grad in (1.0, 0.0, 0.0, 0.0):
    ...     w, state = optimizer.update(torch.tensor(grad), state, w)
    >>> w, state.step
    (tensor(0.7042), tensor(4))
    """
    return _adam("adamw", True, betas, eps, weight_decay, (learning_rate, decay_mask, rate_factor))


def adam(
    learning_rate: float | Tensor | Schedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    *,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay_mask: Choice = None,
    rate_factor: Choice = None,
) -> Optimizer:
    """Return Adam, with weight decay as an L2 term of the gradient.

    The equations of `adamw`, but for its first line, which here is g <- g + weight_decay p.

    Equal to ``torch.optim.Adam(foreach=False, fused=False)``, bit for bit in eager mode on CPU in float64 and float32,
    and without weight decay in bfloat16 and float16. With it, half-precision leaves follow torch as in `sgd`.

    Parameters, returns and errors are those of `adamw`.

    Notes
    -----
    Source: Kingma and Ba, arXiv:1412.6980, algorithm 1.

    Examples
    --------
    >>> optimizer = adam(0.1)
    >>> w = torch.tensor([1.0, -1.0])
    >>> optimizer.update(torch.tensor([3.0, -5.0]), optimizer.init(w), w)[0]
    tensor([ 0.9000, -0.9000])
    """
    return _adam("adam", False, betas, eps, weight_decay, (learning_rate, decay_mask, rate_factor))


def sgd(
    learning_rate: float | Tensor | Schedule,
    momentum: float = 0.0,
    *,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decay_mask: Choice = None,
    rate_factor: Choice = None,
) -> Optimizer:
    """Return stochastic gradient descent with momentum and an L2 term.

    With g the gradient and a the rate of the leaf::

        g <- g + weight_decay p
        b <- momentum b + g         (the first time: b <- g)
        p <- p - a b                (nesterov: p <- p - a (g + momentum b);  without momentum: p <- p - a g)

    Equal to ``torch.optim.SGD(foreach=False, fused=False)`` with no dampening, bit for bit in eager mode on CPU in
    float64 and float32. In bfloat16 and float16 it is equal where torch's vector loop computes (AVX2 and AVX512). On
    the last elements of a run, which fill no vector, torch rounds alpha * x of each sum once more; that would make the
    result depend on where a leaf is cut, so it is not followed: there the two differ by that rounding for each sum.

    Parameters
    ----------
    momentum : float
        In [0, 1). With 0 there is no buffer and ``SGDState.momentum`` is None.
    nesterov : bool
        Look ahead along the momentum; needs `momentum` > 0.
    learning_rate, weight_decay, decay_mask, rate_factor
        As in `adamw`.

    Raises
    ------
    ValueError, TypeError
        When an argument breaks these rules.

    Notes
    -----
    Source: Sutskever et al., ICML 2013, in the form of torch, where the rate multiplies the buffer as a whole.

    Examples
    --------
    >>> optimizer = sgd(0.1, momentum=0.5)
    >>> w, grad = torch.tensor(1.0), torch.tensor(1.0)
    >>> state = optimizer.init(w)
    >>> for _ in range(2):
    ...     w, state = optimizer.update(grad, state, w)
    >>> w, state.momentum
    (tensor(0.7500), tensor(1.5000))
    """
    momentum = number("sgd", "momentum", momentum, below=1.0)
    weight_decay = number("sgd", "weight_decay", weight_decay)
    if nesterov and momentum == 0:
        raise ValueError("sgd: nesterov must be False without momentum, got nesterov=True, momentum=0. Set momentum.")

    def leaf(at: _Leaf, moments: Sequence[Tensor], shared: Sequence[Tensor]) -> tuple[Tensor, ...]:
        grad = _add(at.grad, at.param, weight_decay) if at.decay and weight_decay else at.grad
        if not momentum:
            return (_add(at.param, grad, -at.rate),)
        # the buffer comes first in each operation: its strides are kept
        buffer = torch.where(shared[0] > 1, moments[0] * momentum + grad, grad)
        along = _add(grad, buffer, momentum) if nesterov else buffer
        return _add(at.param, along, -at.rate), buffer

    rule = _Rule("sgd", SGDState, 1 if momentum else 0, lambda step: (step,), leaf)
    return _optimizer(rule, learning_rate, decay_mask, rate_factor)


def lion(
    learning_rate: float | Tensor | Schedule = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    *,
    weight_decay: float = 0.0,
    decay_mask: Choice = None,
    rate_factor: Choice = None,
) -> Optimizer:
    """Return Lion: the sign of an interpolated momentum, with decoupled weight decay.

    With g the gradient and a the rate of the leaf::

        p <- p - a weight_decay p
        p <- p - a sign(b1 m + (1 - b1) g)
        m <- b2 m + (1 - b2) g

    Parameters, returns and errors are those of `adamw`, without `eps` and with state ``LionState``.

    Notes
    -----
    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, algorithm 2.

    Examples
    --------
    >>> optimizer = lion(0.25)
    >>> w = torch.tensor([1.0, 1.0, 1.0])
    >>> optimizer.update(torch.tensor([3.0, -0.1, 0.0]), optimizer.init(w), w)[0]
    tensor([0.7500, 1.2500, 1.0000])
    """
    beta1, beta2 = _betas("lion", betas)
    weight_decay = number("lion", "weight_decay", weight_decay)

    def leaf(at: _Leaf, moments: Sequence[Tensor], shared: Sequence[Tensor]) -> tuple[Tensor, ...]:
        del shared
        (moment,) = moments
        param = _scale(at.param, 1 - at.rate * weight_decay) if at.decay and weight_decay else at.param
        direction = _add(moment * beta1, at.grad, 1 - beta1).sign()
        return _add(param, direction, -at.rate), _add(moment * beta2, at.grad, 1 - beta2)

    return _optimizer(_Rule("lion", LionState, 1, lambda _: (), leaf), learning_rate, decay_mask, rate_factor)


class _Leaf(NamedTuple):
    """What a rule sees of one leaf; `grad` has the dtype of `param`, `rate` is a 0-d float64 tensor."""

    param: Tensor
    grad: Tensor
    rate: Tensor
    decay: bool


class _Rule(NamedTuple):
    """What tells optimizers apart: `leaf` on the scalars that `shared` makes from the step count, 1 at the first."""

    name: str
    state: Callable[..., Any]
    slots: int
    shared: Callable[[Tensor], Sequence[Tensor]]
    leaf: Callable[[_Leaf, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]


def _adam(
    name: str, decoupled: bool, betas: tuple[float, float], eps: float, weight_decay: float, choices: tuple[Any, ...]
) -> Optimizer:
    beta1, beta2 = _betas(name, betas)
    eps, weight_decay = number(name, "eps", eps), number(name, "weight_decay", weight_decay)

    def shared(step: Tensor) -> Sequence[Tensor]:
        # two tensors: for a Python exponent of 0.5 torch takes sqrt, a bit away from Python's x ** 0.5
        correction1, correction2 = (
            1 - torch.pow(torch.full_like(step, beta, dtype=torch.float64), step.to(torch.float64))
            for beta in (beta1, beta2)
        )
        return correction1, torch.pow(correction2, torch.full_like(correction2, 0.5))

    def leaf(at: _Leaf, moments: Sequence[Tensor], shared: Sequence[Tensor]) -> tuple[Tensor, ...]:
        param, grad = at.param, at.grad
        if at.decay and weight_decay and decoupled:
            param = _scale(param, 1 - at.rate * weight_decay)
        elif at.decay and weight_decay:
            grad = _add(grad, param, weight_decay)
        exp_avg = torch.lerp(moments[0], grad, 1 - beta1)
        exp_avg_sq = torch.addcmul(moments[1] * beta2, grad, grad, value=1 - beta2)
        wide = _wide(param.dtype)
        root = shared[1].to(param.device, wide)
        denominator = (exp_avg_sq.sqrt().to(wide) / root).to(param.dtype) + eps
        move = (at.rate / -shared[0]).to(param.device, wide) * exp_avg.to(wide) / denominator.to(wide)
        return (param.to(wide) + move).to(param.dtype), exp_avg, exp_avg_sq

    return _optimizer(_Rule(name, AdamWState, 2, shared, leaf), *choices)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch computes on a leaf of `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _scale(tensor: Tensor, factor: Tensor) -> Tensor:
    """Return tensor * factor, rounded once, for a 0-d float64 factor (which would promote a 0-d leaf)."""
    wide = _wide(tensor.dtype)
    return (tensor.to(wide) * factor.to(tensor.device, wide)).to(tensor.dtype)


def _add(tensor: Tensor, other: Tensor, alpha: float | Tensor) -> Tensor:
    """Return tensor + alpha * other as the vector loop of ``torch.add(..., alpha=)`` does.

    That is: alpha rounded to the dtype of the leaf, then one fused multiply-add, rounded once. torch.add itself waits
    for a tensor alpha, and at the end of a half-precision run it rounds alpha * other too.
    """
    wide = _wide(tensor.dtype)
    if not isinstance(alpha, Tensor):
        alpha = torch.full((), alpha, dtype=torch.float64, device=tensor.device)
    factor = alpha.to(tensor.device, tensor.dtype).to(wide)
    return torch.addcmul(tensor.to(wide), other.to(wide), factor).to(tensor.dtype)


def _optimizer(rule: _Rule, learning_rate: Any, decay_mask: Choice, rate_factor: Choice) -> Optimizer:
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
                rule.leaf(_Leaf(leaf, grad.to(leaf.dtype), rate * label.rate, label.decay), moments, shared)
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
        at = " and ".join(_show(path) for path in sorted(ours ^ theirs, key=str)) or "a container"
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
    """Return the bool (decay_mask) or float (rate_factor) of each leaf."""
    masks = argument == "decay_mask"
    if choice is None:
        return [True if masks else 1.0] * len(leaves)
    if callable(choice):
        values = [choice(path, leaf) for path, leaf in zip([()] if spec is None else spec.paths(), leaves, strict=True)]
    else:
        values = _match(f"{name}: {argument}", spec, choice)
    for at, value in enumerate(values):
        if masks and not isinstance(value, bool):
            raise TypeError(
                f"{name}: decay_mask must give a bool at {_show_at(spec, at)}, got {value!r}. "
                "Convert it with bool(), and give it the structure of the parameters."
            )
        if not masks:
            values[at] = number(name, f"rate_factor at {_show_at(spec, at)}", value)
    return values


def _show(path: tuple[Any, ...]) -> str:
    return repr(".".join(str(key) for key in path)) if path else "the tree itself"


def _show_at(spec: Any, at: int) -> str:
    return _show(() if spec is None else spec.paths()[at])


def _betas(name: str, betas: tuple[float, float]) -> tuple[float, float]:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"{name}: betas must be two numbers, got {betas!r}. Give a pair such as (0.9, 0.999).")
    return number(name, "betas[0]", betas[0], below=1.0), number(name, "betas[1]", betas[1], below=1.0)
