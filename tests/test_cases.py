"""Failures that users of similar systems reported, each with the right value; B01 and so on number them."""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import pytest
import ranks
import torch
import torch.distributed as dist
from collectives import is_collective
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from trees import (
    ADAMW,
    Moment,
    combined,
    conv_loss,
    conv_params,
    differing,
    far,
    named,
    numbers,
    observe,
    torch_adamw,
)

import fzero

STAGES = (0, 1, 2, 3)
F32, F64 = torch.float32, torch.float64
RATE = 0.01

Loss = Callable[[Any, Any], Any]
Batch = Callable[[int, int], Any]


class Case(NamedTuple):
    """A tree, a loss and data: what one row says."""

    params: Any
    loss_fn: Loss
    batch: Batch
    steps: int = 3
    blocks: tuple[str, ...] = ("net",)


class Seen(NamedTuple):
    """What one rank saw of one run."""

    moments: list[Moment]
    owned: list[tuple[str, int, list[float]]]
    """O2: (leaf path, start, values) of every piece of a leaf that this rank's state holds."""
    tree: Any


def train(case: Case, stage: int, rank: int, **settings: Any) -> Seen:
    engine = fzero.Zero(
        case.loss_fn, fzero.adamw(RATE, **ADAMW), stage, blocks=case.blocks if stage == 3 else None, **settings
    )
    state, moments = engine.init(case.params), []
    for step in range(case.steps):
        state, moment = observe(engine, state, case.batch(rank, step))
        moments.append(moment)
    return Seen(moments, pieces(engine, state, rank), engine.params(state))


def pieces(engine: fzero.Zero, state: fzero.State, rank: int) -> list[tuple[str, int, list[float]]]:
    """Return what the state of this rank holds, cut by the layout's own table; padding must be zero."""
    assert engine._bound is not None
    binding = engine._bound[1].binding
    found = []
    for bucket, held in zip(binding.layout.buckets, state.params, strict=True):
        size = binding.layout.shard_length(bucket)
        whole = held.numel() == bucket.length and binding.axis.size > 1
        mine = held[rank * size : (rank + 1) * size] if whole else held
        rest = mine.clone()
        for slot_leaf, start, length in binding.layout.owned(bucket, rank):
            slot = next(slot for slot in bucket.slots if slot.leaf == slot_leaf)
            low = slot.offset + start - rank * size
            found.append(
                (binding.inspected.leaves[binding.trained[slot_leaf]].name, start, mine[low : low + length].tolist())
            )
            rest[low : low + length] = 0
        assert not rest.any(), f"the padding of a bucket is not zero: {rest}"
    return found


def job(rank: int, world: int, make: Callable[[], Case], stages: Sequence[int]) -> dict[int, Seen]:  # noqa: ARG001
    return {stage: train(make(), stage, rank) for stage in stages}


def oracle(case: Case, world: int) -> list[Moment]:
    """O1: one process, the ranks' batches concatenated."""

    def loss_of(params: Any, step: int) -> Tensor:
        loss: Tensor = case.loss_fn(params, combined([case.batch(rank, step) for rank in range(world)]))
        return loss

    return list(torch_adamw(case.params, loss_of, case.steps, lr=RATE))


def check(make: Callable[[], Case], world: int, stages: Sequence[int] = STAGES) -> list[dict[int, Seen]]:
    """Run a case and hold it against O1 (combined batch) and O2 (every element owned exactly once)."""
    results: list[dict[int, Seen]] = ranks.run(job, world, make, stages)
    case = make()
    theirs = oracle(case, world)
    for result in results:
        for stage, seen in result.items():
            for ours, right in zip(seen.moments, theirs, strict=True):
                for kind, leaves in right.trees().items():
                    assert not far(ours.trees()[kind], leaves), f"stage {stage}: {kind}"
    full = named(results[0][stages[0]].tree)
    for stage in stages:
        check_owned([result[stage].owned for result in results], full)
    return results


