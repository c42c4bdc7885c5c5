"""Failures that users of similar systems reported, held against both engines; B08 and so on number them."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from both import ENGINES, Kind, Seen, apart, hooked, opt, oracle, unequal
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from trees import differing, far, numbers, same_bits

import fzero

pytestmark = pytest.mark.ranks

STAGES = (0, 1, 2, 3)
F32 = torch.float32

Runs = dict[tuple[str, int], list[Seen]]


def train(
    rank: int,
    world: int,  # noqa: ARG001  (the launcher passes it)
    make: Callable[[], Kind],
    steps: int,
    settings: dict[str, Any],
    stages: tuple[int, ...] = STAGES,
) -> Runs:
    """Run both engines at some stages on this rank."""
    return {
        (name, stage): list(run(make(), stage, rank, steps, settings))
        for name, run in ENGINES.items()
        for stage in stages
    }


def check(make: Callable[[], Kind], world: int, steps: int = 3, **settings: Any) -> list[Runs]:
    """Hold both engines at every stage on every rank against O1 and against each other."""
    results: list[Runs] = ranks.run(train, world, make, steps, settings, limit=120.0)
    theirs = list(oracle(make(), world, steps, settings.get("accumulate", 1), settings.get("clip_norm")))
    for runs in results:
        for (name, stage), ours in runs.items():
            found = apart(iter(ours), iter(theirs), f"{name} stage {stage}")
            found += unequal(iter(ours), iter(results[0]["functional", stage]), f"{name} stage {stage}, bits")
            assert not found, f"{len(found)}, first {found[:5]}"
    return results


# --- B08 -------------------------------------------------------------------------------------------------------------


class Unit(nn.Module):
    """A module whose single part is also the unit of stage 3."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList([part])

    def forward(self, *inputs: Tensor) -> Any:
        return self.parts[0](*inputs)


def one_linear(world: int) -> Kind:
    """The same six samples, whatever the number of ranks."""

    def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
        inputs, targets = numbers(6, 4, seed=1), numbers(6, 3, seed=2)
        return inputs.chunk(world)[rank], targets.chunk(world)[rank]

    return Kind(lambda: Unit(nn.Linear(4, 3).double()), F.mse_loss, batch)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_b08_gradients_are_averaged_once(world: int) -> None:
    """`exp_avg` is (1-b1) times the mean gradient over the combined batch, and a clipped step does not depend on N."""
    alone = next(oracle(one_linear(1), 1, 1))
    half = float(alone["scalars"]["norm"]) / 2
    for clip in (None, half):
        results = check(functools.partial(one_linear, world), world, 1, clip_norm=clip)
        right = next(oracle(one_linear(1), 1, 1, clip=clip))
        for ours in results[0].values():
            if clip is None:
                assert not far(ours[0]["exp_avg"], {name: 0.1 * leaf for name, leaf in alone["grads"].items()})
            for kind in ("grads", "params", "exp_avg", "exp_avg_sq"):
                assert not far(ours[0][kind], right[kind]), kind


# --- B10 -------------------------------------------------------------------------------------------------------------


class SometimesHead(nn.Module):
    """An MLP 5-4-3 and a head that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(5, 4)])
        self.last, self.head = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, uses: Tensor) -> Tensor:
        x = self.last(torch.tanh(self.parts[0](x)))
        return x + self.head(x) if bool(uses[0]) else x


def sometimes() -> Kind:
    def batch(rank: int, step: int) -> Any:
        seed = 100 * rank + step
        uses = torch.tensor([True, False, True, False]).repeat_interleave(2)
        return (numbers(8, 5, seed=seed), uses), numbers(8, 3, seed=seed + 50)

    return Kind(lambda: SometimesHead().double(), F.mse_loss, batch)


def test_b10_a_head_that_only_some_micro_batches_use() -> None:
    """Every stage equals O1 on the union of the 8 micro-batches, at the first step and at later ones."""
    check(sometimes, 2, 3, accumulate=4)


# --- B11 -------------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """One layer applied twice, once inside activation checkpointing, or to two inputs."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.parts = nn.ModuleList([nn.Linear(3, 3)])

    def forward(self, x: Tensor) -> Tensor:
        layer = self.parts[0]
        if self.mode == "siamese":
            return layer(x) * layer(torch.sin(x))  # type: ignore[no-any-return]
        x = torch.tanh(layer(x))
        if self.mode == "plain":
            return layer(x)  # type: ignore[no-any-return]
        if self.mode == "remat":
            return fzero.remat(layer)(x)  # type: ignore[no-any-return]
        return checkpoint(layer, x, use_reentrant=self.mode == "reentrant")  # type: ignore[no-any-return]


