"""The public interface is frozen here: changing it means changing this file in the same commit."""

import inspect
import re
from pathlib import Path

import pytest

import fzero

README = Path(__file__).parents[1] / "README.md"

NAMES = {
    "AdamWState",
    "CheckpointError",
    "HookedZero",
    "Label",
    "LionState",
    "Mean",
    "Metrics",
    "Optimizer",
    "Overlap",
    "Precision",
    "SGDState",
    "Sharded",
    "State",
    "Zero",
    "adam",
    "adamw",
    "block",
    "constant",
    "export",
    "from_module",
    "latest",
    "lion",
    "load",
    "remat",
    "save",
    "sgd",
    "warmup_cosine",
    "warmup_linear",
}


def parameters(function: object) -> list[str]:
    assert callable(function)
    return [
        f"{p.name}={p.default}" if p.default is not p.empty else p.name
        for p in inspect.signature(function).parameters.values()
    ]


def test_names() -> None:
    modules = {path.stem for path in Path(fzero.__file__).parent.glob("*.py")}
    public = {name for name in vars(fzero) if not name.startswith("_")}
    assert public - (modules - NAMES) == NAMES


def test_engine_arguments_and_defaults() -> None:
    assert parameters(fzero.Zero) == [
        "loss_fn",
        "opt",
        "stage=2",
        "mesh=None",
        "blocks=None",
        f"precision={fzero.Precision()}",
        "clip_norm=None",
        "accumulate=1",
        f"bucket_bytes={25 * 2**20}",
        "buffer_policy=rank0",
        "compile=False",
        f"overlap={fzero.Overlap()}",
        "has_aux=False",
        "donate=True",
        "trainable=None",
    ]
    methods = {name: parameters(getattr(fzero.Zero, name))[1:] for name in vars(fzero.Zero) if not name.startswith("_")}
    assert methods == {
        "init": ["params", "buffers=None"],
        "step": ["state", "batch"],
        "request_stop": [],
        "grads": ["state", "batch"],
        "evaluate": ["state", "batch", "loss_fn=None"],
        "params": ["state"],
        "buffers": ["state"],
        "opt_state": ["state"],
    }


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (
            fzero.adamw,
            "learning_rate=0.001 betas=(0.9, 0.999) eps=1e-08 weight_decay=0.01 decay_mask=None rate_factor=None",
        ),
        (
            fzero.adam,
            "learning_rate=0.001 betas=(0.9, 0.999) eps=1e-08 weight_decay=0.0 decay_mask=None rate_factor=None",
        ),
        (fzero.sgd, "learning_rate momentum=0.0 nesterov=False weight_decay=0.0 decay_mask=None rate_factor=None"),
        (fzero.lion, "learning_rate=0.0001 betas=(0.9, 0.99) weight_decay=0.0 decay_mask=None rate_factor=None"),
        (fzero.constant, "value"),
        (fzero.warmup_linear, "peak warmup_steps total_steps final=0.0"),
        (fzero.warmup_cosine, "peak warmup_steps total_steps final=0.0"),
        (fzero.from_module, "module criterion blocks=None"),
        (fzero.save, "root engine state=None step=None extra=None keep=None blocking=True"),
        (fzero.load, "directory engine"),
        (fzero.latest, "root"),
        (fzero.export, "path engine state=None"),
        (fzero.block, "fn"),
        (fzero.remat, "fn"),
        (fzero.Mean, "total count"),
        (fzero.Metrics, "loss grad_norm skipped step stop aux=None"),
        (fzero.State, "params opt_state buffers fixed step"),
        (fzero.Optimizer, "init update labels"),
        (fzero.AdamWState, "step exp_avg exp_avg_sq"),
    ],
)
def test_signatures(function: object, arguments: str) -> None:
    assert " ".join(parameters(function)) == arguments


def test_the_training_loop_of_the_readme_runs_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 22
    exec(code, {})  # noqa: S102  (our own README)
    loss = re.search(r"loss ([0-9.]+) after 200 steps", capsys.readouterr().out)
    assert loss is not None
    assert float(loss[1]) < 0.2


def test_the_stage_three_example_of_the_readme_runs() -> None:
    import torch

    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[2]
    names: dict[str, object] = {"fzero": fzero, "torch": torch}
    exec(code, names)  # noqa: S102
    engine = names["engine"]
    assert isinstance(engine, fzero.Zero)
    state = engine.init({"layers": [{"w": torch.eye(3)}, {"w": torch.eye(3)}]})
    _, metrics = engine.step(state, torch.ones(2, 3))
    assert int(metrics.step) == 1
    assert float(metrics.grad_norm) > 0
