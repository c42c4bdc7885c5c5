"""The hook engine gives the functional engine's bits; what its hooks do, and when."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import ranks
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trees import ADAMW, TiedGPT, differing, is_matrix, next_token_loss, numbers

import fzero

pytestmark = pytest.mark.ranks

WORLDS = (1, 2, 3, 4)
STAGES = (0, 1, 2, 3)
RATE = 0.01
PIECES = 700
"""Bucket cap in bytes that cuts each model into several buckets."""


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.second, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.first(x)))
        return F.relu(x + self.norm2(self.second(inner)))


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.blocks = nn.Sequential(Residual(5), Residual(5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))


class Kind(NamedTuple):
    """A module, its loss and its data."""

    make: Callable[[], nn.Module]
    criterion: Callable[[Any, Any], Any]
    inputs: Callable[[int], Tensor]
    targets: Callable[[int], Tensor]
    units: Callable[[Any], Any] = lambda _: None

    def module(self) -> nn.Module:
        torch.manual_seed(3)
        return self.make()

    def batch(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        seed = 1000 * rank + step
        return self.inputs(seed), self.targets(seed)


def ids(seed: int) -> Tensor:
    return torch.randint(0, 11, (6, 5), generator=torch.Generator().manual_seed(seed))


KINDS = {
    "mlp": Kind(
        mlp,
        F.mse_loss,
        lambda seed: numbers(6, 5, seed=seed, dtype=torch.float32),
        lambda seed: numbers(6, 3, seed=seed + 500, dtype=torch.float32),
    ),
    "gpt": Kind(TiedGPT, next_token_loss, ids, lambda seed: ids(seed + 500)),
    "resnet": Kind(
        SmallResNet,
        F.cross_entropy,
        lambda seed: numbers(6, 3, 4, 4, seed=seed, dtype=torch.float32),
        lambda seed: torch.randint(0, 3, (6,), generator=torch.Generator().manual_seed(seed)),
    ),
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"bucket_bytes": 25 * 2**20},
    "pieces, clip": {"bucket_bytes": PIECES, "clip_norm": 0.25},
    "micro": {"bucket_bytes": PIECES, "accumulate": 3},
}


def opt() -> fzero.Optimizer:
    return fzero.adamw(RATE, decay_mask=is_matrix, **ADAMW)


Seen = dict[str, dict[str, Tensor]]


def functional(kind: Kind, stage: int, rank: int, steps: int, settings: dict[str, Any]) -> Iterator[Seen]:
    loss_fn, params, buffers = fzero.from_module(kind.module(), kind.criterion)
    engine = fzero.Zero(loss_fn, opt(), stage, **settings)
    state = engine.init(params, buffers)
    for step in range(steps):
        batch = kind.batch(rank, step)
        grads, _ = engine.grads(state, batch)
        state, metrics = engine.step(state, batch)
        moments = engine.opt_state(state)
        yield seen(metrics, grads, engine.params(state), moments, engine.buffers(state) or {})


def hooked(kind: Kind, stage: int, rank: int, steps: int, settings: dict[str, Any]) -> Iterator[Seen]:
    settings = dict(settings)
    count = settings.pop("accumulate", 1)
    module = kind.module()
    if rank:  # only rank 0's values count
        nn.init.ones_(next(module.parameters()))
    engine = fzero.HookedZero(module, opt(), stage, units=kind.units(module), **settings)
    for step in range(steps):
        for inputs, targets in zip(*(part.chunk(count) for part in kind.batch(rank, step)), strict=True):
            engine.backward(kind.criterion(engine(inputs), targets))
        grads = engine.grads()
        metrics = engine.step()
        yield seen(metrics, grads, engine.params(), engine.opt_state(), engine.buffers())


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


def against(ours: Iterator[Seen], theirs: Iterator[Seen], what: str) -> list[str]:
    found = []
    for step, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        for kind, leaves in right.items():
            assert list(left[kind]) == list(leaves)
            found += [f"{what}: step {step} {kind} {leaf}" for leaf in differing(left[kind], leaves)]
    return found


def compare(rank: int, world: int, name: str) -> tuple[list[str], Any]:  # noqa: ARG001  (the launcher passes it)
    """Run both engines at every stage and in every case; report what differs, and rank 0's last moment."""
    found = []
    last = None
    for case, settings in CASES.items():
        for stage in STAGES:
            runs = [run(KINDS[name], stage, rank, 10, settings) for run in (hooked, functional)]
            found += against(runs[0], runs[1], f"{case} stage {stage}")
    return found, last


@functools.cache
def outcome(world: int, name: str) -> Any:
    return ranks.run(compare, world, name, limit=200.0)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_the_same_bits_as_the_functional_engine(world: int, name: str) -> None:
    """Ten steps: gradients, parameters, both moments, buffers, loss and norm; accumulation 1 and 3, with clipping."""
    for rank, (found, _) in enumerate(outcome(world, name)):
        assert not found, f"rank {rank}: {len(found)} differ, first {found[:5]}"
