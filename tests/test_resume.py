"""Training goes on from a checkpoint as if it had never stopped."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run
from saved import OPT, Made, Pile, criterion, module_engine, module_step
from torch import Tensor, nn
from trees import differing, numbers

import fzero

# --- exact resume ----------------------------------------------------------------------------------------------------

ENGINES = ("functional", "hooked")


class Noisy(nn.Module):
    """Dropout, running statistics, and a lone scale."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Dropout(0.5)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x)
        result: Tensor = self.head(x) * self.scale.exp()
        return result


def squares(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def noisy(kind: str, stage: int, seed: int, *, compile_: bool = False) -> Made:
    torch.manual_seed(seed)
    module = Noisy()
    opt = fzero.adamw(fzero.warmup_linear(0.05, 4, 20), **OPT)
    options: dict[str, Any] = {"clip_norm": 0.5, "bucket_bytes": 300, "buffer_policy": "none"}
    if kind == "hooked":
        return Made(fzero.HookedZero(module.train(), opt, stage, **options), None)
    loss_fn, params, buffers = fzero.from_module(module.train(), squares)
    engine = fzero.Zero(loss_fn, opt, stage, accumulate=2, compile=compile_, **options)
    return Made(engine, engine.init(params, buffers))


def train(made: Made, places: torch.Generator, rank: int, first: int, last: int) -> tuple[Made, list[Tensor]]:
    """Train on windows drawn by a generator of the user's; step 1 is skipped on all ranks, and rank 1 draws more."""
    seen = []
    data = numbers(50, 7, seed=5, dtype=torch.float32)
    for step in range(first, last):
        chosen = torch.randint(50, (8,), generator=places)
        inputs, targets = data[chosen], data[chosen, :3]
        if rank:
            torch.rand(step + 1)  # ranks draw different amounts
        if step == 1 and rank == 0:
            targets = targets * float("inf")
        if isinstance(made.engine, fzero.Zero):
            state, metrics = made.engine.step(made.state, (inputs, targets))
            made = Made(made.engine, state)
        else:
            for some, wanted in zip(inputs.chunk(2), targets.chunk(2), strict=True):
                made.engine.backward(squares(made.engine(some), wanted))
            metrics = made.engine.step()
        assert bool(metrics.skipped) == (step == 1)
        seen += [metrics.loss, metrics.grad_norm, metrics.step]
    return made, seen


def resume(rank: int, world: int, folder: str, kind: str, part: str, compile_: bool) -> tuple[Any, list[Tensor]]:  # noqa: ARG001
    """Train 7 steps at once, or 4 and, in new processes, 3."""
    stage = 3 if kind == "functional" else 2
    places = torch.Generator().manual_seed(rank)
    made = noisy(kind, stage, seed=8 if part == "second" else 3, compile_=compile_)
    torch.manual_seed(77 if part == "second" else rank)
    if part == "second":
        made, extra = made.load(fzero.latest(folder))
        places.set_state(extra["places"])
        assert extra["step"] == 4
        made, seen = train(made, places, rank, 4, 7)
    else:
        made, seen = train(made, places, rank, 0, 4)
        if part != "whole":
            made.save(folder, extra={"places": places.get_state(), "step": 4})
        if part == "first":
            return None, []
        made, seen = train(made, places, rank, 4, 7)
    return made.full(), [*seen, torch.rand(3)]


def check_resume(folder: Path, kind: str, world: int, *, compile_: bool = False) -> list[Any]:
    first = "first and second" if compile_ else "whole"  # a run that saves and goes on saves one compilation
    whole = run(resume, world, str(folder), kind, first, compile_, limit=240)
    if not compile_:
        run(resume, world, str(folder), kind, "first", compile_)
    parts = run(resume, world, str(folder), kind, "second", compile_, limit=240)
    return list(zip(whole, parts, strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ENGINES)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(kind: str, tmp_path: Path) -> None:
    # B22 (schedule, skipped step), B34 (moments), B41 (dropout of each rank), buffers of each rank
    for (full, seen), (other, again) in check_resume(tmp_path, kind, 2):
        assert differing(other, full) == []
        assert all(torch.equal(left, right) for left, right in zip(seen, again, strict=True))
        assert int(full["step"]) == 6  # one of seven was skipped


@pytest.mark.parametrize("kind", ENGINES)
def test_a_resumed_run_alone(kind: str, tmp_path: Path) -> None:
    outcomes = []
    for part in ("whole", "first", "second"):
        folder = tmp_path / ("whole" if part == "whole" else "parts")
        outcomes.append(resume(0, 1, str(folder), kind, part, False))
    (full, seen), _, (other, again) = outcomes
    assert differing(other, full) == []
    assert all(torch.equal(left, right) for left, right in zip(seen, again, strict=True))


@pytest.mark.compile
@pytest.mark.ranks
def test_a_resumed_compiled_run(tmp_path: Path) -> None:
    for (full, seen), (other, again) in check_resume(tmp_path, "functional", 2, compile_=True):
        for name, leaf in full.items():
            error = (other[name].double() - leaf.double()).abs().max()
            assert error <= 1e-5 * leaf.double().abs().max(), name
        assert torch.equal(seen[-1], again[-1])


# --- another world ---------------------------------------------------------------------------------------------------


def other_worlds(rank: int, world: int, folder: str, saving: bool) -> Any:
    # 24 samples a step, cut among the ranks: the mean is the same in every world
    def step(made: Made, number: int) -> Made:
        data = numbers(24, 7, seed=number)
        mine = data.chunk(world)[rank]
        state, _ = made.engine.step(made.state, mine)
        return Made(made.engine, state)

    params = {
        "a": numbers(5, seed=1),
        "b": numbers(7, 3, seed=2),
        "c": numbers(1, seed=3),
        "d": torch.tensor(0.5).double(),
    }

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x @ params["b"])
        result: Tensor = (y.sum(1) * params["d"].exp() + params["c"] + x[:, :5] @ params["a"]).square().mean()
        return result

    found = {}
    for stage in (1, 2):
        engine = fzero.Zero(loss_fn, fzero.adamw(0.01, **OPT), stage, bucket_bytes=200)
        made = Made(engine, engine.init(params))
        if saving:
            for number in range(3):
                made = step(made, number)
            made.save(f"{folder}/{stage}")
        else:
            made, _ = made.load(fzero.latest(f"{folder}/{stage}"))
            found[f"{stage} loaded"] = made.full()
        for number in range(3, 5):
            made = step(made, number)
        found[str(stage)] = made.full()
    return found


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param({4: (1, 2, 3, 4, 8), 3: (2,)}, marks=pytest.mark.long, id="all"),
        pytest.param({3: (1, 2)}, marks=pytest.mark.ranks, id="some"),
    ],
)
def test_another_world_goes_on_within_rounding(pairs: dict[int, tuple[int, ...]], tmp_path: Path) -> None:
    # B31
    for saved, worlds in pairs.items():
        folder = str(tmp_path / str(saved))
        expected = run(other_worlds, saved, folder, True)[0]
        for world in worlds:
            for found in run(other_worlds, world, folder, False):
                for stage in ("1", "2"):
                    for name, leaf in expected[stage].items():
                        error = (found[stage][name].double() - leaf.double()).abs().max()
                        assert error <= 1e-12 * leaf.double().abs().max(), f"{saved} to {world}: {name}"


