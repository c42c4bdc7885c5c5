"""The hook engine gives the functional engine's bits; what its hooks do, and when."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from both import Kind, functional, hooked, micros, opt, unequal
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from trees import ADAMW, TiedGPT, differing, far, next_token_loss, numbers

import fzero
from fzero import collectives, hooks

WORLDS = (1, 2, 3, 4)
STAGES = (0, 1, 2, 3)
PIECES = 700
"""Bucket cap in bytes that cuts each model into several buckets."""
F32 = torch.float32
LONG = pytest.mark.long


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.second, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.first(x)))
        return F.relu(x + self.norm2(self.second(inner)))


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.blocks = nn.Sequential(Residual(5), Residual(5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))


def integers(high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def vectors(rank: int, step: int) -> tuple[Tensor, Tensor]:
    seed = 1000 * rank + step
    return numbers(6, 5, seed=seed, dtype=F32), numbers(6, 3, seed=seed + 500, dtype=F32)


def texts(rank: int, step: int) -> tuple[Tensor, Tensor]:
    tokens = integers(11, 6, 6, seed=1000 * rank + step)
    return tokens[:, :-1], tokens[:, 1:]


def images(rank: int, step: int) -> tuple[Tensor, Tensor]:
    seed = 1000 * rank + step
    return numbers(6, 3, 4, 4, seed=seed, dtype=F32), integers(3, 6, seed=seed)


KINDS = {
    "mlp": Kind(mlp, F.mse_loss, vectors),
    "gpt": Kind(TiedGPT, next_token_loss, texts),
    "resnet": Kind(SmallResNet, F.cross_entropy, images),
}

# --- the same bits as the functional engine --------------------------------------------------------------------------


def compare(rank: int, world: int) -> list[str]:  # noqa: ARG001  (the launcher passes it)
    """Return what differs from the functional engine (its own stages are compared elsewhere)."""
    found = []
    for name, kind in KINDS.items():
        for settings in ({}, {"bucket_bytes": PIECES, "clip_norm": 0.25, "accumulate": 3}):
            # with micro-batches stages 0 and 1 sum, then reduce; 2 and 3 reduce, then sum
            pairs = (0, 2) if settings else (2,)
            runs = {stage: list(functional(kind, stage, rank, 10, settings)) for stage in pairs}
            for stage in STAGES:
                ours, theirs = hooked(kind, stage, rank, 10, settings), runs[0 if stage < 2 and settings else 2]
                found += unequal(ours, iter(theirs), f"{name} {settings} stage {stage}")
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    "world", [pytest.param(world, marks=[pytest.mark.long] if world == 3 else []) for world in WORLDS]
)
def test_the_same_bits_as_the_functional_engine(world: int) -> None:
    """Ten steps: gradients, parameters, both moments, buffers, loss and norm; accumulation 1, and 3 with clipping."""
    for rank, found in enumerate(ranks.run(compare, world, limit=300.0)):
        assert not found, f"rank {rank}: {len(found)} differ, first {found[:5]}"


def resnet18() -> nn.Module:
    """Return torchvision's ResNet-18 with the stem that is usual for CIFAR's small images."""
    from torchvision.models import resnet18 as original  # type: ignore[import-untyped]

    module: Any = original(num_classes=10)
    module.conv1, module.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return module  # type: ignore[no-any-return]


def residual_blocks(module: Any) -> list[nn.Module]:
    return [block for group in (module.layer1, module.layer2, module.layer3, module.layer4) for block in group]


def small_images(rank: int, step: int) -> tuple[Tensor, Tensor]:
    seed = 1000 * rank + step
    return numbers(6, 3, 8, 8, seed=seed, dtype=F32), integers(10, 6, seed=seed)


def compare_resnet18(rank: int, world: int, settings: dict[str, Any]) -> list[str]:  # noqa: ARG001
    """Return what differs; all stages of both engines go step by step, since ten of their states would be gigabytes."""
    kind = Kind(resnet18, F.cross_entropy, small_images, residual_blocks)
    ours = [hooked(kind, stage, rank, 10, settings) for stage in STAGES]
    theirs = [functional(kind, stage, rank, 10, settings) for stage in (0, 2)]
    found = []
    for step, (*seen, sum_first, reduce_first) in enumerate(zip(*ours, *theirs, strict=True)):
        for stage, one in enumerate(seen):
            right = sum_first if stage < 2 and "accumulate" in settings else reduce_first
            found += unequal(iter([one]), iter([right]), f"step {step} stage {stage}")
    return found


ACCUMULATED: dict[str, Any] = {"clip_norm": 0.25, "accumulate": 3}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        pytest.param(
            world,
            settings,
            marks=() if (world, settings) == (2, ACCUMULATED) else LONG,
            id=f"{world}-{'accumulated' if settings else 'plain'}",
        )
        for world in WORLDS
        for settings in ({}, ACCUMULATED)
    ],
)
def test_the_same_bits_on_resnet18(world: int, settings: dict[str, Any]) -> None:
    """Ten steps of all stages, BatchNorm's statistics included."""
    assert ranks.run(compare_resnet18, world, settings, limit=500.0) == [[]] * world