def check_owned(owned: Sequence[Sequence[tuple[str, int, list[float]]]], full: dict[str, Tensor]) -> None:
    """O2: put the leaves together from what each rank says that it holds."""
    count = {name: torch.zeros(leaf.numel(), dtype=torch.int64) for name, leaf in full.items()}
    value = {name: torch.zeros(leaf.numel(), dtype=leaf.dtype) for name, leaf in full.items()}
    for rank in owned:
        for name, start, values in rank:
            count[name][start : start + len(values)] += 1
            value[name][start : start + len(values)] = torch.tensor(values, dtype=value[name].dtype)
    assert all(bool((times == 1).all()) for times in count.values()), count
    assert not differing({name: value[name].view(leaf.shape) for name, leaf in full.items()}, full)


def vectors(width: int, rows: int = 4) -> Batch:
    return lambda rank, step: numbers(rows, width, seed=31 * rank + 7 * step + 1)


# --- layout and dtypes -----------------------------------------------------------------------------------------------


def tiny_leaves() -> Case:
    params = {"net": {"a": numbers(3, seed=1), "b": numbers(1, seed=2), "c": numbers(2, 1000, seed=3, scale=0.1)}}

    def net(leaves: Any, x: Tensor) -> Any:
        return (torch.tanh(x @ leaves["c"].T).sum(1, keepdim=True) * leaves["a"] + leaves["b"]).square().mean()

    return Case(params, lambda params, x: fzero.block(net)(params["net"], x), vectors(1000))


@pytest.mark.ranks
@pytest.mark.parametrize("world", [4, 8])
def test_b01_fewer_elements_than_ranks(world: int) -> None:
    results = check(tiny_leaves, world)
    for stage in (1, 2, 3):
        held = [sum(len(values) for _, _, values in result[stage].owned) for result in results]
        assert sum(held) == 2004
        # shards are flat: the part of each rank, with the gaps in front of two aligned leaves
        assert max(held) <= math.ceil((2004 + 2 * 63) / world)


def one_leaf() -> Case:
    params = {"net": {"w": numbers(2, seed=1)}}
    return Case(
        params,
        lambda params, x: fzero.block(lambda net, x: (x @ net["w"]).square().mean())(params["net"], x),
        vectors(2),
    )


def with_empty_dict() -> Case:
    case = one_leaf()
    return case._replace(params={"net": {**case.params["net"], "no": {}}, "empty": {}})


