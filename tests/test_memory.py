"""O5 and B42: what a rank holds between steps, and the most within one, by stage, ranks, eager or compiled."""

import functools
import gc
import itertools
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ranks
import torch
from memory import Peak
from torch import Tensor
from trees import numbers, storages

import fzero

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_gpt import GPT, VOCABULARY, criterion

pytestmark = pytest.mark.ranks

F32 = torch.float32
STAGES = (0, 1, 2, 3)
STEPS = 5
SCALARS = 16
"""Bytes of the step counts of state and optimizer."""
SLACK = 0.05
"""Of the bound: activations, scalars, Python's own."""
BUCKET_BYTES = 2**20
NOISE = 2**15
"""Bytes: what Python's own objects may take more in one run than in another; a 32nd of a bucket."""


# --- a model of 4 M parameters -----------------------------------------------------------------------------------


LAYERS, WIDTH, SMALL, LARGE = 40, 256, 8, (3072, 448)
EVEN_LAYERS, EVEN_WIDTH = 5, 512
BLOCKS = ["large", *(f"layers.{at}" for at in range(LAYERS))]


def many_and_one() -> Any:
    """Return B42's tree, many small leaves and one with a third of all elements."""

    def layer(at: int) -> Any:
        small = [numbers(WIDTH, seed=100 * at + place, dtype=F32, scale=0.1) for place in range(SMALL)]
        return {"w": numbers(WIDTH, WIDTH, seed=at, dtype=F32, scale=1 / 16), "b": small}

    return {"large": numbers(*LARGE, seed=99, dtype=F32, scale=0.01), "layers": [layer(at) for at in range(LAYERS)]}


def even() -> Any:
    """Return a tree of even layers, few enough to compile."""

    def layer(at: int) -> Any:
        bias = numbers(EVEN_WIDTH, seed=at, dtype=F32, scale=0.1)
        return {"w": numbers(EVEN_WIDTH, EVEN_WIDTH, seed=at, dtype=F32, scale=1 / 23), "b": [bias]}

    return {"layers": [layer(at) for at in range(EVEN_LAYERS)]}