# --- torch's data parallel -------------------------------------------------------------------------------------------


def against_ddp(rank: int, world: int, dtype: torch.dtype) -> list[str]:
    ours, theirs = mlp_of(dtype), mlp_of(dtype)
    engine = fzero.HookedZero(ours, opt(), 0)
    ddp = DistributedDataParallel(theirs)
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    vectors_ = [p for p in theirs.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors_, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, foreach=False, **ADAMW)
    check = differing if world == 2 else far
    found = []
    for step in range(5):
        inputs, targets = (part.to(dtype) for part in vectors(rank, step))
        engine.backward(F.mse_loss(engine(inputs), targets))
        grads = {name: leaf for name, leaf in engine.grads().items() if leaf is not None}
        engine.step()
        optimizer.zero_grad()
        F.mse_loss(ddp(inputs), targets).backward()  # type: ignore[no-untyped-call]
        found += check(grads, {name: p.grad.clone() for name, p in theirs.named_parameters() if p.grad is not None})
        optimizer.step()
        found += check(dict(engine.params()), {name: p.detach() for name, p in theirs.named_parameters()})
    return found


def mlp_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return mlp().to(dtype)


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "dtype"), [(2, F32), (3, torch.float64), (4, torch.float64)])
def test_stage_0_is_distributed_data_parallel(world: int, dtype: torch.dtype) -> None:
    """To the bit at two ranks; at more, torch's all-reduce sums in another order: 1e-12 of the leaf's maximum."""
    assert ranks.run(against_ddp, world, dtype) == [[]] * world


# --- what the hooks do -----------------------------------------------------------------------------------------------


def trace(rank: int, world: int, stage: int) -> dict[str, Any]:  # noqa: ARG001
    """Record when buckets are sent, when gradients land, and what lives meanwhile."""
    module = mlp_of(F32)
    engine = fzero.HookedZero(module, opt(), stage, bucket_bytes=PIECES)
    events, alive, loose = [], [], []
    original = collectives.start_scatter

    def start(full: Tensor, axis: Any, dtype: Any = None) -> collectives.Pending:
        events.append("send")
        return original(full, axis, dtype)

    def landed(_: Tensor) -> None:
        collector = engine._collector
        events.append("land")
        alive.append(len(collector._filling) + len(collector._flying))
        loose.append(sum(p.grad is not None for p in module.parameters()))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(landed)  # type: ignore[no-untyped-call]
    hooks.start_scatter = start  # type: ignore[attr-defined]
    inputs, targets = vectors(rank, 0)
    engine.backward(F.mse_loss(engine(inputs), targets))
    left = [name for name, p in module.named_parameters() if p.grad is not None]
    engine.step()
    return {"events": events, "alive": alive, "loose": loose, "left": left}


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
def test_buckets_are_sent_while_backward_runs(stage: int) -> None:
    for result in ranks.run(trace, 2, stage):
        events = result["events"]
        assert events.count("land") == 6
        assert events.count("send") >= 4
        assert events.index("send") < len(events) - 1 - events[::-1].index("land")
        if stage >= 2:
            assert result["left"] == []
            assert max(result["loose"]) == 0, "a gradient moves into its bucket when it lands"
            assert max(result["alive"]) <= 2 + 1, "two of each label at most fill or fly"


