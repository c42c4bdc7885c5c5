"""A compiled step writes the new state into the old one's memory, in loops that hold no scalar's arithmetic.

Read off inductor's code, which tells exactly what is allocated. The kernels themselves are not built for that: they are
replaced by nothing, and no number is looked at.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
from test_compiled import ADAMW, BUCKET, F32, WIDTH, body, deep_batch, mlp_loss, mlp_params
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code
from trees import storages

import fzero

pytestmark = [pytest.mark.compile, pytest.mark.ranks]

DEPTH = 2
CASES = {
    1: ((0, 0.5, True), (1, None, True), (2, 0.5, True), (3, None, True)),
    # the last one is what the others are compared with
    2: ((0, 0.5, True), (1, 0.5, True), (2, None, True), (2, 0.5, True), (3, 0.5, True), (2, None, False)),
}
"""By number of ranks: stage, clip_norm, donate."""


@contextmanager
def without_kernels() -> Iterator[None]:
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1),
        torch._functorch.config.patch(enable_autograd_cache=False),
        mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=lambda *_: None),
    ):
        yield


def flat_buffers(lines: list[str]) -> Counter[int]:
    """Count the flat float32 buffers that the code allocates, by their elements."""
    return Counter(int(size) for line in lines for size in re.findall(r"empty_strided\w*\(\((\d+), \), \(1, \)", line))


def returned(lines: list[str]) -> list[str]:
    """Return the line that makes each result of the graph; memory that is used again counts as what it was made as."""
    text = "\n".join(lines)
    made = dict(re.findall(r"^(buf\d+) = (.*)$", text, re.MULTILINE))
    names = re.search(r"^return \((.*)\)$", text, re.MULTILINE)
    assert names is not None
    results = [made[name.strip()] for name in names[1].split(",") if name.strip()]
    for place in range(len(results)):
        while again := re.match(r"(buf\d+); del", results[place]):
            results[place] = made[again[1]]
    return results


def element_loops(code: str) -> list[str]:
    """Return the loops over elements in the C++ of a code."""
    loops = []
    for start in re.finditer(r"^( +)for\(int64_t x0=.*$", code, re.MULTILINE):
        end = code.index(f"\n{start[1]}}}\n", start.end())
        loops.append(code[start.start() : end])
    return loops


def scalar_work(loop: str) -> list[str]:
    """Return what a loop computes without vectors in float64, as learning rates and bias corrections are."""
    return re.findall(r"std::pow|std::sqrt|c10::convert<double>|static_cast<double>", loop)


def code_of(engine: fzero.Zero, rank: int) -> tuple[str, bool]:
    """Return the code of a step, and whether the state stayed where it was."""
    state = engine.init(mlp_params(F32, DEPTH, WIDTH))
    before = storages(state)
    (after, _), codes = run_and_get_code(lambda: engine.step(state, deep_batch(rank, 0)))
    assert len(codes) == 1, len(codes)
    return codes[0], storages(after) == before


def allocations(rank: int, world: int) -> list[str]:
    found = []
    blocks = [f"layers.{at}" for at in range(DEPTH)]
    for stage, clip, donate in CASES[world]:
        with without_kernels():
            opt = fzero.adamw(fzero.warmup_cosine(0.01, 3, 12), **ADAMW)
            settings: Any = {"blocks": blocks, "clip_norm": clip, "compile": True, "donate": donate}
            code, stayed = code_of(fzero.Zero(mlp_loss, opt, stage, **settings), rank)
        lines, what = body(code), f"W {world}, stage {stage}, clip {clip}, donate {donate}"
        flat, shard = flat_buffers(lines), BUCKET // world
        # at most the packed gradient of each block; in stage 0 also the mean of a shard, which is gathered
        allowed = Counter({BUCKET: DEPTH})
        if stage == 0 and world > 1:
            allowed[shard] += DEPTH
        if not donate:
            allowed[shard] += 3 * DEPTH
        if any(flat[size] > allowed[size] for size in {BUCKET, shard}) or flat[shard] < allowed[shard] * (not donate):
            found.append(f"{what}: allocates {flat}, not {allowed}")
        if stayed is not donate:
            found.append(f"{what}: the state {'stayed' if stayed else 'moved'}")
        tensors = [how for how in returned(lines) if "_strided_cpu((), ()," not in how]
        if bool(tensors) is donate:
            found.append(f"{what}: returns beside scalars: {tensors}")
        length = BUCKET if stage == 0 else shard
        updates = [loop for loop in element_loops(code) if "sqrt()" in loop and f"<int64_t>({length}L)" in loop]
        if not updates:  # one serves both buckets where their kernels are the same
            found.append(f"{what}: no loop updates a bucket")
        found += [f"{what}: in a loop: {work}" for loop in updates for work in scalar_work(loop)[:1]]
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_donated_step_allocates_no_state_and_a_loop_no_scalar(world: int) -> None:
    for found in ranks.run(allocations, world, limit=300.0):
        assert not found, "\n".join(found)


OPTIMIZERS = {
    "adamw": fzero.adamw,
    "adam": lambda rate: fzero.adam(rate, weight_decay=0.1),
    "sgd": lambda rate: fzero.sgd(rate, 0.9, nesterov=True, weight_decay=0.1),
    "lion": lambda rate: fzero.lion(rate, weight_decay=0.1),
}


def update_code(optimizer: fzero.Optimizer) -> str:
    param, gradient = torch.randn(4096), torch.randn(4096)
    state, label = optimizer.init(param), optimizer.labels(param)

    def update(param: Tensor, state: Any, gradient: Tensor) -> Any:
        return optimizer.update(gradient, state, param, labels=label)

    _, codes = run_and_get_code(torch.compile(update, fullgraph=True), param, state, gradient)
    return str(codes[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_update_computes_its_scalars_once(name: str) -> None:
    build: Any = OPTIMIZERS[name]
    with without_kernels():
        code = update_code(build(fzero.warmup_cosine(0.1, 3, 12)))
        assert element_loops(code)
        assert not [work for loop in element_loops(code) for work in scalar_work(loop)]
        # where nothing holds scalars back, inductor computes them again and again
        with (
            mock.patch("fzero.optim.once", lambda scalar: scalar),
            mock.patch("fzero.rule.once", lambda scalar: scalar),
        ):
            torch._dynamo.reset()
            code = update_code(build(fzero.warmup_cosine(0.1, 3, 12)))
        assert [work for loop in element_loops(code) for work in scalar_work(loop)]