def twice(mode: str) -> Kind:
    def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
        seed = 100 * rank + step
        return numbers(4, 3, seed=seed), numbers(4, 3, seed=seed + 50)

    return Kind(lambda: Twice(mode).double(), F.mse_loss, batch)


@pytest.mark.parametrize("mode", ["plain", "siamese", "remat"])
def test_b11_a_layer_used_twice(mode: str) -> None:
    check(functools.partial(twice, mode), 2)


def count_sends(rank: int, world: int, mode: str) -> dict[int, Any]:  # noqa: ARG001
    """Count the reductions of a step of the hook engine, and return the run."""
    from fzero import collectives, hooks

    found: dict[int, Any] = {}
    for stage in STAGES:
        sends: list[int] = []

        def start(full: Tensor, axis: Any, dtype: Any = None, sends: list[int] = sends) -> collectives.Pending:
            sends.append(full.numel())
            return collectives.start_scatter(full, axis, dtype)

        hooks.start_scatter = start  # type: ignore[attr-defined]
        run = list(hooked(twice(mode), stage, rank, 3, {}))
        found[stage] = (run, sends)
    return found


@pytest.mark.parametrize("mode", ["not reentrant", "reentrant"])
def test_b11_checkpointing_reduces_each_leaf_once_a_step(mode: str) -> None:
    """Equal to the run without it, of either engine; under the functional engine `fzero.remat` is for that."""
    results = ranks.run(count_sends, 2, mode)
    plain: list[Runs] = ranks.run(train, 2, functools.partial(twice, "plain"), 3, {})
    theirs = list(oracle(twice("plain"), 2, 3))
    for ours, right in zip(results, plain, strict=True):
        for stage, (run, sends) in ours.items():
            assert len(sends) == 3 * 2, "one bucket with decay and one without, three steps"
            assert not apart(iter(run), iter(theirs))
            assert not unequal(iter(run), iter(right["functional", stage]))
            assert not unequal(iter(run), iter(right["hooked", stage]))


class Remats(nn.Module):
    """A layer, and a container of blocks, BatchNorm and dropout, recomputed; or the same, kept."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.parts = nn.ModuleList([nn.Linear(5, 5)])
        self.middle = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        part, middle = self.parts[0], self.middle
        if self.keeps:
            return middle(part(x))  # type: ignore[no-any-return]
        return fzero.remat(middle)(fzero.remat(part)(x))  # type: ignore[no-any-return]


def train_remats(rank: int, world: int) -> list[str]:  # noqa: ARG001
    def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(step)  # what dropout draws
        return numbers(8, 5, seed=rank + step, dtype=F32), numbers(8, 3, seed=rank + step + 50, dtype=F32)

    found = []
    for name, run in ENGINES.items():
        for stage in STAGES:
            ours, theirs = (
                run(Kind(functools.partial(Remats, keeps), F.mse_loss, batch), stage, rank, 3, {})
                for keeps in (False, True)
            )
            found += unequal(ours, theirs, f"{name} stage {stage}")
    return found


def test_b11_recomputed_modules_give_the_bits_of_kept_ones() -> None:
    """With buffers and dropout, around blocks and without, in either engine."""
    assert ranks.run(train_remats, 2) == [[], []]


class Tables(nn.Module):
    """Layers with a buffer that they read, also read outside them, recomputed as modules and as methods."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Buffer(torch.linspace(0.5, 1.5, 5, dtype=torch.float64))
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        for layer in self.layers:
            layer.table = self.table
        self.last = nn.Linear(5, 3)

    def tail(self, x: Tensor) -> Tensor:
        return self.last(x * self.table)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(fzero.remat(layer)(x) * self.table)
        return fzero.remat(self.tail)(x)


def tables() -> Kind:
    def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
        seed = 100 * rank + step
        return numbers(4, 5, seed=seed), numbers(4, 3, seed=seed + 50)

    return Kind(lambda: Tables().double(), F.mse_loss, batch, lambda module: list(module.layers))


def test_b11_buffers_that_are_only_read_may_be_shared() -> None:
    """Writing them back must not look like a change to autograd."""
    check(tables, 2)