def masks(rank: int, world: int, folder: str, saving: bool) -> Tensor:  # noqa: ARG001
    engine = fzero.HookedZero(nn.Linear(3, 3), fzero.adamw(0.01))
    torch.manual_seed(0 if saving else 99)
    if saving:
        torch.rand(rank)
        fzero.save(folder, engine)
    else:
        fzero.load(fzero.latest(folder), engine)
    return torch.rand(64)


@pytest.mark.ranks
def test_random_numbers_of_another_world_differ_by_rank_and_repeat(tmp_path: Path) -> None:
    # B41
    saved = run(masks, 2, str(tmp_path), True)
    same = run(masks, 2, str(tmp_path), False)
    assert all(torch.equal(left, right) for left, right in zip(saved, same, strict=True))
    other = run(masks, 3, str(tmp_path), False)
    again = run(masks, 3, str(tmp_path), False)
    assert all(torch.equal(left, right) for left, right in zip(other, again, strict=True))
    assert not any(torch.equal(other[left], other[right]) for left, right in ((0, 1), (0, 2), (1, 2)))


# --- rows ------------------------------------------------------------------------------------------------------------


def test_the_optimizer_that_loads_keeps_its_own_betas(tmp_path: Path) -> None:
    # B21
    def make(betas: tuple[float, float]) -> Made:
        opt = fzero.adamw(0.1, betas=betas, eps=1e-8, weight_decay=0.1)
        engine = fzero.Zero(lambda params, x: (params["w"] * x).sum(), opt)
        return Made(engine, engine.init({"w": torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)}))

    def step(made: Made, number: int) -> Made:
        return Made(made.engine, made.engine.step(made.state, numbers(3, seed=number))[0])

    made = make((0.8, 0.95))
    for number in range(5):
        made = step(made, number)
    made.save(tmp_path)
    before = made.full()
    loaded, _ = make((0.9, 0.999)).load(fzero.latest(tmp_path))
    found = step(loaded, 5).full()
    gradient = numbers(3, seed=5)
    moment = 0.9 * before["exp_avg.w"] + 0.1 * gradient
    second = 0.999 * before["exp_avg_sq.w"] + 0.001 * gradient**2
    update = moment / (1 - 0.9**6) / ((second / (1 - 0.999**6)).sqrt() + 1e-8)
    expected = before["params.w"] * (1 - 0.1 * 0.1) - 0.1 * update
    assert int(found["step"]) == 6
    assert torch.allclose(found["params.w"], expected, rtol=1e-12, atol=0)
    # a count that float32 does not have
    state = made.state._replace(
        opt_state=made.state.opt_state._replace(step=torch.tensor(2**24)), step=torch.tensor(2**24)
    )
    fzero.save(tmp_path, made.engine, state)
    loaded, _ = made.load(tmp_path / "step-16777216")
    found = step(loaded, 6).full()
    assert int(found["step"]) == int(loaded.engine.step(loaded.state, numbers(3, seed=7))[1].step) - 1 == 2**24 + 1


