"""Checkpoints go from any world, stage, engine and bucket cap to any other, and keep every bit."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run
from saved import Made, Pile, batch, criterion, module_engine, module_step, tree_engine, tree_step
from trees import differing, named

import fzero
from fzero.manifest import read_manifest


def settings(world: int, case: int) -> tuple[str, int, int]:
    """Return kind, stage and bucket cap: all of them occur among the pairs of worlds."""
    kind = ("tree", "functional", "hooked")[case % 3]
    return kind, (world + case) % 4, (600, 1500, 40_000)[(world + case // 3) % 3]


def make(kind: str, seed: int, stage: int, cap: int) -> Made:
    return tree_engine(seed, stage, cap) if kind == "tree" else module_engine(kind, seed, stage, cap)


def save_all(rank: int, world: int, folder: str, cases: int) -> None:
    for case in range(cases):
        kind, stage, _ = settings(world, case)
        made = make(kind, 10 * world + case, stage, 600)  # three or more buckets
        for step in range(2):
            made = tree_step(made, rank, step) if kind == "tree" else module_step(made, rank, step)[0]
        padded = [bucket for bucket in made.buckets() if bucket.length > bucket.used]
        assert len(made.buckets() if world == 1 else padded) >= 3
        full = made.full()
        assert any(bool(leaf.any()) for name, leaf in full.items() if "exp_avg" in name)
        made.save(Path(folder, f"{world}-{case}"), extra={"rank": rank, "case": torch.tensor(case)})
        if rank == 0:
            torch.save(full, Path(folder, f"{world}-{case}.pt"))


def load_all(rank: int, world: int, folder: str, worlds: tuple[int, ...], cases: int) -> list[str]:
    wrong = []
    for saved in worlds:
        for case in range(cases):
            kind = settings(saved, case)[0]
            # into another seed's values, the other engine, another stage and cap
            _, stage, cap = settings(world, case + saved)
            if kind != "tree":
                kind = ("functional", "hooked")[(saved + world + case) % 2]
            made = make(kind, 10 * saved + case, stage, cap)
            made = tree_step(made, rank, 7) if kind == "tree" else module_step(made, rank, 7)[0]
            made, extra = made.load(fzero.latest(Path(folder, f"{saved}-{case}")))
            expected = torch.load(Path(folder, f"{saved}-{case}.pt"))
            found = made.full()
            wrong += [f"{saved} to {world}, case {case}, {kind} {stage}: {name}" for name in differing(found, expected)]
            extras = [extra] if saved == world else extra
            ranks = [rank] if saved == world else list(range(saved))
            if [(each["rank"], int(each["case"])) for each in extras] != [(other, case) for other in ranks]:
                wrong.append(f"{saved} to {world}, case {case}: extra {extra}")
    return wrong


@pytest.mark.parametrize(
    ("worlds", "cases"),
    [
        pytest.param((1, 2, 3, 4, 5), 12, marks=pytest.mark.long, id="all-worlds"),
        pytest.param((1, 2, 3), 3, marks=pytest.mark.ranks, id="some-worlds"),
    ],
)
def test_any_world_stage_engine_and_cap_to_any_other(worlds: tuple[int, ...], cases: int, tmp_path: Path) -> None:
    for world in worlds:
        run(save_all, world, str(tmp_path), cases, limit=120)
    for world in worlds:
        for wrong in run(load_all, world, str(tmp_path), worlds, cases, limit=300):
            assert wrong == []


# --- strictness ------------------------------------------------------------------------------------------------------


def fails(function: Any, *args: Any) -> str:
    """Return the message of the `CheckpointError` that a call must raise."""
    with pytest.raises(fzero.CheckpointError) as caught:
        function(*args)
    return str(caught.value)


def plain(params: Any, stage: int = 1, opt: Any = None) -> Made:
    engine = fzero.Zero(lambda params, x: sum(leaf.sum() for leaf in params.values()) * x.mean(), opt or OPT, stage)
    return Made(engine, engine.init(params))


OPT = fzero.adamw(0.01)


def refuse(rank: int, world: int, folder: str) -> dict[str, str]:  # noqa: ARG001
    shared = torch.ones(4, 3)
    plain({"w": shared, "tied": shared, "v": torch.ones(6), "gone": torch.ones(2)}).save(folder)
    directory = fzero.latest(folder)
    own = torch.ones(4, 3)
    others = {
        "shape": {"w": shared, "tied": shared, "v": torch.ones(2, 3), "gone": torch.ones(2)},
        "dtype": {"w": shared, "tied": shared, "v": torch.ones(6, dtype=torch.float64), "gone": torch.ones(2)},
        "names": {"w": shared, "tied": shared, "v": torch.ones(6), "new": torch.ones(2)},
        "untied": {"w": shared, "tied": own, "v": torch.ones(6), "gone": torch.ones(2)},
    }
    found = {name: fails(plain(params).load, directory) for name, params in others.items()}
    # an optimizer that has more, or less, than what was saved
    params = {"w": shared, "tied": shared, "v": torch.ones(6), "gone": torch.ones(2)}
    found["less"] = fails(plain(params, opt=fzero.sgd(0.1)).load, directory)
    plain(params, opt=fzero.sgd(0.1)).save(f"{folder}/sgd")
    found["more"] = fails(plain(params).load, fzero.latest(f"{folder}/sgd"))
    return found


@pytest.mark.ranks
def test_what_does_not_fit_is_listed_and_refused_on_all_ranks(tmp_path: Path) -> None:
    # B38, B34
    for found in run(refuse, 2, str(tmp_path)):
        assert "does not fit this engine" in found["shape"]
        assert "differs: params.v was saved as (6,) float32, expected (2, 3) float32" in found["shape"]
        assert "differs: opt_state.exp_avg.v was saved as (6,) float32" in found["shape"]
        assert "differs: params.v was saved as (6,) float32, expected (6,) float64" in found["dtype"]
        for line in ("missing: params.new (2,) float32", "unexpected: params.gone (2,) float32"):
            assert line in found["names"]
        assert "missing: opt_state.exp_avg_sq.new (2,) float32" in found["names"]
        assert "missing: params.w" not in found["names"]
        for line in ("missing: params.w (4, 3) float32", "tie: w was saved tied to tied, expected on its own"):
            assert line in found["untied"]
        assert "unexpected: opt_state.exp_avg.v (6,) float32" in found["less"]
        assert "missing: opt_state.exp_avg.v (6,) float32" in found["more"]


def refuse_arguments(rank: int, world: int, folder: str) -> dict[str, str]:  # noqa: ARG001
    made = plain({"w": torch.ones(5)})
    file = Path(folder, "file")
    if rank == 0:
        file.write_text("")
    torch.distributed.barrier()
    cases: dict[str, Any] = {
        "step": (folder, {"step": -1}),
        "keep": (folder, {"keep": 0}),
        "blocking": (folder, {"blocking": 1}),
        "root": (file, {}),
        # one rank's fault is raised on all
        "extra": (folder, {"extra": {1} if rank == 1 else None}),
        "steps": (folder, {"step": rank}),
    }
    found = {}
    for name, (root, options) in cases.items():
        with pytest.raises((ValueError, TypeError)) as caught:
            made.save(root, **options)
        found[name] = f"{type(caught.value).__name__}: {caught.value}"
    calls: dict[str, Any] = {
        "engine": lambda: fzero.save(folder, "engine"),
        "state": lambda: fzero.save(folder, made.engine, "state"),
        "init": lambda: fzero.save(folder, fzero.Zero(lambda params, batch: params * batch, OPT), made.state),
        "hooked": lambda: fzero.save(folder, fzero.HookedZero(torch.nn.Linear(2, 2), OPT), made.state),
    }
    for name, call in calls.items():
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        found[name] = f"{type(caught.value).__name__}: {caught.value}"
    assert fzero.latest(folder) is None
    return found


@pytest.mark.ranks
def test_bad_arguments_are_named_on_all_ranks(tmp_path: Path) -> None:
    for rank, found in enumerate(run(refuse_arguments, 2, str(tmp_path))):
        assert found["step"] == "ValueError: step: must be an integer of at least 0, or None, got -1"
        assert found["keep"] == "ValueError: keep: must be an integer of at least 1, or None, got 0"
        assert found["blocking"] == "TypeError: blocking: must be True or False, got 1"
        assert "file is not a directory; pass the one that holds" in found["root"]
        assert "extra must be JSON-like" in found["extra"]
        assert found["extra"].startswith("TypeError" if rank == 1 else "ValueError: save: rank 1 failed with TypeError")
        assert "save: the ranks differ, and none of them goes on" in found["steps"]
        assert found["engine"].startswith("TypeError: engine: must be a fzero.Zero or a fzero.HookedZero, got str")
        assert "state: must be what init or step returned, got str" in found["state"]
        assert found["init"] == "ValueError: engine: call init(params) first"
        assert "state: the hook engine has its own; leave it out" in found["hooked"]


def test_a_load_of_nothing_says_so(tmp_path: Path) -> None:
    made = plain({"w": torch.ones(2)})
    assert "directory: is None: fzero.latest found no complete checkpoint" in fails(made.load, fzero.latest(tmp_path))
    made.save(tmp_path)
    assert "has no manifest.json, so it is no complete checkpoint; fzero.latest finds" in fails(made.load, tmp_path)


def test_a_step_that_is_half_done_is_not_saved(tmp_path: Path) -> None:
    engine = fzero.HookedZero(torch.nn.Linear(2, 1), OPT)
    engine.backward(engine(torch.ones(1, 2)).sum())
    with pytest.raises(ValueError, match=r"has gradients that are not in parameters yet; call step\(\) before a save"):
        fzero.save(tmp_path, engine)
    engine.step()
    assert fzero.save(tmp_path, engine).wait() == tmp_path / "step-00000001"


# --- damage ----------------------------------------------------------------------------------------------------------


def test_any_altered_byte_of_any_file_is_noticed_and_named(tmp_path: Path) -> None:
    made = plain({"w": torch.arange(700_000.0), "v": torch.tensor(3.0)})  # of two blocks and more, and of one element
    made.save(tmp_path, extra=torch.arange(4))
    directory = fzero.latest(tmp_path)
    assert directory is not None
    (file,) = directory.glob("*.distcp")
    whole = file.read_bytes()
    places = [*range(0, 800, 13), *range(800, len(whole), 399_989), *range(len(whole) - 9_000, len(whole), 67)]
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 1 << place % 8
        file.write_bytes(broken)
        assert file.name in fails(made.load, directory), f"byte {place}"
    file.write_bytes(whole[:-1])
    assert f"{file.name}: was written with {len(whole)} bytes and has {len(whole) - 1}" in fails(made.load, directory)
    file.write_bytes(whole)
    loaded, extra = made.load(directory)
    assert differing(loaded.full(), made.full()) == []
    assert torch.equal(extra, torch.arange(4))


def damaged(rank: int, world: int, folder: str) -> list[str]:  # noqa: ARG001
    made = module_engine("hooked", 1, 2, 600)
    made, _ = module_step(made, rank, 0)
    made.save(folder)
    directory = fzero.latest(folder)
    assert directory is not None
    made, _ = module_step(made, rank, 1)
    before = made.full()
    found = []
    for victim in (0, 1):
        (file,) = directory.glob(f"rank-{victim:05d}.*")
        whole = file.read_bytes()
        torch.distributed.barrier()
        if rank == 0:
            file.write_bytes(whole[:5000] + bytes([whole[5000] ^ 4]) + whole[5001:])
        torch.distributed.barrier()
        message = fails(made.load, directory)
        assert file.name in message
        found.append(message)
        if rank == 0:
            file.write_bytes(whole)
        torch.distributed.barrier()
    # what was there before is still there: the engine goes on
    assert differing(made.full(), before) == []
    module_step(made, rank, 2)
    # files that one rank does not see
    elsewhere = directory if rank == 0 else Path(folder, "elsewhere", directory.name)
    found.append(fails(made.load, elsewhere))
    return found


@pytest.mark.ranks
def test_damage_that_one_rank_sees_is_raised_on_all_and_changes_nothing(tmp_path: Path) -> None:
    # B36
    for found in run(damaged, 2, str(tmp_path)):
        assert "was damaged: a checksum of the piece at byte" in found[0]
        assert "there is no such directory here; all ranks must see one file system" in found[2]


# --- again, keep, stale ----------------------------------------------------------------------------------------------


def names(folder: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


def again(rank: int, world: int, folder: str) -> dict[str, Any]:
    made, found = module_engine("functional", 2, world % 4, 600), {}
    for step in range(4):
        made, _ = module_step(made, rank, step)
        made.save(folder, keep=2)
    found["kept"] = names(folder)
    # the same step again, with other values
    full = made.full()
    made.save(folder, step=3)
    found["replaced"] = names(folder)
    made, _ = made.load(Path(folder, "step-00000003"))
    found["equal"] = differing(made.full(), full)
    # a lower step never removes a higher one
    made.save(folder, step=1, keep=1)
    found["lower"] = names(folder)
    return found


@pytest.mark.ranks
def test_keep_and_the_same_step_again(tmp_path: Path) -> None:
    first, second = run(again, 2, str(tmp_path))
    assert {name.split("/")[0] for name in first["kept"]} == {"step-00000003", "step-00000004"}
    assert len(first["kept"]) == 2 * 4  # two ranks' files, manifest and metadata: no index, no part is left
    assert len(first["replaced"]) == 2 * 4
    assert set(first["replaced"]) != set(first["kept"])
    assert first["equal"] == second["equal"] == []
    assert {name.split("/")[0] for name in first["lower"]} == {"step-00000001", "step-00000003", "step-00000004"}


def stale(rank: int, world: int, folder: str, step: int) -> list[str]:  # noqa: ARG001
    made, _ = module_step(module_engine("functional", 3, 2, 600), rank, step)
    made.save(folder, step=7)
    full = made.full()
    made, _ = module_step(made, rank, step + 1)
    made, _ = made.load(Path(folder, "step-00000007"))
    return differing(made.full(), full)


@pytest.mark.ranks
def test_files_of_a_larger_world_do_no_harm(tmp_path: Path) -> None:
    assert run(stale, 3, str(tmp_path), 0) == [[]] * 3
    # as if a save of four ranks had been cut short
    for rank in range(4):
        (tmp_path / "step-00000007" / f"rank-{rank:05d}.deadbeef.distcp").write_bytes(b"rubbish")
    (tmp_path / "step-00000007" / "notes.txt").write_text("the user's own")
    assert run(stale, 2, str(tmp_path), 1) == [[]] * 2
    left = sorted(path.name.split(".")[0] for path in (tmp_path / "step-00000007").iterdir())
    assert left == ["", "manifest", "notes", "rank-00000", "rank-00001"]


# --- torch's own tools -----------------------------------------------------------------------------------------------


def save_for_torch(rank: int, world: int, folder: str) -> Any:  # noqa: ARG001
    made = tree_engine(5, 2, 600)
    made = tree_step(made, rank, 0)
    made.save(folder, extra=torch.arange(3) + rank)
    return made.full()


@pytest.mark.ranks
def test_torch_reads_the_directory(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.default_planner import _validate_global_plan
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict_loader import load

    full = run(save_for_torch, 3, str(tmp_path))[0]
    directory = fzero.latest(tmp_path)
    assert directory is not None
    metadata = FileSystemReader(directory).read_metadata()
    # it only counts the plans; torch 2.11 says True, later versions list what is wrong
    verdict: Any = _validate_global_plan([None, None], metadata)  # type: ignore[list-item]
    assert verdict is True or verdict == []
    dcp_to_torch_save(directory, tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    ties = {"rest.w": "rest.tied"}
    for kind in ("params", "exp_avg", "exp_avg_sq"):
        leaves = found[kind] if kind == "params" else found["opt_state"][kind]
        expected = {name.removeprefix(f"{kind}."): leaf for name, leaf in full.items() if name.startswith(f"{kind}.")}
        assert set(expected) - set(leaves) == set(ties)
        for name, leaf in expected.items():
            stored = leaves[ties.get(name, name)]
            assert torch.equal(stored.to(leaf.dtype), leaf), name
            assert stored.dtype == (torch.float32 if leaf.dtype == torch.bfloat16 else leaf.dtype)
    assert [found["ranks"][str(rank)]["extra"]["0"].tolist() for rank in range(3)] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    # a reader of torch that knows what it wants
    wanted = {"params": {"rest.b": torch.zeros(131)}}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        load(wanted, storage_reader=FileSystemReader(directory), no_dist=True)
    assert torch.equal(wanted["params"]["rest.b"], full["params.rest.b"])


# --- who writes what -------------------------------------------------------------------------------------------------


def save_two_stages(rank: int, world: int, folder: str) -> None:  # noqa: ARG001
    for stage in (0, 1):
        made, _ = module_step(module_engine("functional", 2, stage, 600), rank, 0)
        made.save(f"{folder}/{stage}", step=1)


@pytest.mark.ranks
def test_each_rank_writes_its_own_pieces_and_stage_0_those_of_stage_1(tmp_path: Path) -> None:
    run(save_two_stages, 3, str(tmp_path))
    zero, one = (read_manifest(tmp_path / stage / "step-00000001") for stage in "01")
    layout = module_engine("functional", 2, 0, 600)
    assert len(layout.buckets()) >= 3
    for name, leaf in zero.leaves.items():
        other = one.leaves[name]
        assert leaf._replace(pieces=()) == other._replace(pieces=())
        # the same ranges, by the same ranks, of the same bits
        assert [piece._replace(file="") for piece in leaf.pieces] == [piece._replace(file="") for piece in other.pieces]
        assert [piece.file[:10] for piece in leaf.pieces] == [piece.file[:10] for piece in other.pieces]
    sizes = list(zero.files.values())
    assert max(sizes) < 1.5 * min(sizes)  # nobody writes for the others


def test_a_load_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = module_step(module_engine("hooked", 2, 2, 600), 0, 0)
    made.save(tmp_path, extra={"x": [torch.ones(2)]})
    full = made.full()
    made, _ = module_step(made, 0, 1)

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, forbidden)
    directory = fzero.latest(tmp_path)
    assert directory is not None
    (directory / ".metadata").unlink()  # it is for torch's tools only
    made, extra = made.load(directory)
    assert differing(made.full(), full) == []
    assert torch.equal(extra["x"][0], torch.ones(2))


OPTIMIZERS = {
    "sgd": fzero.sgd(0.1),
    "momentum": fzero.sgd(0.1, momentum=0.9),
    "lion": fzero.lion(0.01),
    "adam": fzero.adam(0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_from_either_engine_to_the_other(name: str, tmp_path: Path) -> None:
    opt = OPTIMIZERS[name]

    def hooked() -> Any:
        return fzero.HookedZero(Pile(3), opt, 1, bucket_bytes=600)

    def functional() -> tuple[Any, fzero.State]:
        loss_fn, params, buffers = fzero.from_module(Pile(3), criterion)
        params = {key: torch.zeros_like(leaf) for key, leaf in params.items()}
        engine = fzero.Zero(loss_fn, opt, 2, bucket_bytes=900)
        return engine, engine.init(params, buffers)

    first = hooked()
    for step in range(2):
        inputs, targets = batch(0, step)
        first.backward(criterion(first(inputs), targets))
        first.step()
    fzero.save(tmp_path, first)
    engine, _ = functional()
    state, _ = fzero.load(fzero.latest(tmp_path), engine)
    assert differing(named(engine.opt_state(state)), named(first.opt_state())) == []
    assert differing(dict(engine.params(state)), dict(first.params())) == []
    fzero.save(tmp_path / "back", engine, state)
    second = hooked()
    fzero.load(fzero.latest(tmp_path / "back"), second)
    assert differing(named(second.opt_state()), named(first.opt_state())) == []
    assert differing(dict(second.buffers()), dict(first.buffers())) == []
