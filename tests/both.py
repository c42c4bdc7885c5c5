"""One module trained by either engine, or by torch in one process, seen step by step."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from trees import ADAMW, differing, far, is_matrix

import fzero

RATE = 0.01

Seen = dict[str, dict[str, Tensor]]
"""A run after one step: kind (scalars, grads, params, exp_avg, exp_avg_sq, buffers), then leaf."""


class Kind(NamedTuple):
    """A module, its loss and its data; `batch` gives a rank's (inputs, targets), inputs a tensor or a tuple."""

    make: Callable[[], nn.Module]
    criterion: Callable[[Any, Any], Any]
    batch: Callable[[int, int], Any]
    units: Callable[[Any], list[nn.Module] | None] = lambda _: None
    """What stage 3 gathers as one."""

    def module(self) -> nn.Module:
        torch.manual_seed(3)
        return self.make()


def opt() -> fzero.Optimizer:
    return fzero.adamw(RATE, decay_mask=is_matrix, **ADAMW)


def micros(batch: Any, count: int) -> list[Any]:
    """Split (inputs, targets) into micro-batches."""
    inputs, targets = batch
    if not isinstance(inputs, tuple):
        return list(zip(inputs.chunk(count), targets.chunk(count), strict=True))
    parts = zip(*(part.chunk(count) for part in inputs), strict=True)
    return list(zip(parts, targets.chunk(count), strict=True))


def call(module: Any, inputs: Any) -> Any:
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def functional(kind: Kind, stage: int, rank: int, steps: int, settings: dict[str, Any]) -> Iterator[Seen]:
    """Train with `fzero.Zero`."""
    module = kind.module()
    loss_fn, params, buffers = fzero.from_module(module, kind.criterion, kind.units(module))
    engine = fzero.Zero(loss_fn, opt(), stage, **settings)
    state = engine.init(params, buffers)
    for step in range(steps):
        batch = kind.batch(rank, step)
        grads, _ = engine.grads(state, batch)
        state, metrics = engine.step(state, batch)
        yield seen(metrics, grads, engine.params(state), engine.opt_state(state), engine.buffers(state) or {})


def hooked(kind: Kind, stage: int, rank: int, steps: int, settings: dict[str, Any]) -> Iterator[Seen]:
    """Train with `fzero.HookedZero`."""
    settings = dict(settings)
    count = settings.pop("accumulate", 1)
    module = kind.module()
    if rank:  # only rank 0's values count
        nn.init.ones_(next(module.parameters()))
    engine = fzero.HookedZero(module, opt(), stage, units=kind.units(module), **settings)
    for step in range(steps):
        for inputs, targets in micros(kind.batch(rank, step), count):
            engine.backward(kind.criterion(call(engine, inputs), targets))
        grads = engine.grads()
        metrics = engine.step()
        yield seen(metrics, grads, engine.params(), engine.opt_state(), engine.buffers())


ENGINES = {"functional": functional, "hooked": hooked}


def seen(metrics: fzero.Metrics, grads: Any, params: Any, moments: Any, buffers: Any) -> Seen:
    scalars = {"loss": metrics.loss, "norm": metrics.grad_norm, "step": metrics.step, "count": moments.step}
    return {
        "scalars": scalars,
        "grads": dict(grads),
        "params": dict(params),
        "exp_avg": dict(moments.exp_avg),
        "exp_avg_sq": dict(moments.exp_avg_sq),
        "buffers": dict(buffers),
    }


def oracle(kind: Kind, world: int, steps: int, count: int = 1, clip: float | None = None) -> Iterator[Seen]:
    """O1: one process, the mean over all ranks and micro-batches, torch.optim.AdamW and clip_grad_norm_."""
    module = kind.module()
    named = dict(module.named_parameters())
    groups = [
        {"params": [leaf for leaf in named.values() if is_matrix((), leaf) is decays], "weight_decay": decay}
        for decays, decay in ((True, ADAMW["weight_decay"]), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=RATE, betas=ADAMW["betas"], eps=ADAMW["eps"], foreach=False
    )
    for step in range(steps):
        parts = [part for rank in range(world) for part in micros(kind.batch(rank, step), count)]
        loss = sum(kind.criterion(call(module, inputs), targets) for inputs, targets in parts) / len(parts)
        optimizer.zero_grad()
        loss.backward()
        for leaf in named.values():
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        grads = {name: leaf.grad.clone() for name, leaf in named.items()}  # type: ignore[union-attr]
        norm = nn.utils.clip_grad_norm_(named.values(), float("inf") if clip is None else clip, foreach=False)
        optimizer.step()
        states = {name: optimizer.state[leaf] for name, leaf in named.items()}
        yield {
            "scalars": {"loss": loss.detach(), "norm": norm},
            "grads": grads,
            "params": {name: leaf.detach().clone() for name, leaf in named.items()},
            "exp_avg": {name: state["exp_avg"].clone() for name, state in states.items()},
            "exp_avg_sq": {name: state["exp_avg_sq"].clone() for name, state in states.items()},
        }


def unequal(ours: Iterator[Seen], theirs: Iterator[Seen], what: str = "") -> list[str]:
    """Return every leaf that is not equal to the bit, step by step."""
    found = []
    for step, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        for kind, leaves in right.items():
            assert list(left[kind]) == list(leaves), f"{what}: names of {kind}"
            found += [f"{what}: step {step} {kind} {leaf}" for leaf in differing(left[kind], leaves)]
    return found


def apart(ours: Iterator[Seen], theirs: Iterator[Seen], what: str = "") -> list[str]:
    """Return every leaf that is further from the oracle's than the tolerance of its dtype, step by step."""
    found = []
    for step, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        for kind, leaves in right.items():
            mine = {name: left[kind][name] for name in leaves} if kind == "scalars" else left[kind]
            found += [f"{what}: step {step} {kind} {leaf}" for leaf in far(mine, leaves)]
    return found