class Collectives(TorchDispatchMode):
    """Counts the collectives that this rank starts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_collective(func) and "wait" not in func.name():
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(rank: int, world: int, make: Callable[[], Case]) -> dict[int, Any]:  # noqa: ARG001
    counts = {}
    for stage in STAGES:
        case = make()
        engine = fzero.Zero(case.loss_fn, fzero.adamw(RATE), stage, blocks=case.blocks if stage == 3 else None)
        with Collectives() as init:
            state = engine.init(case.params)
        with Collectives() as step:
            engine.step(state, case.batch(rank, 0))
        with Collectives() as full:
            engine.opt_state(state)
        counts[stage] = (dict(init.counts), dict(step.counts), dict(full.counts))
    return counts


@pytest.mark.ranks
@pytest.mark.parametrize("make", [one_leaf, with_empty_dict])
def test_b02_ranks_without_a_single_element(make: Callable[[], Case]) -> None:
    """Every rank makes the same number and kind of collective calls, whether or not its shard is empty."""
    results = check(make, 4)
    assert [sum(len(values) for _, _, values in result[2].owned) for result in results] == [1, 1, 0, 0]
    first, *others = ranks.run(count_collectives, 4, make)
    assert all(other == first for other in others)
    gather, scatter = "fzero::all_gather", "_c10d_functional::all_to_all_single"
    for stage, (_, step, full) in first.items():
        # the loss and the norm are one gather more; stage 3 gathers its block in forward and again in backward
        assert step == {gather: {0: 2, 1: 2, 2: 2, 3: 3}[stage], scatter: 1}
        assert full == ({} if stage == 0 else {gather: 2})


def learned_scale() -> Case:
    params = {"net": {"scale": torch.tensor(0.3, dtype=F64), "w": numbers(4, 3, seed=1)}}

    def net(leaves: Any, x: Tensor) -> Any:
        return (leaves["scale"].exp() * (x @ leaves["w"])).square().mean()

    return Case(params, lambda params, x: fzero.block(net)(params["net"], x), vectors(4))


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_b03_a_0d_parameter(world: int) -> None:
    """O1 holds the norm too: the scale counts once in it."""
    for result in check(learned_scale, world):
        for seen in result.values():
            assert seen.tree["net"]["scale"].shape == ()


MIXED = {"b": (torch.float64, 3), "a": (torch.float32, 5), "d": (torch.bfloat16, 4), "c": (torch.float16, 2)}


def mixed(order: str) -> Any:
    leaves = {}
    for name in order:
        dtype, size = MIXED[name]
        leaves[name] = torch.arange(1, size + 1).to(dtype) / 4
    return {"net": OrderedDict(leaves)}


def mixed_loss(params: Any, x: Tensor) -> Tensor:
    """Return a loss whose gradient of every element of a leaf is the mean of the batch, exact in every dtype."""

    def net(leaves: Any, x: Tensor) -> Any:
        rows = [(leaf * x.to(leaf.dtype)[:, None]).sum(1).to(F64) for leaf in leaves.values()]
        return torch.stack(rows).sum(0).mean()

    loss: Tensor = fzero.block(net)(params["net"], x)
    return loss


def mixed_job(rank: int, world: int, precision: fzero.Precision) -> dict[Any, dict[str, dict[str, Tensor]]]:
    results = {}
    for order in ("abcd", "dcba"):
        for stage in STAGES:
            blocks = ("net",) if stage == 3 else None
            engine = fzero.Zero(mixed_loss, fzero.adamw(RATE, **ADAMW), stage, blocks=blocks, precision=precision)
            state = engine.init(mixed(order))
            for step in range(3):
                # sums over ranks are multiples of the world, so that no dtype rounds their mean
                state, _ = engine.step(state, torch.full((2,), float(world * (1 + step)) if rank == 0 else 0.0))
            moments = engine.opt_state(state)
            assert list(engine.params(state)["net"]) == list(order)
            trees = {"params": engine.params(state), "exp_avg": moments.exp_avg, "exp_avg_sq": moments.exp_avg_sq}
            results[order, stage] = {kind: named(tree["net"]) for kind, tree in trees.items()}
    return results


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("masters", [True, False])
def test_b04_several_dtypes_in_one_tree(world: int, masters: bool) -> None:
    """Each leaf keeps its dtype and equals AdamW on that leaf alone, to the bit, whatever the order of leaves.

    With float32 masters (the default), it equals AdamW in float32, and the parameter is that, rounded.
    """
    right: dict[str, dict[str, Tensor]] = {"params": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, leaf in mixed("abcd")["net"].items():
        dtype = torch.promote_types(leaf.dtype, F32) if masters else leaf.dtype
        alone = leaf.to(dtype, copy=True).requires_grad_()
        optimizer = torch.optim.AdamW([alone], lr=RATE, foreach=False, fused=False, **ADAMW)
        for step in range(3):
            alone.grad = torch.full_like(alone, 1 + step)
            optimizer.step()
        right["params"][name] = alone.detach().to(leaf.dtype)
        right["exp_avg"][name] = optimizer.state[alone]["exp_avg"]
        right["exp_avg_sq"][name] = optimizer.state[alone]["exp_avg_sq"]
    precision = fzero.Precision() if masters else fzero.Precision(param=None, reduce=None)
    for result in ranks.run(mixed_job, world, precision):
        for key, trees in result.items():
            for kind, leaves in right.items():
                assert not differing(trees[kind], leaves), f"{key}: {kind}"


def convolutions() -> Case:
    return Case(
        {"net": conv_params(F64)},
        conv_loss,
        lambda rank, step: numbers(4, 3, 6, 6, seed=31 * rank + 7 * step),
        steps=2,
    )


@pytest.mark.ranks
def test_b05_strided_leaves_and_gradients() -> None:
    """channels_last, 1x1, transposed leaves and an expanded gradient, by value; gathered leaves are contiguous."""
    for result in check(convolutions, 2):
        for seen in result.values():
            for name, leaf in seen.tree["net"].items():
                assert leaf.shape == conv_params(F64)[name].shape
                assert leaf.is_contiguous()


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
def test_b07_a_group_that_leaves_ranks_out_is_refused(stage: int) -> None:
    for outcome in ranks.outcomes(mesh_of_one, 2, stage):
        assert outcome.error is not None
        assert "ValueError: mesh: has 1 of the 2 ranks" in outcome.error


def mesh_of_one(rank: int, world: int, stage: int) -> None:  # noqa: ARG001
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("apart", "together"))["together"]
    fzero.Zero(linear_loss, fzero.adamw(), stage, mesh=mesh, blocks=("net",))


def linear_loss(params: Any, x: Tensor) -> Tensor:
    def net(leaves: Any, x: Tensor) -> Any:
        return (x @ leaves["w"].T + leaves["b"]).square().mean()

    loss: Tensor = fzero.block(net)(params["net"], x)
    return loss


def linear(dtype: torch.dtype = F64) -> Case:
    params = {"net": {"w": numbers(3, 4, seed=1, dtype=dtype), "b": numbers(3, seed=2, dtype=dtype)}}
    return Case(params, linear_loss, lambda rank, step: numbers(4, 4, seed=31 * rank + 7 * step, dtype=dtype))


def mesh_of_all(rank: int, world: int) -> list[Seen]:
    mesh = init_device_mesh("cpu", (world,))
    return [train(linear(), stage, rank, mesh=mesh) for stage in STAGES]


@pytest.mark.ranks
def test_b07_a_mesh_of_all_ranks_never_drifts() -> None:
    theirs = oracle(linear(), 2)
    for result in ranks.run(mesh_of_all, 2):
        for seen in result:
            for ours, right in zip(seen.moments, theirs, strict=True):
                assert not far(ours.params, right.params)
                assert not far(ours.exp_avg, right.exp_avg)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("stage", STAGES)
def test_b07_a_world_of_one_is_plain_adamw_to_the_bit(stage: int, dtype: torch.dtype) -> None:
    assert not dist.is_initialized()
    case = linear(dtype)
    for ours, right in zip(train(case, stage, 0).moments, oracle(case, 1), strict=True):
        for kind in ("grads", "params", "exp_avg", "exp_avg_sq"):
            assert not differing(getattr(ours, kind), getattr(right, kind)), kind


# --- reduction -------------------------------------------------------------------------------------------------------

IGNORED = -100


def token_params() -> Any:
    """Return a (11, 4) matrix for which feature 0 gives a token of class 0 the loss 1, and feature 1 the loss 4."""
    w = torch.zeros(11, 4, dtype=F64)
    # -log(e^t / (e^t + 10)) = L  for  e^t = 10 / (e^L - 1)
    w[0, 0], w[0, 1] = math.log(10 / (math.e - 1)), math.log(10 / (math.exp(4) - 1))
    return {"net": {"w": w}}


def token_loss(params: Any, batch: Any) -> fzero.Mean:
    x, labels = batch

    def net(leaves: Any, x: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(x @ leaves["w"].T, labels, reduction="sum", ignore_index=IGNORED)

    return fzero.Mean(fzero.block(net)(params["net"], x, labels), (labels != IGNORED).sum())


def tokens(rank: int, valid: Sequence[int], rows: int = 3) -> Any:
    """Return micro-batches of `rows` tokens each, of which the first few are valid; rank 0's have loss 1, others 4."""
    labels = torch.full((len(valid), rows), IGNORED)
    for micro, count in enumerate(valid):
        labels[micro, :count] = 0
    x = torch.zeros(len(valid) * rows, 4, dtype=F64)
    x[:, min(rank, 1)] = 1
    return x, labels.flatten()


