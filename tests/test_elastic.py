"""Runs of the examples whose ranks are killed or asked to end."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_examples import FEW_IMAGES, ROOT, SHORT, TORCHRUN, TRAIN_GPT, TRAIN_RESNET, finish, run, start
from trees import same_bits

import fzero

pytestmark = [
    pytest.mark.example,
    pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks of a program in /proc"),
]

RUN = [*TRAIN_GPT, *SHORT, "--rate", "0.005", "--dropout", "0.1"]


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes that a program has started as ranks, oldest first."""
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    found = []
    for child in map(int, text.split()):
        command = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        if "--checkpoint" in command or any("spawn_main" in word for word in command):
            found.append(child)
    return sorted(found)


def wait_for(root: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait for a complete checkpoint of at least this step."""
    deadline = time.monotonic() + 100
    while process.poll() is None and time.monotonic() < deadline:
        latest = fzero.latest(root)
        if latest is not None and int(latest.name.removeprefix("step-")) >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"no step {step} under {root}\n{finish(process, 1)}")


def digest(output: str) -> str:
    found = re.search(r"^parameters: SHA-256 (\w{64})$", output, re.MULTILINE)
    assert found, output
    return found[1]


@pytest.mark.timeout(400)
def test_a_run_whose_ranks_are_killed_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    code, output = run([*RUN, "--steps", "60"])
    assert code == 0, output
    expected = digest(output)
    root = tmp_path / "checkpoints"
    process = start(
        [*TORCHRUN, "--max-restarts", "2", *RUN, "--steps", "60", "--checkpoint", str(root), "--save-every", "4"]
    )
    source = random.Random(5)  # noqa: S311
    for victim, step in ((1, source.randint(4, 20)), (0, source.randint(28, 44))):
        wait_for(root, step, process)
        time.sleep(source.uniform(0, 0.1))
        os.kill(ranks_of(process)[victim], signal.SIGKILL)
    output = finish(process, 250)
    assert process.returncode == 0, output
    assert len(re.findall(r"^resumed from .*step-000000\d\d$", output, re.MULTILINE)) == 2, output
    assert digest(output) == expected
    assert len(list(root.iterdir())) == 3  # --keep


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "torchrun", [pytest.param(False, marks=pytest.mark.long, id="program"), pytest.param(True, id="rank")]
)
def test_sigterm_saves_and_the_run_goes_on_with_other_ranks(torchrun: bool, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    options = ["--checkpoint", str(root), "--save-every", "5", "--steps", "100000"]
    process = start([*(TORCHRUN if torchrun else []), *RUN, *options])
    wait_for(root, 5, process)
    # torchrun's rank 1 alone, or the program that has started the ranks
    os.kill(ranks_of(process)[1] if torchrun else process.pid, signal.SIGTERM)
    output = finish(process, 60)
    assert process.returncode == 0, output
    found = re.search(r"^asked to end: step (\d+) is saved in", output, re.MULTILINE)
    assert found, output
    latest = fzero.latest(root)
    assert latest is not None
    assert latest.name == f"step-{int(found[1]):08d}"
    steps = str(int(found[1]) + 5)
    code, output = run([*RUN, "--checkpoint", str(root), "--ranks", "3", "--steps", steps], 120)
    assert code == 0, output
    assert f"resumed from {latest}" in output
    assert (root / f"step-{int(steps):08d}" / "manifest.json").is_file()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_sigterm_without_a_peer_ends_with_an_error_and_nothing_in_part(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    process = start([*RUN, "--checkpoint", str(root), "--save-every", "5", "--steps", "100000"])
    wait_for(root, 10, process)
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGKILL)
    os.kill(ranks[0], signal.SIGTERM)
    output = finish(process, 60)
    assert process.returncode == 1, output
    assert "asked to end" not in output
    latest = fzero.latest(root)
    assert latest is not None
    code, output = run([*RUN, "--checkpoint", str(root), "--steps", str(int(latest.name[5:]) + 1)], 120)
    assert code == 0, output
    assert f"resumed from {latest}" in output


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_sigterm_to_a_rank_that_is_left_alone_ends_it_with_an_error(
    victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody starts these ranks but the test, so that nobody ends the one that is left."""
    root = tmp_path / "checkpoints"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    processes = []
    with monkeypatch.context() as patch:
        for rank in range(2):
            for name, value in {**address, "RANK": str(rank)}.items():
                patch.setenv(name, value)
            # rarely: a save that is under way waits for the other rank as long as the store's limit, five minutes
            processes.append(start([*RUN, "--checkpoint", str(root), "--save-every", "300", "--steps", "100000"]))
    left = processes[1 - victim]
    try:
        wait_for(root, 300, left)
        processes[victim].kill()
        left.send_signal(signal.SIGTERM)
    finally:
        processes[victim].kill()
        finish(processes[victim], 10)
        output = finish(left, 60)
    assert left.returncode == 1, output
    assert "asked to end" not in output
    assert "Traceback" in output
    latest = fzero.latest(root)
    assert latest is not None
    assert list(root.iterdir()) == [latest]
    code, output = run([*RUN, "--checkpoint", str(root), "--steps", "301"], 120)
    assert code == 0, output
    assert f"resumed from {latest}" in output


@pytest.mark.long
@pytest.mark.timeout(300)
def test_resnet_goes_on_with_the_other_engine_to_the_same_bits(tmp_path: Path) -> None:
    resnet = [*TRAIN_RESNET, *FEW_IMAGES, "--epochs", "2", "--batches", "5"]
    saves = ["--save-every", "3", "--keep", "9", "--checkpoint"]
    roots = [tmp_path / name for name in ("whole", "parts")]
    code, output = run([*resnet, "--engine", "hooked", *saves, str(roots[0])])
    assert code == 0, output
    (roots[1]).mkdir()
    (roots[0] / "step-00000006").rename(roots[1] / "step-00000006")
    code, output = run([*resnet, "--engine", "functional", "--stage", "3", *saves, str(roots[1])])
    assert code == 0, output
    assert "resumed from" in output
    assert sorted(path.name for path in roots[1].iterdir()) == ["step-00000006", "step-00000009", "step-00000010"]
    whole, parts = (state(root / "step-00000010") for root in roots)
    assert set(whole) == set(parts)
    assert [name for name in whole if not same_bits(whole[name], parts[name])] == []


def state(directory: Path) -> dict[str, torch.Tensor]:
    """Return all leaves of a checkpoint but what a rank has of its own, read by torch."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(directory, directory / "all.pt")
    found = torch.load(directory / "all.pt", weights_only=True)
    leaves = {f"params.{name}": leaf for name, leaf in found["params"].items()}
    leaves |= {f"buffers.{name}": leaf for name, leaf in found["buffers"].items()}
    return leaves | {f"exp_avg.{name}": leaf for name, leaf in found["opt_state"]["exp_avg"].items()}


def test_bad_options_are_refused() -> None:
    for program in (TRAIN_GPT, TRAIN_RESNET):
        code, output = run([*program, "--save-every", "3"], 60)
        assert code == 2, output
        assert "--save-every: where to? pass --checkpoint DIR" in output


def test_the_checkpoint_benchmark_compares_both(tmp_path: Path) -> None:
    program = [str(ROOT / "examples" / "benchmark_checkpoint.py"), "--device", "cpu", "--folder", str(tmp_path)]
    code, output = run([*program, "--width", "64", "--layers", "4", "--rounds", "1"], 120)
    assert code == 0, output
    assert re.findall(r"^(fsdp2|fzero) +[\d.]+ +[\d.]+", output, re.MULTILINE) == ["fsdp2", "fzero"]
    assert list(tmp_path.iterdir()) == []
    code, output = run([*program, "--ranks", "1"], 60)
    assert code == 2, output
    assert "one rank has nothing to shard; use --ranks 2 or more" in output
