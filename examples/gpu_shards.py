"""The memory of one rank of N, measured on one device: the ranks that are not there are torch's fake process group.

The step is the real one, of rank 0, with its buckets, gathers and scatters. Only what arrives from the others is
missing, so numbers mean nothing here, but every tensor has its size. It needs torch and fzero only.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from gpu_model import Batch, Size, batches, make, with_fzero
from torch.testing._internal.distributed import fake_pg

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from meters import Memory

STEPS = 2  # before the one that is measured


class Mirror(dist.Store):  # type: ignore[name-defined,misc]
    """A store in which every other rank has said what this one says: they agree on everything."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.counts: dict[str, int] = {}

    def set(self, key: str, value: Any) -> None:
        """Keep a value."""
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Return a value; rank 0's for that of another rank."""
        return self.values[key] if key in self.values else self.values[f"{key.rpartition('/')[0]}/0"]

    def add(self, key: str, amount: int) -> int:
        """Count."""
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for nobody."""


@contextmanager
def one_of(ranks: int) -> Iterator[None]:
    """Be rank 0 of a process group whose other ranks are not there."""
    assert hasattr(fake_pg, "FakeProcessGroup")  # the import has registered the backend
    store = Mirror()  # the process group does not keep the Python part of it alive
    dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        del store


@dataclass(frozen=True)
class Held:
    """Bytes of one rank, and what ZeRO's accounting says of them."""

    ranks: int
    stage: int
    compiled: bool
    rest: int
    peak: int
    rest_formula: float
    peak_formula: float


def formulas(size: int, ranks: int, stage: int, *, compiled: bool) -> tuple[float, float]:
    """Return the bytes of `size` float32 parameters with AdamW, between steps and at most within one.

    Between steps: parameters and two moments, 12 bytes a parameter, in shards from stage 1 on. Within a step gathered
    parameters (4) and gradients (4) come on top as the stage says; compiled, with one micro-batch, full gradients do
    not live to the end of backward in stage 1 either. Activations, and up to two buckets or blocks under way, are not
    counted. Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, sec. 5, with 4 bytes where its mixed precision has 2,
    and the shard that stays beside what is gathered from it.
    """
    rest = 12 * size / (ranks if stage else 1)
    added = {
        0: 4 * size,
        1: 4 * size if compiled else 8 * size + 4 * size / ranks,
        2: 4 * size + (0 if compiled else 4 * size / ranks),
        3: 4 * size / ranks,
    }
    return rest, rest + added[stage]


def held(size: Size, ranks: int, stage: int, memory: Memory, *, compiled: bool) -> Held:
    """Measure one rank of `ranks` in float32."""
    batch: Batch = batches(size, memory.device, 1)[0]
    with one_of(ranks):
        gc.collect()  # what the last one has left
        before = memory.in_use() or 0
        module = make(size, memory.device)
        count = sum(parameter.numel() for parameter in module.parameters())
        train = with_fzero(module, stage=stage, compiled=compiled)
        del module

        def steps(number: int) -> None:
            for _ in range(number):
                train(batch)

        steps(STEPS)
        gc.collect()
        rest = (memory.in_use() or 0) - before
        peak = (memory.peak(partial(steps, 1)) or 0) - before
    if memory.device.type == "cuda":
        torch.cuda.empty_cache()
    return Held(ranks, stage, compiled, rest, peak, *formulas(count, ranks, stage, compiled=compiled))