def test_b11_checkpointing_by_torch_says_what_to_use_under_the_functional_engine() -> None:
    for mode in ("reentrant", "not reentrant"):
        for stage in (2, 3):
            with pytest.raises(RuntimeError, match=r"fzero\.remat|use_reentrant=True"):
                list(ENGINES["functional"](twice(mode), stage, 0, 1, {}))


# --- B13 -------------------------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """A trunk and two heads; a rank may use the first only."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList([nn.Linear(5, 6)])
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor, both: Tensor) -> Tensor:
        x = torch.tanh(self.trunk[0](x))
        return self.heads[0](x) + (self.heads[1](x) if bool(both[0]) else 0)  # type: ignore[no-any-return]


class Repeats(nn.Module):
    """A layer that one rank calls once and another three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(5, 4)])
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        x = self.first[0](x)
        for _ in range(int(times[0])):
            x = torch.tanh(self.layer(x))
        return self.last(x)  # type: ignore[no-any-return]


class Uneven(nn.Module):
    """Four layers, of which each rank skips another, and a leaf, registered last, that one rank uses first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])
        self.last = nn.Linear(5, 3)
        self.first = nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.first(x) if int(skip[0]) == 2 else x
        for number, layer in enumerate(self.layers):
            x = x if number == int(skip[0]) else torch.tanh(layer(x))
        return self.last(x)  # type: ignore[no-any-return]