def token_gradient(batches: Sequence[Any]) -> Tensor:
    """Return the gradient of the mean over all valid tokens, in one process."""
    w: Tensor = token_params()["net"]["w"].requires_grad_()
    x, labels = combined(batches)
    (gradient,) = torch.autograd.grad(F.cross_entropy(x @ w.T, labels, ignore_index=IGNORED), w)
    return gradient


def token_job(rank: int, world: int, batches: Sequence[Any], accumulate: int) -> dict[int, Any]:  # noqa: ARG001
    found = {}
    for stage in STAGES:
        opt = fzero.adamw(RATE, **ADAMW)
        engine = fzero.Zero(token_loss, opt, stage, blocks=("net",) if stage == 3 else None, accumulate=accumulate)
        state = engine.init(token_params())
        grads, loss = engine.grads(state, batches[rank])
        mean = engine.evaluate(state, batches[rank])[0]
        state, metrics = engine.step(state, batches[rank])
        moments, params = engine.opt_state(state), engine.params(state)
        found[stage] = (
            {"loss": loss, "metrics": metrics.loss, "evaluate": mean},
            grads["net"]["w"],
            moments.exp_avg["net"]["w"],
            params["net"]["w"],
            bool(metrics.skipped),
        )
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("valid", "accumulate"),
    [
        (((3, 3, 0), (0, 2, 0)), 1),
        (((3, 2, 1), (0, 2, 0)), 3),
        (((1, 2, 3), (1, 0, 1)), 3),
        (((3, 3, 0), (0, 2, 0)), 9),
    ],
)
def test_b09_every_token_has_the_same_weight(valid: Sequence[Sequence[int]], accumulate: int) -> None:
    """6 tokens of loss 1 and 2 of loss 4: the mean is 14 / 8 = 1.75, not 2.5."""
    batches = [tokens(rank, counts) for rank, counts in enumerate(valid)]
    right = token_gradient(batches)
    for result in ranks.run(token_job, 2, batches, accumulate):
        for losses, gradient, exp_avg, _, skipped in result.values():
            assert not skipped
            for name, loss in losses.items():
                assert float(loss) == pytest.approx(1.75, rel=1e-12), name
            assert not far({"w": gradient, "exp_avg": exp_avg}, {"w": right, "exp_avg": 0.1 * right})


