"""What must hold for parameters on a device that is not the default one, as far as CPU and meta can show it.

Factory functions that do not say a device make tensors on meta in these tests; the parameters are on CPU. Such a tensor
cannot get into a result: on CUDA it would be one on CPU.
"""

import contextlib
import dataclasses
import time
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.testing._internal.distributed import fake_pg
from trees import differing, named, numbers

import fzero
from fzero import direct
from fzero.axis import Axis, axis_of, with_own_group
from fzero.batch import placed
from fzero.compiling import Queue
from fzero.given import Inspected
from fzero.overlap import compile_options

CPU, META, CUDA = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 0)
ENGINE: Any = fzero.Zero


class Scale(nn.Module):
    """A norm with a running mean, in float32 whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().float().mean(0), 0.1)  # type: ignore[operator]
        return F.layer_norm(x, (6,), self.weight)


class Net(nn.Module):
    """Buffers, dropout, recomputation and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), Scale(), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + fzero.remat(layer)(x)
        return self.last(x)  # type: ignore[no-any-return]


def counted(output: Tensor, targets: Tensor) -> fzero.Mean:
    return fzero.Mean((output - targets).square().sum(), targets.numel())


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    seed = 100 * rank + step
    return numbers(8, 5, seed=seed, dtype=torch.float32), numbers(8, 1, seed=seed + 50, dtype=torch.float32)


def made(kind: str) -> fzero.Optimizer:
    return {
        "adamw": fzero.adamw(fzero.warmup_cosine(1e-2, 1, 5)),
        "adam": fzero.adam(1e-2, weight_decay=0.1),
        "sgd": fzero.sgd(torch.tensor(0.1), 0.9, nesterov=True, weight_decay=0.1),
        "lion": fzero.lion(1e-3),
    }[kind]


def functional(rank: int, stage: int, opt: fzero.Optimizer, precision: fzero.Precision) -> Any:
    loss_fn, params, buffers = fzero.from_module(Net(), counted)
    engine = fzero.Zero(loss_fn, opt, stage, accumulate=2, clip_norm=0.5, buffer_policy="mean", precision=precision)
    state = engine.init(params, buffers)
    seen = []
    for step in range(2):
        torch.manual_seed(10 * rank + step)
        state, metrics = engine.step(state, batch(rank, step))
        seen.append(metrics)
    loss, _ = engine.evaluate(state, batch(rank, 2))
    grads = engine.grads(state, batch(rank, 3))
    return seen, loss, grads, engine.params(state), engine.buffers(state), engine.opt_state(state)


def hooked(rank: int, stage: int, opt: fzero.Optimizer, precision: fzero.Precision) -> Any:
    engine = fzero.HookedZero(Net(), opt, stage, clip_norm=0.5, buffer_policy="mean", precision=precision)
    seen = []
    for step in range(2):
        torch.manual_seed(10 * rank + step)
        for micro in range(2):
            inputs, targets = batch(rank, 2 * step + micro)
            engine.backward(counted(engine(inputs), targets))
        grads = engine.grads()
        seen.append((engine.step(), grads))
    return seen, engine.params(), engine.buffers(), engine.opt_state()


def strays(rank: int, world: int, kind: str, stages: tuple[int, ...]) -> list[str]:  # noqa: ARG001
    """Return the results that are not where they must be, or not the same, when the default device is another one."""
    found = []
    for run in (functional, hooked):
        for stage in stages:
            for precision in (fzero.Precision(), fzero.Precision.bf16):
                results = []
                for context in (contextlib.nullcontext(), META):
                    torch.manual_seed(0)
                    net, opt = Net(), made(kind)
                    data = {(at, step): batch(at, step) for at in range(2) for step in range(4)}
                    with (
                        mock.patch(f"{__name__}.Net", lambda net=net: net),
                        mock.patch(f"{__name__}.batch", lambda at, step, data=data: data[at, step]),
                        context,
                    ):
                        results.append(named({"all": run(rank, stage, opt, precision)}))
                where = f"{run.__name__} {stage} {precision.compute}"
                right, ours = results
                found += [f"{where} {name} on {leaf.device}" for name, leaf in ours.items() if leaf.device != CPU]
                found += [] if found else [f"{where} {name}" for name in differing(ours, right)]
    return found


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd", "lion"])
def test_every_tensor_is_made_on_the_device_of_the_parameters(kind: str) -> None:
    assert not strays(0, 1, kind, (0, 2))


@pytest.mark.ranks
def test_every_tensor_of_a_rank_is_made_there_too() -> None:
    for found in ranks.run(strays, 2, "adamw", (0, 1, 2, 3), limit=200.0):
        assert not found, f"{len(found)}, first {found[:4]}"


# --- batches ---------------------------------------------------------------------------------------------------------


