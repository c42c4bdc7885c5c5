"""Full parameters as one safetensors file, read back by the safetensors package."""

import importlib
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run
from saved import module_engine, module_step, tree_engine, tree_step
from torch import Tensor, nn
from trees import TiedGPT, differing, named, next_token_loss, numbers

import fzero


def load_file(path: Path) -> dict[str, Tensor]:
    """Read it as users do."""
    reader: Any = importlib.import_module("safetensors.torch")
    found: dict[str, Tensor] = reader.load_file(path)
    return found


def ties_in(path: Path) -> Any:
    reader: Any = importlib.import_module("safetensors")
    with reader.safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    return json.loads(metadata["ties"])


def exported(rank: int, world: int, folder: str) -> list[dict[str, Tensor]]:  # noqa: ARG001
    found = []
    for stage in range(4):
        made = tree_step(tree_engine(5, stage, 600), rank, 0)
        fzero.export(f"{folder}/tree-{stage}.safetensors", made.engine, made.state)
        found.append(named(made.engine.params(made.state)))
        made, _ = module_step(module_engine("hooked", 5, stage, 600), rank, 0)
        fzero.export(f"{folder}/pile-{stage}.safetensors", made.engine)
        found.append(dict(made.engine.params()))
    return found


@pytest.mark.ranks
def test_an_export_is_every_leaf_once_with_ties_recorded(tmp_path: Path) -> None:
    # B39
    found = run(exported, 3, str(tmp_path))[0]
    for stage in range(4):
        for kind, full, ties in (
            ("tree", found[2 * stage], {"rest.w": "rest.tied"}),
            ("pile", found[2 * stage + 1], {}),
        ):
            path = tmp_path / f"{kind}-{stage}.safetensors"
            loaded = load_file(path)
            assert differing(loaded, {name: leaf for name, leaf in full.items() if name not in ties}) == []
            assert ties_in(path) == ties
            unique = sum(leaf.numel() * leaf.element_size() for leaf in loaded.values())
            assert unique < os.path.getsize(path) < unique + 8000  # noqa: PTH202
            assert not list(tmp_path.glob("*.part"))


def tied(rank: int, world: int, folder: str) -> dict[str, Tensor]:  # noqa: ARG001
    torch.manual_seed(3)
    module = TiedGPT()
    tokens = torch.arange(12).view(2, 6) % 11
    loss_fn, params, _ = fzero.from_module(module, next_token_loss)
    engine = fzero.Zero(loss_fn, fzero.adamw(0.01), 2, precision=fzero.Precision.bf16)
    state, _ = engine.step(engine.init(params), (tokens[:, :-1], tokens[:, 1:]))
    fzero.export(f"{folder}/functional.safetensors", engine, state)
    hooked = fzero.HookedZero(module, fzero.adamw(0.01), 3, precision=fzero.Precision.bf16)
    hooked.backward(next_token_loss(hooked(tokens[:, :-1]), tokens[:, 1:]))
    hooked.step()
    fzero.export(f"{folder}/hooked.safetensors", hooked)
    return dict(engine.params(state))


@pytest.mark.ranks
def test_a_plain_module_loads_an_export_and_an_engine_starts_from_a_plain_state_dict(tmp_path: Path) -> None:
    # B29, B39
    full = run(tied, 2, str(tmp_path))[0]
    for kind in ("functional", "hooked"):
        path = tmp_path / f"{kind}.safetensors"
        ties, loaded = ties_in(path), load_file(path)
        assert ties == {"head.weight": "tokens.weight"}
        assert differing(loaded, full) == []
        module = TiedGPT()
        module.load_state_dict({**loaded, **{name: loaded[source] for name, source in ties.items()}})
        assert module.head.weight is module.tokens.weight
        assert differing(dict(module.named_parameters()), full) == []
        # and back: either engine starts from what a plain module loaded
        plain = TiedGPT()
        plain.load_state_dict(module.state_dict())
        loss_fn, params, _ = fzero.from_module(plain, next_token_loss)
        engine = fzero.Zero(loss_fn, fzero.adamw(0.01))
        assert differing(dict(engine.params(engine.init(params))), full) == []
        assert differing(dict(fzero.HookedZero(plain, fzero.adamw(0.01)).params()), full) == []


def test_views_of_one_buffer_and_every_dtype(tmp_path: Path) -> None:
    # B39
    buffer = numbers(100, seed=1, dtype=torch.float32)
    params = {
        "one": buffer[:60].view(6, 10),
        "two": buffer[60:],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.zeros(0, 3, dtype=torch.float64),
        "ids": torch.arange(5),
        "flags": torch.tensor([True, False]),
        "lone": torch.tensor(2.5, dtype=torch.float16),
    }
    engine = fzero.Zero(lambda params, x: params["one"].sum() * x.sum(), fzero.adamw(0.01))
    path = tmp_path / "all.safetensors"
    fzero.export(path, engine, engine.init(params))
    assert differing(load_file(path), params) == []
    assert ties_in(path) == {}


def failing(rank: int, world: int, folder: str) -> str:  # noqa: ARG001
    made = module_engine("functional", 1, 1, 600)
    path = Path(folder, "all.safetensors")
    fzero.export(path, made.engine, made.state)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="there is no directory" if rank == 0 else "rank 0 failed with ValueError"):
        fzero.export(f"{folder}/nowhere/all.safetensors", made.engine, made.state)
    big = fzero.Zero(lambda params, x: params["w"].sum() * x, fzero.adamw(0.01))
    state = big.init({"w": torch.ones(10**6)})
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, resource.RLIM_INFINITY))
    with pytest.raises(fzero.CheckpointError) as caught:
        fzero.export(path, big, state)
    assert path.read_bytes() == before
    assert [file.name for file in Path(folder).iterdir()] == [path.name]
    return str(caught.value)


@pytest.mark.ranks
def test_an_export_that_fails_fails_on_all_ranks_and_keeps_the_old_file(tmp_path: Path) -> None:
    for message in run(failing, 2, str(tmp_path)):
        assert "cannot be written: [Errno 27] File too large" in message


def test_an_export_of_what_safetensors_does_not_know_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    module.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False))
    engine = fzero.HookedZero(module, fzero.adamw(0.01))
    with pytest.raises(
        ValueError, match=r"parameter 'phase' has dtype torch.complex64, which safetensors does not know"
    ):
        fzero.export(tmp_path / "x.safetensors", engine)