def first_update(gradient: Tensor) -> Tensor:
    """Return the parameter after one step of torch's AdamW."""
    w: Tensor = token_params()["net"]["w"].requires_grad_()
    w.grad = gradient
    torch.optim.AdamW([w], lr=RATE, foreach=False, fused=False, **ADAMW).step()
    return w.detach()


@pytest.mark.ranks
@pytest.mark.parametrize("accumulate", [1, 3])
def test_b15_a_rank_without_a_valid_token(accumulate: int) -> None:
    batches = [tokens(0, (3, 2, 1)), tokens(1, (0, 0, 0))]
    right = token_gradient(batches[:1])
    for result in ranks.run(token_job, 2, batches, accumulate):
        for losses, gradient, _, param, skipped in result.values():
            assert not skipped
            assert float(losses["metrics"]) == pytest.approx(1.0, rel=1e-12)
            assert not far({"w": gradient, "param": param}, {"w": right, "param": first_update(right)})


@pytest.mark.ranks
@pytest.mark.parametrize("accumulate", [1, 3])
def test_b15_no_valid_token_anywhere(accumulate: int) -> None:
    """The gradient is exactly zero and the step is taken: decay applies, as in B14."""
    batches = [tokens(rank, (0, 0, 0)) for rank in range(2)]
    zero = torch.zeros(11, 4, dtype=F64)
    for result in ranks.run(token_job, 2, batches, accumulate):
        for losses, gradient, exp_avg, param, skipped in result.values():
            assert not skipped
            assert [float(loss) for loss in losses.values()] == [0.0, 0.0, 0.0]
            assert torch.equal(gradient, zero)
            assert torch.equal(exp_avg, zero)
            assert torch.equal(param, first_update(zero))


@pytest.mark.ranks
@pytest.mark.parametrize("accumulate", [1, 3])
def test_b15_a_rank_with_batch_size_0(accumulate: int) -> None:
    empty = tokens(1, (0, 0, 0), rows=0)
    assert empty[0].shape == (0, 4)
    batches = [empty, tokens(0, (3, 2, 1)), empty]
    right = token_gradient(batches[1:2])
    for result in ranks.run(token_job, 3, batches, accumulate):
        for losses, gradient, _, param, skipped in result.values():
            assert not skipped
            assert float(losses["metrics"]) == pytest.approx(1.0, rel=1e-12)
            assert not far({"w": gradient, "param": param}, {"w": right, "param": first_update(right)})