def squares(params: Any, batch: Any) -> Tensor:
    loss: Tensor = (params["w"] * batch["x"]).square().mean()
    return loss


def test_a_batch_on_cpu_is_moved_and_one_that_is_there_is_the_same() -> None:
    data = {"x": torch.ones(4), "more": (torch.ones(4, 2), None)}
    assert placed(data, CPU) is data
    moved = placed(data, META)
    assert [leaf.device for leaf in named(moved).values()] == [META, META]
    assert moved["x"].shape == (4,)
    assert moved["more"][1] is None


def test_a_batch_on_another_device_is_refused_by_name() -> None:
    engine = fzero.Zero(squares, fzero.sgd(0.1))
    state = engine.init({"w": torch.tensor(1.0)})
    wrong = {"x": torch.ones(4, device="meta")}
    state, _ = engine.step(state, {"x": torch.ones(4)})
    for call in (engine.step, engine.grads, engine.evaluate):
        with pytest.raises(ValueError, match=r"batch: leaf 'x' is on meta, the state on cpu; .* or on CPU"):
            call(state, wrong)


def first_batch(rank: int, world: int) -> str:  # noqa: ARG001  (the launcher passes it)
    engine = fzero.Zero(squares, fzero.sgd(0.1))
    state = engine.init({"w": torch.tensor(1.0)})
    try:
        engine.step(state, {"x": torch.ones(4, device="meta" if rank else "cpu")})
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
def test_a_first_batch_on_another_device_is_an_error_on_all_ranks() -> None:
    for found in ranks.run(first_batch, 2):
        assert "batch: leaf 'x' is on meta" in found


# --- devices of ranks ------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda_only() -> Iterator[None]:
    """Have two ranks that communicate on CUDA only, as `init_process_group("nccl")` makes them."""
    dist.init_process_group("cuda:fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("cuda_only")
def test_parameters_that_the_group_cannot_communicate_are_refused() -> None:
    axis = axis_of(None)
    axis.check_device(CUDA)
    assert axis.scatters_natively(CUDA)
    with pytest.raises(ValueError, match=r"params: are on cpu, but the process group communicates on cuda only"):
        axis.check_device(CPU)
    Axis().check_device(CPU)


def inspected(device: torch.device, *, meta: bool) -> Inspected:
    return Inspected(0, "*", (), (), (), device, meta)


def test_ranks_without_values_take_the_kind_of_device_of_rank_0() -> None:
    here = inspected(CPU, meta=False)
    notes = [here.notes(), {"ties": (), "meta": True, "device": "cuda"}]
    assert here.on_one_kind(notes) is here
    assert inspected(CUDA, meta=True).on_one_kind(notes).device == CPU
    with mock.patch.object(torch.cuda, "current_device", return_value=3):
        found = inspected(CPU, meta=True).on_one_kind([{"ties": (), "meta": False, "device": "cuda"}])
    assert found.device == torch.device("cuda", 3)


def test_values_on_different_kinds_of_device_are_refused() -> None:
    here = inspected(CPU, meta=False)
    notes = [here.notes(), {"ties": (), "meta": False, "device": "cuda"}]
    with pytest.raises(ValueError, match=r"params: are on cuda on rank 1, on cpu on rank 0"):
        here.on_one_kind(notes)


# --- process groups of gathers and scatters --------------------------------------------------------------------------


def apart(rank: int, world: int) -> tuple[list[str], set[str], set[str]]:
    """Train stage 3 with blocks gathered over a group of their own; return differences and the groups used."""
    results, used = [], []
    real = torch.ops._c10d_functional
    for own in (False, True):
        gathers: set[str] = set()
        scatters: set[str] = set()

        class Ops:
            def __getattr__(self, name: str, gathers: set[str] = gathers, scatters: set[str] = scatters) -> Any:
                def call(*args: Any) -> Any:
                    if name == "all_to_all_single":
                        scatters.add(args[-1])
                    return getattr(real, name)(*args)

                return call

        def all_gather(shard: Tensor, size: int, group: str, gathers: set[str] = gathers) -> Tensor:
            if shard.numel() * world >= 36:
                gathers.add(group)
            return direct.all_gather(shard, size, group)  # type: ignore[no-any-return]

        patched = mock.patch.object(fzero.Zero, "_gathers_apart", return_value=own)
        seen = mock.patch("fzero.collectives.direct", types.SimpleNamespace(all_gather=all_gather, AVAILABLE=True))
        with patched, seen, mock.patch("fzero.collectives._ops", Ops()):
            torch.manual_seed(0)
            loss_fn, params, _ = fzero.from_module(nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))), F.mse_loss)
            engine = fzero.Zero(loss_fn, fzero.adamw(0.01), 3)
            state = engine.init(params)
            for step in range(2):
                x = numbers(4, 6, seed=10 * rank + step, dtype=torch.float32)
                state, metrics = engine.step(state, (x, x.flip(0)))
            used.append((gathers, scatters))
            results.append(named({"params": engine.params(state), "metrics": metrics}))
    assert used[0][0] == used[0][1]
    return differing(results[1], results[0]), *used[1]


