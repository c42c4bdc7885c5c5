"""Learning rates as pure functions of the count of applied steps.

A schedule maps the count of steps already applied, an int64 tensor that is 0 at the first update, to a
float64 tensor of the same shape. It uses torch operations only, so a compiled step compiles once for all
counts, and nothing waits for a device.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Schedule = Callable[[Tensor], Tensor]


def constant(value: float) -> Schedule:
    """Return the schedule that is the same at every count: f(c) = value.

    Parameters
    ----------
    value : float
        The rate; finite, at least 0.

    Raises
    ------
    ValueError, TypeError
        When `value` is not a finite number of at least 0.

    Examples
    --------
    >>> constant(0.5)(torch.tensor(7))
    tensor(0.5000, dtype=torch.float64)
    """
    value = number("constant", "value", value)
    return lambda count: torch.full_like(count, value, dtype=torch.float64)


def warmup_linear(peak: float, warmup_steps: int, total_steps: int, final: float = 0.0) -> Schedule:
    """Return a linear rise to `peak`, then a straight line to `final`.

    With W = `warmup_steps`, T = `total_steps`, c the count and a = max(W - 1, 0), the count that gets `peak`::

        f(c) = peak (c + 1) / W               for c < W
        f(c) = peak (1 - r) + final r         for c >= W,   r = min((c - a) / max(T - 1 - a, 1), 1)

    So the k-th applied update uses f(k - 1): the first peak / W (never 0), the W-th `peak`, the T-th `final`
    (`peak` where T = W or T = 1), and every later one `final`. `peak` and `final` are met exactly.

    Parameters
    ----------
    peak, final : float
        Rates; finite, at least 0.
    warmup_steps : int
        Updates of the rise, in [0, total_steps]; with 0 the first update uses `peak`.
    total_steps : int
        Updates until `final`, at least 1.

    Raises
    ------
    ValueError, TypeError
        When an argument breaks these rules.

    Notes
    -----
    Source: the warm-up is that of Goyal et al., arXiv:1706.02677, sec. 2.2.

    Examples
    --------
    >>> schedule = warmup_linear(1.0, 2, 6)
    >>> [schedule(torch.tensor(count)).item() for count in range(7)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return _warmup("warmup_linear", peak, warmup_steps, total_steps, final, lambda ratio: ratio)


def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, final: float = 0.0) -> Schedule:
    """Return a linear rise to `peak`, then half a cosine to `final`.

    As `warmup_linear`, with r (its share of the way from `peak` to `final`) replaced by (1 - cos(pi r)) / 2::

        f(c) = peak (c + 1) / W                             for c < W
        f(c) = peak (1 + cos(pi r)) / 2 + final (1 - cos(pi r)) / 2    for c >= W

    Parameters
    ----------
    peak, final : float
        Rates; finite, at least 0.
    warmup_steps : int
        Updates of the rise, in [0, total_steps]; with 0 the first update uses `peak`.
    total_steps : int
        Updates until `final`, at least 1.

    Raises
    ------
    ValueError, TypeError
        When an argument breaks these rules.

    Notes
    -----
    Source: Loshchilov and Hutter, SGDR, arXiv:1608.03983, eq. 5, without restarts.

    Examples
    --------
    >>> schedule = warmup_cosine(1.0, 2, 6, final=0.5)
    >>> [round(schedule(torch.tensor(count)).item(), 4) for count in range(7)]
    [0.5, 1.0, 0.9268, 0.75, 0.5732, 0.5, 0.5]
    """
    return _warmup(
        "warmup_cosine", peak, warmup_steps, total_steps, final, lambda ratio: (1 - torch.cos(math.pi * ratio)) / 2
    )


def _warmup(
    name: str, peak: float, warmup_steps: int, total_steps: int, final: float, shape: Callable[[Tensor], Tensor]
) -> Schedule:
    """Rise to `peak`, then move to `final` by shape(r), r in [0, 1] with shape(0) = 0 and shape(1) = 1."""
    peak, final = number(name, "peak", peak), number(name, "final", final)
    for argument, value in (("warmup_steps", warmup_steps), ("total_steps", total_steps)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: {argument} must be an int, got {value!r}. Give it as a count of updates.")
    if total_steps <= 0:
        raise ValueError(f"{name}: total_steps must be at least 1, got {total_steps}. Give the length of the run.")
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(
            f"{name}: warmup_steps must be in [0, total_steps], got {warmup_steps} with total_steps={total_steps}. "
            "Shorten the warm-up or lengthen the run."
        )
    at_peak = max(warmup_steps - 1, 0)
    length = max(total_steps - 1 - at_peak, 1)

    def schedule(count: Tensor) -> Tensor:
        position = count.to(torch.float64)
        moved = shape(((position - at_peak) / length).clamp(0, 1))
        # a weighted sum, not peak + (final - peak) * moved: the latter misses `final` by a rounding
        after = peak * (1 - moved) + final * moved
        return torch.where(position < warmup_steps, peak * ((position + 1) / max(warmup_steps, 1)), after)

    return schedule


def number(name: str, argument: str, value: object, below: float = math.inf) -> float:
    """Return `value` as a float, or raise in the words of function `name` unless it is a number in [0, below)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: {argument} must be a number, got {value!r}. Give a Python float.")
    if not 0 <= value < below:
        rule = "finite and at least 0" if below == math.inf else f"in [0, {below:g})"
        raise ValueError(f"{name}: {argument} must be {rule}, got {value}. Correct it where {name} is called.")
    return float(value)