class Backwards(nn.Module):
    """Layers that are called in another order than they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        for number in order[0]:
            x = torch.tanh(self.layers[int(number)](x))
        return self.last(x)  # type: ignore[no-any-return]


FLAGS: dict[str, Callable[[int], Tensor]] = {
    "heads": lambda rank: torch.full((4,), rank == 0),
    "repeats": lambda rank: torch.full((4,), 3 if rank else 1),
    "skips": lambda rank: torch.full((4,), 1 + rank),
    "backwards": lambda _: torch.tensor([[2, 0, 3, 1]]).expand(4, 4),
    "twice": lambda _: torch.tensor([[1, 0, 1, 2, 3, 2]]).expand(4, 6),
    "another order": lambda rank: torch.tensor([[0, 1, 3, 2] if rank else [0, 1, 2, 3]]).expand(4, 4),
}


def uneven(what: str) -> Kind:
    def batch(rank: int, step: int) -> Any:
        seed = 100 * rank + step
        return (numbers(4, 5, seed=seed), FLAGS[what](rank)), numbers(4, 3, seed=seed + 50)

    if what == "heads":
        return Kind(lambda: Heads().double(), F.mse_loss, batch, lambda module: [*module.trunk, *module.heads])
    if what == "repeats":
        return Kind(
            lambda: Repeats().double(), F.mse_loss, batch, lambda module: [module.first[0], module.layer, module.last]
        )
    kind = Uneven if what == "skips" else Backwards
    return Kind(lambda: kind().double(), F.mse_loss, batch)


@pytest.mark.parametrize("what", ["heads", "repeats", "skips", "backwards", "twice"])
def test_b13_a_part_that_ranks_use_unevenly(what: str) -> None:
    """Ends equal to O1 at every stage, on every rank, and the engines agree within its tolerance. A bucket a leaf."""
    make = functools.partial(uneven, what)
    theirs = list(oracle(make(), 2, 3))
    for runs in ranks.run(train, 2, make, 3, {"bucket_bytes": 1}):
        for (name, stage), ours in runs.items():
            assert not apart(iter(ours), iter(theirs), f"{name} stage {stage}")


@pytest.mark.parametrize("engine", ["functional", "hooked"])
def test_b13_another_order_on_one_rank_ends_every_rank(engine: str) -> None:
    """The parameters of two blocks of equal size are never mixed up: the ranks end, within the time limit."""
    ended = ranks.outcomes(drain, 2, engine, limit=80.0)
    assert all(outcome.error for outcome in ended), ended
    assert any("out of turn" in (outcome.error or "") or "once more" in (outcome.error or "") for outcome in ended)


def drain(rank: int, world: int, engine: str) -> None:  # noqa: ARG001
    list(ENGINES[engine](uneven("another order"), 3, rank, 2, {}))


def gathers_a_step(rank: int, world: int) -> list[int]:  # noqa: ARG001
    """Count the gathers of a block, step by step, when blocks are called in an order of their own."""
    from fzero import binding, comm

    found: list[int] = []

    def counting(shard: Tensor, token: Tensor, axis: Any) -> Any:
        found[-1] += 1
        return comm.gather(shard, token, axis)

    binding.gather = counting  # type: ignore[attr-defined]
    kind = uneven("backwards")
    loss_fn, params, buffers = fzero.from_module(kind.module(), kind.criterion)
    engine = fzero.Zero(loss_fn, opt(), 3)
    state = engine.init(params, buffers)
    for step in range(3):
        found.append(0)
        state, _ = engine.step(state, kind.batch(rank, step))
    return found


def skip_later(rank: int, world: int) -> list[str]:  # noqa: ARG001
    """All ranks call blocks in an order of their own; from the second step on each leaves out another one."""
    orders = ([2, 0, 3, 1], [0, 3, 1], [2, 0, 1])

    def batch(rank: int, step: int) -> Any:
        order = torch.tensor([orders[0] if step == 0 else orders[(step + rank) % 3]])
        return (numbers(4, 5, seed=100 * rank + step), order.expand(4, -1)), numbers(4, 3, seed=rank + 50)

    kind = Kind(lambda: Backwards().double(), F.mse_loss, batch)
    theirs = list(ENGINES["functional"](kind, 2, rank, 5, {"bucket_bytes": 1}))
    return unequal(ENGINES["functional"](kind, 3, rank, 5, {"bucket_bytes": 1}), iter(theirs), "stage 3")


def test_b13_blocks_may_be_skipped_in_the_order_of_the_first_step() -> None:
    assert ranks.run(skip_later, 2) == [[], []]


def test_b13_an_order_of_its_own_costs_gathers_once() -> None:
    for found in ranks.run(gathers_a_step, 2):
        # four blocks, a bucket with decay and one without, in forward and in backward
        assert found[0] > 2 * 2 * 4
        assert found[1:] == [2 * 2 * 4] * 2


# --- B14 -------------------------------------------------------------------------------------------------------------


class OneNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.parts = nn.ModuleList([nn.Linear(1, 1)])

    def forward(self, x: Tensor, uses: Tensor) -> Tensor:
        rest = self.parts[0](x).sum() * 0
        return self.w + rest if bool(uses[0]) else rest  # type: ignore[no-any-return]


def unused(rank: int, world: int) -> list[tuple[float, int]]:  # noqa: ARG001
    optimizer = fzero.adamw(0.1, weight_decay=0.1)
    loss_fn, params, _ = fzero.from_module(OneNumber(), lambda out, _: out)
    found = []
    for stage in STAGES:
        engine, zero = fzero.HookedZero(OneNumber(), optimizer, stage), fzero.Zero(loss_fn, optimizer, stage)
        state = zero.init(params)
        for step in range(4):
            inputs = (torch.ones(2, 1), torch.full((2,), step == 0))
            engine.backward(engine(*inputs))
            engine.step()
            state, _ = zero.step(state, (inputs, torch.zeros(2)))
        found.append((float(engine.params()["w"]), int(engine.opt_state().step)))
        found.append((float(zero.params(state)["w"]), int(zero.opt_state(state).step)))
    return found


def test_b14_an_unused_parameter_has_a_zero_gradient() -> None:
    """Decay and old momentum keep moving it, and the step counts: 0.7042 and 4, not 0.8900 and 1."""
    for found in ranks.run(unused, 2):
        assert [(round(value, 4), count) for value, count in found] == [(0.7042, 4)] * 8


# --- B17 -------------------------------------------------------------------------------------------------------------


class Sums(nn.Module):
    """An (8, 8) leaf and one of 5 elements, whose gradients are ones."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.five = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean() * (self.matrix.sum() + self.five.sum())


class Ones(nn.Module):
    """The same, and a tied leaf of 6 elements with a gradient of twos."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Sums()])
        self.left, self.right = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
        self.right.weight = self.left.weight

    def forward(self, x: Tensor) -> Tensor:
        pair = torch.ones(2, dtype=x.dtype)
        return self.parts[0](x) + self.left(pair).sum() + self.right(pair).sum()  # type: ignore[no-any-return]


def ones() -> Kind:
    return Kind(lambda: Ones().double(), lambda out, _: out, lambda rank, step: (torch.ones(2, 1).double(),) * 2)  # noqa: ARG005


@pytest.mark.parametrize("clip", [1.0, 100.0])
def test_b17_the_norm_counts_every_element_once(clip: float) -> None:
    """8 x 8 and 5 ones and 6 twos: the square root of 93 on every rank, and the update is O1's."""
    for runs in check(ones, 4, 2, clip_norm=clip):
        for ours in runs.values():
            assert abs(float(ours[0]["scalars"]["norm"]) - 93**0.5) < 1e-12 * 93