@fzero.block
def large(weight: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


@fzero.block
def layer(p: Any, x: Tensor) -> Tensor:
    x = x + torch.tanh(x @ p["w"])
    for bias in p["b"]:
        x = x + bias
    return x


def loss_fn(params: Any, x: Tensor) -> Tensor:
    x = large(params["large"], x)[:, :WIDTH] if "large" in params else x
    for p in params["layers"]:
        x = layer(p, x)
    return x.square().mean()


class Held(NamedTuple):
    """Bytes of one rank at one stage."""

    elements: int
    """Elements of all leaves."""
    lengths: tuple[int, ...]
    """Elements of every bucket, padding included."""
    gaps: int
    """Elements that alignment and padding may take at most: 63 before every leaf but the first, W - 1 at the end."""
    rest: int
    peak: int


def held(rank: int, world: int, stages: tuple[int, ...], accumulate: int, compile_it: bool) -> list[Held]:
    found = []
    peak = Peak()
    with ExitStack() as stack:
        if compile_it:
            torch._inductor.config.compile_threads = 1
            stack.enter_context(peak.inside_inductor())
        for stage in stages:
            engine = fzero.Zero(
                loss_fn,
                fzero.adamw(1e-3),
                stage,
                blocks=BLOCKS[1 : 1 + EVEN_LAYERS] if compile_it else BLOCKS,
                bucket_bytes=BUCKET_BYTES,
                accumulate=accumulate,
                compile=compile_it,
            )
            state = engine.init(even() if compile_it else many_and_one())
            batch = numbers(4, EVEN_WIDTH if compile_it else LARGE[0], seed=rank, dtype=F32)
            for _ in range(STEPS - 1):
                state, _ = engine.step(state, batch)
            step = functools.partial(engine.step, state, batch)
            rest = sum(storages(state).values())
            assert engine._bound is not None
            buckets = engine._bound[1].binding.layout.buckets
            within = peak.of(step, compiled=compile_it)
            found.append(
                Held(
                    sum(bucket.used for bucket in buckets),
                    tuple(bucket.length for bucket in buckets),
                    sum(63 * (len(bucket.slots) - 1) + world - 1 for bucket in buckets),
                    rest,
                    rest + within,
                )
            )
            del engine, state, step
    return found


# --- the bounds ----------------------------------------------------------------------------------------------------


def bound(stage: int, world: int, seen: Held, *, at_once: bool, eager: bool) -> float:
    """Return O5's bound of the peak of model state, in bytes; `at_once`: compiled with one micro-batch.

    The buckets beside it are, in the eager step and on gloo, the raw gradients of a bucket and what they are packed
    into, or what is sent and what comes; compiled, what is sent and what comes of the one in flight. In eager stage 3
    the block that is gathered lives until its gradients are packed: there it is three blocks, not O5's two.
    """
    full = 4 * sum(seen.lengths)
    shard = full / world
    beside = (3 if eager and stage == 3 else 2) * 4 * max(seen.lengths)
    if stage == 0:
        return 4 * full + beside
    if stage == 1:
        return beside + (full + 3 * shard if at_once else 2 * full + 4 * shard)
    if stage == 2:
        return beside + (full + 3 * shard if at_once else full + 4 * shard)
    return beside + 4 * shard


def check(found: dict[int, list[list[Held]]], *, at_once: bool, eager: bool) -> None:
    """Hold every rank of every world to O5; stages and worlds to each other."""
    for world, everywhere in found.items():
        for everyone in everywhere:
            for stage, seen in zip(STAGES, everyone, strict=True):
                share = 1 if stage == 0 else world
                exact = 12 * sum(seen.lengths) // share
                assert seen.rest == exact + SCALARS, (world, stage, seen)
                assert 12 * seen.elements <= exact * share <= 12 * (seen.elements + seen.gaps), (world, stage, seen)
                limit = bound(stage, world, seen, at_once=at_once, eager=eager)
                assert seen.rest < seen.peak <= (1 + SLACK) * limit, (world, stage, seen.peak / limit, seen)
            peaks = [seen.peak for seen in everyone]
            rises = [later - earlier for earlier, later in itertools.pairwise(peaks)]
            assert world == 1 or max(rises) <= NOISE, f"W {world}: a stage needs more than the last: {peaks}"
    worlds = sorted(found)
    for fewer, more in itertools.pairwise(worlds):
        for stage in STAGES[1:]:
            less, seen = found[more][0][stage], found[fewer][0][stage]
            assert less.peak < seen.peak, f"stage {stage}: not less with {more} ranks than with {fewer}"


def test_b42_bytes_of_the_eager_step_are_those_of_its_stage() -> None:
    found = {world: ranks.run(held, world, STAGES, 1, False, limit=200.0) for world in (1, 2, 4)}
    check(found, at_once=False, eager=True)


def test_b42_bytes_of_the_eager_step_with_micro_batches_are_those_of_its_stage() -> None:
    check({2: ranks.run(held, 2, STAGES, 2, False, limit=200.0)}, at_once=False, eager=True)


@pytest.mark.compile
def test_b42_bytes_of_the_compiled_step_are_those_of_its_stage() -> None:
    check({2: ranks.run(held, 2, STAGES, 1, True, limit=400.0)}, at_once=True, eager=False)


# --- the two engines -----------------------------------------------------------------------------------------------


def engines(rank: int, world: int) -> dict[str, int]:  # noqa: ARG001
    """Return the most bytes that an engine added, while it made a step of eager stage 2, by engine."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(VOCABULARY, (4, 65), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    found, peak = {}, Peak()
    for kind in ("functional", "hooked"):
        gc.collect()
        before = peak.in_use()
        module = GPT(6, 128, 64, 0.0)
        if kind == "functional":
            loss, params, buffers = fzero.from_module(module, criterion)
            functional = fzero.Zero(loss, fzero.adamw(1e-3), 2, bucket_bytes=BUCKET_BYTES)
            state = functional.init(params, buffers)
            del module, params
            step: Any = functools.partial(functional.step, state, (inputs, targets))
        else:
            hooked = fzero.HookedZero(module, fzero.adamw(1e-3), 2, bucket_bytes=BUCKET_BYTES)
            step = functools.partial(hooked_step, hooked, inputs, targets)
        for _ in range(STEPS - 1):
            step()
        gc.collect()
        rest = peak.in_use() - before
        found[kind] = rest + peak.of(step, compiled=False)
        del step
    return found


def hooked_step(engine: fzero.HookedZero, inputs: Tensor, targets: Tensor) -> None:
    engine.backward(criterion(engine(inputs), targets))
    engine.step()


def test_the_functional_engine_needs_about_what_the_hook_engine_needs() -> None:
    for found in ranks.run(engines, 2, limit=120.0):
        assert found["functional"] <= 1.15 * found["hooked"], found