@pytest.mark.ranks
def test_blocks_gathered_over_a_group_of_their_own_give_the_same_bits() -> None:
    for different, gathers, scatters in ranks.run(apart, 2):
        assert not different
        assert len(scatters) == 1
        assert gathers - scatters
    cuda, cpu = CUDA, CPU
    native = fzero.Zero(lambda params, _: params.sum(), fzero.sgd(0.1), 3, blocks=["a"])
    assert native._axis.backend("cpu") == ""
    assert native._gathers_apart(cuda)
    assert not native._gathers_apart(cpu)
    assert not fzero.Zero(lambda params, _: params.sum(), fzero.sgd(0.1), 2)._gathers_apart(cuda)
    assert with_own_group(native._axis) is native._axis


# --- compilation -----------------------------------------------------------------------------------------------------


def test_cuda_graphs_are_refused_and_no_global_setting_turns_them_on() -> None:
    with pytest.raises(TypeError, match=r"compile: must be True or False, got 'reduce-overhead'.*CUDA graphs"):
        ENGINE(squares, fzero.sgd(0.1), compile="reduce-overhead")
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        for stage in range(4):
            options = compile_options(stage, fzero.Overlap(), 0)
            assert options["triton.cudagraphs"] is False
            compiler = torch._TorchCompileInductorWrapper("default", options, None)
            assert compiler.config["triton.cudagraphs"] is False


def queued(rank: int, world: int, one_device: bool) -> tuple[int, float]:  # noqa: ARG001  (the launcher passes it)
    device = torch.device("cuda", 0 if one_device else rank)
    axis = axis_of(None)
    with mock.patch.object(Axis, "device", device):
        queue = Queue(dataclasses.replace(axis))
        started = time.monotonic()
        if rank and one_device:
            time.sleep(0.5)  # rank 0 is the first
        with queue("whole", first=False):
            queue.wait(fx.Graph())
            turns = len(queue._done)
            if not rank:
                time.sleep(1.5)  # compiles
    return turns, time.monotonic() - started


@pytest.mark.ranks
@pytest.mark.parametrize("one_device", [True, False])
def test_ranks_wait_only_for_who_compiles_for_the_same_device(one_device: bool) -> None:
    (first, _), (second, waited) = ranks.run(queued, 2, one_device)
    assert first == 1
    assert second == (0 if one_device else 1)
    assert (waited > 1.2) is one_device


# --- random numbers of recomputed functions --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def draw() -> Iterator[Any]:
    """Return an operation with the signature of CUDA's fused attention: tensors, sizes, and nothing in one place."""
    library: Any = torch.library.Library("fzero_tests", "DEF")  # type: ignore[no-untyped-call]
    library.define(
        "draw(Tensor x, float dropout_p=0.0) -> (Tensor, SymInt, Tensor?, Tensor)",
        tags=(torch.Tag.nondeterministic_seeded,),
    )

    def run(x: Tensor, dropout_p: float = 0.0) -> tuple[Tensor, int, None, Tensor]:
        mask = (torch.rand_like(x) >= dropout_p).to(x.dtype)
        return x * mask, x.numel(), None, mask

    library.impl("draw", run, "CPU")
    yield torch.ops.fzero_tests.draw
    library._destroy()


@pytest.mark.parametrize("dropout", [0.5, 0.0])
def test_what_is_drawn_beside_sizes_and_missing_tensors_is_replayed(draw: Any, dropout: float) -> None:
    fixed, seen = torch.ones(64), []

    def function(x: Tensor) -> Tensor:
        mask, count, nothing, _ = draw(fixed, dropout)
        assert nothing is None
        seen.append(mask.clone())
        out: Tensor = x * x * mask * count / 64
        return out

    x = torch.arange(1.0, 65.0)
    gradient = torch.func.grad(lambda x: fzero.remat(function)(x).sum())(x)
    assert len(seen) == 2
    assert torch.equal(gradient, 2 * x * seen[0])
    assert (seen[0] == 0).any() == (dropout > 0)
    assert torch.equal(seen[0], seen[1])


def test_attention_without_dropout_is_computed_again_and_not_kept() -> None:
    from fzero.recompute import _Record

    query = torch.randn(1, 2, 16, 8)
    with _Record() as record:
        torch.func.grad(lambda q: F.scaled_dot_product_attention(q, query, query).sum())(query)
        assert not record.drawn
        F.dropout(query, 0.5)
    assert record.drawn