# --- B27, B28 --------------------------------------------------------------------------------------------------------


class ConvNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())])
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.parts[0](x).mean((2, 3)))  # type: ignore[no-any-return]


def conv_norm(size: int = 8) -> Kind:
    def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
        seed = 100 * rank + step
        return numbers(size, 3, 4, 4, seed=seed, dtype=F32), numbers(size, 2, seed=seed + 50, dtype=F32)

    return Kind(ConvNorm, F.mse_loss, batch)


@pytest.mark.parametrize("world", [1, 2])
def test_b27_running_statistics_are_those_of_a_normal_forward(world: int) -> None:
    """At the first step and after three; the counter stays int64. With rank 0's policy they are rank 0's."""
    results = ranks.run(train, world, conv_norm, 3, {})
    for runs in results:
        for (name, stage), ours in runs.items():
            for step, moment in enumerate(ours):
                plain = conv_norm().module()
                before = ours[step - 1] if step else {"params": dict(plain.named_parameters()), "buffers": {}}
                plain.load_state_dict({**before["params"], **before["buffers"]}, strict=False)
                plain(conv_norm().batch(0, step)[0])
                right = dict(plain.named_buffers())
                assert list(moment["buffers"]) == list(right)
                assert not differing(moment["buffers"], right), f"{name} {stage} {step}"
                assert int(right["parts.0.1.num_batches_tracked"]) == step + 1
            assert not unequal(iter(ours), iter(results[0]["functional", stage]))


@pytest.mark.parametrize("policy", ["rank0", "mean"])
def test_b28_all_ranks_end_with_the_same_statistics(policy: str) -> None:
    """Under either policy; evaluation then gives the same on every rank, and integer counters are not averaged."""
    results = ranks.run(train, 2, functools.partial(conv_norm, 4), 3, {"buffer_policy": policy})
    images = numbers(2, 3, 4, 4, seed=7, dtype=F32)
    outputs = []
    for runs in results:
        for key, ours in runs.items():
            last, first = ours[-1], results[0]["functional", key[1]][-1]
            assert not differing(last["buffers"], first["buffers"]), key
            assert last["buffers"]["parts.0.1.num_batches_tracked"].dtype == torch.int64
            assert int(last["buffers"]["parts.0.1.num_batches_tracked"]) == 3
            plain = conv_norm().module().eval()
            plain.load_state_dict({**last["params"], **last["buffers"]})
            outputs.append(plain(images))
    assert all(same_bits(output, outputs[0]) for output in outputs)


# --- B29 -------------------------------------------------------------------------------------------------------------


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.parts = nn.ModuleList([nn.Linear(4, 4)])
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.parts[0](self.tokens(tokens))))  # type: ignore[no-any-return]


def tied() -> Kind:
    def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
        tokens = torch.tensor([1, 2, 2, 6])
        return tokens, tokens.roll(1 + rank)

    return Kind(lambda: TiedHead().double(), F.cross_entropy, batch)


def test_b29_a_tied_embedding_is_one_leaf() -> None:
    """28 elements of state, not 56; the gradient is the sum of both uses; five steps equal O1."""
    for runs in check(tied, 2, 5):
        for ours in runs.values():
            assert list(ours[-1]["params"]) == ["tokens.weight", "parts.0.weight", "parts.0.bias"]
            assert ours[-1]["exp_avg"]["tokens.weight"].numel() == 28


def still_tied(rank: int, world: int, stage: int) -> bool:  # noqa: ARG001
    module = TiedHead()
    engine = fzero.HookedZero(module, opt(), stage)
    for _ in range(2):
        engine.backward(F.cross_entropy(engine(torch.tensor([1, 2, 2, 6])), torch.tensor([2, 2, 6, 1])))
        engine.step()
    return module.head.weight is module.tokens.weight


def test_b29_the_hook_engine_leaves_the_module_tied() -> None:
    for stage in STAGES:
        assert ranks.run(still_tied, 2, stage) == [True, True]
