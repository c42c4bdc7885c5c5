"""Load: every rank reads what it needs of the pieces of any world, by offset, and checks what it reads."""

import os
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from fzero import archive
from fzero.archive import BLOCK
from fzero.axis import Axis
from fzero.contents import buffer_entries, contents
from fzero.extra import decode
from fzero.insides import Insides, insides, settle
from fzero.manifest import (
    CheckpointError,
    Leaf,
    Manifest,
    Piece,
    complete_steps,
    differences,
    incomplete,
    read_manifest,
)
from fzero.pieces import Entry
from fzero.together import seed_anew, set_random_states, together


def latest(root: str | os.PathLike[str]) -> Path | None:
    """Return the directory of the highest complete step under `root`, or None.

    It looks, on this rank alone, for the index that a save writes last. Where ranks may see different files, take rank
    0's answer.
    """
    return next(reversed(complete_steps(Path(root)).values()), None)


def load(directory: str | os.PathLike[str] | None, engine: Any) -> Any:
    """Load a training state saved at any number of ranks, at any stage, by either engine. Collective.

    Call it after `engine.init` (whose leaves may all be on meta); the hook engine is changed in place, once all ranks
    have read everything, and what it has of gradients is dropped. Parameters, masters, optimizer state, buffers and
    step are those that were saved, to the bit: of the optimizer's own settings (betas, schedule) the engine's count.

    In a world of the same size torch's random generators of each rank go on where they were; buffers that differed
    between ranks differ again. In another world ranks get rank 0's buffers, and are seeded by the saved states and
    their own number, so that all draw different numbers, the same in every such load.

    Reads of every file what this rank needs; memory: one state of this rank beside the one it has. Nothing is
    unpickled.

    Parameters
    ----------
    directory
        One checkpoint, such as `fzero.latest` returns.
    engine
        A `fzero.Zero` or `fzero.HookedZero`.

    Returns
    -------
    tuple or Any
        For the functional engine ``(state, extra)``, for the hook engine `extra`: this rank's own, or in a world of
        another size the list of all ranks'. Tensors in it are on the CPU.

    Raises
    ------
    CheckpointError
        On all ranks, if one does not see the checkpoint, if it is not complete, if a file was damaged (naming it), or
        if leaves are missing, unexpected, or of other shapes, dtypes or ties (listing them all).
    """
    inside = insides(engine)
    settle(engine)
    path = Path(directory) if isinstance(directory, (str, os.PathLike)) else Path()
    axis = inside.static.axis

    def check() -> tuple[Manifest, Any, list[Entry]]:
        if directory is None:
            raise CheckpointError("directory: is None: fzero.latest found no complete checkpoint; start without one")
        if not isinstance(directory, (str, os.PathLike)):
            raise TypeError(f"directory: must be the path of a checkpoint, got {directory!r}")
        manifest = read_manifest(path)
        blank, held = inside.blank()
        found = contents(held, inside.static, writing=False)
        entries = [*found.entries, *buffer_entries(found.buffers, mine=True)]
        problems = differences(manifest, entries, found.ties)
        problems += [f"incomplete: {name}" for name in incomplete(manifest.leaves.items())]
        if problems:
            raise CheckpointError(f"{path}: does not fit this engine:\n  " + "\n  ".join(problems))
        return manifest, blank, entries

    (manifest, blank, entries), _ = together(
        axis, "load", check, digest=lambda found: f"{path.name}, files {found[0].files}"
    )
    (extra, random), _ = together(axis, "load, reading", lambda: _read_all(path, manifest, entries, axis))
    result = inside.adopt(blank)
    _restore_random(manifest, random, inside)
    return extra if result is None else (result, extra)


def _restore_random(manifest: Manifest, random: dict[str, Tensor], inside: Insides) -> None:
    axis = inside.static.axis
    if manifest.ranks == axis.size:
        set_random_states(random, inside.static.device)
        return
    states = [
        [piece.blocks for piece in leaf.pieces]
        for leaf in manifest.leaves.values()
        if leaf.path[0] == "ranks" and leaf.path[2] == "random"
    ]
    seed_anew(states, axis.rank)


# --- reading ---------------------------------------------------------------------------------------------------------