def unused_loss(params: Any, x: Tensor) -> Tensor:
    """Return a loss that uses the parameter only for positive data."""
    if x[0] > 0:
        loss: Tensor = fzero.block(lambda net, x: net["w"] * x.mean())(params["net"], x)
        return loss
    return x.mean() * 0


def unused_job(rank: int, world: int) -> list[tuple[float, int]]:  # noqa: ARG001
    found = []
    for stage in STAGES:
        engine = fzero.Zero(
            unused_loss, fzero.adamw(0.1, weight_decay=0.1), stage, blocks=("net",) if stage == 3 else None
        )
        state = engine.init({"net": {"w": torch.tensor(1.0, dtype=F64)}})
        for use in (1.0, 0.0, 0.0, 0.0):
            state, metrics = engine.step(state, torch.full((2,), use, dtype=F64))
        found.append((float(engine.params(state)["net"]["w"]), int(metrics.step)))
    return found


@pytest.mark.ranks
def test_b14_an_unused_parameter_has_a_zero_gradient() -> None:
    """Decay and old momentum go on moving it: 0.7042 after 4 steps, the step count is 4, at every stage."""
    w = torch.tensor(1.0, dtype=F64, requires_grad=True)
    optimizer = torch.optim.AdamW([w], lr=0.1, weight_decay=0.1, foreach=False, fused=False)
    for gradient in (1.0, 0.0, 0.0, 0.0):
        w.grad = torch.tensor(gradient, dtype=F64)
        optimizer.step()
    right = float(w.detach())
    assert right == pytest.approx(0.7042, abs=5e-5)
    for result in ranks.run(unused_job, 2):
        assert result == [(right, 4)] * 4


def two_heads() -> Case:
    """Return a model whose second head only rank 0 uses: a step's batch says so in its first column."""
    params = {name: {"w": numbers(4, 3, seed=seed)} for seed, name in enumerate(("net", "left", "right"))}

    def head(leaves: Any, x: Tensor) -> Any:
        return (x @ leaves["w"]).square().sum(1)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        first, uses = fzero.block(head)(params["left"], x), x[:, 0] > 0
        total = (first + fzero.block(head)(params["net"], x)).mean()
        if uses.any():
            total = total + (fzero.block(head)(params["right"], x[uses])).sum() / len(x)
        result: Tensor = total
        return result

    def batch(rank: int, step: int) -> Tensor:
        x = numbers(4, 4, seed=31 * rank + 7 * step)
        x[:, 0] = 1.0 if rank == 0 else -1.0
        return x

    return Case(params, loss_fn, batch, blocks=("net", "left"))


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_b13_a_part_that_only_one_rank_uses(world: int) -> None:
    """It finishes, and the other ranks' missing use counts as zero: in stage 3 if the part is not a block."""
    check(two_heads, world)


# --- hyper-parameters ------------------------------------------------------------------------------------------------


def decay_params() -> Any:
    return {
        "net": {
            "w": numbers(4, 3, seed=1),
            "b": numbers(3, seed=2),
            "ln": numbers(3, seed=3),
            "emb": numbers(7, 4, seed=4),
        }
    }


def zero_loss(params: Any, x: Tensor) -> Tensor:
    def net(leaves: Any, x: Tensor) -> Any:
        return sum(leaf.sum() for leaf in leaves.values()) * x.mean() * 0

    loss: Tensor = fzero.block(net)(params["net"], x)
    return loss


