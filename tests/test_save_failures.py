"""Saves that fail, are cut short, or go on in the background: nothing is lost and nobody waits for ever."""

import contextlib
import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import outcomes, run
from saved import Made, module_engine, module_step
from torch import Tensor
from trees import differing

import fzero
from fzero import archive, writing
from fzero.manifest import publish

monkey = pytest.MonkeyPatch()
"""Of a rank, which ends with it."""


def set_patience(seconds: float) -> None:
    """Set how long this rank waits for the others."""
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=seconds))


def complete(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir() if (path / "manifest.json").exists())


# --- who is not there ------------------------------------------------------------------------------------------------


def alone(rank: int, world: int, folder: str) -> str:  # noqa: ARG001
    set_patience(2)
    made = module_engine("functional", 1, 1, 600)
    if rank == 0:
        with pytest.raises(RuntimeError, match="did not arrive within 2 s") as caught:
            made.save(folder)
        return str(caught.value)
    time.sleep(3)
    return ""


@pytest.mark.ranks
def test_a_save_on_rank_0_only_says_that_it_is_collective(tmp_path: Path) -> None:
    # B37
    message = run(alone, 2, str(tmp_path))[0]
    assert "save: rank 1 did not arrive within 2 s" in message
    assert "All ranks must call this together" in message
    assert complete(str(tmp_path)) == []


# --- a full disk -----------------------------------------------------------------------------------------------------


def full_disk(rank: int, world: int, folder: str, blocking: bool) -> tuple[str, list[str], list[str]]:  # noqa: ARG001
    made, _ = module_step(module_engine("hooked", 1, 2, 600), rank, 0)
    made.save(folder)
    expected = made.full()
    made, _ = module_step(made, rank, 1)
    if rank == 1:  # no file of this process may grow beyond this
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, resource.RLIM_INFINITY))
    with pytest.raises(fzero.CheckpointError) as caught:
        made.save(folder, extra=torch.zeros(10**6), keep=1, blocking=blocking).wait()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    left = complete(folder)
    rubbish = sorted(path.name for path in Path(folder).iterdir() if path.name not in left)
    dist.barrier()
    # the same step can be saved now
    made.save(folder)
    again = made.full()
    made, _ = made.load(fzero.latest(folder))
    assert differing(made.full(), again) == []
    made, _ = made.load(Path(folder, "step-00000001"))
    assert differing(made.full(), expected) == []
    return str(caught.value), left, rubbish


@pytest.mark.ranks
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
def test_a_disk_that_is_full_for_one_rank_fails_on_all_and_keeps_the_last_checkpoint(
    blocking: bool, tmp_path: Path
) -> None:
    for message, left, rubbish in run(full_disk, 2, str(tmp_path), blocking):
        assert re.search(r"save step 2 \([0-9a-f]{8}\), writing", message)
        assert "OSError: [Errno 27] File too large" in message
        assert left == ["step-00000001"]
        assert rubbish == []


def no_index(rank: int, world: int, folder: str, part: str) -> str:  # noqa: ARG001
    made, _ = module_step(module_engine("functional", 1, 1, 600), rank, 0)
    made.save(folder)
    made, _ = module_step(made, rank, 1)

    def broken(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkey.setattr(writing, part, broken)
    with pytest.raises(fzero.CheckpointError) as caught:
        made.save(folder)
    monkey.undo()
    assert complete(folder) == ["step-00000001"]
    made.save(folder)
    assert complete(folder) == ["step-00000001", "step-00000002"]
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize("part", ["write_part", "metadata", "_begin"])
def test_what_fails_on_rank_0_fails_on_all(part: str, tmp_path: Path) -> None:
    for message in run(no_index, 2, str(tmp_path), part):
        assert "OSError: [Errno 28] No space left on device" in message


# --- in the background -----------------------------------------------------------------------------------------------


def slowly(function: Callable[..., Any], gate: threading.Event) -> Callable[..., Any]:
    def wrapped(*args: Any) -> Any:
        assert gate.wait(30)
        return function(*args)

    return wrapped


def behind(rank: int, world: int, folder: str, kind: str, stage: int) -> list[str]:  # noqa: ARG001
    made = module_engine(kind, 2, stage, 600)
    for step in range(3):
        made, _ = module_step(made, rank, step)
    expected, extra = made.full(), torch.arange(3) + rank
    gate = threading.Event()
    monkey.setattr(archive, "write", slowly(archive.write, gate))
    started = time.monotonic()
    handle = made.save(folder, extra={"x": extra}, blocking=False)
    extra += 100  # the caller's own again
    torch.rand(5)
    for step in range(3, 5):
        made, _ = module_step(made, rank, step)  # writes into the memory that is being saved
    assert not handle.done()
    assert complete(folder) == []
    assert time.monotonic() - started < 20
    gate.set()
    directory = handle.wait()
    assert handle.done()
    assert handle.wait() == directory
    made, found = made.load(directory)
    assert torch.equal(found["x"], torch.arange(3) + rank)
    return differing(made.full(), expected)


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "stage"), [("functional", 2), ("hooked", 1), ("functional", 0)])
def test_a_save_in_the_background_is_of_the_moment_it_was_asked_for(kind: str, stage: int, tmp_path: Path) -> None:
    # B35
    assert run(behind, 2, str(tmp_path), kind, stage) == [[], []]


