"""Bad input is refused on every rank, with the argument or the path named, and within the time limit."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fzero

Params = dict[str, Tensor]


def mse(params: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (x @ params["w"] + params["b"] - y).square().mean()


def weights() -> Params:
    return {"w": torch.ones(4, 3), "b": torch.zeros(3)}


def data(size: int = 6) -> tuple[Tensor, Tensor]:
    return torch.ones(size, 4), torch.ones(size, 3)


# --- arguments: no process needed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"stage": 5}, ValueError, r"stage: must be 0, 1, 2 or 3, got 5"),
        ({"stage": True}, ValueError, r"stage: .*got True"),
        ({"stage": 3}, ValueError, r"blocks: stage 3 needs"),
        ({"stage": 3, "blocks": "w"}, TypeError, r"blocks: must be a sequence"),
        ({"blocks": ["a", "a.b"]}, ValueError, r"blocks: 'a.b' lies inside 'a'"),
        ({"blocks": ["a", "a"]}, ValueError, r"blocks: 'a' is named twice"),
        ({"blocks": [()]}, ValueError, r"blocks: the empty path"),
        ({"clip_norm": 0.0}, ValueError, r"clip_norm: .*got 0.0"),
        ({"clip_norm": float("nan")}, ValueError, r"clip_norm: .*got nan"),
        ({"accumulate": 0}, ValueError, r"accumulate: .*got 0"),
        ({"accumulate": 2.0}, ValueError, r"accumulate: .*got 2.0"),
        ({"bucket_bytes": 0}, ValueError, r"bucket_bytes: .*got 0"),
        ({"buffer_policy": "sum"}, ValueError, r"buffer_policy: must be one of none, rank0, mean, got 'sum'"),
        ({"opt": "adamw"}, TypeError, r"opt: must be a fzero.Optimizer"),
        ({"loss_fn": 3}, TypeError, r"loss_fn: must be a function, got int"),
        ({"mesh": 3}, TypeError, r"mesh: must be a .*DeviceMesh"),
        ({"precision": None}, TypeError, r"precision"),
        ({"overlap": None}, TypeError, r"overlap"),
    ],
)
def test_argument_is_refused_by_name(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"loss_fn": mse, "opt": fzero.sgd(0.1), **arguments}
    with pytest.raises(error, match=message):
        fzero.Zero(given.pop("loss_fn"), given.pop("opt"), **given)


def test_learning_rate_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="learning_rate"):
        fzero.adamw(float("nan"))


def test_several_ranks_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 2 .*init_process_group"):
        fzero.Zero(mse, fzero.sgd(0.1))


def overlapping() -> Params:
    base = torch.ones(10)
    return {"a": base[:6], "b": base[4:]}


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"w": 3.0}, TypeError, r"params: leaf 'w' must be a tensor, got float"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, TypeError, r"leaf 'w' is complex"),
        ({"w": torch.ones(2, 2).to_sparse()}, TypeError, r"leaf 'w' must be a dense tensor"),
        ({"w": torch.ones(2), "m": torch.ones(2, device="meta")}, ValueError, r"leaf 'm' is on meta but"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, ValueError, r"one plain path 'a.b'"),
        (overlapping(), ValueError, r"leaf 'b' overlaps leaf 'a' in memory"),
    ],
)
def test_tree_is_refused_by_path(params: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fzero.Zero(mse, fzero.sgd(0.1)).init(params)


def test_views_of_one_memory_that_do_not_overlap_are_accepted() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    engine = fzero.Zero(lambda params, x: (params["a"].sum() + params["b"].sum()) * x.sum(), fzero.sgd(0.1))
    state = engine.init({"a": base[:, :2], "b": base[:, 2:]})
    assert torch.equal(engine.params(state)["b"], base[:, 2:])


def test_leaves_on_two_devices_are_refused_by_path() -> None:
    class Elsewhere(Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda", 0)

    params = {"b": torch.zeros(3), "w": torch.ones(4, 3).as_subclass(Elsewhere)}
    with pytest.raises(ValueError, match="leaf 'w' is on cuda:0 but leaf 'b' is on cpu"):
        fzero.Zero(mse, fzero.sgd(0.1)).init(params)


def test_blocks_that_name_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks: 'layers.9' is not the path of a subtree"):
        fzero.Zero(mse, fzero.sgd(0.1), stage=3, blocks=["layers.9"]).init(weights())


def test_another_structure_later_is_refused() -> None:
    engine = fzero.Zero(mse, fzero.sgd(0.1))
    engine.init(weights())
    with pytest.raises(ValueError, match="another structure than at this engine's first init"):
        engine.init({**weights(), "c": torch.ones(1)})


def test_state_of_another_engine_is_refused() -> None:
    engine, other = fzero.Zero(mse, fzero.sgd(0.1)), fzero.Zero(mse, fzero.sgd(0.1))
    foreign = other.init({"w": torch.ones(400)})
    with pytest.raises(ValueError, match="call init"):
        engine.step(foreign, data())
    engine.init(weights())
    with pytest.raises(ValueError, match="was not made by this engine"):
        engine.step(foreign, data())
    with pytest.raises(TypeError, match="state: must be what init or step returned, got dict"):
        engine.step(weights(), data())  # type: ignore[arg-type]


BATCHES: list[tuple[Any, type[Exception], str]] = [
    ((), ValueError, r"batch: has no leaves"),
    ((torch.ones(6, 4), 3), TypeError, r"batch: leaf '1' must be a tensor, got int"),
    ((torch.ones(6, 4), torch.tensor(1.0)), ValueError, r"batch: leaf '1' is 0-d"),
    ((torch.ones(6, 4), torch.ones(4, 3)), ValueError, r"leaf '1' has leading dim 4, leaf '0' has 6"),
    ((torch.ones(7, 4), torch.ones(7, 3)), ValueError, r"accumulate: 3 micro-batches do not divide .* 7"),
]


@pytest.mark.parametrize(("batch", "error", "message"), BATCHES)
def test_batch_is_refused(batch: Any, error: type[Exception], message: str) -> None:
    engine = fzero.Zero(mse, fzero.sgd(0.1), accumulate=3)
    state = engine.init(weights())
    with pytest.raises(error, match=message):
        engine.step(state, batch)


LOSSES: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (
        lambda params, batch: (params["w"].sum() * batch[0].sum()).long(),
        TypeError,
        r"loss must be floating, got torch.int64",
    ),
    (lambda params, batch: params["w"] * batch[0].sum(), ValueError, r"loss must be 0-d, got shape \(4, 3\)"),
    (lambda params, batch: (params["w"].sum(), batch), TypeError, r"a tuple of 2; for \(loss, aux\) set has_aux=True"),
    (lambda params, batch: 3.0 * len(params) * len(batch), TypeError, r"got float"),
    (
        lambda params, batch: fzero.Mean(params["w"].sum(), torch.ones(2) * len(batch)),
        ValueError,
        r"Mean.count must be 0-d, got shape \(2,\)",
    ),
]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compile)])
@pytest.mark.parametrize(("loss_fn", "error", "message"), LOSSES)
def test_loss_is_refused(loss_fn: Any, error: type[Exception], message: str, compiled: bool) -> None:
    engine = fzero.Zero(loss_fn, fzero.sgd(0.1), compile=compiled)
    state = engine.init(weights())
    with pytest.raises(error, match=message):
        engine.step(state, data())


def test_missing_aux_and_buffers_are_refused() -> None:
    engine = fzero.Zero(mse, fzero.sgd(0.1), has_aux=True)
    with pytest.raises(TypeError, match=r"loss_fn: must return \(loss, aux\), got Tensor"):
        engine.step(engine.init(weights()), data())
    engine = fzero.Zero(lambda params, _, batch: mse(params, batch), fzero.sgd(0.1))
    with pytest.raises(TypeError, match=r"loss_fn: must return \(loss, new_buffers\), got Tensor"):
        engine.step(engine.init(weights(), {"n": torch.zeros(1)}), data())


def test_new_buffers_of_another_shape_are_refused() -> None:
    def grows(params: Params, buffers: Params, batch: Any) -> Any:
        return mse(params, batch), {"n": torch.cat([buffers["n"], buffers["n"]])}

    engine = fzero.Zero(grows, fzero.sgd(0.1))
    state = engine.init(weights(), {"n": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"loss_fn: new_buffers leaf 'n' must have shape \(2,\) .* got \(4,\)"):
        engine.step(state, data())


# --- a fault on one rank is raised on all ----------------------------------------------------------------------------


def one_rank_at_fault(rank: int, world: int, what: str) -> None:
    assert world == 2
    odd = rank == 1
    engine = fzero.Zero(
        mse, fzero.sgd(0.2 if odd and what == "opt" else 0.1), accumulate=3 if odd and what == "accumulate" else 1
    )
    params = weights()
    if odd and what == "shape":
        params["w"] = torch.ones(4, 5)
    if odd and what == "leaf":
        params["w"] = 1.0  # type: ignore[assignment]
    if odd and what == "key":
        params["c"] = torch.ones(1)
    state = engine.init(params)
    batch: Any = data(6)
    if odd and what == "batch":
        batch = list(batch)
    if odd and what == "batch leaf":
        batch = (batch[0], None, 3)
    engine.step(state, batch)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", r"init: the ranks differ.*Rank 1: .*w torch.float32 \(4, 5\)"),
        ("leaf", r"leaf 'w' must be a tensor, got float"),
        ("key", r"init: the ranks differ"),
        ("accumulate", r"init: the ranks differ"),
        ("opt", r"init: the ranks differ.*optimizer SGDState"),
        ("batch", r"the first step: the ranks differ"),
        ("batch leaf", r"batch: leaf '.' must be a tensor, got int"),
    ],
)
def test_a_fault_on_one_rank_is_raised_on_all(what: str, message: str) -> None:
    for outcome in ranks.outcomes(one_rank_at_fault, 2, what):
        assert outcome.error is not None, outcome
        assert re.search(message, outcome.error.split("Traceback")[0], re.DOTALL), outcome.error


def small_mesh(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match="mesh: a mesh of 2 dims"):
        fzero.Zero(mse, fzero.sgd(0.1), mesh=mesh)
    with pytest.raises(ValueError, match=r"mesh: has 1 of the 2 ranks"):
        fzero.Zero(mse, fzero.sgd(0.1), mesh=mesh["b"])
    assert rank < world


@pytest.mark.ranks
def test_a_mesh_that_leaves_ranks_out_is_refused() -> None:
    ranks.run(small_mesh, 2)


TIED = torch.ones(2)


@pytest.mark.parametrize(
    ("trainable", "params", "error", "message"),
    [
        (
            {"a": 1, "b": True},
            {"a": torch.ones(2), "b": torch.ones(2)},
            TypeError,
            r"trainable must give a bool at .*a",
        ),
        ({"a": True}, {"a": torch.ones(2), "b": torch.ones(2)}, ValueError, r"trainable"),
        (lambda _path, _leaf: False, {"a": torch.ones(2)}, ValueError, r"trainable: excludes every leaf"),
        ({"a": True, "b": False}, {"a": TIED, "b": TIED}, ValueError, r"trainable: leaves 'a' and 'b' are tied"),
    ],
)
def test_a_mask_of_what_is_trained_is_checked(trainable: Any, params: Any, error: Any, message: str) -> None:
    engine = fzero.Zero(lambda params, _: params["a"].sum(), fzero.sgd(0.1), trainable=trainable)
    with pytest.raises(error, match=message):
        engine.init(params)


def test_the_loss_function_sees_what_is_not_trained_in_the_compute_dtype() -> None:
    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        assert params["a"].dtype == params["b"].dtype == torch.bfloat16
        loss: Tensor = (params["a"] * params["b"] * batch).sum()
        return loss

    params = {"a": torch.ones(3), "b": torch.full((3,), 2.0), "n": torch.arange(3)}
    engine = fzero.Zero(
        loss_fn, fzero.sgd(0.5), precision=fzero.Precision.bf16, trainable={"a": True, "b": False, "n": True}
    )
    state, metrics = engine.step(engine.init(params), torch.ones(1, 3))
    after = engine.params(state)
    assert after["a"].tolist() == [0.0] * 3
    assert after["b"].dtype == torch.float32
    assert after["b"].tolist() == [2.0] * 3
    assert float(metrics.grad_norm) == pytest.approx(12**0.5)
