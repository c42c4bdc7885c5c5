"""Both engines on a CUDA device: the numbers of CPU, the memory of the stage, batches from pinned memory, CUDA graphs.

One device is enough for all but the last test. Most of these run on CPU too, if DEVICE says so and the mark is gone.
"""

import gc
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import both
import optree
import pytest
import ranks
import torch
import torch.distributed as dist
from test_stages import against, other_values
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from trees import (
    ADAMW,
    MODELS,
    Moment,
    combined,
    differing,
    distance,
    far,
    is_matrix,
    named,
    numbers,
    observe,
    storages,
    torch_adamw,
)

import fzero

DEVICE = torch.device("cuda", 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # what inductor says of float32 and of softmax, and Python of forks beside threads
    pytest.mark.filterwarnings("ignore:TensorFloat32"),
    pytest.mark.filterwarnings("ignore:.*Online softmax"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

F32, F64 = torch.float32, torch.float64
STAGES = (0, 1, 2, 3)
STEPS, RATE, CLIP = 3, 0.01, 0.25
COMPILED = {F64: 1e-10, F32: 1e-5}
"""Relative to a leaf's largest element, as the README promises."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
    gc.collect()


def placed(tree: Any, device: torch.device = DEVICE) -> Any:
    """Return a tree on a device; tied leaves stay tied."""
    new: dict[int, Tensor] = {}
    return optree.tree_map(lambda leaf: new.setdefault(id(leaf), leaf.to(device)), tree)


def on_cpu(run: list[Moment]) -> list[Moment]:
    everything: Any = run
    return cast("list[Moment]", optree.tree_map(Tensor.cpu, everything))


def train(name: str, dtype: torch.dtype, stage: int, steps: int = STEPS, **settings: Any) -> list[Moment]:
    """Train a model on the device; everything that it changed, on CPU."""
    model = MODELS[name](dtype)
    opt = fzero.adamw(RATE, decay_mask=is_matrix, **ADAMW)
    engine = fzero.Zero(model.loss_fn, opt, stage, blocks=model.blocks, clip_norm=CLIP, **settings)
    state, seen = engine.init(placed(model.params)), []
    for step in range(steps):
        state, moment = look(engine, state, placed(model.batch(0, step)))
        everything: Any = (state, moment)
        assert {leaf.device for leaf in named(everything).values()} == {DEVICE}
        seen.append(moment)
    return on_cpu(seen)


def look(engine: fzero.Zero, state: fzero.State, batch: Any) -> tuple[fzero.State, Moment]:
    """Take a step and return everything that it changed; a compiled one without gradients, which are one more graph."""
    if not engine._compile:
        return observe(engine, state, batch)
    state, metrics = engine.step(state, batch)
    moments = engine.opt_state(state)
    params = named(engine.params(state))
    return state, Moment(
        metrics.loss.clone(), metrics.grad_norm.clone(), {}, params, named(moments.exp_avg), named(moments.exp_avg_sq)
    )


def oracle(name: str, dtype: torch.dtype, world: int = 1) -> list[Moment]:
    """Return what torch makes of it on CPU, in one process."""
    model = MODELS[name](dtype)
    data = [combined([model.batch(rank, step) for rank in range(world)]) for step in range(STEPS)]
    return list(
        torch_adamw(
            model.params,
            lambda tree, step: model.plain(tree, data[step]),
            STEPS,
            lr=RATE,
            clip=CLIP,
            decay_mask=is_matrix,
        )
    )


def apart(ours: list[Moment], theirs: list[Moment], tolerance: dict[torch.dtype, float]) -> list[str]:
    """Return the leaves that are further apart; gradients show in the moments."""
    ours, theirs = ([moment._replace(grads={}) for moment in run] for run in (ours, theirs))

    def compare(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
        distances = {leaf: distance(left[leaf], right[leaf]) for leaf in right}
        return [f"{leaf} {away:.1e}" for leaf, away in distances.items() if away > tolerance[right[leaf].dtype]]

    return against(ours, theirs, "", compare)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_eager_steps_equal_torch_on_cpu(name: str, stage: int, accumulate: int) -> None:
    assert not against(train(name, F64, stage, accumulate=accumulate), oracle(name, F64), "", far)


@pytest.mark.parametrize(
    ("name", "dtype", "stage", "accumulate"),
    [("tree", F64, 2, 1), ("gpt", F32, 1, 1), ("gpt", F64, 2, 4), ("gpt", F32, 3, 1)],
)
def test_compiled_steps_equal_eager_ones(name: str, dtype: torch.dtype, stage: int, accumulate: int) -> None:
    eager = train(name, dtype, stage, accumulate=accumulate)
    compiled = train(name, dtype, stage, accumulate=accumulate, compile=True)
    assert not apart(compiled, eager, COMPILED)


KIND = both.Kind(
    lambda: nn.Sequential(nn.Linear(9, 16), *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))).to(
        DEVICE, F64
    ),
    F.mse_loss,
    lambda rank, step: (
        numbers(8, 9, seed=step + 10 * rank).to(DEVICE),
        numbers(8, 16, seed=50 + step + 10 * rank).to(DEVICE),
    ),
    lambda module: list(module)[1:],
)


@pytest.mark.parametrize("stage", STAGES)
def test_the_hook_engine_equals_torch(stage: int) -> None:
    settings = {"accumulate": 2, "clip_norm": CLIP, "bucket_bytes": 700}
    ours = both.hooked(KIND, stage, 0, STEPS, settings)
    assert not both.apart(ours, both.oracle(KIND, 1, STEPS, 2, CLIP))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Be the only rank of a process group on the device's backend."""
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, f"file://{tmp_path}/rendezvous", rank=0, world_size=1, timeout=limit)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stage", STAGES)
def test_a_group_of_one_equals_torch_on_cpu(stage: int) -> None:
    assert not against(train("tree", F64, stage), oracle("tree", F64), "", far)


def test_bf16_computes_in_bfloat16_and_keeps_float32() -> None:
    seen: list[torch.dtype] = []

    class Watching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.extend((x.dtype, self.weight.dtype))
            return super().forward(x)

    def run(precision: fzero.Precision, *, compiled: bool) -> list[float]:
        torch.manual_seed(0)
        linear = nn.Linear if compiled else Watching
        module = nn.Sequential(linear(64, 64), nn.Tanh(), linear(64, 8)).to(DEVICE)
        loss_fn, params, _ = fzero.from_module(module, lambda out, right: F.mse_loss(out.float(), right))
        engine = fzero.Zero(loss_fn, fzero.adamw(0.01), 2, precision=precision, compile=compiled)
        state, losses = engine.init(params), []
        x = numbers(32, 64, seed=1, dtype=F32).to(DEVICE)
        for _ in range(20):
            state, metrics = engine.step(state, (x, x[:, :8] * 0.5))
            losses.append(float(metrics.loss))
        assert {leaf.dtype for leaf in named((state.params, state.opt_state.exp_avg)).values()} == {F32}
        return losses

    full = run(fzero.Precision(), compiled=False)
    assert set(seen) == {F32}
    seen.clear()
    for compiled in (False, True):
        half = run(fzero.Precision.bf16, compiled=compiled)
        assert half[-1] < 0.5 * half[0]
        assert half == pytest.approx(full, rel=0.1)
        assert half != full
    assert set(seen) == {torch.bfloat16}


# --- random numbers of recomputed functions --------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputed_attention_equals_the_one_that_is_kept(dropout: float) -> None:
    query = numbers(2, 4, 128, 64, seed=1, dtype=F32).to(DEVICE, torch.bfloat16)

    def attend(q: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, q * 0.5, q + 1, dropout_p=dropout, is_causal=True)
        return F.dropout(out, dropout)

    results = []
    for function in (attend, fzero.remat(attend)):

        def loss(q: Tensor, function: Any = function) -> Tensor:
            return function(q).float().square().sum()  # type: ignore[no-any-return]

        torch.manual_seed(3)
        under_func = torch.func.grad(loss)(query)
        torch.manual_seed(3)
        leaf = query.clone().requires_grad_()
        (plain,) = torch.autograd.grad(loss(leaf), leaf)
        results.append((under_func, plain))
    (right, _), (ours, eager) = results
    scale = right.float().abs().max()
    # (bfloat16 sums of gradients in another order)
    for found in (ours, eager):
        assert (found - right).float().abs().max() <= 0.02 * scale


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_is_the_same_when_a_block_runs_again(compiled: bool) -> None:
    def drop(params: Any, x: Tensor) -> Tensor:
        return F.dropout(params["w"] * x, 0.5)

    def loss_fn(params: Any, x: Tensor) -> Any:
        out = fzero.remat(drop)(params["block"], x)
        return out.sum(), out

    engine = fzero.Zero(loss_fn, fzero.sgd(0.125), 3, blocks=["block"], has_aux=True, compile=compiled)
    state = engine.init({"block": {"w": torch.full((64,), 2.0, device=DEVICE)}})
    for _ in range(2):
        before = engine.params(state)["block"]["w"]
        state, metrics = engine.step(state, torch.ones(1, 64, device=DEVICE))
        out = metrics.aux[0, 0]
        assert 0 < int((out == 0).sum()) < 64
        # d sum(out) / dw is out / w
        torch.testing.assert_close(before - engine.params(state)["block"]["w"], 0.125 * out / before)


# --- batches ---------------------------------------------------------------------------------------------------------


def squares(params: Any, batch: Any) -> Tensor:
    loss: Tensor = (params["w"] * batch["x"]).square().mean()
    return loss


@pytest.mark.parametrize("compiled", [False, True])
def test_batches_on_cpu_pinned_or_not_give_the_same_step(compiled: bool) -> None:
    results = []
    x = numbers(64, 33, seed=1, dtype=F32)
    for data in (x.to(DEVICE), x, x.pin_memory() if DEVICE.type == "cuda" else x):
        engine = fzero.Zero(squares, fzero.adamw(0.1), accumulate=2, compile=compiled)
        state = engine.init({"w": torch.ones(33, device=DEVICE)})
        for _ in range(2):
            state, metrics = engine.step(state, {"x": data})
        loss, _ = engine.evaluate(state, {"x": data})
        results.append(named([engine.params(state), metrics, loss, engine.grads(state, {"x": data})]))
    for found in results[1:]:
        assert not differing(found, results[0])


def test_a_batch_on_the_device_is_refused_by_a_state_on_cpu() -> None:
    engine = fzero.Zero(squares, fzero.sgd(0.1))
    state = engine.init({"w": torch.ones(3)})
    with pytest.raises(ValueError, match=rf"batch: leaf 'x' is on {DEVICE}, the state on cpu"):
        engine.step(state, {"x": torch.ones(2, 3, device=DEVICE)})


# --- memory ----------------------------------------------------------------------------------------------------------

MEGA = 2**22


def large(params: Any, batch: Tensor) -> Tensor:
    x = batch
    for part in params["layers"]:
        x = layer(part, x)
    loss: Tensor = x.square().mean() + params["small"].square().sum()
    return loss


layer = fzero.block(lambda part, x: torch.tanh(x @ part["w"]) + part["b"])


def large_params() -> Any:
    """Return 4 M float32 parameters: four large leaves and small ones."""
    return {
        "layers": [
            {"w": numbers(1024, 1024, seed=at, dtype=F32, scale=0.03).to(DEVICE), "b": torch.zeros(1024, device=DEVICE)}
            for at in range(4)
        ],
        "small": torch.ones(7, device=DEVICE),
    }


BLOCKS = [f"layers.{at}" for at in range(4)]


def measured(stage: int, **settings: Any) -> tuple[list[tuple[int, int]], int, int]:
    """Return (allocated, reserved) after every step, what the state has at rest, and the peak above that."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    engine = fzero.Zero(large, fzero.adamw(1e-3), stage, blocks=BLOCKS, **settings)
    state = engine.init(large_params())
    x = torch.ones(8, 1024, device=DEVICE)
    seen = []
    for _ in range(10):
        state, _ = engine.step(state, x)
        seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    gc.collect()
    rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    state, _ = engine.step(state, x)
    return seen, rest - before, torch.cuda.max_memory_allocated() - rest


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs the counts of CUDA's allocator")
@pytest.mark.parametrize(("stage", "compiled"), [(0, False), (1, False), (2, False), (3, False), (2, True), (3, True)])
def test_memory_is_constant_over_steps_b42(stage: int, compiled: bool) -> None:
    seen, rest, _ = measured(stage, compile=compiled)
    assert len(set(seen[3:])) == 1, seen
    assert rest <= 1.05 * 12 * MEGA + 2**21


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs the counts of CUDA's allocator")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_donated_step_makes_no_second_state(compiled: bool) -> None:
    _, _, donated = measured(2, compile=compiled)
    _, _, kept = measured(2, compile=compiled, donate=False)
    assert kept - donated >= 8 * MEGA


@pytest.mark.parametrize("compiled", [False, True])
def test_a_donated_state_stays_where_it_is(compiled: bool) -> None:
    engine = fzero.Zero(large, fzero.adamw(1e-3), 2, compile=compiled)
    state = engine.init(large_params())
    before = storages(state)
    for _ in range(3):
        state, _ = engine.step(state, torch.ones(8, 1024, device=DEVICE))
    assert storages(state) == before


# --- buckets and hooks -----------------------------------------------------------------------------------------------


def test_the_size_of_buckets_changes_no_bit_b12() -> None:
    kind = both.Kind(
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(6))).to(DEVICE),
        F.mse_loss,
        lambda rank, step: (  # noqa: ARG005
            numbers(64, 512, seed=step, dtype=F32).to(DEVICE),
            numbers(64, 512, seed=50 + step, dtype=F32).to(DEVICE),
        ),
    )
    for stage in (1, 2, 3):
        runs = [list(both.hooked(kind, stage, 0, 20, {"bucket_bytes": cap})) for cap in (1, 3 * 2**20, 2**30)]
        for run in runs[1:]:
            assert not both.unequal(iter(run), iter(runs[0]), f"stage {stage}")


# --- one rank of many ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_of_eight_is_the_same_eagerly_and_compiled(stage: int) -> None:
    """The device's own reduce-scatter; the other ranks are torch's fake group, which gives back what it was given."""
    sys.path.append(str(Path(__file__).parent.parent / "examples"))
    try:
        from gpu_shards import one_of
    finally:
        sys.path.pop()
    with one_of(8):
        eager = train("tree", F64, stage)
        compiled = train("tree", F64, stage, compile=True)
        assert not apart(compiled, eager, COMPILED)


# --- CUDA graphs -----------------------------------------------------------------------------------------------------


def test_a_global_setting_for_cuda_graphs_overwrites_nothing() -> None:
    counters.clear()
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        engine = fzero.Zero(squares, fzero.adamw(0.1), compile=True, donate=False)
        states = [engine.init({"w": torch.ones(33, device=DEVICE)})]
        kept: list[tuple[Any, Any]] = []
        for step in range(4):
            state, metrics = engine.step(states[-1], {"x": numbers(8, 33, seed=step, dtype=F32)})
            states.append(state)
            result: Any = (state, metrics)
            kept.append((result, optree.tree_map(Tensor.clone, result)))
        for result, copied in kept:
            assert not differing(named(result), named(copied))
    assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="only CUDA has graphs")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_donated_step_can_be_captured_by_hand(compiled: bool) -> None:
    def engine_and_state() -> tuple[fzero.Zero, fzero.State]:
        engine = fzero.Zero(large, fzero.adamw(1e-3), 2, clip_norm=1.0, compile=compiled)
        return engine, engine.init(large_params())

    data = [numbers(8, 1024, seed=step, dtype=F32).to(DEVICE) for step in range(6)]
    engine, state = engine_and_state()
    for x in data:
        state, metrics = engine.step(state, x)
    right = named([engine.params(state), engine.opt_state(state).exp_avg, metrics.loss])

    engine, state = engine_and_state()
    x = torch.empty_like(data[0])
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for warm in data[:3]:
            state, _ = engine.step(state, x.copy_(warm))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state, metrics = engine.step(state, x)
    for late in data[3:]:
        x.copy_(late)
        graph.replay()
    assert not far(named([engine.params(state), engine.opt_state(state).exp_avg, metrics.loss]), right)


# --- two devices -----------------------------------------------------------------------------------------------------


def on_nccl(rank: int, world: int, folder: str) -> list[list[Moment]]:
    """Train on one device a rank; only rank 0's values count."""
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    limit = timedelta(seconds=60)
    dist.init_process_group("nccl", f"file://{folder}/nccl", rank=rank, world_size=world, timeout=limit)
    model, runs = MODELS["tree"](F64), []
    for stage, compiled in [*((stage, False) for stage in STAGES), (2, True), (3, True)]:
        opt = fzero.adamw(RATE, decay_mask=is_matrix, **ADAMW)
        engine = fzero.Zero(model.loss_fn, opt, stage, blocks=model.blocks, clip_norm=CLIP, compile=compiled)
        state, seen = engine.init(placed(other_values(model.params) if rank else model.params, device)), []
        for step in range(STEPS):
            state, moment = look(engine, state, placed(model.batch(rank, step), device))
            seen.append(moment)
        runs.append(on_cpu(seen))
    return runs


@pytest.mark.ranks
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_equal_torch_in_one_process(tmp_path: Path) -> None:
    right = oracle("tree", F64, world=2)
    for runs in ranks.run(on_nccl, 2, str(tmp_path), limit=400.0):
        for run in runs:
            assert not apart(run, right, COMPILED)
