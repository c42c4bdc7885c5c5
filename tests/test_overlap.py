"""Where a compiled step has its collectives never changes its numbers."""

import types
import warnings
from typing import Any
from unittest import mock

import optree
import pytest
import ranks
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trees import ADAMW, far, named, numbers

import fzero
from fzero.overlap import compile_options


class Dropping(nn.Module):
    """Layers with a tie and dropout, and leaves outside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Dropout(0.2), nn.LayerNorm(12)) for _ in range(3)
        )
        self.last = nn.Linear(12, 12)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)  # type: ignore[no-any-return]


def train(rank: int, stage: int, **settings: Any) -> Any:
    torch.manual_seed(0)
    loss_fn, params, _ = fzero.from_module(Dropping(), F.mse_loss)
    engine = fzero.Zero(loss_fn, fzero.adamw(0.001, **ADAMW), stage, bucket_bytes=300, **settings)
    state = engine.init(params)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        batch = (numbers(6, 12, seed=rank + step, dtype=torch.float32), torch.ones(6, 12))
        state, metrics = engine.step(state, batch)
    moments = engine.opt_state(state)
    return engine.params(state), moments.exp_avg, moments.exp_avg_sq, metrics.loss, metrics.grad_norm


OVERLAPS = (fzero.Overlap(), fzero.Overlap(prefetch=0, in_flight=0), fzero.Overlap(prefetch=3, in_flight=4))


def compare(rank: int, world: int, stage: int, accumulate: int) -> list[str]:  # noqa: ARG001  (the launcher passes it)
    torch._inductor.config.compile_threads = 1
    # dropout draws other numbers than eagerly, but the same at every setting
    with torch._inductor.config.patch(fallback_random=True):
        found = []
        theirs = train(rank, stage, accumulate=accumulate)
        for overlap in OVERLAPS:
            ours = train(rank, stage, accumulate=accumulate, compile=True, overlap=overlap)
            for number, (mine, right) in enumerate(zip(ours, theirs, strict=True)):
                found += [f"{overlap} {number} {leaf}" for leaf in far(named({"a": mine}), named({"a": right}))]
    return found


@pytest.mark.ranks
@pytest.mark.compile
@pytest.mark.parametrize(
    ("stage", "accumulate"),
    [(3, 1), *(pytest.param(*pair, marks=pytest.mark.long) for pair in ((1, 1), (2, 1), (3, 2)))],
)
def test_every_setting_equals_eager(stage: int, accumulate: int) -> None:
    for found in ranks.run(compare, 2, stage, accumulate, limit=400.0):
        assert not found, f"{len(found)}, first {found[:4]}"


@pytest.mark.parametrize("wrong", [{"prefetch": -1}, {"in_flight": -1}, {"in_flight": 1.5}, {"prefetch": True}])
def test_bad_settings_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"overlap: {next(iter(wrong))} must be None or an integer of at least 0"):
        fzero.Overlap(**wrong)
    with pytest.raises(TypeError, match=r"overlap: must be a fzero\.Overlap"):
        fzero.Zero(lambda params, _: params.sum(), fzero.sgd(0.1), overlap=1)  # type: ignore[arg-type]


def test_a_torch_without_the_hook_is_told_once_and_gives_no_unknown_option() -> None:
    known = torch._inductor.config.get_config_copy()
    for name in ("post_grad_custom_post_pass", "unsafe_marked_cacheable_functions"):
        assert name in known
        del known[name]
    with (
        mock.patch("fzero.overlap.config", types.SimpleNamespace(get_config_copy=lambda: known)),
        pytest.warns(UserWarning, match="do not overlap"),
    ):
        options = compile_options(2, fzero.Overlap(), 0)
    assert set(options) <= set(known)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "post_grad_custom_post_pass" in compile_options(2, fzero.Overlap(), 0)
    everything: Any = options
    assert all(value is False for value in optree.tree_leaves(everything))


def other_order(rank: int, world: int) -> str:  # noqa: ARG001  (the launcher passes it)
    """Return what a rank is told whose loss function gathers equal blocks in another order."""
    torch._inductor.config.compile_threads = 1

    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        order = ("a", "b") if rank == 0 else ("b", "a")
        for name in order:
            batch = fzero.block(lambda weight, x: torch.tanh(x @ weight))(params[name], batch)
        return batch.square().mean()

    engine = fzero.Zero(loss_fn, fzero.sgd(0.1), 3, blocks=["a", "b"], compile=True)
    state = engine.init({name: torch.eye(4) for name in ("a", "b")})
    try:
        engine.step(state, torch.ones(2, 4))
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.ranks
@pytest.mark.compile
def test_b13_ranks_that_gather_in_another_order_are_told_before_anything_runs() -> None:
    """Their blocks are equally large: the collectives would match, and mix up the parameters."""
    for told in ranks.run(other_order, 2, limit=120):
        assert "the ranks differ, and none of them goes on" in told
        assert "same blocks in the same order on all ranks" in told