def frozen(rank: int, world: int, folder: str, saving: bool) -> Any:  # noqa: ARG001
    torch.manual_seed(1 if saving else 2)
    module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    module[0].requires_grad_(False)
    module.register_parameter("index", nn.Parameter(torch.arange(7) + (0 if saving else 9), requires_grad=False))
    found = {}
    for stage in range(4):
        engine = fzero.HookedZero(module if stage == 0 else _copy(module), fzero.adamw(0.1, **OPT), stage)
        if saving:
            for _ in range(3):
                engine.backward(engine(torch.ones(2, 5)).square().mean())
                engine.step()
            fzero.save(f"{folder}/{stage}", engine)
        else:
            fzero.load(fzero.latest(f"{folder}/{(stage + 1) % 4}"), engine)
        moments = {name for name, leaf in engine.opt_state().exp_avg.items() if leaf is not None}
        assert moments == {"1.weight", "1.bias"}
        found[stage] = dict(engine.params())
        # what forward uses is what was loaded
        found[stage]["output"] = engine(torch.ones(2, 5)).detach()
        if not saving:  # into the other engine as well, and through it
            ours: Any = _copy(module)
            loss_fn, params, _ = fzero.from_module(
                ours, lambda output, _: output.square().mean(), blocks=[ours[0], ours[1]]
            )
            functional = fzero.Zero(loss_fn, fzero.adamw(0.1, **OPT), stage)
            functional.init(params)
            state, _ = fzero.load(fzero.latest(f"{folder}/{(stage + 1) % 4}"), functional)
            fzero.save(f"{folder}/functional{stage}", functional, state)
            state, _ = fzero.load(fzero.latest(f"{folder}/functional{stage}"), functional)
            assert differing(dict(functional.params(state)), dict(engine.params())) == []
            assert functional.opt_state(state).exp_avg["0.weight"] is None
    return found