def deep(rank: int, world: int, stage: int) -> int:  # noqa: ARG001
    """Return how many buckets of full gradient were alive at most, of ten of one label."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(10)))
    engine = fzero.HookedZero(module, opt(), stage, bucket_bytes=256)
    most = 0

    def landed(_: Tensor) -> None:
        nonlocal most
        most = max(most, len(engine._collector._filling) + len(engine._collector._flying))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(landed)  # type: ignore[no-untyped-call]
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    return most


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [2, 3])
def test_at_most_two_buckets_of_gradient_are_alive(stage: int) -> None:
    assert [1 <= most <= 2 for most in ranks.run(deep, 2, stage)] == [True, True]


def local_sums(rank: int, world: int, stage: int) -> list[str]:  # noqa: ARG001
    """Three micro-batches, all but the last without communication: the local sum is reduced once, as in stage 0."""
    kind = KINDS["mlp"]
    settings = {"bucket_bytes": PIECES, "accumulate": 3}
    theirs = functional(kind, 0, rank, 3, settings)
    engine = fzero.HookedZero(kind.module(), opt(), stage, bucket_bytes=PIECES)
    found = []
    for step, right in enumerate(theirs):
        parts = micros(kind.batch(rank, step), 3)
        last_syncs = step != 2  # in the last step it is left to grads and step
        for place, (inputs, targets) in enumerate(parts):
            if place == 2 and last_syncs:
                engine.backward(kind.criterion(engine(inputs), targets))
            else:
                with engine.no_sync():
                    engine.backward(kind.criterion(engine(inputs), targets))
        found += differing({n: g for n, g in engine.grads().items() if g is not None}, right["grads"])
        engine.step()
        found += differing(engine.params(), right["params"])
    return found


@pytest.mark.ranks
def test_no_sync_sums_locally_at_every_stage() -> None:
    for stage in STAGES:
        assert ranks.run(local_sums, 2, stage) == [[], []]


# --- stage 3 ---------------------------------------------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self, inside: bool | None, packs: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.inside, self.packs = nn.Linear(6, 9), nn.Linear(9, 6), inside, packs

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, mask: Tensor | None = None, shift: Tensor | None = None) -> Any:
        if shift is not None:
            x = x + self.down(self.up(shift))
        if self.inside is None:
            aside = F.linear(x, self.up.weight.detach())  # a use that no gradient of a parameter tells of
            out = x + self.inner(x) + torch.tanh(aside).sum(-1, keepdim=True)
        else:
            out = x + checkpoint(self.inner, x, use_reentrant=self.inside)
        return {"out": (out, mask)} if self.packs else out


class Net(nn.Module):
    """Three parts, used in the way that `how` says."""

    def __init__(self, how: str, inside: bool | None = None) -> None:
        super().__init__()
        self.how = how
        self.stem, self.head = nn.Linear(5, 6), nn.Linear(6, 2)
        self.parts = nn.ModuleList(Part(inside, packs=how == "dict") for _ in range(3))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.head(WAYS[self.how](self, self.stem(x), rank))  # type: ignore[no-any-return]


def one_by_one(net: Net, x: Tensor, rank: int) -> Tensor:  # noqa: ARG001
    for part in net.parts:
        x = part(x)
    return x


def conditioned(net: Net, x: Tensor, rank: int) -> Tensor:  # noqa: ARG001
    """One tensor that goes into every unit, and an input that a unit changes in place."""
    shift = torch.tanh(x)
    for part in net.parts:
        x = part(x.mul_(2), shift=shift)
    return x


def packed(net: Net, x: Tensor, rank: int) -> Tensor:  # noqa: ARG001
    for part in net.parts:
        x, _ = part(x, mask=torch.ones(3, dtype=torch.int64))["out"]
    return x


def checkpointed(reentrant: bool) -> Callable[[Net, Tensor, int], Tensor]:
    def way(net: Net, x: Tensor, rank: int) -> Tensor:  # noqa: ARG001
        for part in net.parts:
            x = checkpoint(part, x, use_reentrant=reentrant)
        return x

    return way


def two_in_one(reentrant: bool) -> Callable[[Net, Tensor, int], Tensor]:
    def way(net: Net, x: Tensor, rank: int) -> Tensor:  # noqa: ARG001
        x = checkpoint(lambda y: net.parts[1](net.parts[0](y)), x, use_reentrant=reentrant)
        return net.parts[2](x)  # type: ignore[no-any-return]

    return way


def both_ways(reentrant: bool) -> Callable[[Net, Tensor, int], Tensor]:
    def way(net: Net, x: Tensor, rank: int) -> Tensor:  # noqa: ARG001
        x = checkpoint(net.parts[0], net.parts[0](x), use_reentrant=reentrant)
        return net.parts[2](net.parts[1](x))  # type: ignore[no-any-return]

    return way


def siamese(net: Net, x: Tensor, rank: int) -> Tensor:
    return one_by_one(net, x, rank) * one_by_one(net, 2 * x, rank)


def backwards(net: Net, x: Tensor, rank: int) -> Tensor:  # noqa: ARG001
    for part in reversed(net.parts):
        x = part(x)
    return x


def without(skipped: int) -> Callable[[Net, Tensor, int], Tensor]:
    """Rank 1 skips one part."""

    def way(net: Net, x: Tensor, rank: int) -> Tensor:
        for place, part in enumerate(net.parts):
            x = x if rank == 1 and place == skipped else part(x)
        return x

    return way


def other_counts(net: Net, x: Tensor, rank: int) -> Tensor:
    for _ in range(3 if rank else 1):
        x = net.parts[1](x)
    return x


WAYS: dict[str, Callable[[Net, Tensor, int], Tensor]] = {
    "plain": one_by_one,
    "conditioned": conditioned,
    "dict": packed,
    "reentrant": checkpointed(True),
    "not reentrant": checkpointed(False),
    "two in one, reentrant": two_in_one(True),
    "two in one, not reentrant": two_in_one(False),
    "both ways, reentrant": both_ways(True),
    "both ways, not reentrant": both_ways(False),
    "siamese": siamese,
    "backwards": backwards,
    "without 0": without(0),
    "without 1": without(1),
    "without 2": without(2),
    "other counts": other_counts,
}


def use_net(rank: int, stage: int, how: str, inside: bool | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    engine = fzero.HookedZero(Net(how, inside), opt(), stage)
    for step in range(3):
        x = numbers(4, 5, seed=10 * rank + step, dtype=F32).requires_grad_()
        loss = engine(x, rank=rank).square().mean()
        if step == 1:  # an evaluation between forward and backward
            with torch.no_grad():
                engine(x.detach(), rank=rank)
        engine.backward(loss)
        metrics = engine.step()
    assert stage < 3 or not any(flat.here for flat in engine._flats), "something is left gathered"
    return {**engine.params(), "norm": metrics.grad_norm}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def use_nets(rank: int, world: int) -> list[str]:  # noqa: ARG001
    found = []
    for how in WAYS:
        insides = (None, True, False) if how in ("plain", "reentrant", "not reentrant", "dict") else (None,)
        for inside in insides:
            ours, theirs = use_net(rank, 3, how, inside), use_net(rank, 2, how, inside)
            found += [f"{how} {inside} {leaf}" for leaf in differing(ours, theirs)]
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
def test_stage_3_whatever_way_units_are_used(world: int) -> None:
    """Checkpointing in and around units in both modes, units used twice, out of order, or not by every rank (B13)."""
    assert ranks.run(use_nets, world, limit=200.0) == [[]] * world


class Shifted(nn.Module):
    """Six square layers, each of which gets the same second input."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Bilinear(16, 16, 16, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.sin(x)
        for part in self.parts:
            x = part(x, shift)
        return x


