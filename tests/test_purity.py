"""What a step leaves behind: no graph, no changed input, and nothing at all if a gradient is not finite."""

import gc
import time
from collections.abc import Callable
from typing import Any

import optree
import pytest
import ranks
import torch
from torch import Tensor, nn
from trees import differing, named, numbers, storages

import fzero

STAGES = (0, 1, 2, 3)
MILLION = 1_000_000
SCALARS = 64
"""Bytes: step counts of state and optimizer, and as many for the metrics."""


def wide_params() -> Any:
    """Return exactly a million float32 parameters in leaves that do not divide evenly."""
    return {
        "layers": [{"w": numbers(499, 997, seed=at, dtype=torch.float32, scale=0.01)} for at in range(2)],
        "rest": numbers(MILLION - 2 * 499 * 997, seed=5, dtype=torch.float32),
    }


def wide_loss(params: Any, x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = fzero.block(lambda layer, x: torch.tanh(x @ layer["w"]) @ layer["w"].T)(layer, x)
    loss: Tensor = x.square().mean() + params["rest"].square().mean()
    return loss


def wide_engine(stage: int, **settings: Any) -> fzero.Zero:
    opt = fzero.adamw(1e-3)
    return fzero.Zero(wide_loss, opt, stage, blocks=("layers.0", "layers.1"), bucket_bytes=2**20, **settings)


def live_bytes() -> int:
    """Return the bytes of all storages that Python can reach."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return sum(storages([tensor for tensor in tensors if tensor.device.type == "cpu"]).values())


def settled(before: int, expected: int) -> int:
    """Return the live bytes; gloo's own thread lets go of the last message a moment after the wait for it."""
    deadline = time.monotonic() + 5.0
    while (live := live_bytes()) - before > expected + SCALARS and time.monotonic() < deadline:
        time.sleep(0.01)
    return live


def has_graph(tree: Any) -> bool:
    return any(leaf.grad_fn is not None or leaf.requires_grad for leaf in optree.tree_leaves(tree))


def strides_of(tree: Any) -> list[tuple[int, ...]]:
    return [leaf.stride() for leaf in optree.tree_leaves(tree)]


def memory_job(rank: int, world: int, stage: int, donate: bool, accumulate: int) -> dict[str, Any]:
    gc.collect()
    gc.freeze()  # what was there before is not looked at again
    before = live_bytes()
    engine = wide_engine(stage, donate=donate, accumulate=accumulate)
    state = engine.init(wide_params())
    batch = numbers(2, 499, seed=rank, dtype=torch.float32)
    data = batch.untyped_storage().nbytes()
    layout = engine._bound[1].binding.layout  # type: ignore[index]
    exact = sum((bucket.length if stage == 0 else layout.shard_length(bucket)) * 12 for bucket in layout.buckets)
    gaps = sum(64 * len(bucket.slots) + world for bucket in layout.buckets)
    seen, graphs, strides = [], [], strides_of(state)
    for _ in range(20):
        state, metrics = engine.step(state, batch)
        graphs.append(has_graph((state, metrics)))
        seen.append(settled(before + data, exact + SCALARS) - before - data)
    graphs.append(has_graph((engine.params(state), engine.opt_state(state), engine.grads(state, batch))))
    graphs.append(has_graph(engine.evaluate(state, batch)))
    return {
        "live": seen,
        "graph": any(graphs),
        "state": sum(storages(state).values()),
        "exact": exact,
        "bound": 12 * (MILLION + gaps) / (1 if stage == 0 else world),
        "strides": strides == strides_of(state),
    }


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("world", "donate", "accumulate"), [(1, True, 1), (2, True, 2), (3, False, 1)])
def test_b26_memory_is_constant_and_is_the_states(stage: int, world: int, donate: bool, accumulate: int) -> None:
    """Live bytes are equal from step 3 to 20; O5 at rest: 12 N in stage 0, 12 N / W and padding in the others."""
    for result in ranks.run(memory_job, world, stage, donate, accumulate, limit=120.0):
        assert len(set(result["live"][2:])) == 1, result["live"]
        assert not result["graph"]
        assert result["strides"]
        assert result["exact"] <= result["state"] <= result["exact"] + SCALARS
        assert result["exact"] <= result["bound"]
        # nothing lives between steps but the state and the metrics
        assert result["state"] <= result["live"][-1] <= result["state"] + SCALARS


