"""What users have run into: each was once silently wrong or refused for no reason."""

from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import fzero

F = nn.functional


def steps(loss_fn: Any, params: Any, buffers: Any, batch: Any, stage: int, **settings: Any) -> tuple[Any, Any, Any]:
    engine = fzero.Zero(loss_fn, fzero.sgd(0.1), stage, **settings)
    state = engine.init(params, buffers)
    for _ in range(2):
        state, metrics = engine.step(state, batch)
    return engine.params(state), engine.buffers(state), metrics


def pair(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)


class Peeked(nn.Module):
    """Uses the parameters of its blocks without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            weight: Any = block.weight
            x = x + x @ weight
        return x


def test_a_block_s_parameter_outside_its_call_is_refused_by_name() -> None:
    loss_fn, params, _ = fzero.from_module(Peeked(), F.mse_loss)
    with pytest.raises(TypeError, match="the parameters of block 'weight' are sharded here"):
        steps(loss_fn, params, None, pair(), 3)
    assert torch.isfinite(steps(loss_fn, params, None, pair(), 2)[2].loss)


def test_hooks_of_a_block_run_once() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].register_forward_hook(lambda _module, _args, output: 2 * output)
    module[1].register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    loss_fn, params, _ = fzero.from_module(module, F.mse_loss)
    results = [steps(loss_fn, params, None, pair(), stage)[2] for stage in (0, 1, 2, 3)]
    assert len({float(metrics.loss) for metrics in results}) == 1
    assert len({float(metrics.grad_norm) for metrics in results}) == 1


class Counting(nn.Module):
    """Assigns to its buffer instead of writing into it."""

    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n = self.n + 1
        return self.w * x * self.n


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_buffer_that_is_assigned_changes(stage: int) -> None:
    loss_fn, params, buffers = fzero.from_module(nn.Sequential(Counting(), Counting()), F.mse_loss)
    _, after, _ = steps(loss_fn, params, buffers, pair(), stage)
    assert [float(value) for value in after.values()] == [2.0, 2.0]


@pytest.mark.compile
@pytest.mark.parametrize("donate", [True, False])
def test_compiled_buffers_keep_their_places(donate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: real(function, backend="aot_eager", fullgraph=True))

    def loss_fn(params: Any, buffers: Any, batch: Tensor) -> Any:
        return (batch @ params["w"]).square().mean(), {"m": buffers["m"] + 1, "a": buffers["a"] + 100}

    buffers = {"m": torch.zeros(2), "a": torch.zeros(2)}
    params = {"w": torch.ones(4, 4)}
    _, after, _ = steps(loss_fn, params, buffers, pair()[0], 2, compile=True, donate=donate)
    assert list(after) == ["m", "a"]
    assert after["m"].tolist() == [2, 2]
    assert after["a"].tolist() == [200, 200]


def test_an_input_changed_in_place_inside_remat_is_noticed() -> None:
    w, x = torch.ones(3, 3, requires_grad=True), torch.ones(2, 3)

    def changes(w: Tensor, x: Tensor) -> Tensor:
        return (x.mul_(2.0) @ w).tanh()

    with pytest.raises(RuntimeError, match=r"in-?place"):
        torch.autograd.grad(fzero.remat(changes)(w, x * 0.1).sum(), w)


@pytest.mark.parametrize("stage", [0, 2])
def test_aux_is_a_copy(stage: int) -> None:
    engine = fzero.Zero(lambda p, b: ((p["w"] * b).mean(), p["w"]), fzero.sgd(1.0), stage, has_aux=True)
    state = engine.init({"w": torch.zeros(2)})
    _, seen = engine.evaluate(state, torch.ones(1, 2))
    state, metrics = engine.step(state, torch.ones(1, 2))
    assert metrics.aux.tolist() == [[0.0, 0.0]]
    assert seen.tolist() == [0.0, 0.0]


def test_the_state_of_another_optimizer_is_refused() -> None:
    def loss_fn(params: Any, batch: Tensor) -> Any:
        return (params["w"] * batch).mean()

    params, batch = {"w": torch.zeros(2)}, torch.ones(1, 2)
    adam, sgd = (fzero.Zero(loss_fn, opt) for opt in (fzero.adamw(), fzero.sgd(0.1, 0.9)))
    ours, theirs = adam.init(params), sgd.init(params)
    for engine, state in ((adam, theirs), (sgd, ours)):
        with pytest.raises(ValueError, match="was not made by this engine"):
            engine.step(state, batch)
    any_tree: Any = ours
    wide: Any = optree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, any_tree)
    with pytest.raises(ValueError, match="was not made by this engine"):
        adam.step(wide, batch)


def test_new_buffers_under_other_keys_are_refused() -> None:
    engine = fzero.Zero(lambda p, b, x: ((p["w"] * x).mean(), {"other": b["n"]}), fzero.sgd(0.1))
    state = engine.init({"w": torch.zeros(2)}, {"n": torch.zeros(1)})
    with pytest.raises(ValueError, match="new_buffers must have the structure of the buffers"):
        engine.step(state, torch.ones(1, 2))


def test_inference_mode_is_refused() -> None:
    engine = fzero.Zero(lambda p, x: (p["w"] * x).mean(), fzero.sgd(0.1))
    state = engine.init({"w": torch.zeros(2)})
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        engine.step(state, torch.ones(1, 2))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_module_that_stands_twice_in_the_list_counts_as_outside(stage: int) -> None:
    twice, once = nn.Linear(4, 4), nn.Linear(4, 4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([twice, once, twice])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x).tanh()
            return x

    loss_fn, params, _ = fzero.from_module(Model(), F.mse_loss)
    assert loss_fn.blocks == ("blocks.1",)
    after, _, _ = steps(loss_fn, params, None, pair(), stage)
    expected, _, _ = steps(loss_fn, params, None, pair(), 0)
    assert all(torch.equal(after[name], expected[name]) for name in expected)


class Layered:
    """Decorated methods."""

    @fzero.block
    def block(self, params: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ params["w"])

    @fzero.remat
    def again(self, x: Tensor) -> Tensor:
        return x.square()


@pytest.mark.parametrize("stage", [2, 3])
def test_block_and_remat_decorate_methods(stage: int) -> None:
    model = Layered()

    def loss_fn(params: Any, batch: Tensor) -> Any:
        return model.again(model.block(params["layer"], batch)).mean()

    params = {"layer": {"w": torch.eye(4)}}
    engine = fzero.Zero(loss_fn, fzero.sgd(0.1), stage, blocks=["layer"])
    gradient, _ = engine.grads(engine.init(params), pair()[0])
    expected = torch.func.grad(lambda w: torch.tanh(pair()[0] @ w).square().mean())(params["layer"]["w"])
    assert torch.equal(gradient["layer"]["w"], expected)


ENGINE: Any = fzero.Zero
FROM_MODULE: Any = fzero.from_module
"""Untyped, to be called wrongly."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ENGINE(F.mse_loss, fzero.sgd(0.1), clip_norm="1"), "clip_norm: .*'1'"),
        (lambda: ENGINE(F.mse_loss, fzero.sgd(0.1), blocks=[1]), "blocks: each must be a plain path"),
        (lambda: ENGINE(F.mse_loss, fzero.sgd(0.1), compile="yes"), "compile: must be True or False, got 'yes'"),
        (lambda: ENGINE(F.mse_loss, fzero.sgd(0.1), 2.0), "stage: must be 0, 1, 2 or 3, got 2.0"),
        (lambda: FROM_MODULE(nn.Linear(2, 2), "mse"), "from_module: criterion must be a function"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.compile
def test_a_fault_of_the_optimizer_under_the_compiler_is_told_as_it_is() -> None:
    """Nothing that fzero does to find a clearer error hides it."""
    base = fzero.sgd(0.1)

    def update(*args: Any, **settings: Any) -> Any:
        if torch.compiler.is_compiling():
            raise ValueError("no update today")
        return base.update(*args, **settings)

    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        return (params["w"] * batch).sum()  # type: ignore[no-any-return]

    engine = fzero.Zero(loss_fn, base._replace(update=update), compile=True, accumulate=2)
    state = engine.init({"w": torch.ones(3)})
    with pytest.raises(torch._dynamo.exc.Unsupported, match="no update today"):
        engine.step(state, torch.ones(2, 3))
