"""The program that measures on a GPU, run on CPU at its tiny size."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.example

EXAMPLES = Path(__file__).parent.parent / "examples"
# Compiling is what takes the time: the quick test runs every other line.
WITHOUT_COMPILER = (
    "import runpy, sys, torch; torch.compile = lambda function, **_: function; sys.path.insert(0, {folder!r}); "
    "sys.argv[0] = {program!r}; runpy.run_path({program!r}, run_name='__main__')"
)


def report(folder: Path, *arguments: str, compiles: bool = True, limit: float = 120.0) -> tuple[int, str]:
    program = str(EXAMPLES / "gpu_report.py")
    code = WITHOUT_COMPILER.format(folder=str(EXAMPLES), program=program)
    start = [program] if compiles else ["-c", code]
    path = os.pathsep.join([str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "error", *start, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
        check=False,
    )
    return done.returncode, done.stdout


def tables(text: str) -> list[list[list[str]]]:
    """Return the cells of every table, heads first."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("| "):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [[table[0], *table[2:]] for table in found if table]


def check(text: str) -> None:
    assert re.match(r"# fzero .* on CPU \(.*\): these are no figures of a GPU, 20\d\d-\d\d-\d\d \d\d:\d\d", text), text
    numbers, memory, times, compiled = tables(text)
    assert [row[0] for row in numbers[1:]] == [*(f"stage {at}, eager" for at in range(4)), "stage 2, compiled"]
    assert all(float(row[1]) <= float(row[2]) for row in numbers[1:])
    assert [(int(row[0]), int(row[1])) for row in memory[1:]] == [(n, stage) for n in (8, 64) for stage in range(4)]
    rest = {(row[0], row[1]): float(row[3]) for row in memory[1:]}
    assert rest["8", "0"] > 2 * rest["8", "1"]
    for row in memory[1:]:
        assert float(row[3]) >= float(row[4])
    assert [(row[0], row[1]) for row in compiled[1:]] == [("8", "2"), ("8", "3")]
    ways = {(row[0], row[1]): dict(zip(times[0], row, strict=True)) for row in times[1:]}
    assert len(ways) == len(times) - 1 == 9
    assert {precision for precision, _ in ways} == {"fp32", "bf16"}
    for (precision, _), way in ways.items():
        against = ways[precision, "torch.compile"]
        ratio = float(way["step ms"]) / float(against["step ms"])
        assert float(way["x compile"]) == pytest.approx(ratio, rel=0.02)
        assert way["rest MB"] == way["peak MB"] == "-"
        assert float(way["loss"]) == pytest.approx(float(against["loss"]), rel=0.02)


def test_every_part_of_the_report_is_written_and_agrees(tmp_path: Path) -> None:
    file = tmp_path / "table.md"
    arguments = ("--device", "cpu", "--rounds", "1", "--steps", "2", "--peak-flops", "1e10", "--out", str(file))
    code, output = report(tmp_path, *arguments, compiles=False)
    assert code == 0, output
    check(file.read_text())
    assert "Left out" not in output
    for row in tables(file.read_text())[2][1:]:
        # FLOPs of a step at this size, counted by hand: 6 weights + 12 layers width context, times tokens
        tokens, weights = 2 * 32, 12 * 2 * 64**2 + 128 * 64
        flops = tokens * (6 * weights + 12 * 2 * 64 * 32)
        assert float(row[6].rstrip("%")) == pytest.approx(100 * flops / (float(row[2]) / 1e3) / 1e10, rel=0.05)


def test_what_there_is_no_time_for_is_left_out_and_named(tmp_path: Path) -> None:
    code, output = report(tmp_path, "--device", "cpu", "--budget", "0.000001", compiles=False)
    assert code == 0, output
    (written,) = tmp_path.glob("gpu-report-20??-??-??-cpu.md")
    for name in ("stage 2, compiled", "time of fzero in bf16", "memory of one rank of 64, stage 3, eager"):
        assert re.search(rf"Left out, .*{name}", written.read_text())
    assert not [row for table in tables(output) for row in table[1:]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--budget", "0"], "--budget 0.0: must be above 0"),
        (["--device", "cpu", "--width", "65"], "--width 65: must be a multiple of 64"),
        pytest.param(
            [],
            "--device cuda: no CUDA device was found; --device cpu checks",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_what_cannot_run_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    code, output = report(tmp_path, *arguments)
    assert code == 2
    assert message in output
    assert not list(tmp_path.iterdir())


def test_a_missing_optree_is_named_with_what_to_do(tmp_path: Path) -> None:
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text(
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'optree' else real(name, *rest)\n"
    )
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "gpu_report.py"), "--device", "cpu"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(EXAMPLES.parent)])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert re.match(r"fzero needs optree\. .*pip install optree.*PYTHONPATH", done.stderr)


@pytest.mark.long
def test_the_report_agrees_compiled(tmp_path: Path) -> None:
    file = tmp_path / "table.md"
    arguments = ("--device", "cpu", "--rounds", "1", "--budget", "2000", "--out", str(file))
    code, output = report(tmp_path, *arguments, limit=550)
    assert code == 0, output
    check(file.read_text())
