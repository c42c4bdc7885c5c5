"""What `init` starts from, and what comes out beside parameters: meta leaves, rank 0's values, aux, buffers."""

from typing import Any

import pytest
import ranks
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fzero

Params = dict[str, Any]


def loss_fn(params: Params, batch: Tensor) -> Tensor:
    hidden = torch.tanh(batch @ params["tie"] + params["b"])
    loss: Tensor = (hidden @ params["w"]).square().mean() + params["tie"].square().sum()
    weighted: Tensor = loss * params["count"].sum()
    return weighted


def tree(seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(5, 5, generator=generator)
    return {
        "tie": shared,
        "again": shared,
        "w": torch.randn(3, 5, generator=generator).T,
        "b": torch.randn(5, generator=generator),
        "count": torch.tensor([seed + 1, 2]),
        "flag": torch.tensor(seed == 0),
    }


def start(rank: int, world: int, stage: int, others: str) -> dict[str, Any]:
    params = tree(0 if rank == 0 else rank + 10)
    if rank and others == "meta":
        params = {key: leaf.to("meta") for key, leaf in params.items()}  # which also unties them
    if rank and others == "strides":
        params["w"] = params["w"].contiguous()
    buffers = {"mean": torch.full((2,), float(rank)), "seen": torch.tensor(rank)}
    if rank and others == "meta":
        buffers = {key: buffer.to("meta") for key, buffer in buffers.items()}
    mesh = init_device_mesh("cpu", (world,))

    def with_buffers(params: Params, buffers: dict[str, Tensor], batch: Tensor) -> Any:
        return loss_fn(params, batch), {"mean": buffers["mean"] + rank, "seen": buffers["seen"] + 1}

    blocks = ["b"] if stage == 3 else None
    loss = _through_block(with_buffers) if stage == 3 else with_buffers
    engine = fzero.Zero(loss, fzero.adamw(1e-2), stage, mesh=mesh, blocks=blocks)
    state = engine.init(params, buffers)
    first = engine.params(state), engine.buffers(state)
    state, _ = engine.step(state, torch.ones(2, 5) * (rank + 1))
    after = engine.params(state)
    moments = engine.opt_state(state)
    return {
        "first": first,
        "after": after,
        "tied": after["tie"].data_ptr() == after["again"].data_ptr(),
        "moments tied": moments.exp_avg["tie"].data_ptr() == moments.exp_avg["again"].data_ptr(),
        "no moments": (moments.exp_avg["count"], moments.exp_avg_sq["flag"]),
        "elements": sum(bucket.used for bucket in engine._bound[1].binding.layout.buckets) if engine._bound else 0,
        "keys": list(after),
    }


def _through_block(loss: Any) -> Any:
    unpack = fzero.block(lambda leaf: leaf * 1.0)
    return lambda params, buffers, batch: loss({**params, "b": unpack(params["b"])}, buffers, batch)


@pytest.mark.ranks
@pytest.mark.parametrize("others", ["values", "meta", "strides"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_rank_0_s_values_win(stage: int, others: str) -> None:
    results = ranks.run(start, 3, stage, others)
    wanted = tree(0)
    for result in results:
        params, buffers = result["first"]
        assert all(torch.equal(params[key], wanted[key]) for key in wanted)
        assert params["flag"].dtype == torch.bool
        assert torch.equal(buffers["mean"], torch.zeros(2))
        assert buffers["seen"] == 0
        assert result["tied"]
        assert result["moments tied"]
        assert result["no moments"] == (None, None)
        assert result["elements"] == 25 + 15 + 5
        assert result["keys"] == list(wanted)
        assert torch.equal(result["after"]["count"], wanted["count"])
        assert not torch.equal(result["after"]["tie"], wanted["tie"])
        for key in wanted:
            assert torch.equal(result["after"][key], results[0]["after"][key])


def tied_differently(rank: int, world: int) -> None:
    params = tree(0)
    if rank == world - 1:
        params["again"] = params["again"].clone()
    with pytest.raises(ValueError, match=rf"params: rank {world - 1} ties leaves"):
        fzero.Zero(loss_fn, fzero.sgd(0.1)).init(params)


@pytest.mark.ranks
def test_a_tie_that_only_some_ranks_have_is_refused_on_all() -> None:
    ranks.run(tied_differently, 2)


def policies(rank: int, world: int, policy: str) -> dict[str, Tensor]:
    def step(params: Params, buffers: dict[str, Tensor], batch: Tensor) -> Any:
        new = {"wide": buffers["wide"] + rank, "half": buffers["half"] + rank + 1, "seen": buffers["seen"] + 1 + rank}
        return (params["w"] * batch).sum(), new

    engine = fzero.Zero(step, fzero.sgd(0.1), buffer_policy=policy)
    buffers = {
        "wide": torch.zeros(2, 3, dtype=torch.float64),
        "half": torch.zeros(3, dtype=torch.bfloat16),
        "seen": torch.tensor(0),
    }
    state = engine.init({"w": torch.ones(3)}, buffers)
    state, _ = engine.step(state, torch.ones(2, 3))
    assert world == 3
    assert all(torch.equal(buffer, torch.zeros_like(buffer)) for buffer in buffers.values())  # the caller's are intact
    result: dict[str, Tensor] = engine.buffers(state)
    return result


@pytest.mark.ranks
@pytest.mark.parametrize("policy", ["none", "rank0", "mean"])
def test_buffer_policies(policy: str) -> None:
    for rank, buffers in enumerate(ranks.run(policies, 3, policy)):
        shift = {"none": rank, "rank0": 0, "mean": 1}[policy]
        assert torch.equal(buffers["wide"], torch.full((2, 3), float(shift), dtype=torch.float64))
        assert torch.equal(buffers["half"], torch.full((3,), shift + 1.0, dtype=torch.bfloat16))
        assert buffers["seen"] == 1 + rank  # integers are each rank's own
        assert buffers["seen"].dtype == torch.int64


@pytest.mark.parametrize("accumulate", [1, 2])
def test_aux_is_stacked_over_micro_batches(accumulate: int) -> None:
    def with_aux(params: Params, batch: Tensor) -> Any:
        return (params["w"] * batch).mean(), {"rows": batch[:, 0], "none": None, "sum": batch.sum()}

    engine = fzero.Zero(with_aux, fzero.sgd(0.1), accumulate=accumulate, has_aux=True)
    batch = torch.arange(12.0).reshape(4, 3)
    state = engine.init({"w": torch.ones(3)})
    loss, aux = engine.evaluate(state, batch)
    assert loss == batch.mean()
    assert torch.equal(aux["rows"], batch[:, 0])
    state, metrics = engine.step(state, batch)
    assert torch.equal(metrics.aux["rows"], batch[:, 0].reshape(accumulate, -1))
    assert metrics.aux["sum"].shape == (accumulate,)
    assert metrics.aux["none"] is None
    assert not metrics.aux["rows"].requires_grad


def test_evaluate_with_a_module_in_eval_mode_changes_nothing() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    loss_fn, params, buffers = fzero.from_module(module, nn.functional.mse_loss)
    eval_loss_fn, _, _ = fzero.from_module(module.eval(), nn.functional.mse_loss)
    batch = torch.randn(8, 3), torch.randn(8, 1)
    for stage in (0, 1, 2, 3):
        engine = fzero.Zero(loss_fn, fzero.adamw(1e-2), stage)
        state = engine.init(params, buffers)
        state, _ = engine.step(state, batch)
        trained, statistics = engine.params(state), engine.buffers(state)
        loss, aux = engine.evaluate(state, batch, loss_fn=eval_loss_fn)
        expected = torch.func.functional_call(module, (trained, statistics), (batch[0],))
        assert torch.equal(loss, nn.functional.mse_loss(expected, batch[1]))
        assert aux is None
        assert all(torch.equal(value, statistics[name]) for name, value in engine.buffers(state).items())
        assert statistics["1.num_batches_tracked"] == 1
    after = module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not module.training


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_count_that_16_bit_floats_cannot_hold_divides_exactly(dtype: torch.dtype) -> None:
    count = 100_003  # above 65504, and no multiple of a power of two
    engine = fzero.Zero(
        lambda params, x: fzero.Mean((params["w"] * x).sum(), torch.tensor(count)),
        fzero.sgd(1.0),
        precision=fzero.Precision(param=dtype, reduce=dtype),
    )
    state = engine.init({"w": torch.zeros(2, dtype=dtype)})
    gradient, _ = engine.grads(state, torch.tensor([[300.0, -500.0]], dtype=dtype))
    expected = (torch.tensor([300.0, -500.0]) / count).to(dtype)
    assert torch.equal(gradient["w"], expected)
    state, _ = engine.step(state, torch.tensor([[300.0, -500.0]], dtype=dtype))
    assert torch.equal(engine.params(state)["w"], -expected)