def _copy(module: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(module)


@pytest.mark.ranks
def test_frozen_parameters_come_back(tmp_path: Path) -> None:
    # B33
    before, after = (run(frozen, 2, str(tmp_path), saving) for saving in (True, False))
    for rank in range(2):
        for stage in range(4):
            assert differing(after[rank][stage], before[rank][(stage + 1) % 4]) == []


def masters(rank: int, world: int, folder: str, saving: bool) -> Any:  # noqa: ARG001
    found = {}
    for kind in ENGINES:
        for stage in range(4):
            torch.manual_seed(1 if saving else 2)
            module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)).to(torch.bfloat16)
            where = f"{folder}/{kind}{stage}"
            inputs = numbers(3, 5, seed=rank, dtype=torch.bfloat16)
            if kind == "hooked":
                made = Made(fzero.HookedZero(module, fzero.adamw(1e-3), stage), None)
            else:
                loss_fn, params, _ = fzero.from_module(module, lambda y, _: y.float().square().mean())
                engine = fzero.Zero(loss_fn, fzero.adamw(1e-3), stage)
                made = Made(engine, engine.init(params))

            def forward(made: Made, inputs: Tensor = inputs) -> Tensor:
                if isinstance(made.engine, fzero.Zero):
                    return made.engine.evaluate(made.state, (inputs, inputs))[0]
                result: Tensor = made.engine(inputs).detach()
                return result

            def step(made: Made, inputs: Tensor = inputs) -> Made:
                if isinstance(made.engine, fzero.Zero):
                    return Made(made.engine, made.engine.step(made.state, (inputs, inputs))[0])
                made.engine.backward(made.engine(inputs).float().square().mean())
                made.engine.step()
                return made

            if saving:
                for _ in range(3):
                    made = step(made)
                made.save(where)
            else:
                made, _ = made.load(fzero.latest(where))
            found[kind, stage] = {"forward": forward(made), **made.full()}
            made = step(made)
            found[kind, stage] |= {f"then {name}": leaf for name, leaf in made.full().items()}
            assert found[kind, stage]["params.0.weight"].dtype == torch.bfloat16
    return found


@pytest.mark.ranks
def test_sixteen_bit_weights_are_refreshed_from_their_masters(tmp_path: Path) -> None:
    # B40
    before, after = (run(masters, 2, str(tmp_path), saving) for saving in (True, False))
    for rank in range(2):
        for key, full in before[rank].items():
            assert differing(after[rank][key], full) == [], key
            shared = {name: leaf for name, leaf in full.items() if "forward" not in name}
            assert differing({name: before[0][key][name] for name in shared}, shared) == []


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))
        return result