def _read_all(path: Path, manifest: Manifest, entries: Sequence[Entry], axis: Axis) -> tuple[Any, dict[str, Tensor]]:
    """Fill the entries; return `extra` and this rank's random states."""
    with Files(path) as files:
        for entry in entries:
            own = manifest.leaves.get(f"ranks.{axis.rank}.{entry.name}") if manifest.ranks == axis.size else None
            for start, part in entry.parts:
                files.read(own or manifest.leaves[entry.name], start, part)
        # what belongs to one rank is read by one, to check it at least
        mine = {rank: _of_rank(manifest, rank, files) for rank in range(axis.rank, manifest.ranks, axis.size)}
        random = {key[1]: tensor for key, tensor in mine.get(axis.rank, {}).items() if key[0] == "random"}
        if manifest.ranks == axis.size:
            return _extra(manifest, axis.rank, mine[axis.rank]), random
        others = (mine.get(rank) or _of_rank(manifest, rank, files, "extra") for rank in range(manifest.ranks))
        return [_extra(manifest, rank, found) for rank, found in enumerate(others)], random


def _of_rank(manifest: Manifest, rank: int, files: "Files", kind: str | None = None) -> dict[tuple[str, ...], Tensor]:
    """Return the tensors that a saved rank had of its own, or those of one kind."""
    found = {}
    for leaf in manifest.leaves.values():
        if leaf.path[:2] == ("ranks", str(rank)) and kind in (None, leaf.path[2]):
            tensor = torch.zeros(leaf.shape, dtype=getattr(torch, leaf.dtype))
            files.read(leaf, 0, tensor.view(-1))
            found[leaf.path[2:]] = tensor
    return found


def _extra(manifest: Manifest, rank: int, tensors: dict[tuple[str, ...], Tensor]) -> Any:
    count = sum(key[0] == "extra" for key in tensors)
    return decode(manifest.extra[rank], [tensors["extra", str(place)] for place in range(count)])


class Files:
    """The files of a checkpoint, opened when they are needed."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._stack = directory, ExitStack()
        self._open: dict[str, int] = {}
        self._scratch: Tensor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, leaf: Leaf, start: int, part: Tensor) -> None:
        """Read the elements of a leaf from `start` on into a contiguous 1-D tensor on any device."""
        size = part.element_size()
        stop = start + part.numel()
        first = max(0, bisect_right(leaf.pieces, start, key=lambda piece: piece.start) - 1)
        for piece in leaf.pieces[first:]:
            if piece.start >= stop:
                break
            low, high = max(start, piece.start), min(stop, piece.start + piece.numel)
            if low < high:
                into = part[low - start : high - start].view(torch.uint8)
                self._read(piece, piece.numel * size, (low - piece.start) * size, into)

    def _read(self, piece: Piece, nbytes: int, low: int, into: Tensor) -> None:
        """Read the bytes from `low` on of a piece of `nbytes`; check its frame and the blocks that they lie in."""
        head = self._fetch(piece, 0, piece.head)
        tail = self._fetch(piece, piece.head + nbytes, piece.tail)
        self._check(piece, zlib.crc32(tail, zlib.crc32(head)) == piece.frame)
        high = low + into.numel()
        for number in range(low // BLOCK, -(-high // BLOCK)):
            begin, end = number * BLOCK, min((number + 1) * BLOCK, nbytes)
            inside, until = max(begin, low), min(end, high)
            target = into[inside - low : until - low]
            direct = (inside, until) == (begin, end) and not target.is_cuda
            block = target if direct else self._aside(end - begin)
            view = archive.memory(block)
            self._fetch_into(piece, piece.head + begin, view)
            before = piece.blocks[number - 1] if number else 0
            self._check(piece, zlib.crc32(view, before) == piece.blocks[number])
            if not direct:
                target.copy_(block[inside - begin : until - begin])

    def _aside(self, nbytes: int) -> Tensor:
        """Return memory for a block that is not wanted whole, or not on the CPU."""
        if self._scratch is None:
            self._scratch = torch.empty(BLOCK, dtype=torch.uint8)
        return self._scratch[:nbytes]

    def _check(self, piece: Piece, right: bool) -> None:
        if not right:
            raise CheckpointError(
                f"{self._directory / piece.file}: was damaged: a checksum of the piece at byte {piece.at} is wrong"
            )

    def _fetch(self, piece: Piece, at: int, count: int) -> bytes:
        data = bytearray(count)
        self._fetch_into(piece, at, memoryview(data))
        return bytes(data)

    def _fetch_into(self, piece: Piece, at: int, view: memoryview) -> None:
        descriptor, at = self._descriptor(piece.file), piece.at + at
        while view:
            count = os.preadv(descriptor, [view], at)
            self._check(piece, count > 0)
            view, at = view[count:], at + count

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            self._open[file] = os.open(self._directory / file, os.O_RDONLY)
            self._stack.callback(os.close, self._open[file])
        return self._open[file]