def counted_loss(params: Any, buffers: Any, batch: Any) -> tuple[Tensor, Any]:
    """Return a loss with a floating and an integer buffer, one of which it writes in place."""
    x = batch["x"]
    seen = buffers["mean"].mul_(0.9).add_(0.1 * x.detach().mean(0))
    out = fzero.block(lambda net, x: x @ net["w"] + net["b"])(params["net"], x)
    return (out * batch["gain"]).square().mean(), {"mean": seen, "count": buffers["count"] + 1}


def small_params() -> Any:
    return {"net": {"w": numbers(5, 3, seed=1), "b": numbers(3, seed=2)}, "ids": torch.tensor([3, 1])}


def small_engine(stage: int, **settings: Any) -> tuple[fzero.Zero, fzero.State]:
    opt = fzero.adamw(fzero.warmup_linear(0.1, 4, 10), weight_decay=0.1)
    engine = fzero.Zero(counted_loss, opt, stage, blocks=("net",), **settings)
    buffers = {"mean": torch.zeros(5, dtype=torch.float64), "count": torch.zeros((), dtype=torch.int64)}
    return engine, engine.init(small_params(), buffers)


def small_batch(rank: int, step: int, gain: float = 1.0) -> Any:
    gains = torch.ones(4, 1, dtype=torch.float64)
    gains[2] = gain
    return {"x": numbers(4, 5, seed=31 * rank + 7 * step), "gain": gains}


def snapshot(tree: Any) -> dict[str, Tensor]:
    return {name: leaf.clone() for name, leaf in named(tree).items()}


def donate_job(rank: int, world: int) -> list[str]:  # noqa: ARG001
    found = []
    for stage in STAGES:
        kept, state = small_engine(stage, donate=False)
        reused, other = small_engine(stage)
        for step in range(3):
            batch = small_batch(rank, step)
            old, memory, given = snapshot(state), storages(other), snapshot(batch)
            new, metrics = kept.step(state, batch)
            found += [f"stage {stage}: old {name} changed" for name in differing(named(state), old)]
            if step and set(storages(new)) & (set(storages(state)) - set(storages(state.fixed))):
                found.append(f"stage {stage}: the new state lies in the old one's memory")
            other, others = reused.step(other, batch)
            if storages(other) != memory:
                found.append(f"stage {stage}: a donated state moved")
            found += [f"stage {stage}: donation changes {name}" for name in differing(named(other), named(new))]
            found += [f"stage {stage}: batch {name} changed" for name in differing(named(batch), given)]
            if set(storages(others)) & set(storages(other)):
                found.append(f"stage {stage}: metrics lie in the state's memory")
            del metrics
            state = new
        before = snapshot(other)
        results = (reused.params(other), reused.buffers(other), reused.opt_state(other), reused.grads(other, batch))
        loss, _ = reused.evaluate(other, batch)
        if set(storages((results, loss))) & set(storages(other)):
            found.append(f"stage {stage}: full trees lie in the state's memory")
        found += [f"stage {stage}: reading changed {name}" for name in differing(named(other), before)]
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
def test_donation_reuses_memory_and_without_it_the_old_state_stays(world: int) -> None:
    for found in ranks.run(donate_job, world):
        assert not found, found


