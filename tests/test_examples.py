from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.example

ROOT = Path(__file__).parent.parent
TRAIN_GPT = [str(ROOT / "examples" / "train_gpt.py"), "--device", "cpu"]
SHORT = ["--layers", "2", "--width", "64", "--context", "64", "--batch", "4", "--steps", "30"]
TRAIN_RESNET = [str(ROOT / "examples" / "train_resnet.py"), "--data", "digits", "--device", "cpu"]
FEW_IMAGES = ["--width", "16", "--batch", "32", "--batches", "12", "--epochs", "1", "--rate", "0.003"]
ENGINES = ("hooked", "functional")
COMPARE = [str(ROOT / "examples" / "compare_engines.py"), "--device", "cpu"]
ADAMW = [str(ROOT / "examples" / "benchmark_adamw.py")]
BENCHMARK = [str(ROOT / "examples" / "benchmark.py"), "--device", "cpu"]
PEERS = ["ddp", "zero-redundancy", "fsdp2", "hooked-2", "zero-2", "zero-2-compiled"]
FEW_STEPS = ["--layers", "2", "--width", "64", "--context", "32", "--batch", "2", "--warmup", "2"]
ROUNDS, STEPS = 8, 3  # short rounds: in the quietest one, few of the bytes on loopback are of other programs
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    # A process group of its own, so that a program that hangs is ended together with its ranks and nothing else.
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float) -> str:
    # The pipe ends only when every process that holds it has ended: no rank is left behind.
    try:
        output, _ = process.communicate(timeout=seconds)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        error.add_note(process.communicate()[0])
        raise
    return output


def run(arguments: list[str], seconds: float = 400) -> tuple[int, str]:
    process = start(arguments)
    output = finish(process, seconds)
    return process.returncode, output


def refuses(arguments: list[str], message: str) -> None:
    code, output = run(arguments, 60)
    assert code == 2, output
    assert message in output
    assert "Traceback" not in output


def losses(output: str) -> tuple[float, float]:
    found = re.search(r"^validation loss: ([\d.]+) before, ([\d.]+) after", output, re.MULTILINE)
    assert found, output
    return float(found[1]), float(found[2])


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([*TRAIN_GPT, "--ranks", "2"], id="two-ranks"),
        pytest.param([*TRAIN_GPT, "--ranks", "1", "--accumulate", "2", "--dropout", "0.1"], id="one-process"),
        pytest.param([*TORCHRUN, *TRAIN_GPT, "--stage", "3"], id="torchrun"),
        pytest.param([*TRAIN_GPT, "--precision", "bf16"], id="bf16"),
        pytest.param([*TRAIN_GPT, "--stage", "3", "--compile"], id="compiled"),
    ],
)
def test_train_gpt_learns(arguments: list[str], tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    code, output = run([*arguments, *SHORT, "--rate", "0.005", "--plot", str(picture)])
    assert code == 0, output
    before, after = losses(output)
    assert 5 < before < 6
    assert after < before - 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "--- sample ---\nThe " in output


def test_train_gpt_fails_when_its_loss_is_too_high() -> None:
    code, output = run([*TRAIN_GPT, *SHORT, "--steps", "2", "--below", "0.1"])
    assert code == 1, output
    assert re.search(r"rank \d failed: .*Traceback.*AssertionError: the validation loss ended at", output, re.DOTALL)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("whole_group", [False, True], ids=["parent", "terminal"])
def test_train_gpt_is_interrupted(whole_group: bool) -> None:
    process = start([*TRAIN_GPT, *SHORT, "--steps", "1000000"])
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("step     0 ") for line in lines)
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    finally:
        output = finish(process, 60)
    assert process.returncode == 130, output
    assert "Traceback" not in output