def at_rest(rank: int, world: int) -> list[int]:  # noqa: ARG001
    """Return the bytes of parameters and moments, and the most bytes of gathered units, over the wanted ones."""
    torch.manual_seed(0)
    module = Shifted()
    engine = fzero.HookedZero(module, opt(), 3)
    size, most = 16**3 * 4, 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(flat.full.untyped_storage().nbytes() for flat in engine._flats))

    for part in module.parts:
        part.register_forward_hook(look)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
    engine.backward(engine(torch.ones(2, 16, requires_grad=True)).square().mean())
    engine.step()
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for flat, state in zip(engine._flats, engine._opt_states, strict=True)
        for tensor in (flat.full, flat.owned, *state[1:])
    }
    assert all(parameter.numel() == 0 for parameter in module.parameters())
    return [sum(held.values()) - 6 * size * 3 // world, most - size]


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
def test_stage_3_keeps_a_share_at_rest_and_one_unit_at_work(world: int) -> None:
    for rest, work in ranks.run(at_rest, world):
        assert rest == 0
        assert work <= 0


class Leaky(nn.Module):
    """A unit with a way out beside its return value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.aside: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.aside = self.inner(torch.tanh(self.inner(x)))
        return x


def test_stage_3_a_gradient_by_a_way_aside_is_an_error_and_never_reads_freed_memory() -> None:
    unit = Leaky()
    engine = fzero.HookedZero(nn.Sequential(unit, Leaky()), opt(), 3)
    engine(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(unit.aside.sum())
    with pytest.raises(RuntimeError, match="must be a matrix"):
        unit.inner(torch.ones(2, 3))


def again(module: Any, x: Tensor) -> Any:
    return module[0](x)


def one_more(rank: int, world: int) -> None:  # noqa: ARG001
    """Rank 1 goes back to a unit that the others have left."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    engine = fzero.HookedZero(module, opt(), 3)
    if rank:
        module.register_forward_hook(lambda module, _, out: again(module, out))
    engine.backward(engine(torch.ones(2, 3)).square().mean())
    engine.step()


@pytest.mark.ranks
def test_b13_a_unit_that_one_rank_alone_needs_once_more_ends_in_errors_on_all() -> None:
    errors = [outcome.error for outcome in ranks.outcomes(one_more, 2, limit=60.0)]
    assert all(errors), errors
    assert "a unit gathered once more" in str(errors[1])


# --- what stays as it is ---------------------------------------------------------------------------------------------


def frozen(rank: int, world: int, stage: int) -> list[str]:  # noqa: ARG001
    """Freeze the middle layer; the rest must be as if it were a constant."""
    runs: list[dict[str, Tensor]] = []
    for as_buffer in (False, True):
        module = mlp_of(F32)
        assert isinstance(module, nn.Sequential)
        middle = module[2]
        assert isinstance(middle, nn.Linear)
        first = {name: p.detach().clone() for name, p in middle.named_parameters()}
        values = {name: value + rank for name, value in first.items()}  # only rank 0's count
        for name, value in values.items():
            if as_buffer:
                delattr(middle, name)
                middle.register_buffer(name, value)
            else:
                setattr(middle, name, nn.Parameter(value, requires_grad=False))
        units = [module[0], module[4]]
        if not as_buffer:
            loss_fn, params, _ = fzero.from_module(module, F.mse_loss, blocks=list(module[::2]))
            functional = fzero.Zero(loss_fn, opt(), stage, clip_norm=0.1)
            state = functional.init(params)
            for step in range(3):
                state, metrics = functional.step(state, vectors(rank, step))
            assert functional.opt_state(state).exp_avg["2.weight"] is None
            assert functional.grads(state, vectors(rank, 3))[0]["2.weight"] is None
            runs.append({**functional.params(state), "norm": metrics.grad_norm})
        engine = fzero.HookedZero(module, opt(), stage, clip_norm=0.1, units=units)
        for step in range(3):
            inputs, targets = vectors(rank, step)
            engine.backward(F.mse_loss(engine(inputs), targets))
            grads = engine.grads()
            metrics = engine.step()
        full = {**engine.params(), **engine.buffers()}
        runs.append({**full, "norm": metrics.grad_norm})
        if not as_buffer:
            assert list(engine.params()) == [f"{at}.{kind}" for at in (0, 2, 4) for kind in ("weight", "bias")]
            assert grads["2.weight"] is None
            assert engine.opt_state().exp_avg["2.weight"] is None
            assert differing({"w": full["2.weight"]}, {"w": first["weight"]}) == []
    return differing(runs[0], runs[1]) + differing(runs[1], runs[2])


@pytest.mark.ranks
def test_frozen_parameters_are_carried_unchanged() -> None:
    for stage in (1, 3):
        assert ranks.run(frozen, 2, stage) == [[], []]


def skipping(rank: int, world: int, stage: int) -> list[str]:  # noqa: ARG001
    """A step with an infinite gradient on rank 1 only changes nothing, buffers included, and the run goes on."""
    kind = KINDS["resnet"]
    engine = fzero.HookedZero(kind.module(), opt(), stage)
    found: list[str] = []
    for step in range(3):
        images_, labels = kind.batch(rank, step)
        before = everything(engine)
        factor = float("inf") if rank == 1 and step == 1 else 1.0
        engine.backward(kind.criterion(engine(images_), labels) * factor)
        metrics = engine.step()
        assert bool(metrics.skipped) is (step == 1)
        changed = differing(everything(engine), before)
        found += changed if step == 1 else []
        assert step == 1 or "norm.running_mean" in changed
    assert int(metrics.step) == 2
    return found


def everything(engine: fzero.HookedZero) -> dict[str, Tensor]:
    moments = engine.opt_state()
    flat = {f"{name}.m": leaf for name, leaf in moments.exp_avg.items()}
    return {**engine.params(), **engine.buffers(), **flat, "step": moments.step}


@pytest.mark.ranks
def test_a_step_that_is_not_finite_anywhere_changes_nothing() -> None:
    for stage in (0, 3):
        assert ranks.run(skipping, 2, stage) == [[], []]


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stage": 4}, "stage: must be 0, 1, 2 or 3, got 4"),
        ({"stage": 1.0}, r"stage: must be 0, 1, 2 or 3, got 1\.0"),
        ({"clip_norm": 0.0}, "clip_norm: must be a positive"),
        ({"clip_norm": "1"}, "clip_norm: must be a positive finite number or None, got '1'"),
        ({"clip_norm": True}, "clip_norm: must be a positive finite number or None, got True"),
        ({"bucket_bytes": 0}, "bucket_bytes: must be an integer"),
        ({"buffer_policy": "sum"}, "buffer_policy: must be one of none, rank0, mean"),
        ({"stage": 3, "units": []}, "units: stage 3 needs"),
        ({"units": [nn.Linear(1, 1)]}, r"units\[0\]: must be a submodule"),
    ],
)
def test_arguments_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fzero.HookedZero(mlp(), opt(), **settings)


