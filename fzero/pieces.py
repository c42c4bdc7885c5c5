"""What a checkpoint holds of a leaf: flat ranges of it, cut into rectangles. Arithmetic only."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

LARGEST = 2**30
"""Bytes: a longer range is cut first, so that no size in a file needs more than 32 bits."""


class Rectangle(NamedTuple):
    """A box of a leaf that is also one range of its elements in logical order."""

    start: int
    """Elements of the leaf before it."""
    numel: int
    """Its elements."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Entry(NamedTuple):
    """One full leaf of a checkpoint, and what this rank has of it."""

    path: tuple[str, ...]
    """What the leaf is of ("params", or "opt_state" and a moment), then its plain path."""
    shape: tuple[int, ...]
    dtype: str
    """As torch prints it, without "torch."."""
    parts: tuple[tuple[int, Tensor], ...] = ()
    """(start in elements of the leaf, contiguous 1-D view): what is written from, or read into."""

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""
        return ".".join(self.path)

    @property
    def numel(self) -> int:
        """Elements of the full leaf."""
        return math.prod(self.shape)


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype in checkpoints."""
    return str(tensor.dtype).removeprefix("torch.")


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """Cut the elements `start` to `stop` of a leaf, in logical order, into rectangles: at most 2n-1 of n dims.

    >>> [(box.offsets, box.sizes) for box in rectangles((4, 3), 2, 10)]
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if not shape:
        return [Rectangle(0, 1, (), ())]
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    found = []
    while start < stop:
        # the outermost dim whose whole slices begin here and fit
        dim = next(dim for dim, stride in enumerate(strides) if start % stride == 0 and start + stride <= stop)
        offsets = tuple(start // stride % size for stride, size in zip(strides, shape, strict=True))
        length = min((stop - start) // strides[dim], shape[dim] - offsets[dim])
        sizes = (*[1] * dim, length, *shape[dim + 1 :])
        found.append(Rectangle(start, length * strides[dim], offsets, sizes))
        start += length * strides[dim]
    return found


def cut(entry: Entry) -> list[tuple[Rectangle, Tensor]]:
    """Return what this rank has of a leaf as rectangles with their elements."""
    found = []
    for start, part in entry.parts:
        longest = LARGEST // part.element_size()
        for low in range(0, part.numel(), longest):
            high = min(low + longest, part.numel())
            for box in rectangles(entry.shape, start + low, start + high):
                at = box.start - start
                found.append((box, part[at : at + box.numel]))
    return found
