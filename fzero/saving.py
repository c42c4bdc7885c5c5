"""Save: what all ranks agree on first, and the thread of a save in the background."""

import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from fzero import archive
from fzero.agree import agree, own_store
from fzero.contents import Contents, buffer_entries, contents
from fzero.extra import encode
from fzero.insides import Insides, insides, settle
from fzero.manifest import CheckpointError
from fzero.pieces import Entry, dtype_name
from fzero.together import random_states
from fzero.writing import Job, begin, write


class Handle:
    """A checkpoint that is being written, or was."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        """Where it is, once it is complete."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._told = False

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread of its own; Python waits for it before it ends."""

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  (whatever it is, `wait` raises it)
                self._error = error

        self._thread = threading.Thread(target=run, name=f"save {self.directory.name}")
        self._thread.start()

    def done(self) -> bool:
        """Return whether nothing is being written any more, be it complete or failed. Waits for nothing."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete, on this rank alone, and return its directory.

        Raises
        ------
        CheckpointError
            If it could not be written: on all ranks the same.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._told = True
            raise CheckpointError(str(self._error)) from self._error
        return self.directory

    def finish(self) -> None:
        """Wait; raise a failure that nobody was told of yet."""
        if not self._told:
            self.wait()


def save(
    root: str | os.PathLike[str],
    engine: Any,
    state: Any = None,
    step: int | None = None,
    extra: Any = None,
    keep: int | None = None,
    blocking: bool = True,
) -> Handle:
    """Save a training state as ``root/step-00000100``. Collective.

    Each rank writes its own part of parameters (masters), optimizer state and replicated leaves, torch's random state
    of that rank, and its `extra`, into one file of its own, and syncs it. Then rank 0 writes the index, in one move:
    before it there is no checkpoint, and with it there is a complete one. An earlier checkpoint of the same step, and
    those that `keep` leaves out, are removed after that. All ranks must see the same file system at `root`.

    Needs no memory beyond a few MB; with ``blocking=False`` that of this rank's part, in CPU memory. Communicates a few
    short texts through the store, no tensors.

    Parameters
    ----------
    root
        The directory that holds a run's checkpoints; made if it is not there.
    engine, state
        A `fzero.Zero` and its state, or a `fzero.HookedZero` alone.
    step
        The number to save under; None: that of applied updates.
    extra
        This rank's own JSON-like data (None, bool, int, float, str, list, tuple, dict with strings as keys) and
        tensors: the position in the data, generators, schedules of one's own.
    keep
        How many complete checkpoints stay, the new one among them, counted down from its step; None: all. Higher steps
        are never removed.
    blocking
        False: copy what is to be written, return at once and write in a thread. What goes wrong there is raised by
        `wait` or by the next save; call `wait` before the process group is destroyed.

    Returns
    -------
    Handle
        ``handle.wait()`` returns the directory.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument of one breaks these rules or the ranks' states differ in structure or step.
    CheckpointError
        On all ranks, if one cannot write (the disk is full) or is gone. Earlier checkpoints are as they were.
    """
    inside = insides(engine)
    settle(engine)
    job = _agree_on(inside, root, (state, step, extra, keep, blocking))
    handle = Handle(job.directory)
    save_id = begin(job)
    if blocking:
        write(job, save_id, None)
        return handle
    job = job._replace(entries=tuple(_copied(entry) for entry in job.entries))
    store = own_store() if job.axis.size > 1 else None
    settle(engine, handle)
    handle.start(lambda: write(job, save_id, store))
    return handle


def _agree_on(inside: Insides, place: Any, given: tuple[Any, ...]) -> Job:
    """Check everything that a rank was given and learn from the others what they write."""
    axis, device = inside.static.axis, inside.static.device
    state, step, extra, keep, blocking = given

    root = Path(place) if isinstance(place, (str, os.PathLike)) else None

    def check() -> tuple[Contents, Any, list[Tensor]]:
        if root is None:
            raise TypeError(f"root: must be the path of a directory, got {place!r}")
        found = contents(inside.held(state), inside.static, writing=True)
        for name, value, least in (("step", step, 0), ("keep", keep, 1)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"{name}: must be an integer of at least {least}, or None, got {value!r}")
        if not isinstance(blocking, bool):
            raise TypeError(f"blocking: must be True or False, got {blocking!r}")
        if root.exists() and not root.is_dir():
            raise ValueError(f"root: {root} is not a directory; pass the one that holds the run's checkpoints")
        return found, *encode(extra)

    def describe(found: tuple[Contents, Any, list[Tensor]]) -> str:
        return f"root {root}, step {step}, keep {keep}, blocking {blocking}; {found[0].digest()}"

    def note(found: tuple[Contents, Any, list[Tensor]]) -> dict[str, Any]:
        return {"buffers": [_checksum(buffer) for buffer in found[0].buffers.values()]}

    (found, own_extra, tensors), _, notes = agree(axis, "save", check, describe, note)
    sums = zip(found.buffers.items(), notes[axis.rank]["buffers"], notes[0]["buffers"], strict=True)
    differing = {name: buffer for (name, buffer), here, first in sums if here != first}
    buffers = buffer_entries(found.buffers, mine=axis.rank == 0)
    prefix = ("ranks", str(axis.rank))
    own = [
        *buffer_entries(differing, mine=True, prefix=prefix),
        *(_own((*prefix, "random", kind), random) for kind, random in random_states(device).items()),
        *(_own((*prefix, "extra", str(place)), tensor) for place, tensor in enumerate(tensors)),
    ]
    whole = (*found.entries, *buffers)
    applied = int(found.step) if step is None else step
    return Job(axis, Path(place), applied, keep, (*whole, *own), whole, found.ties, own_extra)


def _own(path: tuple[str, ...], tensor: Tensor) -> Entry:
    flat = tensor.detach().contiguous().view(-1)
    return Entry(path, tuple(tensor.shape), dtype_name(tensor), ((0, flat),) if flat.numel() else ())


def _checksum(buffer: Tensor) -> int:
    flat = buffer.detach().cpu().contiguous()
    return zlib.crc32(archive.memory(flat)) if flat.numel() else 0


def _copied(entry: Entry) -> Entry:
    return entry._replace(parts=tuple((start, part.to("cpu", copy=True)) for start, part in entry.parts))