def test_modules_are_refused_by_parameter() -> None:
    with pytest.raises(TypeError, match="module: must be an"):
        fzero.HookedZero("module", opt())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="opt: must be a"):
        fzero.HookedZero(mlp(), torch.optim.AdamW)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameter with requires_grad"):
        fzero.HookedZero(nn.ReLU(), opt())
    with pytest.raises(ValueError, match="'weight' is on meta"):
        fzero.HookedZero(nn.Linear(2, 2, device="meta"), opt())
    both = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    both[1].weight.data = both[0].weight.data
    with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' share memory"):
        fzero.HookedZero(both, opt())


def test_losses_and_the_order_of_calls_are_checked() -> None:
    engine = fzero.HookedZero(mlp(), opt())
    out = engine(torch.ones(2, 5))
    for what in (engine.step, engine.grads):
        with pytest.raises(ValueError, match="no gradient since the last step"):
            what()
    with pytest.raises(TypeError, match=r"loss: must be a 0-d floating tensor or fzero.Mean, got float"):
        engine.backward(1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loss: must be floating"):
        engine.backward(torch.tensor(1))
    with pytest.raises(ValueError, match=r"loss: must be 0-d, got shape \(2, 3\)"):
        engine.backward(out)
    with pytest.raises(ValueError, match="loss: has no graph"):
        engine.backward(out.sum().detach())
    with pytest.raises(RuntimeError, match=r"parameter '.*' got a gradient outside engine.backward"):
        out.sum().backward()
    loss = engine(torch.ones(2, 5)).sum()
    engine.backward(loss)
    with pytest.raises(ValueError, match="Mean and plain losses"):
        engine.backward(fzero.Mean(engine(torch.ones(2, 5)).sum(), 2))
    stale = engine(torch.ones(2, 5)).sum()
    engine.step()
    with pytest.raises(RuntimeError, match="second time"):
        engine.backward(loss)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(stale)
    with pytest.raises(ValueError, match="no gradient since the last step"):
        engine.step()


class NestedUse(nn.Module):
    """A parameter used inside a backward pass inside the backward pass, and not by a call of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda y: F.linear(y, self.layer.weight), self.first(x), use_reentrant=True)
        return F.linear(x, self.layer.weight, self.layer.bias)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_gradient_that_comes_too_late_is_an_error_and_what_was_collected_is_dropped(stage: int) -> None:
    module = NestedUse()
    engine = fzero.HookedZero(module, opt(), stage, bucket_bytes=1)
    with pytest.raises(RuntimeError, match=r"'layer.weight' got one more gradient after its bucket was sent"):
        engine.backward(engine(torch.ones(2, 3)).sum())
    assert all(parameter.grad is None for parameter in module.parameters())
    engine.backward(module.first(torch.ones(2, 3)).sum())
    assert not engine.grads()["layer.bias"].any()  # type: ignore[union-attr]
    assert int(engine.step().step) == 1


def test_stage_3_without_a_graph_and_under_autograd_grad() -> None:
    engine = fzero.HookedZero(mlp(), opt(), 3)
    with torch.inference_mode():
        first = engine(torch.ones(1, 5))
    x = torch.ones(1, 5, requires_grad=True)
    out = engine(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    plain = mlp()
    plain.load_state_dict(engine.params())
    assert torch.equal(plain(x), first.clone())
    assert torch.equal(torch.autograd.grad(plain(x).sum(), x)[0], gradient)
    engine.backward(engine(x).sum())
    assert int(engine.step().step) == 1


def different(rank: int, world: int) -> str:  # noqa: ARG001
    with pytest.raises(ValueError, match="HookedZero: ") as caught:
        fzero.HookedZero(nn.Linear(3 + rank, 2), opt())
    return str(caught.value)


@pytest.mark.ranks
def test_modules_that_differ_between_ranks_are_refused_on_all() -> None:
    first, second = ranks.run(different, 2)
    assert first == second
    assert "the ranks differ" in first


def test_the_interface_is_frozen() -> None:
    names = [name for name in vars(fzero.HookedZero) if not name.startswith("_")]
    assert names == ["backward", "no_sync", "step", "request_stop", "params", "buffers", "opt_state", "grads"]
    assert list(inspect.signature(fzero.HookedZero).parameters) == [
        *("module", "opt", "stage", "mesh", "units", "bucket_bytes", "clip_norm", "buffer_policy", "precision")
    ]
