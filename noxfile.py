"""The checks of this project: ``nox`` runs the default ones, ``nox -l`` lists all, ``nox -s tests -- -k tree`` picks.

Every session uses one environment, ``.nox/fzero``, since torch alone takes gigabytes. It is installed on the first
run and again when ``pyproject.toml`` changes. ``nox --no-venv`` installs nothing and checks with the interpreter
that runs nox.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2026.4"
nox.options.error_on_missing_interpreters = True

# Each test belongs to exactly one of the sessions tests, ranks, compile and examples (or needs a CUDA device).
TESTS = "not ranks and not compile and not example and not gpu and not long"
RANKS = "ranks and not compile and not example and not gpu and not long"
COMPILE = "compile and not example and not gpu and not long"
EXAMPLES = "example and not gpu and not long"

# The interpreter of the checks. The session `fzero` replaces it by that of its own environment.
interpreter = Path(sys.executable)


@nox.session(reuse_venv=True, default=False)
def fzero(session: nox.Session) -> None:
    """Prepare the environment that all other sessions use (they require this one)."""
    if session.venv_backend == "none":  # --no-venv: the environment is prepared by whoever says so
        return
    global interpreter  # noqa: PLW0603 - what one session hands to the others
    interpreter = Path(session.bin) / "python"
    stamp = session.env_dir / "installed"
    wanted = hashlib.sha256(Path("pyproject.toml").read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        stamp.unlink(missing_ok=True)
        session.install("--editable", ".[examples,dev]")
        stamp.write_text(wanted)


def run(session: nox.Session, *module: str, **env: str) -> None:
    """Run a module of the environment, such as pytest, with its arguments."""
    session.run(str(interpreter), "-m", *module, env=env)


@nox.session(requires=["fzero"], venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check style and format."""
    run(session, "ruff", "check", ".")
    run(session, "ruff", "format", "--check", ".")


@nox.session(requires=["fzero"], venv_backend="none")
def types(session: nox.Session) -> None:
    """Check types: mypy strict over source, examples, tests and this file."""
    run(session, "mypy", "fzero", "examples", "tests", "noxfile.py")


@nox.session(requires=["fzero"], venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run what needs one process and no compiler, and the examples in docstrings."""
    run(session, "pytest", "-m", TESTS, "--doctest-modules", "fzero", "tests", *session.posargs)


@nox.session(requires=["fzero"], venv_backend="none")
def ranks(session: nox.Session) -> None:
    """Run the tests that start several processes, each with one thread."""
    run(session, "pytest", "-m", RANKS, *session.posargs, OMP_NUM_THREADS="1")


@nox.session(name="compile", requires=["fzero"], venv_backend="none")
def compile_(session: nox.Session) -> None:
    """Run the tests that compile; they share what inductor compiled."""
    cache = str(session.cache_dir.absolute() / "inductor")
    run(session, "pytest", "-m", COMPILE, *session.posargs, OMP_NUM_THREADS="1", TORCHINDUCTOR_CACHE_DIR=cache)


@nox.session(requires=["fzero"], venv_backend="none")
def examples(session: nox.Session) -> None:
    """Run every example, shortened: the loss falls."""
    cache = str(session.cache_dir.absolute() / "inductor")
    run(session, "pytest", "-m", EXAMPLES, *session.posargs, TORCHINDUCTOR_CACHE_DIR=cache)


@nox.session(requires=["fzero"], venv_backend="none", default=False)
def long(session: nox.Session) -> None:
    """Run the tests that take minutes each."""
    run(session, "pytest", "-m", "long and not gpu", *session.posargs, OMP_NUM_THREADS="1")


@nox.session(requires=["fzero"], venv_backend="none", default=False)
def gpu(session: nox.Session) -> None:
    """On a machine with a CUDA device: run the tests that need one, then measure (under 5 minutes)."""
    run(session, "pytest", "-m", "gpu", *session.posargs)
    session.run(str(interpreter), "examples/gpu_report.py")


@nox.session(requires=["fzero"], venv_backend="none", default=False)
def accept(session: nox.Session) -> None:
    """Run every example at its full length (minutes each), or those named: ``nox -s accept -- train_gpt``."""
    plots = session.cache_dir.absolute() / "accept"
    plots.mkdir(exist_ok=True)
    # small: that the default peers agree is accepted here, times are measured on request
    small = ("--layers", "2", "--width", "64", "--context", "64", "--steps", "2", "--rounds", "2")
    # arguments of each run, with the result that an example's docstring promises where it asserts less by itself
    resnet = ("--data", "digits", "--stage", "2", "--at-least", "0.95", "--engine")
    runs: dict[str, list[tuple[str, ...]]] = {
        # that it works; what it measures is measured by the session gpu
        "gpu_report": [("--device", "cpu", "--budget", "1000", "--out", str(plots / "gpu_report.md"))],
        "benchmark": [(*small, "--plot", str(plots / "benchmark.png"))],
        "train_gpt": [("--below", "2.5", "--plot", str(plots / "train_gpt.png"))],
        "train_resnet": [
            (*resnet, kind, "--plot", str(plots / f"train_resnet-{kind}.png")) for kind in ("hooked", "functional")
        ],
    }
    shared = {"launch", "peers", "meters", "resume", "checkout", "gpu_model", "gpu_shards"}  # no programs
    programs = sorted(program.stem for program in Path("examples").glob("*.py") if program.stem not in shared)
    for name in session.posargs or programs:
        for arguments in runs.get(name, [()]):
            session.run(str(interpreter), f"examples/{name}.py", *arguments)
