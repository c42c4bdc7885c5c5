"""Export: full parameters as one safetensors file, bucket by bucket."""

import json
import os
import struct
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero import archive
from fzero.agree import agree
from fzero.comm import gather, new_token
from fzero.contents import Held
from fzero.insides import Insides, insides
from fzero.layout import split
from fzero.manifest import CheckpointError, sync_directory
from fzero.together import together

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls dtypes."""


def export(path: str | os.PathLike[str], engine: Any, state: Any = None) -> None:
    """Write the full parameters as one safetensors file, under their plain paths, in the dtypes given. Collective.

    Rank 0 writes, on CPU, bucket after bucket, and moves the file to its place at the end; no rank ever holds more than
    one full bucket (or leaf, if that is larger). A tied leaf stands there once, under its first name; the file's
    metadata have ``"ties"``, a JSON object with the other names and what each is tied to. Buffers and optimizer state
    are not exported. Communicates every bucket once (all-gather), in the dtype of storage.

    The format is that of https://github.com/huggingface/safetensors (README, "Format"), which readers of any framework
    know; the package itself cannot write leaf by leaf, so it is not used.

    Parameters
    ----------
    path
        The file, in a directory that exists.
    engine, state
        A `fzero.Zero` and its state, or a `fzero.HookedZero` alone.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument of one breaks these rules or a dtype has no name in safetensors.
    CheckpointError
        On all ranks, if rank 0 cannot write. A file that was there before is as it was.
    """
    inside = insides(engine)
    target = Path(path) if isinstance(path, (str, os.PathLike)) else Path()
    axis = inside.static.axis

    def check() -> Held:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path: must be that of a file to write, got {path!r}")
        held = inside.held(state)
        _check_names(inside.given())
        if axis.rank == 0 and not target.absolute().parent.is_dir():
            raise ValueError(f"path: there is no directory {target.absolute().parent}; make it first")
        return held

    held, _, _ = agree(axis, "export", check, lambda _: f"{target}")
    header, places = _plan(inside, held)
    part = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.part")
    writes = axis.rank == 0
    descriptor, fault = -1, None
    try:
        if writes:
            descriptor, fault = _begin(part, header)
        for name, leaf in _leaves(inside, held):
            # every rank gathers to the end, whatever goes wrong on rank 0
            if writes and fault is None:
                fault = _put(descriptor, leaf, *places[name])
        together(axis, "export", lambda: _finish(descriptor, part, target, fault) if writes else None)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
            part.unlink(missing_ok=True)


def _check_names(given: Mapping[str, torch.dtype]) -> None:
    """Refuse what safetensors has no name for."""
    for name, dtype in given.items():
        if name == "__metadata__":
            raise ValueError("export: safetensors has no room for a parameter named '__metadata__'; rename it")
        if dtype not in _NAMES:
            raise ValueError(f"export: parameter {name!r} has dtype {dtype}, which safetensors does not know")


def _plan(inside: Insides, held: Held) -> tuple[bytes, dict[str, tuple[int, torch.dtype]]]:
    """Return the head of the file, and where in it each leaf starts and in which dtype. Wide dtypes first: aligned."""
    given, shapes = inside.given(), {}
    for bucket in inside.static.layout.buckets:
        shapes.update({inside.static.names[slot.leaf]: slot.shape for slot in bucket.slots})
    shapes.update({name: tuple(leaf.shape) for name, leaf in held.fixed.items()})
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "ties": json.dumps(inside.export_ties())}}
    starts, end = {}, 0
    for name in sorted(shapes, key=lambda name: -given[name].itemsize):
        begin, end = end, end + torch.Size(shapes[name]).numel() * given[name].itemsize
        entries[name] = {"dtype": _NAMES[given[name]], "shape": shapes[name], "data_offsets": [begin, end]}
        starts[name] = begin
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return head, {name: (len(head) + start, given[name]) for name, start in starts.items()}


def _leaves(inside: Insides, held: Held) -> Iterator[tuple[str, Tensor]]:
    """Give every leaf in full, one bucket after the other, by name. Collective."""
    static = inside.static
    for bucket, tensor in zip(static.layout.buckets, held.shards, strict=True):
        full = tensor if static.whole else gather(tensor, new_token(tensor), static.axis)[0]
        for slot, leaf in zip(bucket.slots, split(bucket, full), strict=True):
            yield static.names[slot.leaf], leaf
    yield from held.fixed.items()


def _begin(part: Path, header: bytes) -> tuple[int, OSError | None]:
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as error:
        return -1, error
    return descriptor, _put(descriptor, torch.frombuffer(bytearray(header), dtype=torch.uint8), 0, torch.uint8)


def _put(descriptor: int, leaf: Tensor, at: int, dtype: torch.dtype) -> OSError | None:
    data = leaf.detach().to("cpu", dtype).contiguous()
    try:
        archive.put(descriptor, archive.memory(data), at)
    except OSError as error:
        return error
    return None


def _finish(descriptor: int, part: Path, target: Path, fault: OSError | None) -> None:
    if fault is not None:
        raise CheckpointError(f"export: {target} cannot be written: {fault}")
    os.fsync(descriptor)
    part.replace(target)
    sync_directory(target.absolute().parent)
