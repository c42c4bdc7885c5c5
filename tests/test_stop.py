"""A request to stop on one rank is known to all at the same step, by the small all-gather of every step."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import ranks
import saved
import torch
from collectives import is_collective
from saved import Made, module_engine, module_step
from test_compiled import CONTROL_BYTES, LIMIT, MLP_BLOCKS, Recorder, compiling, mlp_batch, mlp_loss, mlp_params
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trees import differing

import fzero

STEPS = 4
CASES: list[tuple[str, int, dict[str, Any]]] = [
    *((kind, stage, {}) for kind in ("functional", "hooked") for stage in (0, 1, 2, 3)),
    ("functional", 1, {"accumulate": 2}),
    ("functional", 2, {"accumulate": 2, "donate": False}),
]


class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each collective and how many bytes it is given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if is_collective(func) and name != "wait_tensor":
            self.seen.append((name, args[0].numel() * args[0].itemsize))
        return func(*args, **(kwargs or {}))


@contextmanager
def on_sigterm(act: Callable[[], Any]) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def told(metrics: fzero.Metrics) -> bool:
    assert (metrics.stop.dtype, metrics.stop.shape, metrics.stop.requires_grad) == (torch.bool, (), False)
    return bool(metrics.stop)


def trained(made: Made, rank: int, before: Callable[[int], None]) -> tuple[list[bool], dict[str, Tensor], list[Any]]:
    """Train; return what each step told, the state after all of them, and what each communicated."""
    stops, sent = [], []
    for step in range(STEPS):
        before(step)
        with Sent() as seen:
            made, metrics = module_step(made, rank, step)
        stops.append(told(metrics))
        sent.append(seen.seen)
    return stops, made.full(), sent


# --- all ranks know at the same step ---------------------------------------------------------------------------------


def one_asks(rank: int, world: int) -> list[Any]:
    found = []
    for kind, stage, options in CASES:
        quiet, expected, plain = trained(module_engine(kind, 1, stage, 400, **options), rank, lambda _: None)
        asking = module_engine(kind, 1, stage, 400, **options)

        def ask(step: int, engine: Any = asking.engine) -> None:
            if step == 2 and rank == world - 1:
                assert engine.request_stop() is None
                engine.request_stop()

        stops, state, sent = trained(asking, rank, ask)
        found.append((quiet, stops, differing(state, expected), sent == plain, sent))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_know_at_the_same_step_and_nothing_else_changes(world: int) -> None:
    for found in ranks.run(one_asks, world):
        for case, (quiet, stops, changed, as_before, sent) in zip(CASES, found, strict=True):
            assert quiet == [False] * STEPS, case
            assert stops == [False, False, True, True], case  # the flag stays
            assert changed == [], case
            assert as_before, case  # no collective more, none larger
            for step in sent:
                assert step.count(("all_gather", 40)) == 1, (case, step)


def interrupted(rank: int, world: int) -> list[list[bool]]:
    """Let a signal come to one rank while the first loss is computed."""
    found = []
    for kind, stage in (("functional", 2), ("hooked", 2), ("functional", 3), ("hooked", 0)):
        pending = [rank == world - 1]
        real = saved.criterion

        def criterion(output: Tensor, targets: Tensor, pending: list[bool] = pending, real: Any = real) -> Any:
            if pending and pending.pop():
                os.kill(os.getpid(), signal.SIGTERM)
            return real(output, targets)

        with mock.patch.object(saved, "criterion", criterion):
            made = module_engine(kind, 1, stage, 400)
            with on_sigterm(made.engine.request_stop):
                found.append(trained(made, rank, lambda _: None)[0])
    return found


@pytest.mark.ranks
def test_a_signal_in_the_first_forward_pass_is_not_lost() -> None:
    # the hook engine's step begins after forward and backward, so that it tells still
    late, early = [False, True, True, True], [True] * STEPS
    assert ranks.run(interrupted, 2) == [[late, early, late, early]] * 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["functional", "hooked"])
def test_a_world_of_one(kind: str, stage: int) -> None:
    made = module_engine(kind, 1, stage, 400)
    made, metrics = module_step(made, 0, 0)
    assert not told(metrics)
    made.engine.request_stop()
    made, metrics = module_step(made, 0, 1)
    assert told(metrics)
    nothing = torch.full((4,), float("nan"), dtype=torch.float64)
    with mock.patch.object(saved, "batch", return_value=(nothing, nothing)):
        made, metrics = module_step(made, 0, 2)
    assert bool(metrics.skipped)
    assert told(metrics)


# --- compiled --------------------------------------------------------------------------------------------------------


def compiled(rank: int, world: int) -> list[Any]:
    found = []
    for stage, accumulate, donate in ((2, 2, True), (3, 1, False), (0, 1, True)):
        settings: Any = {"stage": stage, "blocks": MLP_BLOCKS, "accumulate": accumulate, "donate": donate}
        engine = fzero.Zero(mlp_loss, fzero.sgd(0.05), compile=True, **settings)
        pending = [rank == world - 1]

        def record(recorder: Recorder, graph: Any, _: Any, pending: list[bool] = pending) -> Any:
            if pending and pending.pop():  # in the middle of the first compilation
                os.kill(os.getpid(), signal.SIGTERM)
            recorder.graphs.append(graph)
            return graph.forward

        with mock.patch.object(Recorder, "record", record), compiling() as recorder, on_sigterm(engine.request_stop):
            state, stops, graphs = engine.init(mlp_params(torch.float64, depth=3)), [], []
            for step in range(STEPS):
                state, metrics = engine.step(state, mlp_batch(rank, step))
                stops.append(told(metrics))
                graphs.append(len(recorder.graphs))
            found.append((stops, graphs, pending, sum(count["small all_gather"] for count in recorder.collectives())))
    return found


@pytest.mark.compile
@pytest.mark.ranks
def test_compiled_steps_carry_the_flag_as_a_tensor_and_compile_once() -> None:
    assert CONTROL_BYTES == 64
    for found in ranks.run(compiled, 2, limit=LIMIT):
        for (stops, graphs, pending, small), parts in zip(found, (2, 1, 1), strict=True):
            assert stops == [False, True, True, True]  # the signal came while the first step compiled
            assert graphs == [parts] * STEPS
            assert pending == []
            assert small == 1