def test_names_are_plain_whatever_wraps_the_module(tmp_path: Path) -> None:
    # B38
    def wrapped(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        module: Any = Inner()
        module.second = torch.compile(module.second, backend="eager")
        return torch.compile(module, backend="eager")  # type: ignore[return-value]

    engine = fzero.HookedZero(wrapped(1), fzero.adamw(0.1))
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    fzero.save(tmp_path, engine)
    loss_fn, params, _ = fzero.from_module(Inner(), squares)
    plain = fzero.Zero(loss_fn, fzero.adamw(0.1))
    plain.init(params)
    state, _ = fzero.load(fzero.latest(tmp_path), plain)
    found = dict(plain.params(state))
    assert list(found) == ["first.weight", "first.bias", "second.weight", "second.bias"]
    expected = {name.replace("_orig_mod.", ""): leaf for name, leaf in engine.params().items()}
    assert differing(found, expected) == []
    # and what from_module makes of a wrapped module has plain names
    _, params, _ = fzero.from_module(wrapped(2), squares)
    assert [name.replace("second._orig_mod", "second") for name in params] == list(found)


def wrapped_in_ddp(rank: int, world: int) -> list[str]:  # noqa: ARG001
    module = nn.parallel.DistributedDataParallel(Inner())
    return list(fzero.from_module(torch.compile(module, backend="eager"), squares)[1])  # type: ignore[arg-type]


@pytest.mark.ranks
def test_names_of_a_module_inside_ddp_are_plain() -> None:
    # B38
    for names in run(wrapped_in_ddp, 2):
        assert names == ["first.weight", "first.bias", "second.weight", "second.bias"]


# --- meta ------------------------------------------------------------------------------------------------------------


def from_meta(rank: int, world: int, folder: str) -> Any:  # noqa: ARG001
    made = module_engine("functional", 4, 3, 600)
    made, _ = module_step(made, rank, 0)
    made.save(folder)
    full = made.full()
    loss_fn, params, buffers = fzero.from_module(Pile(4).to("meta"), criterion)
    engine = fzero.Zero(loss_fn, fzero.adamw(0.01, **OPT), 2, bucket_bytes=900)
    empty = engine.init(params, buffers)
    with pytest.raises(
        ValueError, match=r"state: has no values, since all leaves were on meta at init; call fzero.load"
    ):
        engine.step(empty, (torch.ones(2), torch.ones(2)))
    made, _ = Made(engine, empty).load(fzero.latest(folder))
    found = made.full()
    module_step(made, rank, 1)
    return differing(found, full)


@pytest.mark.ranks
def test_an_engine_without_values_is_ready_for_load(tmp_path: Path) -> None:
    assert run(from_meta, 2, str(tmp_path)) == [[], []]


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory(what: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{what}:")[1].split()[0]) * 1024


def added(function: Any) -> int:
    """Return by how many bytes the memory of this process rises above what it is before a call."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    function()
    return _memory("VmHWM") - before


def peak(rank: int, world: int, folder: str) -> tuple[int, int, int, int]:
    leaf = 2**20
    params = {f"layer{at}.w": torch.empty(leaf // 1024, 1024, device="meta" if rank else "cpu") for at in range(16)}
    if rank == 0:
        for tensor in params.values():
            tensor.fill_(0.5)
    engine = fzero.Zero(
        lambda params, x: sum(w.sum() for w in params.values()) * x.mean(),
        fzero.adamw(0.1),
        3,
        blocks=[f"layer{at}" for at in range(16)],
    )
    state = engine.init(params)
    del params
    shard = 3 * 16 * leaf * 4 // world
    fzero.save(f"{folder}/warm", engine, state)
    fzero.export(f"{folder}/warm.safetensors", engine, state)
    return (
        shard,
        added(lambda: fzero.save(folder, engine, state)),
        added(lambda: fzero.load(fzero.latest(folder), engine)),
        added(lambda: fzero.export(f"{folder}/all.safetensors", engine, state)),
    )


@pytest.mark.ranks
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's count of the peak")  # noqa: PTH110
def test_no_rank_needs_more_than_its_own_part(tmp_path: Path) -> None:
    # B32: 16 M parameters at 4 ranks
    for shard, saving, loading, exporting in run(peak, 4, str(tmp_path), limit=120):
        slack = 8 * 2**20
        leaf = 4 * 2**20
        assert saving < slack
        assert loading < shard + slack  # the new state itself
        # one bucket of 25 MiB at most, here one leaf, what gathers it, and its copy on rank 0
        assert exporting < 4 * leaf + slack