def decay_job(rank: int, world: int) -> list[Any]:  # noqa: ARG001
    def decays(path: Any, leaf: Tensor) -> bool:
        assert leaf.shape == decay_params()["net"][path[-1]].shape, "the mask sees full leaves"
        return leaf.ndim >= 2

    def rate(path: Any, leaf: Tensor) -> float:  # noqa: ARG001
        return 0.5 if path[-1] == "emb" else 1.0

    masks: list[Any] = [decays, {"net": {"w": True, "b": False, "ln": False, "emb": True}}]
    found = []
    for stage in STAGES:
        for mask in masks:
            for factor in (None, rate):
                opt = fzero.adamw(0.1, weight_decay=0.1, decay_mask=mask, rate_factor=factor)
                engine = fzero.Zero(zero_loss, opt, stage, blocks=("net",) if stage == 3 else None)
                state = engine.init(decay_params())
                for _ in range(5):
                    state, _ = engine.step(state, torch.ones(2, dtype=F64))
                found.append((factor is not None, engine.params(state)["net"]))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_b20_decay_is_decided_on_the_full_leaf(world: int) -> None:
    """w and emb shrink by 0.99^5 = 0.95099005, b and ln stay to the bit; with half the rate emb by 0.995^5."""
    start = decay_params()["net"]
    for result in ranks.run(decay_job, world):
        assert len(result) == 16
        for halved, params in result:
            factors = {"w": 0.95099005, "emb": 0.995**5 if halved else 0.95099005}
            for name, factor in factors.items():
                torch.testing.assert_close(params[name], start[name] * factor, rtol=1e-8, atol=0)
            assert not differing({"b": params["b"], "ln": params["ln"]}, {"b": start["b"], "ln": start["ln"]})


# --- trees -----------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    w: Any
    b: Any


def pair_tree(kind: str, reverse: bool) -> Any:
    """Return two leaves of equal shape in a container; each rank may insert them in another order."""
    items = [("w", numbers(3, seed=1)), ("b", numbers(3, seed=2))]
    items = items[::-1] if reverse else items
    if kind == "named tuple":
        return {"net": Pair(**dict(items)), "no": None}
    if kind == "layers":
        items = [({"w": "layers.2", "b": "layers.10"}[name], leaf) for name, leaf in items]
    made: dict[str, Any] = OrderedDict(items) if kind == "OrderedDict" else dict(items)
    return {"no": None, "net": made} if reverse else {"net": made, "no": None}


def pair_loss(params: Any, x: Tensor) -> Tensor:
    def net(leaves: Any, x: Tensor) -> Any:
        w, b = (leaves.w, leaves.b) if isinstance(leaves, Pair) else (leaves.get("w"), leaves.get("b"))
        w, b = (leaves["layers.2"], leaves["layers.10"]) if w is None else (w, b)
        return ((x * w).sum(1) + (b**2).sum()).square().mean()

    assert params["no"] is None
    loss: Tensor = fzero.block(net)(params["net"], x)
    return loss


def pair_job(rank: int, world: int, kind: str, reverse: bool) -> dict[int, Seen]:  # noqa: ARG001
    case = Case(pair_tree(kind, reverse and rank == 1), pair_loss, vectors(3))
    return {stage: train(case, stage, rank) for stage in STAGES}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["dict", "OrderedDict", "layers", "named tuple"])
def test_b30_trees_in_another_insertion_order(kind: str) -> None:
    """The same result as in one order, or an error on all ranks; each rank's own types and key orders come back."""
    ended = ranks.outcomes(pair_job, 2, kind, True)
    if kind == "OrderedDict":
        for outcome in ended:
            assert outcome.error is not None
            assert "ValueError: init: the ranks differ" in outcome.error
        return
    theirs = oracle(Case(pair_tree(kind, reverse=False), pair_loss, vectors(3)), 2)
    for rank, outcome in enumerate(ended):
        assert outcome.error is None, outcome.error
        mine = pair_tree(kind, reverse=rank == 1)
        for seen in outcome.result.values():
            for ours, right in zip(seen.moments, theirs, strict=True):
                for name in ("grads", "params", "exp_avg", "exp_avg_sq"):
                    assert not far(getattr(ours, name), getattr(right, name)), name
            check_order(seen.tree, mine)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["dict", "OrderedDict", "layers", "named tuple"])
def test_b30_the_output_has_the_input_s_types_and_key_orders(kind: str) -> None:
    for result in ranks.run(pair_job, 2, kind, False):
        for seen in result.values():
            check_order(seen.tree, pair_tree(kind, reverse=False))


def check_order(ours: Any, right: Any) -> None:
    assert type(ours["net"]) is type(right["net"])
    assert list(ours) == list(right)
    assert ours["no"] is None
    if isinstance(right["net"], dict):
        assert list(ours["net"]) == list(right["net"])
    assert optree.tree_structure(ours) == optree.tree_structure(right)