def bad_job(rank: int, world: int, value: float, culprit: int, accumulate: int, clip: float | None) -> list[Any]:
    """Train with a poisoned batch at step 1 on one rank; compare with a run that never had this step."""
    found: list[Any] = []
    for stage in STAGES:
        for donate in (True, False):
            settings = {"accumulate": accumulate, "clip_norm": clip, "donate": donate}
            engine, state = small_engine(stage, **settings)
            without, other = small_engine(stage, **settings)
            decisions = []
            for step in range(5):
                poisoned = step == 1
                batch = small_batch(rank, step, value if poisoned and rank == culprit % world else 1.0)
                before = snapshot(state)
                state, metrics = engine.step(state, batch)
                decisions.append((bool(metrics.skipped), int(metrics.step)))
                if poisoned:
                    found += [f"stage {stage}: skipped step changed {name}" for name in differing(named(state), before)]
                else:
                    other, _ = without.step(other, batch)
                found += [f"stage {stage} step {step}: {name}" for name in differing(named(state), named(other))]
            found.append(decisions)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("value", "accumulate", "clip"), [(float("inf"), 1, 0.5), (float("nan"), 2, None), (1e200, 4, 0.5)]
)
def test_b18_one_rank_s_bad_gradient_makes_the_step_the_identity(
    world: int, value: float, accumulate: int, clip: float | None
) -> None:
    """Parameters, moments, buffers, step and rate go on as if the step had not been; all ranks decide alike."""
    for result in ranks.run(bad_job, world, value, world - 1, accumulate, clip):
        assert result == [[(False, 1), (True, 1), (False, 2), (False, 3), (False, 4)]] * 8


def nan_job(rank: int, world: int) -> list[Any]:  # noqa: ARG001
    found = []
    for stage in STAGES:
        engine, state = small_engine(stage, clip_norm=1.0)
        start = snapshot(state)
        decisions = []
        for step in range(5):
            state, metrics = engine.step(state, small_batch(rank, step, float("nan")))
            decisions.append((bool(metrics.skipped), int(metrics.step), bool(metrics.grad_norm.isfinite())))
        found.append((decisions, differing(named(state), start)))
    return found


@pytest.mark.ranks
def test_b18_nan_at_every_step_is_seen_by_the_caller() -> None:
    for result in ranks.run(nan_job, 2):
        assert result == [([(True, 0, False)] * 5, [])] * 4


def first_shard_job(rank: int, world: int, poison: Callable[[int], float]) -> list[bool]:  # noqa: ARG001
    """Make the gradient of the first element infinite, which rank 0 owns, from the data of another rank."""
    found = []
    for stage in STAGES:
        engine = fzero.Zero(
            lambda params, x: fzero.block(lambda net, x: (net["w"] * x.mean(0)).sum())(params["net"], x),
            fzero.adamw(0.1),
            stage,
            blocks=("net",),
        )
        state = engine.init({"net": {"w": torch.ones(128)}})
        x = torch.ones(2, 128)
        x[0, 0] = poison(rank)
        before = snapshot(state)
        state, metrics = engine.step(state, x)
        found.append(bool(metrics.skipped) and not differing(named(state), before))
    return found


def on_rank_1(rank: int) -> float:
    return float("inf") if rank == 1 else 1.0


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_b18_an_inf_in_one_shard_only(world: int) -> None:
    for result in ranks.run(first_shard_job, world, on_rank_1):
        assert result == [True] * 4


@pytest.mark.parametrize("stage", STAGES)
def test_recurrent_modules_keep_nothing_of_a_step(stage: int) -> None:
    """They hold a list of their weights beside the parameters, which would keep the gathered ones alive."""
    module = nn.Sequential(nn.LSTM(3, 4), nn.LSTM(4, 4))

    def loss(output: Any, target: Tensor) -> Tensor:
        return torch.mean((output[0] - target).square())

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = module

        def forward(self, x: Tensor) -> Any:
            return self.parts[1](self.parts[0](x)[0])

    loss_fn, params, _ = fzero.from_module(First(), loss)
    engine = fzero.Zero(loss_fn, fzero.sgd(0.1), stage)
    engine.step(engine.init(params), (torch.ones(2, 5, 3), torch.ones(2, 5, 4)))
    kept: list[Tensor] = []
    for skeleton in (loss_fn._skeleton, loss_fn._units):
        for child in skeleton.modules():
            kept += getattr(child, "_flat_weights", [])
    assert len(kept) >= 8
    assert all(not isinstance(weight, Tensor) or weight.is_meta for weight in kept)
