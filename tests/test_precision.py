"""Storage, compute and reduction in other dtypes, in both engines."""

from collections.abc import Callable
from typing import Any

import optree
import pytest
import ranks
import torch
from both import ENGINES, Kind, opt, unequal
from collectives import is_collective
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from trees import ADAMW, TiedGPT, next_token_loss, numbers

import fzero

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
STAGES = (0, 1, 2, 3)

# --- the same bits at every stage, in both engines -------------------------------------------------------------------


class Mixer(nn.Module):
    """A perceptron with buffers, whose inputs are floating."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 5)])
        self.register_buffer("seen", torch.zeros(()))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        for part in self.parts:
            x = torch.tanh(part(x))
        return self.last(x)  # type: ignore[no-any-return]


def vectors(rank: int, step: int) -> tuple[Tensor, Tensor]:
    seed = 100 * rank + step
    return numbers(6, 5, seed=seed, dtype=F32), numbers(6, 3, seed=seed + 50, dtype=F32)


def texts(rank: int, step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 11, (6, 6), generator=torch.Generator().manual_seed(100 * rank + step))
    return tokens[:, :-1], tokens[:, 1:]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


def wide_next_token(logits: Tensor, targets: Tensor) -> Tensor:
    return next_token_loss(logits.float(), targets)


def half_given() -> nn.Module:
    """Parameters that are given in bfloat16: computed with so, masters in float32."""
    return Mixer().to(BF16)


PRECISIONS: dict[str, tuple[Callable[[], nn.Module], fzero.Precision]] = {
    "bf16": (Mixer, fzero.Precision.bf16),
    "given": (half_given, fzero.Precision(compute=BF16)),
    "no masters": (half_given, fzero.Precision(param=None, reduce=None, compute=BF16)),
    "wider": (Mixer, fzero.Precision(param=F64, compute=F32, reduce=F64)),
    "gpt": (TiedGPT, fzero.Precision.bf16),
}


def compare(rank: int, world: int, name: str) -> list[str]:  # noqa: ARG001  (the launcher passes it)
    make, precision = PRECISIONS[name]
    kind = Kind(make, wide_next_token, texts) if name == "gpt" else Kind(make, mean_square, vectors)
    found = []
    for settings in ({}, {"accumulate": 3, "clip_norm": 0.25, "bucket_bytes": 300}):
        runs = {
            (engine, stage): list(run(kind, stage, rank, 4, {**settings, "precision": precision}))
            for engine, run in ENGINES.items()
            for stage in STAGES
        }
        for (engine, stage), seen in runs.items():
            right = runs["functional", 0 if stage < 2 or not settings else 2]
            found += unequal(iter(seen), iter(right), f"{settings} {engine} stage {stage}")
    given = next(make().parameters()).dtype
    first = runs["functional", 2][0]
    stored = precision.stored(given)
    kinds = {"params": given, "exp_avg": stored, "grads": precision.reduced(precision.computed(given))}
    found += [
        f"{what} {leaf.dtype}" for what, dtype in kinds.items() for leaf in first[what].values() if leaf.dtype != dtype
    ]
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "name"),
    [
        *((world, "bf16") for world in (1, 2, 3)),
        *((2, name) for name in ("given", "no masters")),
        *(pytest.param(2, name, marks=pytest.mark.long) for name in ("wider", "gpt")),
    ],
)
def test_stages_and_engines_agree_to_the_bit(world: int, name: str) -> None:
    for found in ranks.run(compare, world, name, limit=120.0):
        assert not found, f"{len(found)} differ, first {found[:5]}"


# --- what the dtypes are for -----------------------------------------------------------------------------------------


@fzero.block
def steady(params: Any, x: Tensor) -> Any:
    """Return a loss whose gradient is one everywhere."""
    return params["w"]["v"].sum().float() * x.mean()


def masters(rank: int, world: int) -> list[Any]:  # noqa: ARG001
    """Train a leaf of ones by a gradient of ones, as B19 says."""
    results = []
    for stage in STAGES:
        for precision in (fzero.Precision(), fzero.Precision(param=None)):
            engine = fzero.Zero(
                steady,
                fzero.adamw(6e-4, weight_decay=0.0),
                stage,
                blocks=["w"],
                precision=precision,
            )
            state = engine.init({"w": {"v": torch.ones(9, dtype=BF16)}})
            for _ in range(100):
                state, _ = engine.step(state, torch.ones(2))
            moments = engine.opt_state(state).exp_avg["w"]["v"]
            results.append((engine.params(state)["w"]["v"], moments.dtype, state.params[0][0].float()))
    return results


@pytest.mark.ranks
def test_b19_masters_keep_small_updates_of_16_bit_parameters() -> None:
    """0.94 after a hundred steps, as AdamW in float32; the parameter is that, rounded. Without masters still 1."""
    right = torch.ones(9, requires_grad=True)
    optimizer = torch.optim.AdamW([right], lr=6e-4, weight_decay=0.0, foreach=False)
    for _ in range(100):
        right.grad = torch.ones(9)
        optimizer.step()
    assert abs(float(right[0].detach()) - 0.94) < 1e-4
    for results in ranks.run(masters, 2):
        for with_masters, without in zip(results[::2], results[1::2], strict=True):
            param, dtype, master = with_masters
            assert dtype == F32
            assert torch.equal(master, right[0].detach())
            assert torch.equal(param, right.detach().to(BF16))
            assert without[1] == BF16
            assert torch.equal(without[0], torch.ones(9, dtype=BF16))


class Small(nn.Module):
    """A weight whose gradient is the mean of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(1, 1, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[0](x).mean()  # type: ignore[no-any-return]


def many_micro_batches(rank: int, world: int) -> list[float]:  # noqa: ARG001
    """Return the sum of 1024 gradients of bfloat16(0.001), by stage and engine."""
    inputs, found = torch.full((1024, 1), 0.001), []
    for stage in STAGES:
        loss_fn, params, _ = fzero.from_module(Small(), lambda out, _: out)
        zero = fzero.Zero(loss_fn, opt(), stage, accumulate=1024, precision=fzero.Precision.bf16)
        grads, _ = zero.grads(zero.init(params), (inputs, torch.zeros(1024)))
        found.append(float(next(iter(grads.values()))) * 1024)
        for quiet in (False, True) if stage in (0, 2) else ():  # the others collect in the same way
            engine = fzero.HookedZero(Small(), opt(), stage, precision=fzero.Precision.bf16)
            for number in range(1024):
                if quiet and number < 1023:
                    with engine.no_sync():
                        engine.backward(engine(inputs[number : number + 1]))
                elif quiet or number % 16 == 15 or stage >= 2:
                    engine.backward(engine(inputs[number : number + 1]))
                else:
                    with engine.no_sync():
                        engine.backward(engine(inputs[number : number + 1]))
            grad = next(iter(engine.grads().values()))
            assert grad is not None
            found.append(float(grad) * 1024)
    return found


@pytest.mark.ranks
def test_b16_sums_over_micro_batches_are_in_float32() -> None:
    """1.0234; in bfloat16 the sum would stop at 0.5."""
    for found in ranks.run(many_micro_batches, 2, limit=200.0):
        assert all(abs(value - 1.0234) < 0.001 for value in found), found


def many_ranks(rank: int, world: int) -> list[Tensor]:  # noqa: ARG001
    inputs, found = torch.full((1, 1), 256.0 if rank == 0 else 0.5), []
    for stage in (0, 2, 3):
        loss_fn, params, _ = fzero.from_module(Small(), lambda out, _: out)
        for reduce in (F32, None):
            engine = fzero.Zero(loss_fn, opt(), stage, precision=fzero.Precision(compute=BF16, reduce=reduce))
            grads, _ = engine.grads(engine.init(params), (inputs, torch.zeros(1)))
            found.append(next(iter(grads.values())).flatten()[0])
    return found


@pytest.mark.ranks
def test_b16_many_small_contributions_beside_a_large_one() -> None:
    """(256 + 7 x 0.5) / 8 in float32; with sums rounded to bfloat16, 260 / 8 rounded."""
    for found in ranks.run(many_ranks, 8, limit=200.0):
        for wide, narrow in zip(found[::2], found[1::2], strict=True):
            assert float(wide) == (256 + 3.5) / 8
            assert narrow.dtype == BF16
            assert float(narrow) == 32.5


# --- bytes -----------------------------------------------------------------------------------------------------------


class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what collectives are given, in bytes, by operation; the 40 bytes of control do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if is_collective(func) and name != "wait_tensor" and args[0].numel() != 5:
            self.bytes[name] = self.bytes.get(name, 0) + args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def count_bytes(rank: int, world: int) -> dict[Any, dict[str, int]]:  # noqa: ARG001
    found = {}
    for stage in (1, 2, 3):
        for name, precision in (("fp32", fzero.Precision.fp32), ("bf16", fzero.Precision.bf16)):
            loss_fn, params, _ = fzero.from_module(TiedGPT(), wide_next_token)
            engine = fzero.Zero(loss_fn, opt(), stage, precision=precision)
            state = engine.init(params)
            state, _ = engine.step(state, texts(rank, 0))
            with Sent() as sent:
                engine.step(state, texts(rank, 1))
            found[stage, name] = sent.bytes
    return found


@pytest.mark.ranks
def test_half_the_bytes_with_bf16() -> None:
    for found in ranks.run(count_bytes, 2):
        for stage in (1, 2, 3):
            wide, narrow = found[stage, "fp32"], found[stage, "bf16"]
            assert set(wide) == set(narrow) == {"all_gather", "all_to_all_single"}
            assert all(2 * narrow[name] == wide[name] > 0 for name in wide)


# --- compiled, evaluate, errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_compiled_is_eager(stage: int, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within what bfloat16 resolves; masters and moments are float32."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **_: real(fn, fullgraph=True, backend="aot_eager"))
    runs = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        loss_fn, params, buffers = fzero.from_module(Mixer(), mean_square)
        engine = fzero.Zero(
            loss_fn,
            fzero.adamw(0.01, **ADAMW),
            stage,
            accumulate=accumulate,
            compile=compile_it,
            precision=fzero.Precision.bf16,
        )
        state = engine.init(params, buffers)
        for step in range(3):
            state, metrics = engine.step(state, vectors(0, step))
        loss, _ = engine.evaluate(state, vectors(0, 7))
        runs.append((state, metrics.loss, metrics.grad_norm, loss))
    everything: Any = runs
    for ours, theirs in zip(optree.tree_leaves(everything[1]), optree.tree_leaves(everything[0]), strict=True):
        assert ours.dtype == theirs.dtype != BF16
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def test_what_the_loss_function_sees() -> None:
    seen: list[torch.dtype] = []

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        seen.extend([params["w"].dtype, params["n"].dtype, x.dtype])
        return torch.sum(params["w"].float() * x)

    engine = fzero.Zero(loss_fn, fzero.sgd(0.1), precision=fzero.Precision.bf16)
    state = engine.init({"w": torch.ones(3), "n": torch.ones(2, dtype=torch.int64)})
    engine.evaluate(state, torch.ones(4, 3))
    assert seen == [BF16, torch.int64, F32]


@pytest.mark.parametrize("wrong", ["bf16", torch.bfloat16, None])
def test_other_things_than_a_precision_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"precision: must be a fzero\.Precision"):
        fzero.Zero(lambda params, _: params.sum(), fzero.sgd(0.1), precision=wrong)
    with pytest.raises(TypeError, match=r"precision: must be a fzero\.Precision"):
        fzero.HookedZero(nn.Linear(1, 1), fzero.sgd(0.1), precision=wrong)


@pytest.mark.parametrize("wrong", [torch.int8, torch.complex64, "float32"])
def test_dtypes_that_are_not_floating_are_refused(wrong: Any) -> None:
    for name in ("param", "compute", "reduce"):
        with pytest.raises(TypeError, match=f"precision: {name} must be a floating dtype"):
            fzero.Precision(**{name: wrong})
