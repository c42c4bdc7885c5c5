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

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.rule import At, Choice, Optimizer, Rule, add, lift, scale, wide
from fzero.schedule import Schedule, number
from fzero.trace import once


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

    def leaf(at: At, moments: Sequence[Tensor], shared: Sequence[Tensor]) -> tuple[Tensor, ...]:
        grad = add(at.grad, at.param, weight_decay) if at.decay and weight_decay else at.grad
        if not momentum:
            return (add(at.param, grad, -at.rate),)
        # the buffer comes first in each operation: its strides are kept
        buffer = torch.where(shared[0] > 1, moments[0] * momentum + grad, grad)
        along = add(grad, buffer, momentum) if nesterov else buffer
        return add(at.param, along, -at.rate), buffer

    rule = Rule("sgd", SGDState, 1 if momentum else 0, lambda step: (step,), leaf)
    return lift(rule, learning_rate, decay_mask, rate_factor)


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

    def leaf(at: At, moments: Sequence[Tensor], shared: Sequence[Tensor]) -> tuple[Tensor, ...]:
        del shared
        (moment,) = moments
        param = scale(at.param, 1 - at.rate * weight_decay) if at.decay and weight_decay else at.param
        direction = add(moment * beta1, at.grad, 1 - beta1).sign()
        return add(param, direction, -at.rate), add(moment * beta2, at.grad, 1 - beta2)

    return lift(Rule("lion", LionState, 1, lambda _: (), leaf), learning_rate, decay_mask, rate_factor)


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

    def leaf(at: At, moments: Sequence[Tensor], shared: Sequence[Tensor]) -> tuple[Tensor, ...]:
        param, grad = at.param, at.grad
        if at.decay and weight_decay and decoupled:
            param = scale(param, 1 - at.rate * weight_decay)
        elif at.decay and weight_decay:
            grad = add(grad, param, weight_decay)
        exp_avg = torch.lerp(moments[0], grad, 1 - beta1)
        exp_avg_sq = torch.addcmul(moments[1] * beta2, grad, grad, value=1 - beta2)
        own = wide(param.dtype)
        root = once(shared[1].to(param.device, own))
        denominator = (exp_avg_sq.sqrt().to(own) / root).to(param.dtype) + eps
        move = once((at.rate / -shared[0]).to(param.device, own)) * exp_avg.to(own) / denominator.to(own)
        return (param.to(own) + move).to(param.dtype), exp_avg, exp_avg_sq

    return lift(Rule(name, AdamWState, 2, shared, leaf), *choices)


def _betas(name: str, betas: tuple[float, float]) -> tuple[float, float]:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"{name}: betas must be two numbers, got {betas!r}. Give a pair such as (0.9, 0.999).")
    return number(name, "betas[0]", betas[0], below=1.0), number(name, "betas[1]", betas[1], below=1.0)
