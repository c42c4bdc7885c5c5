import importlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import optree
import pytest
import ranks
import torch
import torch.distributed as dist
from collectives import is_collective
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fzero
from fzero import direct
from fzero.agree import agree
from fzero.axis import MESSAGE_BYTES, Axis, axis_of, with_own_group
from fzero.collectives import from_rank0, share_buffers, sum_in_order, sum_over_ranks
from fzero.comm import anchor, attach, gather, new_token, scatter

C = 37
"""Elements of a shard: odd, so that nothing lines up by chance."""
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def randn(seed: int, *shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def shard_of(rank: int, dtype: torch.dtype = F64) -> Tensor:
    return randn(rank, C, dtype=dtype)


def full_of(rank: int, world: int, dtype: torch.dtype = F64) -> Tensor:
    return randn(100 + rank, world * C, dtype=dtype)


def in_rank_order(rank: int, world: int, dtype: torch.dtype) -> Tensor:
    """Compute what `scatter` must give this rank from every rank's known data, without `fzero`."""
    wide = F32 if dtype in (F16, BF16) else dtype
    total = torch.zeros(C, dtype=wide)
    for other in range(world):
        total = total + full_of(other, world, dtype)[rank * C : (rank + 1) * C].to(wide)
    return total.to(dtype)


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_collective(func):
            self.seen[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def gathered(shard: Tensor, axis: Axis) -> Tensor:
    return gather(shard, new_token(shard), axis)[0]


def scattered(full: Tensor, axis: Axis) -> Tensor:
    return scatter(full, new_token(full), axis)[0]


def transpose(function: Callable[[Tensor], Tensor], at: Tensor) -> Callable[[Tensor], Tensor]:
    pull: Callable[[Tensor], tuple[Tensor]] = torch.func.vjp(function, at)[1]
    return lambda cotangent: pull(cotangent)[0]


# --- the pair is linear, and each is the other's transpose -----------------------------------------------------------


def check_adjoint(rank: int, world: int) -> None:
    axis = axis_of(None)
    shards, fulls = [shard_of(other) for other in range(world)], [full_of(other, world) for other in range(world)]
    shard, full = shards[rank], fulls[rank]
    whole = gathered(shard, axis)
    mine = scattered(full, axis)
    assert torch.equal(whole, torch.cat(shards))
    assert torch.equal(mine, in_rank_order(rank, world, F64))
    left = sum_over_ranks((whole * full).sum()[None], axis)
    right = sum_over_ranks((shard * mine).sum()[None], axis)
    assert abs(left - right) <= 1e-12 * abs(left)

    # the transpose that torch.func takes
    pull = transpose(lambda leaf: gathered(leaf, axis), shard)
    assert torch.equal(pull(full), mine)
    assert torch.equal(transpose(lambda leaf: scattered(leaf, axis), full)(shard), whole)
    # that of autograd
    leaf = shard.clone().requires_grad_()
    (got,) = torch.autograd.grad(gathered(leaf, axis), leaf, full)
    assert torch.equal(got, mine)
    leaf = full.clone().requires_grad_()
    (got,) = torch.autograd.grad(scattered(leaf, axis), leaf, shard)
    assert torch.equal(got, whole)
    # and twice over: the transpose of the transpose is the map itself
    assert torch.equal(transpose(pull, full)(shard), whole)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_gather_and_scatter_are_each_others_transpose(world: int) -> None:
    ranks.run(check_adjoint, world)


def test_in_a_world_of_one_both_are_the_identity() -> None:
    shard, token = shard_of(0), torch.zeros(0)
    assert gather(shard, token, Axis()) == (shard, token)
    assert scatter(shard, token, Axis()) == (shard, token)
    assert sum_over_ranks(shard, Axis()) is shard
    assert share_buffers(shard, "mean", Axis()) is shard
    assert from_rank0(shard, Axis()) is shard


def objective(shard: Tensor, full: Tensor, axis: Axis) -> Tensor:
    """A scalar that goes through both maps, each more than once, and is not linear."""
    whole = gathered(shard, axis)
    back = scattered(whole.square() * full, axis)
    return (gathered(back.sin(), axis) * full).sum() + (back * shard).sum()


def expected_gradient(rank: int, world: int) -> Tensor:
    """Compute the gradient of the sum over ranks of `objective` in one process, with torch alone."""
    shards = [shard_of(other).requires_grad_() for other in range(world)]
    whole = torch.cat(shards)
    total = torch.zeros((), dtype=F64)
    backs = [
        torch.stack([(whole.square() * full_of(other, world)) for other in range(world)]).sum(0)[at * C : (at + 1) * C]
        for at in range(world)
    ]
    for other in range(world):
        total = total + (torch.cat(backs).sin() * full_of(other, world)).sum() + (backs[other] * shards[other]).sum()
    return torch.autograd.grad(total, shards)[rank]


def check_ways(rank: int, world: int) -> None:
    axis = axis_of(None)
    shard, full = shard_of(rank), full_of(rank, world)

    def under_func(leaf: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = torch.func.grad_and_value(lambda free: objective(free, full, axis))(leaf)
        return gradient, value

    def under_autograd(leaf: Tensor, full: Tensor, run: Callable[..., Tensor] = objective) -> tuple[Tensor, Tensor]:
        free = leaf.clone().requires_grad_()
        value = run(free, full, axis)
        return torch.autograd.grad(value, free)[0], value.detach()

    gradient, value = under_func(shard, full)
    expected = expected_gradient(rank, world)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)

    compiled = torch.compile(under_func, fullgraph=True, backend="aot_eager")
    outer = torch.compile(objective, fullgraph=True, backend="aot_eager")
    ways = {
        "torch.autograd.grad": under_autograd(shard, full),
        "torch.compile of torch.func": compiled(shard, full),
        "torch.autograd over torch.compile": under_autograd(shard, full, outer),
    }
    for name, (got, got_value) in ways.items():
        assert torch.equal(got, gradient), name
        assert torch.equal(got_value, value), name


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_the_gradient_is_the_same_eagerly_and_compiled(world: int) -> None:
    ranks.run(check_ways, world, limit=120)


# --- the order of summation, the operations, the dtypes --------------------------------------------------------------


def check_order(rank: int, world: int) -> None:
    axis = axis_of(None)
    assert axis.backend("cpu") == "gloo"
    for dtype in (F64, F32, BF16, F16):
        with Counting() as count:
            mine = scattered(full_of(rank, world, dtype), axis)
        assert torch.equal(mine, in_rank_order(rank, world, dtype)), dtype
        assert dict(count.seen) == {"all_to_all_single": 1, "wait_tensor": 1}, dtype
        with Counting() as count:
            whole = gathered(shard_of(rank, dtype), axis)
        assert torch.equal(whole, torch.cat([shard_of(other, dtype) for other in range(world)])), dtype
        assert dict(count.seen) == {"all_gather": 1, "wait_tensor": 1}, dtype
    # the data tells orders apart, else the above proves nothing
    back = sum_in_order(torch.stack([full_of(other, world, F32) for other in reversed(range(world))]))
    order = sum_in_order(torch.stack([full_of(other, world, F32) for other in range(world)]))
    assert torch.equal(back, order) == (world == 2)
    # a bucket that is not contiguous: B05
    strided = torch.stack([full_of(rank, world), full_of(rank, world)], 1)[:, 0]
    assert not strided.is_contiguous()
    assert torch.equal(scattered(strided, axis), in_rank_order(rank, world, F64))
    expanded = torch.ones((), dtype=F64).expand(world * C)
    assert torch.equal(scattered(expanded, axis), torch.full((C,), float(world), dtype=F64))
    assert torch.equal(gathered(torch.ones((), dtype=F64).expand(C), axis), torch.ones(world * C, dtype=F64))


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_scatter_on_gloo_sums_in_rank_order_and_sends_each_element_once(world: int) -> None:
    ranks.run(check_order, world)


def check_messages(rank: int, world: int) -> None:
    axis = axis_of(None)
    length = 4 * MESSAGE_BYTES // F32.itemsize - 5

    def of(other: int) -> Tensor:
        return torch.randn(world * length, 2, generator=torch.Generator().manual_seed(other))[:, 0]

    assert not of(rank).is_contiguous()
    right = sum_in_order(torch.stack([of(other).reshape(world, -1)[rank] for other in range(world)]))
    with Counting() as count:
        assert torch.equal(scattered(of(rank), axis), right)
    assert count.seen["all_to_all_single"] == 4
    assert torch.equal(torch.compile(scattered, backend="aot_eager", fullgraph=True)(of(rank), axis), right)
    sums = right.clone()
    leaf, token = torch.zeros(length, requires_grad=True), new_token(right)
    proxy, token = anchor(leaf, token, axis, sums=sums)
    torch.autograd.grad((proxy * of(rank)).sum() + token.sum(), leaf)
    assert torch.equal(sums, right + right)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_a_large_piece_travels_in_several_messages(world: int) -> None:
    ranks.run(check_messages, world, limit=120)


def check_under_way(rank: int, world: int) -> None:
    axis = axis_of(None)
    length = MESSAGE_BYTES // F32.itemsize + 5  # two messages
    shards = [torch.full((length,), float(18 * rank + number)) for number in range(18)]
    query = randn(1, 8, 12, 128, 32, dtype=F32)
    for _ in range(60):
        fulls = [direct.all_gather(shard, world, axis.group) for shard in shards]
        for number, full in enumerate(fulls):
            F.scaled_dot_product_attention(query, query, query)  # allocates and frees meanwhile
            pieces = torch.ops._c10d_functional.wait_tensor(full).view(world, length)
            for other in range(world):
                assert torch.equal(pieces[other], torch.full((length,), float(18 * other + number)))


@pytest.mark.ranks
def test_many_gathers_under_way_at_once() -> None:
    """torch's own, over gloo's coalesced all-gather, corrupts the heap: most runs of half a minute are killed by it."""
    ranks.run(check_under_way, 2, limit=120)


def test_16_bit_floats_are_summed_in_float32_and_rounded_once() -> None:
    pieces = torch.tensor([[256.0], [1.0], [1.0]], dtype=BF16)  # in bfloat16 256 + 1 is 256
    assert sum_in_order(pieces).item() == 258
    pieces = torch.tensor([[65504.0], [65504.0], [-65504.0]], dtype=F16)  # the partial sum overflows float16
    assert sum_in_order(pieces).item() == 65504


# --- what one rank's loss does not use -------------------------------------------------------------------------------


def loss_of_rank(rank: int, shards: list[Tensor], axis: Axis, through: str) -> Tensor:
    """Use bucket 0 everywhere, bucket 1 on rank 0 only, bucket 2 nowhere."""
    token = new_token(shards[0])
    fulls = []
    for shard in shards:
        if through == "gather":
            full, token = gather(shard, token, axis)
        else:
            proxy, token = anchor(shard, token, axis)
            gathered = gather(shard.detach(), new_token(shard), axis)[0]
            (full,) = attach(gathered, proxy, ((0, gathered.numel(), (gathered.numel(),)),))
        fulls.append(full)
    loss = fulls[0].square().sum() * (rank + 1)
    if rank == 0:
        loss = loss + (fulls[1] * fulls[0]).sin().sum()
    return loss + token.sum()


def check_unused(rank: int, world: int, through: str) -> None:
    axis = axis_of(None)
    shards = [randn(10 * number + rank, C) for number in range(3)]

    def differentiate(leaves: list[Tensor]) -> list[Tensor]:
        gradient: list[Tensor] = torch.func.grad(lambda free: loss_of_rank(rank, free, axis, through))(leaves)
        return gradient

    fulls = [
        torch.cat([randn(10 * number + other, C) for other in range(world)]).requires_grad_() for number in range(3)
    ]
    total = sum((fulls[0].square().sum() * (other + 1) for other in range(world)), torch.zeros(()))
    total = total + (fulls[1] * fulls[0]).sin().sum()
    wanted = torch.autograd.grad(total, fulls, allow_unused=True, materialize_grads=True)

    free = [shard.clone().requires_grad_() for shard in shards]
    with Counting() as count:
        plain = torch.autograd.grad(loss_of_rank(rank, free, axis, through), free)
    assert count.seen["all_to_all_single"] == 3
    compiled = torch.compile(differentiate, fullgraph=True, backend="aot_eager")
    for got in (plain, differentiate(shards), compiled(shards)):
        for number in range(3):
            expected = wanted[number][rank * C : (rank + 1) * C]
            torch.testing.assert_close(got[number], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks
@pytest.mark.parametrize("through", ["gather", "anchor"])
def test_a_bucket_that_one_rank_does_not_use_is_scattered_on_every_rank(through: str) -> None:
    ranks.run(check_unused, 2, through, limit=120)


def check_summed_in_place(rank: int, world: int) -> None:
    """Twice through anchors with sums, beside the gradient without: the sums hold it twice, the gradient is zero."""
    axis = axis_of(None)
    shards = [randn(10 * number + rank, C) for number in range(3)]

    def loss(free: list[Tensor], sums: list[Tensor] | None) -> Tensor:
        token, total = new_token(free[0]), torch.zeros((), dtype=F64)
        for number, shard in enumerate(free):
            proxy, token = anchor(shard, token, axis, None if sums is None else sums[number])
            gathered = gather(shard.detach(), new_token(shard), axis)[0]
            (full,) = attach(gathered, proxy, ((0, gathered.numel(), (gathered.numel(),)),))
            if number < 2 - rank:  # the last bucket is used nowhere, the second by rank 0 only
                total = total + full.sin().sum() * (rank + 1)
        return total + token.sum()

    wanted = torch.func.grad(lambda free: loss(free, None))(shards)

    def eagerly(sums: list[Tensor]) -> tuple[Tensor, ...]:
        free = [shard.clone().requires_grad_() for shard in shards]
        return torch.autograd.grad(loss(free, sums), free)

    def functionally(sums: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(torch.func.grad(lambda free: loss(free, sums))(shards))

    compiled = torch.compile(functionally, fullgraph=True, backend="aot_eager")
    ways: list[Callable[[list[Tensor]], tuple[Tensor, ...]]] = [eagerly, functionally, compiled]
    for way in ways:
        sums = [torch.ones_like(shard) for shard in shards]
        for times in (1, 2):
            with nullcontext() if way is compiled else Counting() as count:
                gradients = way(sums)
            assert count is None or count.seen["all_to_all_single"] == (3 if world > 1 else 0)
            for number in range(3):
                assert torch.equal(gradients[number], torch.zeros_like(shards[number]))
                once = 1 + wanted[number]
                assert torch.equal(sums[number], once if times == 1 else once + wanted[number])
    assert float(wanted[0].abs().max()) > 0
    assert float(wanted[2].abs().max()) == 0


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_are_summed_in_place_where_they_are_scattered(world: int) -> None:
    ranks.run(check_summed_in_place, world, limit=120)


def partly_used(rank: int) -> Callable[[Any, Tensor], Tensor]:
    @fzero.block
    def layer(params: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x @ params["w"])
        return h * params["scale"] if rank == 0 else h

    def loss(params: Any, batch: Tensor) -> Tensor:
        h = layer(params["inner"], batch)
        if rank == 0:
            h = h + params["outer"]
        return h.square().mean()

    return loss


def partly_used_params() -> dict[str, Any]:
    return {"inner": {"w": randn(1, 5, 3), "scale": randn(2, 3)}, "outer": randn(3, 3), "never": randn(4, 2, 2)}


def check_engine_unused(rank: int, world: int) -> None:
    params: Any = partly_used_params()
    batches = [randn(20 + other, 4, 5) for other in range(world)]

    leaves, treespec = optree.tree_flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    theirs = torch.optim.AdamW(leaves, lr=0.1, eps=1e-3, foreach=False, fused=False)
    gradients = []
    for _ in range(2):
        tree: Any = treespec.unflatten(leaves)
        losses = [partly_used(other)(tree, batches[other]) for other in range(world)]
        loss = sum(losses, torch.zeros(())) / world
        gradients.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
        for leaf, gradient in zip(leaves, gradients[-1], strict=True):
            leaf.grad = gradient.clone()
        theirs.step()

    for stage in (1, 2, 3):
        for cap in (1, 2**20):
            opt = fzero.adamw(0.1, eps=1e-3)
            engine = fzero.Zero(partly_used(rank), opt, stage, blocks=["inner"], bucket_bytes=cap)
            state = engine.init(params)
            for step in range(2):
                ours, _ = engine.grads(state, batches[rank])
                for got, expected in zip(optree.tree_leaves(ours), gradients[step], strict=True):
                    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
                state, _ = engine.step(state, batches[rank])
            for got, expected in zip(optree.tree_leaves(engine.params(state)), leaves, strict=True):
                torch.testing.assert_close(got, expected.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.ranks
def test_a_leaf_that_one_rank_does_not_use_has_the_combined_gradient() -> None:
    ranks.run(check_engine_unused, 2)
    ranks.run(check_engine_unused, 3)


# --- small collectives -----------------------------------------------------------------------------------------------


def check_small(rank: int, world: int) -> None:
    axis = axis_of(None)
    mine = [full_of(other, world, F32) for other in range(world)]
    assert torch.equal(sum_over_ranks(mine[rank], axis), torch.stack(mine).sum(0))
    assert torch.equal(share_buffers(mine[rank], "rank0", axis), mine[0])
    torch.testing.assert_close(share_buffers(mine[rank], "mean", axis), sum_in_order(torch.stack(mine)) / world)
    assert torch.equal(mine[rank], full_of(rank, world, F32)), "an argument was written to"
    samples = [
        torch.tensor(1.5, dtype=F64),
        torch.tensor([[True, False], [False, True]]),
        torch.tensor([2**40, -3]),
        torch.zeros(0, 3),
        torch.arange(6.0, dtype=BF16).view(2, 3).T,
        torch.tensor([math.nan, math.inf, -0.0]),
    ]
    for sample in samples:
        given = sample if rank == 0 else torch.zeros_like(sample)
        got = from_rank0(given, axis)
        assert (got.dtype, got.shape) == (sample.dtype, sample.shape)
        assert torch.allclose(got.double(), sample.double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.ranks
def test_small_collectives() -> None:
    ranks.run(check_small, 3)


# --- axes ------------------------------------------------------------------------------------------------------------


def test_the_axis_of_no_process_group_has_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert axis_of(None) == Axis()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert axis_of(None) == Axis(1, 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="init_process_group"):
        axis_of(None)
    wrong: Any = "dp"
    with pytest.raises(TypeError, match=r"mesh: must be a torch\.distributed\.DeviceMesh or None, got str"):
        axis_of(wrong)


def check_axes(rank: int, world: int) -> None:
    axis = axis_of(None)
    assert (axis.size, axis.rank, axis.backend("cpu"), axis.device) == (world, rank, "gloo", torch.device("cpu"))
    of_mesh = axis_of(init_device_mesh("cpu", (world,)))
    assert (of_mesh.size, of_mesh.rank) == (world, rank)
    assert torch.equal(gathered(shard_of(rank), of_mesh), torch.cat([shard_of(other) for other in range(world)]))
    part = DeviceMesh("cpu", [0])
    if rank == 0:
        with pytest.raises(ValueError, match=r"mesh: has 1 of the 2 ranks"):
            axis_of(part)
    with pytest.raises(ValueError, match=r"2 dims"):
        axis_of(init_device_mesh("cpu", (1, world)))


@pytest.mark.ranks
def test_the_axis_of_a_mesh() -> None:
    ranks.run(check_axes, 2)


def check_unnamed_backend(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    again = dist.distributed_c10d.PrefixStore("again", store)
    dist.init_process_group(store=again, rank=rank, world_size=world)
    assert "gloo" not in dist.get_backend()
    check_order(rank, world)


@pytest.mark.ranks
def test_a_process_group_made_without_naming_a_backend_sums_in_rank_order_too() -> None:
    ranks.run(check_unnamed_backend, 3)


def gloo_threads() -> list[str]:
    names = (task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir())
    return [name for name in names if "gloo" in name]


def check_end(rank: int, world: int) -> list[str]:
    engine = fzero.Zero(lambda params, batch: (params["w"] * batch).sum(), fzero.sgd(0.1), stage=2)
    state = engine.init({"w": torch.ones(8)})
    engine.step(state, torch.ones(8))
    module = torch.nn.Sequential(torch.nn.Linear(4, 2))
    hooked = fzero.HookedZero(module, fzero.sgd(0.1), stage=3, units=list(module))
    hooked.backward(hooked(torch.ones(3, 4)).sum())
    hooked.step()
    axis = axis_of(None)
    from_rank0(torch.ones(3), with_own_group(axis))
    importlib.import_module("torch.distributed.nn")  # as the first compilation does

    dist.barrier()
    assert gloo_threads()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    left = gloo_threads()
    again = dist.distributed_c10d.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=world)  # which `ranks` destroys
    dist.barrier()
    return left


@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads in /proc")
def test_engines_do_not_keep_a_destroyed_process_group() -> None:
    """One that is kept keeps threads that end in SIGABRT, rarely, when they free a tensor while Python ends."""
    assert ranks.run(check_end, 2) == [[], []]


def check_fallback(rank: int, world: int) -> None:
    direct.AVAILABLE = False
    with Counting() as count:
        check_small(rank, world)
    assert count.seen["all_gather_into_tensor"]
    assert "all_gather" not in count.seen


@pytest.mark.ranks
def test_a_torch_without_the_private_registry_gathers_by_its_own_operation() -> None:
    ranks.run(check_fallback, 3)


def check_empty_and_meta(rank: int, world: int) -> None:
    del world
    engine = fzero.Zero(lambda params, batch: batch.sum() + params["w"].sum(), fzero.sgd(0.1))
    given = {"w": torch.arange(5.0) if rank == 0 else torch.zeros(5, device="meta")}
    state = engine.init(given)
    assert torch.equal(engine.params(state)["w"], torch.arange(5.0))
    nothing = fzero.Zero(lambda _, batch: batch.sum(), fzero.sgd(0.1))
    state = nothing.init({})
    _, metrics = nothing.step(state, torch.ones(3))
    assert metrics.loss == 3


@pytest.mark.ranks
def test_leaves_without_a_device_of_their_own_are_on_cpu_on_gloo() -> None:
    ranks.run(check_empty_and_meta, 2)


# --- what all ranks agree on -----------------------------------------------------------------------------------------


def failing_on(rank: int, guilty: int) -> Callable[[], str]:
    def check() -> str:
        if rank == guilty:
            raise ValueError("leaf 'w' is bad")
        return "ok"

    return check


def check_agree(rank: int, world: int) -> None:
    axis = axis_of(None)
    found, digest, notes = agree(axis, "a", lambda: 7, str, lambda _: {"rank": rank, "list": (1, 2)})
    assert (found, digest) == (7, "7")
    assert notes == [{"rank": other, "list": [1, 2]} for other in range(world)]
    for guilty in range(world):
        with pytest.raises(ValueError, match="leaf 'w' is bad") as caught:
            agree(axis, "a", failing_on(rank, guilty), str)
        # the guilty rank raises its own error, the others say whose it is
        text = "leaf 'w' is bad" if rank == guilty else f"a: rank {guilty} failed with ValueError: leaf 'w' is bad"
        assert str(caught.value) == text
    for odd in range(1, world):
        with pytest.raises(ValueError, match=rf"the ranks differ.*Rank 0: same\. Rank {odd}: other"):
            agree(axis, "a", lambda odd=odd: "other" if rank == odd else "same", str)  # type: ignore[misc]
    # after all that the ranks still agree, and collectives still work
    assert agree(axis, "a", lambda: 8, str)[0] == 8
    assert gathered(shard_of(rank), axis).numel() == world * C


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_a_fault_or_a_difference_on_one_rank_is_raised_on_all(world: int) -> None:
    ranks.run(check_agree, world)


def check_absent(rank: int, world: int, absent: int) -> str | None:
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=2))
    axis = axis_of(None)
    dist.barrier()  # a rank that ends while the others still connect to it is another failure
    if rank == absent:
        return None
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        agree(axis, "init", lambda: 1, str)
    # rank 0 waits for each of the others, and the others for rank 0
    assert time.monotonic() - began < 2 * world + 2
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_comes_ends_in_the_time_limit(absent: int) -> None:
    for rank, message in enumerate(ranks.run(check_absent, 2, absent)):
        if rank != absent:
            who = "rank 1" if rank == 0 else "some rank"
            assert message.startswith(f"init: {who} did not arrive within 2 s"), message


def check_engine_agree(rank: int, world: int) -> None:
    del world

    def loss(params: dict[str, Tensor], batch: Tensor) -> Tensor:
        return (batch @ params["w"]).square().mean()

    # B43 and the contract: a fault that one rank sees at init or at the first step is raised on all of them
    engine = fzero.Zero(loss, fzero.sgd(0.1))
    bad: Any = {"w": torch.ones(3) if rank == 0 else "no tensor"}
    with pytest.raises((TypeError, ValueError), match="leaf 'w' must be a tensor"):
        engine.init(bad)
    with pytest.raises(ValueError, match="ranks differ"):
        engine.init({"w": torch.ones(3 + rank)})
    with pytest.raises(ValueError, match="ranks differ"):
        fzero.Zero(loss, fzero.sgd(0.1), 1 + rank).init({"w": torch.ones(3)})
    state = engine.init({"w": torch.ones(3)})
    with pytest.raises(ValueError, match="0-d") as caught:
        engine.step(state, torch.ones(4, 3) if rank == 0 else torch.ones(()))
    assert ("rank 1" in str(caught.value)) == (rank == 0)
    with pytest.raises(ValueError, match="ranks differ"):
        engine.step(state, torch.ones(4, 3, dtype=F32 if rank == 0 else F64))
    state, metrics = engine.step(state, torch.ones(4, 3))
    assert int(metrics.step) == 1


@pytest.mark.ranks
def test_the_engine_raises_on_all_ranks_what_one_rank_sees() -> None:
    ranks.run(check_engine_agree, 2)