def surfaces(rank: int, world: int, folder: str) -> tuple[str, str]:  # noqa: ARG001
    made, _ = module_step(module_engine("functional", 2, 1, 600), rank, 0)

    def broken(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    messages = []
    for told in (False, True):
        if rank == 1:
            monkey.setattr(archive, "write", broken)
        handle = made.save(folder, blocking=False)
        if told:
            with pytest.raises(fzero.CheckpointError) as caught:
                handle.wait()
        else:
            with pytest.raises(fzero.CheckpointError) as caught:
                made.save(folder)  # the next save
        messages.append(str(caught.value))
        monkey.undo()
        made.save(folder, step=5 + told)  # nobody is told twice
    assert complete(folder) == ["step-00000005", "step-00000006"]
    return messages[0], messages[1]


@pytest.mark.ranks
def test_an_error_in_the_background_is_raised_by_the_next_save_or_by_wait(tmp_path: Path) -> None:
    for messages in run(surfaces, 2, str(tmp_path)):
        for message in messages:
            assert re.search(r"save step 1 \([0-9a-f]{8}\), writing", message)
            assert "No space left on device" in message


def many(rank: int, world: int, folder: str) -> list[list[str]]:  # noqa: ARG001
    """Train, and save every step in the background without waiting."""
    made, expected = module_engine("hooked", 2, 3, 600), {}
    for step in range(1, 6):
        made, _ = module_step(made, rank, step)
        made.save(folder, blocking=False)
        expected[step] = made.full()
    made.save(folder, step=9)
    found = []
    for step, full in expected.items():
        made, _ = made.load(Path(folder, f"step-{step:08d}"))
        found.append(differing(made.full(), full))
    return found


def two_engines(rank: int, world: int, folder: str) -> list[list[str]]:  # noqa: ARG001
    """Two engines save the same step at once, in the background; on each rank another one is slow."""
    mades = [module_engine("functional", seed, 1, 600) for seed in (2, 3)]
    mades = [module_step(made, rank, 0)[0] for made in mades]
    real = archive.write

    def slower(descriptor: int, *args: Any) -> Any:
        time.sleep(0.02 * ((descriptor + rank) % 2))
        return real(descriptor, *args)

    monkey.setattr(archive, "write", slower)
    handles = [made.save(f"{folder}/{name}", blocking=False) for made, name in zip(mades, "ab", strict=True)]
    found = [made.load(handle.wait())[0] for made, handle in zip(mades, handles, strict=True)]
    return [differing(after.full(), before.full()) for after, before in zip(found, mades, strict=True)]


@pytest.mark.ranks
def test_two_engines_save_at_once(tmp_path: Path) -> None:
    assert run(two_engines, 2, str(tmp_path)) == [[[], []]] * 2


@pytest.mark.ranks
def test_saves_in_the_background_follow_each_other(tmp_path: Path) -> None:
    assert run(many, 2, str(tmp_path)) == [[[]] * 5] * 2


# --- ranks that are killed -------------------------------------------------------------------------------------------

LAST = 400


def step_of(made: Made) -> int:
    return int(made.full()["step"])


def digest(full: dict[str, Tensor]) -> str:
    import hashlib

    found = hashlib.sha256()
    for name, leaf in full.items():
        found.update(name.encode() + bytes(archive.memory(leaf.contiguous())) if leaf.numel() else b"")
    return found.hexdigest()


def undisturbed(rank: int, world: int, steps: int) -> list[str]:  # noqa: ARG001
    made, found = module_engine("functional", 6, 2, 600), []
    for step in range(steps):
        found.append(digest(made.full()))
        made, _ = module_step(made, rank, step)
    return found


def cut_short(rank: int, world: int, folder: str, victim: int, delay: float, blocking: bool) -> tuple[int, str]:  # noqa: ARG001
    """Load the latest, report it, and train and save until killed; a survivor must end by itself."""
    made = module_engine("functional", 6, 2, 600)
    directory = fzero.latest(folder)
    if directory is not None:
        made, extra = made.load(directory)
        assert extra == {"rank": rank}
    report = step_of(made), digest(made.full())
    if rank == 0:
        Path(folder, "report").write_text(f"{report[0]} {report[1]}")
    dist.barrier()
    set_patience(2)
    if rank == victim:
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    for step in range(report[0], LAST):
        made, _ = module_step(made, rank, step)
        made.save(folder, extra={"rank": rank}, keep=2, blocking=blocking)
    raise AssertionError("was not killed")


def kill_often(folder: Path, times: int) -> None:
    source = random.Random(7)  # noqa: S311
    expected = run(undisturbed, 2, 120, limit=120)[0]
    reached = 0
    for turn in range(times):
        victim, delay = turn % 2, source.uniform(0.1, 1.2)
        ended = outcomes(cut_short, 2, str(folder), victim, delay, turn % 4 < 2)
        assert ended[victim].exitcode == -signal.SIGKILL, ended[victim].error
        survivor = ended[1 - victim]
        assert survivor.error is not None
        assert "was not killed" not in survivor.error
        step, found = (folder / "report").read_text().split()
        assert int(step) >= reached, "a complete checkpoint was lost"
        assert found == expected[int(step)], f"turn {turn}: another state at step {step}"
        reached = int(step)
    assert reached > times // 4, "no save got through"
    directories = [path for path in folder.iterdir() if path.name.startswith("step-")]
    assert len(directories) <= 2 + times


@pytest.mark.parametrize("times", [pytest.param(4, marks=pytest.mark.ranks), pytest.param(20, marks=pytest.mark.long)])
def test_a_rank_killed_at_a_random_moment_of_a_save_loses_nothing(times: int, tmp_path: Path) -> None:
    # B36
    kill_often(tmp_path, times)


def killed_at(rank: int, world: int, folder: str, place: str) -> None:  # noqa: ARG001
    set_patience(2)
    made, _ = module_step(module_engine("hooked", 6, 2, 600), rank, 0)
    made.save(folder)
    made, _ = module_step(made, rank, 1)

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    real_put, count = archive.put, iter(range(10**6))
    places: dict[str, tuple[int, Any, str, Any]] = {
        "in the middle of a write": (
            1,
            archive,
            "put",
            lambda *args: die() if next(count) == 25 else real_put(*args),
        ),
        "after the first shard": (1, writing, "_write_own", die),
        "before the index": (0, writing, "metadata", die),
        "before the manifest": (
            0,
            writing,
            "publish",
            lambda path, save_id: die() if path.name == "manifest.json" else publish(path, save_id),
        ),
        "before cleaning": (0, writing, "_clean", die),
    }
    victim, *change = places[place]
    if rank == victim:
        monkey.setattr(*change)
    made.save(folder, step=1 if place == "before cleaning" else None)


def after_kill(rank: int, world: int, folder: str, place: str) -> tuple[list[str], list[str]]:  # noqa: ARG001
    made, _ = module_step(module_engine("hooked", 6, 2, 600), rank, 0)
    first = made.full()
    made, _ = module_step(made, rank, 1)
    second = made.full()
    directory = fzero.latest(folder)
    assert directory is not None
    assert directory.name == "step-00000001"
    partial = Path(folder, "step-00000002")
    dist.barrier()
    if partial.exists():
        with pytest.raises(fzero.CheckpointError, match=r"has no manifest.json, so it is no complete checkpoint"):
            made.load(partial)
    made, _ = made.load(directory)
    wrong = differing(made.full(), second if place == "before cleaning" else first)
    made, _ = module_step(module_engine("hooked", 6, 2, 600), rank, 0)
    made, _ = module_step(made, rank, 1)
    made.save(folder, keep=1)  # that step again
    made, _ = made.load(fzero.latest(folder))
    wrong += differing(made.full(), second)
    return wrong, sorted(path.name.split(".")[0] for path in partial.iterdir())


@pytest.mark.ranks
@pytest.mark.parametrize(
    "place",
    [
        "in the middle of a write",
        "before the manifest",
        pytest.param("after the first shard", marks=pytest.mark.long),
        pytest.param("before the index", marks=pytest.mark.long),
        pytest.param("before cleaning", marks=pytest.mark.long),
    ],
)
def test_a_save_cut_short_there_counts_as_none_and_can_be_repeated(place: str, tmp_path: Path) -> None:
    # B36
    ended = outcomes(killed_at, 2, str(tmp_path), place)
    assert sorted(outcome.exitcode for outcome in ended if outcome.exitcode is not None) == [-signal.SIGKILL, 1]
    for wrong, left in run(after_kill, 2, str(tmp_path), place):
        assert wrong == []
        assert left == ["", "manifest", "rank-00000", "rank-00001"]


# --- what a reader of this found -------------------------------------------------------------------------------------


def small() -> tuple[fzero.Zero, Any]:
    engine = fzero.Zero(lambda params, batch: (params["w"] * batch).square().mean(), fzero.adamw(0.1))
    return engine, engine.init({"w": torch.ones(200_000)})


def test_two_saves_of_one_step_at_once_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    (one, state), (other, same) = small(), small()
    for turn in range(12):
        root = tmp_path / str(turn)
        fzero.save(root, one, state, step=3)
        handle = fzero.save(root, one, state, step=3, blocking=False)
        time.sleep(turn * 0.001)
        for finish in (lambda root=root: fzero.save(root, other, same, step=3), handle.wait):
            with contextlib.suppress(fzero.CheckpointError):  # one of them may fail, and says so
                finish()
        fzero.load(fzero.latest(root), other)


def test_extra_is_what_it_was_even_if_it_is_conjugated_or_negated_later(tmp_path: Path) -> None:
    engine, state = small()
    z = torch.tensor([1 + 2j, 3 - 4j])
    extra = [z.conj(), z.conj().imag[:1], torch._neg_view(torch.ones(2))]
    assert extra[0].is_conj()
    assert extra[1].is_neg()
    assert extra[2].is_neg()
    for number, blocking in enumerate((True, False)):
        fzero.save(tmp_path, engine, state, step=number, extra=extra, blocking=blocking).wait()
        _, found = fzero.load(fzero.latest(tmp_path), engine)
        for left, right in zip(found, extra, strict=True):
            assert torch.equal(left, right)


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:.*nested:UserWarning")
def test_what_would_not_come_back_is_refused(tmp_path: Path) -> None:
    engine, state = small()
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for odd in (quantized, nested):
        with pytest.raises(TypeError, match=r"extra\[0\] must be a plain tensor, got"):
            fzero.save(tmp_path, engine, state, extra=[odd])
    twice = fzero.Zero(lambda params, _: params["w"].sum(), fzero.sgd(0.1))
    with pytest.raises(ValueError, match=r"params: two leaves have one name 'params\.w'"):
        fzero.save(tmp_path, twice, twice.init({"w": torch.zeros(2), "_orig_mod": {"w": torch.ones(2)}}))
    named = fzero.Zero(lambda params, _: params["__metadata__"].sum(), fzero.sgd(0.1))
    with pytest.raises(ValueError, match="no room for a parameter named '__metadata__'"):
        fzero.export(tmp_path / "x.safetensors", named, named.init({"__metadata__": torch.ones(1)}))
    assert list(tmp_path.iterdir()) == []


def wrong_place(rank: int, world: int, folder: str) -> list[str]:  # noqa: ARG001
    set_patience(20)
    engine, state = small()
    directory = fzero.save(folder, engine, state).wait()
    places: list[Any] = [5] * 3 if rank else [folder, directory, f"{folder}/x.safetensors"]
    told = []
    for call in (
        lambda: fzero.save(places[0], engine, state),
        lambda: fzero.load(places[1], engine),
        lambda: fzero.export(places[2], engine, state),
    ):
        started = time.monotonic()
        with pytest.raises((TypeError, ValueError, fzero.CheckpointError)) as caught:
            call()
        assert time.monotonic() - started < 10
        told.append(str(caught.value))
    return told


@pytest.mark.ranks
def test_a_place_that_is_none_on_one_rank_is_refused_on_all_at_once(tmp_path: Path) -> None:
    for told in run(wrong_place, 2, str(tmp_path)):
        for message, name in zip(told, ("root", "directory", "path"), strict=True):
            assert f"{name}: " in message or "differ" in message, message