def test_train_gpt_refuses_bad_arguments(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    missing = tmp_path / "missing"
    for arguments, message in (
        (["--text", str(missing)], f"--text {missing}: No such file or directory"),
        (["--text", str(short)], f"--text {short}: too short: 9 bytes, and --context 128 needs 1290"),
        (["--text", str(tmp_path)], f"--text {tmp_path}: Is a directory"),
        (["--width", "100"], "--width 100: must be a multiple of 32"),
        (["--steps", "0"], "--steps: must be at least 1, got 0"),
        (["--accumulate", "3"], "--batch 2: does not divide into --accumulate 3 equal parts"),
        (["--plot", str(missing / "loss.png")], f"there is no folder {missing}"),
    ):
        refuses([*TRAIN_GPT, *arguments], message)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([*TRAIN_RESNET, "--engine", "hooked"], id="hooked"),
        pytest.param([*TRAIN_RESNET, "--engine", "functional"], id="functional"),
        pytest.param([*TRAIN_RESNET, "--engine", "hooked", "--accumulate", "2", "--stage", "1"], id="accumulated"),
        pytest.param([*TORCHRUN, *TRAIN_RESNET, "--stage", "3"], id="torchrun"),
        pytest.param([*TRAIN_RESNET, "--ranks", "1"], id="one-process"),
    ],
)
def test_train_resnet_learns(arguments: list[str], tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    code, output = run([*arguments, *FEW_IMAGES, "--plot", str(picture)])
    assert code == 0, output
    found = re.search(r"^training loss: ([\d.]+) in the first quarter, ([\d.]+) in the last", output, re.MULTILINE)
    assert found, output
    assert float(found[2]) < float(found[1]) - 0.2
    assert "running statistics: equal on all ranks" in output
    assert re.search(r"^top-1: 0\.\d{3}\n\Z", output, re.MULTILINE), output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_train_resnet_gives_the_same_bits_with_either_engine() -> None:
    outputs = [run([*TRAIN_RESNET, *FEW_IMAGES, "--batches", "3", "--engine", kind]) for kind in ENGINES]
    assert [code for code, _ in outputs] == [0, 0], outputs
    digests = [re.findall(r"SHA-256 (\w+)", output) for _, output in outputs]
    assert len(digests[0]) == 1
    assert digests[0] == digests[1]


def test_train_resnet_fails_when_it_is_not_accurate_enough() -> None:
    code, output = run([*TRAIN_RESNET, *FEW_IMAGES, "--batches", "1", "--at-least", "0.95"])
    assert code == 1, output
    assert re.search(r"rank \d failed: .*Traceback.*AssertionError: top-1 ended at", output, re.DOTALL)


def test_train_resnet_refuses_bad_arguments() -> None:
    for arguments, message in (
        (["--engine", "hooked", "--compile"], "--compile: the hook engine runs eagerly; use --engine functional"),
        (["--accumulate", "3"], "--batch 32: does not divide into --accumulate 3 equal parts"),
    ):
        refuses([*TRAIN_RESNET, *arguments], message)


def test_compare_engines_adds_up() -> None:
    code, output = run([*COMPARE, "--model", "mlp", "--ranks", "2", "--steps", "3"])
    assert code == 0, output
    rows = re.findall(r"^(DDP|hooked|functional) +([-0-3]) ", output, re.MULTILINE)
    assert rows == [("DDP", "-"), *((kind, stage) for kind in ENGINES for stage in "0123")]
    assert "the table adds up" in output


def test_benchmark_compares_peers_that_do_the_same_work(tmp_path: Path) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "times.png"
    rounds = ["--rounds", str(ROUNDS), "--steps", str(STEPS)]
    files = ["--json", str(report), "--plot", str(picture)]
    code, output = run([*BENCHMARK, *FEW_STEPS, *rounds, "--only", ",".join(PEERS), "--gbit", "1", *files])
    assert code == 0, output
    assert "the losses of all peers agree" in output
    assert re.search(r"^floor: one process alone [\d.]+ ms, alone-compiled [\d.]+ ms;", output, re.MULTILINE), output
    assert picture.read_bytes().startswith(b"\x89PNG")

    found = json.loads(report.read_text())
    assert found["ranks"] == 2
    peers = found["peers"]
    assert list(peers) == PEERS
    for peer in (*peers.values(), *found["floor"].values()):
        assert len(peer["losses"]) == 1 + 2 + 2 + ROUNDS * STEPS  # the first, warm-up, measured and timed steps
        assert len(peer["times"]) == ROUNDS * STEPS
    for peer in peers.values():
        assert peer["losses"] == pytest.approx(peers["ddp"]["losses"], rel=1e-3)
        assert peer["ratio"] == peer["median"] / peers["ddp"]["median"]
    if sys.platform == "linux":
        least = found["parameter_bytes"]  # 2S(N-1)/N
        for name in ("zero-2", "zero-2-compiled", "hooked-2"):
            # a packet's headers, its acknowledgement, and the barriers of a round
            assert least < peers[name]["least_sent"] < 1.1 * least
        assert peers["zero-2"]["rest"] < peers["ddp"]["rest"] < peers["ddp"]["peak"]


def test_benchmark_refuses_bad_arguments() -> None:
    for arguments, message in (
        (["--only", "ddp,zero-4"], "--only: unknown: zero-4; choose from: ddp, ddp-compiled, zero-redundancy, fsdp2,"),
        (["--ranks", "1"], "one rank has nobody to talk to; use --ranks 2 or more"),
        (["--gbit", "0"], "--gbit 0.0: must be above 0"),
        (["--only", ""], "--only: unknown: ; choose from: ddp,"),
        (["--width", "100"], "--width 100: must be a multiple of 32"),
    ):
        refuses([*BENCHMARK, *arguments], message)


def test_benchmark_adamw_compares_updates_that_do_the_same() -> None:
    code, output = run([*ADAMW, "--elements", "100003", "--rounds", "3"])
    assert code == 0, output
    rows = re.findall(r"^(.+), (fused|foreach|compiled|eager) +[\d.]+ +([\d.]+)$", output, re.MULTILINE)
    assert [row[:2] for row in rows] == [
        ("torch", "fused"),
        ("torch", "foreach"),
        ("fzero", "compiled"),
        ("fzero", "eager"),
    ]
    assert float(rows[0][2]) == 1
    assert "all rows agree within 1e-05 after 6 steps" in output


def test_benchmark_adamw_refuses_bad_arguments() -> None:
    for arguments, message in (
        (["--at-most", "nan"], "--at-most nan: must be above 0"),
        (["--elements", "0"], "--elements: must be at least 1, got 0"),
    ):
        refuses([*ADAMW, *arguments], message)


def test_benchmark_adamw_fails_when_the_compiled_update_is_too_slow() -> None:
    code, output = run([*ADAMW, "--elements", "1000", "--rounds", "2", "--at-most", "0.000001"])
    assert code == 1, output
    assert "AssertionError: the compiled update takes" in output
