"""The index of a checkpoint: a JSON file that says which leaf lies where, and without which there is no checkpoint.

A checkpoint is a directory ``step-00000100``::

    manifest.json               written last, in one move: with it the checkpoint is complete
    rank-00003.4f2a1b9c.distcp  what rank 3 wrote, one archive a piece; the second part names one save
    .metadata                   the same index for torch's own tools; never read here

Files that the manifest does not name do not count.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fzero.archive import BLOCK
from fzero.pieces import Entry

MANIFEST, METADATA = "manifest.json", ".metadata"
OURS = re.compile(r"rank-\d{5,}\.[0-9a-f]{8}\.(distcp|json)|(manifest\.json|\.metadata)\.[0-9a-f]{8}\.part")
"""Files of saves, finished or not, beside manifest and metadata."""

_STEP = re.compile(r"step-(\d{8,})")
_FORMAT = 1
_BEFORE, _BETWEEN, _AFTER = '{"checksum": "', '", "checkpoint": ', "}\n"
_CHECKSUM = 64


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is not complete, is damaged, or does not fit; raised on all ranks."""


class Piece(NamedTuple):
    """A range of a leaf in a file."""

    file: str
    start: int
    numel: int
    """Elements of the leaf before it, and its own."""
    at: int
    head: int
    tail: int
    frame: int
    blocks: tuple[int, ...]
    """Of its archive: see `fzero.archive.Written`."""


class Leaf(NamedTuple):
    """A leaf as it was saved."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    """Ordered by their start; together they are the leaf."""


class Manifest(NamedTuple):
    """Everything about a checkpoint but its tensors."""

    step: int
    ranks: int
    files: dict[str, int]
    """Bytes of every file."""
    leaves: dict[str, Leaf]
    """By name; those of one rank alone under ``ranks.``, its number, and what they are."""
    ties: dict[str, str]
    """Of every leaf of the parameters that is another one: which."""
    extra: tuple[Any, ...]
    """By rank, as `fzero.extra.encode` gives it."""

    def text(self) -> str:
        """Return it as JSON with a checksum."""
        number = {name: place for place, name in enumerate(self.files)}
        leaves = {
            name: {
                "path": leaf.path,
                "shape": leaf.shape,
                "dtype": leaf.dtype,
                "pieces": [[number[piece.file], *piece[1:]] for piece in leaf.pieces],
            }
            for name, leaf in self.leaves.items()
        }
        rest = {"step": self.step, "ranks": self.ranks, "files": self.files, "ties": self.ties, "extra": self.extra}
        body = json.dumps({"format": _FORMAT, "byteorder": sys.byteorder, "block": BLOCK, **rest, "leaves": leaves})
        return _BEFORE + hashlib.sha256(body.encode()).hexdigest() + _BETWEEN + body + _AFTER


def read_manifest(directory: Path) -> Manifest:
    """Read the index of a checkpoint and see that its files are there.

    Raises
    ------
    CheckpointError
        If there is none, it was damaged, or a file is missing or of another size: naming the file.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: there is no such directory here; all ranks must see one file system")
    try:
        text = (directory / MANIFEST).read_bytes().decode()
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory}: has no {MANIFEST}, so it is no complete checkpoint; fzero.latest finds the last complete one"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{directory / MANIFEST}: cannot be read ({error})") from error
    manifest = _parse(text, directory / MANIFEST)
    check_files(directory, manifest.files)
    return manifest


def check_files(directory: Path, files: Mapping[str, int]) -> None:
    """Raise `CheckpointError` unless files are there with as many bytes as were written."""
    for name, size in files.items():
        try:
            found = (directory / name).stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{directory / name}: belongs to the checkpoint but is not there ({error})"
            ) from error
        if found != size:
            raise CheckpointError(f"{directory / name}: was written with {size} bytes and has {found}; it was damaged")


