"""One tensor as torch.save writes it, with its bytes at a known place: torch's tools read it, and so do we, by offset.

The file of a rank is a sequence of such archives, one a piece. An archive is a zip file of four stored records
(the pickle that rebuilds the tensor, its byte order, the version of the format, the bytes); the last is the data, so
that all before it, the *head*, and all behind it, the *tail*, are a few hundred bytes each. Nothing here unpickles.

Checksums are CRC-32: running ones over the data, one after every `BLOCK` bytes, so that the last is the one that zip
asks for and each block can be checked without those before it; and one over head and tail.
"""

import ctypes
import io
import os
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 2**20
"""Bytes that are checked, and read, as one."""

ALIGN = 64
"""The data of a piece starts at a multiple of this many bytes in its archive, as torch does it."""

_DATED = 0x21
"""1980-01-01, the first day of zip: files of equal tensors are equal."""


class Written(NamedTuple):
    """Where an archive lies in its file, and its checksums."""

    at: int
    """Bytes before it."""
    head: int
    """Bytes of the head; the data follows."""
    tail: int
    frame: int
    """Checksum of head and tail."""
    blocks: tuple[int, ...]
    """Running checksums of the data after every block."""


def memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, which must outlive them."""
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("the memory of a tensor that is conjugated or negated later has other values than the tensor")
    count = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")


def write(descriptor: int, at: int, sizes: Sequence[int], data: Tensor) -> Written:
    """Write a flat contiguous tensor of `sizes` as an archive at a place of a file; returns what to remember.

    A tensor on another device is copied to the CPU block by block.
    """
    info = _Info(data.dtype, tuple(sizes), data.numel() * data.element_size())
    start = len(info.head(0))
    crc, done, blocks = 0, 0, []
    step = BLOCK // data.element_size()
    for low in range(0, data.numel(), step):
        block = memory(held := data[low : low + step].cpu())
        crc = zlib.crc32(block, crc)
        blocks.append(crc)
        put(descriptor, block, at + start + done)
        done += len(block)
        del block, held
    head, tail = info.head(crc), info.tail(crc)
    put(descriptor, head, at)
    put(descriptor, tail, at + start + done)
    return Written(at, len(head), len(tail), zlib.crc32(tail, zlib.crc32(head)), tuple(blocks))


def put(descriptor: int, data: bytes | memoryview, at: int) -> None:
    """Write all of some bytes at a place of a file."""
    left = memoryview(data)
    while left:
        count = os.pwrite(descriptor, left, at)
        left, at = left[count:], at + count


# --- the zip file ----------------------------------------------------------------------------------------------------


class _Info:
    """What head and tail of an archive are made of."""

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...], nbytes: int) -> None:
        self._small = [
            ("piece/data.pkl", _pickled(dtype, sizes, nbytes)),
            ("piece/byteorder", sys.byteorder.encode()),
            ("piece/version", b"3\n"),
        ]
        self._nbytes = nbytes

    def head(self, crc: int) -> bytes:
        """Return the records before the data, and the header of the data."""
        found = b"".join(_local(name, zlib.crc32(data), len(data)) + data for name, data in self._small)
        bare = len(found) + len(_local("piece/data/0", crc, self._nbytes))
        # as torch pads: an extra field named FB
        padding = -(bare + 4) % ALIGN
        extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
        return found + _local("piece/data/0", crc, self._nbytes, extra)

    def tail(self, crc: int) -> bytes:
        """Return the directory of the archive."""
        at, directory = 0, b""
        for name, data in self._small:
            directory += _central(name, zlib.crc32(data), len(data), at)
            at += len(_local(name, 0, 0)) + len(data)
        directory += _central("piece/data/0", crc, self._nbytes, at)
        count, end = len(self._small) + 1, len(self.head(crc)) + self._nbytes
        return directory + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(directory), end, 0)


def _local(name: str, crc: int, size: int, extra: bytes = b"") -> bytes:
    fields = (b"PK\3\4", 20, 0, 0, 0, _DATED, crc, size, size, len(name), len(extra))
    return struct.pack("<4s5H3L2H", *fields) + name.encode() + extra


def _central(name: str, crc: int, size: int, at: int) -> bytes:
    fields = (b"PK\1\2", 20, 20, 0, 0, 0, _DATED, crc, size, size, len(name), 0, 0, 0, 0, 0, at)
    return struct.pack("<4s6H3L5H2L", *fields) + name.encode()


def _pickled(dtype: torch.dtype, sizes: tuple[int, ...], nbytes: int) -> bytes:
    """Return the pickle of a contiguous tensor whose bytes are the record "0", of any dtype alike."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= max(size, 1)
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(_Rebuilt(sizes, tuple(strides), dtype, nbytes))
    return stream.getvalue()


class _Storage(NamedTuple):
    nbytes: int


class _Rebuilt:
    def __init__(self, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> None:
        hooks: OrderedDict[str, Any] = OrderedDict()
        self._arguments = (_Storage(nbytes), 0, sizes, strides, False, hooks, dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v3, self._arguments  # noqa: SLF001  (what torch.save itself names)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        """Stand for the bytes as torch.save does."""
        return ("storage", torch.UntypedStorage, "0", "cpu", obj.nbytes) if isinstance(obj, _Storage) else None
