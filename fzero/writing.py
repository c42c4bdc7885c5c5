"""Write a checkpoint: every rank its own pieces, rank 0 the index, and what was there before is removed last."""

import contextlib
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from fzero import archive
from fzero.axis import Axis
from fzero.manifest import (
    MANIFEST,
    METADATA,
    OURS,
    CheckpointError,
    Leaf,
    Manifest,
    Piece,
    check_files,
    complete_steps,
    directory_of,
    incomplete,
    publish,
    read_manifest,
    step_directories,
    sync_directory,
    write_part,
)
from fzero.metadata import metadata
from fzero.pieces import Entry, cut
from fzero.together import together


class Job(NamedTuple):
    """One save, checked and agreed on."""

    axis: Axis
    root: Path
    step: int
    keep: int | None
    entries: tuple[Entry, ...]
    """What this rank writes."""
    whole: tuple[Entry, ...]
    """All leaves of the state, for those that nobody has an element of."""
    ties: dict[str, str]
    extra: Any
    """This rank's, without its tensors."""

    @property
    def directory(self) -> Path:
        """Where the step is."""
        return directory_of(self.root, self.step)


def begin(job: Job) -> str:
    """Make the directory, all ranks together; return a name of this save that no other has."""
    work = (lambda: _begin(job)) if job.axis.rank == 0 else str
    _, notes = together(job.axis, f"save step {job.step}, beginning", work, note=lambda save_id: {"id": save_id})
    return str(notes[0]["id"])


def write(job: Job, save_id: str, store: Any) -> None:
    """Write a checkpoint, all ranks together, each through a store that no other thread uses.

    A rank that has reported its file never touches it again, whatever happens: rank 0 may still name it in the index.
    Rank 0 alone says what is complete, and so what is rubbish.
    """
    axis, first, topic = job.axis, job.axis.rank == 0, f"save step {job.step} ({save_id})"
    try:
        together(axis, f"{topic}, writing", lambda: _write_own(job, save_id), store)
        together(axis, f"{topic}, completing", lambda: _complete(job, save_id) if first else None, store)
    except BaseException:
        if first:
            with contextlib.suppress(OSError):
                _sweep(job.directory, save_id)
                job.directory.rmdir()  # only if it is empty
        raise


def _begin(job: Job) -> str:
    """Make the directory, without what an unfinished save has left there, and return a name for this save."""
    job.directory.mkdir(parents=True, exist_ok=True)
    _sweep(job.directory)
    sync_directory(job.root)
    return uuid.uuid4().hex[:8]


def _write_own(job: Job, save_id: str) -> None:
    """Write what this rank has, and an index of it for rank 0."""
    if not job.directory.is_dir():
        raise CheckpointError(
            f"{job.directory}: rank 0 made this directory, and this rank does not see it; all ranks must see one file "
            "system at root"
        )
    name = _file(job.axis.rank, save_id)
    path = job.directory / name
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        end, leaves = 0, {}
        for entry in job.entries:
            pieces = []
            for box, data in cut(entry):
                piece = archive.write(descriptor, end, box.sizes, data)
                end += piece.head + data.numel() * data.element_size() + piece.tail
                pieces.append((box.start, box.numel, *piece))
            leaves[entry.name] = (entry.path, entry.shape, entry.dtype, pieces)
        os.fsync(descriptor)
        path.with_suffix(".json").write_text(json.dumps({"bytes": end, "leaves": leaves, "extra": job.extra}))
    except BaseException:
        path.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    sync_directory(job.directory)


def _file(rank: int, save_id: str) -> str:
    return f"rank-{rank:05d}.{save_id}.distcp"


def _complete(job: Job, save_id: str) -> None:
    """Put the ranks' indices together, check that every leaf is there once, and let the checkpoint be seen."""
    files, extras = {}, []
    pieces: dict[str, list[Piece]] = {}
    leaves = {entry.name: Leaf(entry.path, entry.shape, entry.dtype, ()) for entry in job.whole}
    for rank in range(job.axis.size):
        name = _file(rank, save_id)
        index = json.loads((job.directory / name).with_suffix(".json").read_text())
        files[name] = index["bytes"]
        extras.append(index["extra"])
        for leaf, (path, shape, dtype, found) in index["leaves"].items():
            leaves.setdefault(leaf, Leaf(tuple(path), tuple(shape), dtype, ()))
            pieces.setdefault(leaf, []).extend(Piece._make([name, *piece[:-1], tuple(piece[-1])]) for piece in found)
    for name, found in pieces.items():
        leaves[name] = leaves[name]._replace(pieces=tuple(sorted(found, key=lambda piece: piece.start)))
    broken = incomplete(leaves.items())
    if broken:
        raise CheckpointError(f"save: the ranks' pieces of {', '.join(broken)} are not the whole leaf once")
    manifest = Manifest(job.step, job.axis.size, files, leaves, job.ties, tuple(extras))
    write_part(job.directory / METADATA, save_id, metadata(manifest))
    write_part(job.directory / MANIFEST, save_id, manifest.text().encode())
    check_files(job.directory, files)  # another save of this step may have taken them for rubbish
    publish(job.directory / MANIFEST, save_id)
    publish(job.directory / METADATA, save_id)
    try:
        _clean(job)
    except OSError as error:
        raise CheckpointError(f"{job.directory} is complete, but what it replaces is still there: {error}") from error


# --- cleaning up -----------------------------------------------------------------------------------------------------


def _sweep(directory: Path, save_id: str = "") -> None:
    """Remove what saves, or one of them, have left in a directory beside the complete checkpoint there.

    Nothing, if that is damaged.
    """
    try:
        keep = read_manifest(directory).files if (directory / MANIFEST).is_file() else {}
    except CheckpointError:
        return
    for path in list(directory.iterdir()):
        if OURS.fullmatch(path.name) and save_id in path.name and path.name not in keep:
            path.unlink(missing_ok=True)


def _clean(job: Job) -> None:
    """Remove what the new checkpoint replaces."""
    _sweep(job.directory)
    if job.keep is None:
        return
    complete = complete_steps(job.root)
    kept = sorted(step for step in complete if step <= job.step)[-job.keep :]
    for step, path in step_directories(job.root).items():
        if step < job.step and step not in kept:
            (path / MANIFEST).unlink(missing_ok=True)  # first, so that it is never seen in part
            shutil.rmtree(path)