def _parse(text: str, file: Path) -> Manifest:
    start = len(_BEFORE) + _CHECKSUM + len(_BETWEEN)
    body = text[start : -len(_AFTER)]
    checksum = hashlib.sha256(body.encode()).hexdigest()
    if text != _BEFORE + checksum + _BETWEEN + body + _AFTER:
        raise CheckpointError(f"{file}: was damaged: its checksum is not that of its content")
    found = json.loads(body)
    if (found["format"], found["byteorder"], found["block"]) != (_FORMAT, sys.byteorder, BLOCK):
        raise CheckpointError(
            f"{file}: is of format {found['format']}, {found['byteorder']}-endian, with blocks of {found['block']} "
            f"bytes; this version reads format {_FORMAT}, {sys.byteorder}-endian, {BLOCK} bytes"
        )
    names = list(found["files"])
    leaves = {}
    for name, leaf in found["leaves"].items():
        pieces = tuple(Piece._make([names[piece[0]], *piece[1:-1], tuple(piece[-1])]) for piece in leaf["pieces"])
        leaves[name] = Leaf(tuple(leaf["path"]), tuple(leaf["shape"]), leaf["dtype"], pieces)
    return Manifest(found["step"], found["ranks"], found["files"], leaves, found["ties"], tuple(found["extra"]))


def incomplete(leaves: Iterable[tuple[str, Leaf]]) -> list[str]:
    """Return the leaves whose pieces, ordered by their start, are not the whole leaf once."""
    found = []
    for name, leaf in leaves:
        end = 0
        for piece in leaf.pieces:
            end = end + piece.numel if piece.start == end else -1
        if end != Entry(leaf.path, leaf.shape, leaf.dtype).numel:
            found.append(name)
    return found


def differences(manifest: Manifest, entries: Sequence[Entry], ties: dict[str, str]) -> list[str]:
    """Return what does not fit between a checkpoint and what an engine expects."""
    saved = {name: leaf for name, leaf in manifest.leaves.items() if leaf.path[0] != "ranks"}
    wanted = {entry.name: entry for entry in entries}
    found = [f"missing: {_show(entry)}" for name, entry in wanted.items() if name not in saved]
    found += [f"unexpected: {_show(leaf, name)}" for name, leaf in saved.items() if name not in wanted]
    for name, entry in wanted.items():
        leaf = saved.get(name)
        if leaf is not None and (leaf.shape, leaf.dtype) != (entry.shape, entry.dtype):
            found.append(
                f"differs: {name} was saved as {leaf.shape} {leaf.dtype}, expected {entry.shape} {entry.dtype}"
            )
    for name in sorted(set(ties) | set(manifest.ties)):
        before, now = manifest.ties.get(name), ties.get(name)
        if before != now:
            found.append(f"tie: {name} was saved {_tied(before)}, expected {_tied(now)}")
    return found


def _show(leaf: Entry | Leaf, name: str | None = None) -> str:
    return f"{leaf.name if isinstance(leaf, Entry) else name} {leaf.shape} {leaf.dtype}"


def _tied(source: str | None) -> str:
    return "on its own" if source is None else f"tied to {source}"


# --- the file system -------------------------------------------------------------------------------------------------


def directory_of(root: Path, step: int) -> Path:
    """Return where a step is saved."""
    return root / f"step-{step:08d}"


def step_directories(root: Path) -> dict[int, Path]:
    """Return the directories of steps under a root, complete or not, ordered by step."""
    found = {}
    if root.is_dir():
        for path in root.iterdir():
            match = _STEP.fullmatch(path.name)
            if match and path.is_dir():
                found[int(match[1])] = path
    return dict(sorted(found.items()))


def complete_steps(root: Path) -> dict[int, Path]:
    """Return the directories of complete checkpoints under a root, ordered by step."""
    return {step: path for step, path in step_directories(root).items() if (path / MANIFEST).is_file()}


def write_part(path: Path, save_id: str, data: bytes) -> None:
    """Write what will be a file, durably, beside it; `publish` moves it there."""
    with path.with_name(f"{path.name}.{save_id}.part").open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def publish(path: Path, save_id: str) -> None:
    """Let what `write_part` wrote be the file, in one move."""
    path.with_name(f"{path.name}.{save_id}.part").replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make what was created, moved or removed in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
