"""What the host does in a step does not grow with the number of ranks: 1024 ranks of torch's fake process group."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from trees import numbers

import fzero

LEAVES, PER_BLOCK, SIZE = 1000, 100, 256
"""A block of 25600 elements divides by both numbers of ranks: no bucket is padded."""
FEW, MANY = 2, 1024


@contextmanager
def ranks_of(world: int) -> Iterator[None]:
    """Be rank 0 of a group whose collectives communicate nothing, and whose other ranks always agree."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        with mock.patch("fzero.agree._exchange", lambda axis, _topic, report, _store=None: [report] * axis.size):
            yield
    finally:
        dist.destroy_process_group()


@fzero.block
def block(weights: Any, x: Tensor) -> Tensor:
    for weight in weights:
        x = x * weight
    return x


def loss_fn(params: Any, x: Tensor) -> Tensor:
    for weights in params:
        x = block(weights, x)
    return x.square().mean()


def engine_of(stage: int) -> tuple[fzero.Zero, fzero.State]:
    params = [[1 + numbers(SIZE, seed=at, scale=0.01) for at in range(PER_BLOCK)] for _ in range(LEAVES // PER_BLOCK)]
    blocks = [str(at) for at in range(LEAVES // PER_BLOCK)]
    engine = fzero.Zero(loss_fn, fzero.adamw(1e-3), stage, blocks=blocks, clip_norm=1.0)
    return engine, engine.init(params)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that are dispatched; what one does within itself is its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def work_of(stage: int, world: int) -> tuple[Counter[str], Counter[str]]:
    """Return what a step dispatches, and the functions that Python calls in another one, each with its count."""
    with ranks_of(world):
        engine, state = engine_of(stage)
        batch = torch.ones(2, SIZE, dtype=torch.float64)
        for _ in range(2):
            state, _ = engine.step(state, batch)
        with Operations() as operations:
            state, _ = engine.step(state, batch)
        calls: Counter[str] = Counter()

        def note(frame: Any, event: str, what: Any) -> None:
            if event == "call":
                calls[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1
            elif event == "c_call":
                calls[f"{what.__qualname__} of {frame.f_code.co_qualname}"] += 1

        sys.setprofile(note)
        try:
            engine.step(state, batch)
        finally:
            sys.setprofile(None)
    return operations.seen, calls


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_of_1024_ranks_does_on_the_host_what_one_of_two_ranks_does(stage: int) -> None:
    few, many = work_of(stage, FEW), work_of(stage, MANY)
    assert few[0].total() > 2 * LEAVES
    assert few[1].total() > 2 * LEAVES
    for left, right in zip(few, many, strict=True):
        assert left == right, {name: (left[name], right[name]) for name in left | right if left[name] != right[name]}
