"""What the training examples share to survive: checkpoints every so many steps, resuming, and an end on SIGTERM.

    torchrun --nproc-per-node 2 --max-restarts 2 examples/train_gpt.py --checkpoint runs/1 --save-every 50

goes on from the last complete checkpoint when a rank dies, and so does the same command with another number of ranks.
On SIGTERM to any rank all of them save after the next step, and end with exit code 0.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from launch import on_all_ranks, positive
from torch import Tensor

import fzero

if TYPE_CHECKING:
    import argparse

Save = Callable[..., Any]
"""Saves under a root, with what else `fzero.save` takes."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for checkpoints."""
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="save there, at the end and on SIGTERM (default: nowhere)")
    add("--save-every", type=positive, metavar="K", help="save every K steps too, in the background")
    add("--keep", type=positive, default=3, metavar="N", help="how many checkpoints stay (default: 3)")
    add("--resume", choices=("auto", "no"), default="auto", help="auto: from the latest in DIR, if any (default)")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what makes no sense."""
    if options.save_every is not None and options.checkpoint is None:
        parser.error("--save-every: where to? pass --checkpoint DIR")


def digest(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of the names and bits of a dict of tensors."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Checkpoints:
    """The checkpoints of one run, on one rank of `world`, which trains with `engine`."""

    def __init__(self, options: argparse.Namespace, world: int, engine: fzero.Zero | fzero.HookedZero) -> None:
        self.options, self.world = options, world
        self.saved: tuple[int, Any] | None = None  # the last step, and its handle
        if options.checkpoint is not None:
            # the next step tells all ranks, so that all end at the same one
            signal.signal(signal.SIGTERM, lambda *_: engine.request_stop())

    def latest(self) -> Path | None:
        """Return the checkpoint to go on from, the same on every rank."""
        if self.options.checkpoint is None or self.options.resume == "no":
            return None
        return on_all_ranks(fzero.latest(self.options.checkpoint), self.world)[0]

    def after(self, step: int, metrics: fzero.Metrics, save: Save) -> bool:
        """Save after a step if it is time or a rank was asked to end; return whether to end. Collective if it saves."""
        if self.options.checkpoint is None:
            return False
        ending = bool(metrics.stop)  # on CUDA this waits for the step
        if ending or (self.options.save_every is not None and step % self.options.save_every == 0):
            self.save(step, save)
        if ending:
            self.wait()
            if not dist.is_initialized() or dist.get_rank() == 0:
                print(f"asked to end: step {step} is saved in {self.options.checkpoint}", flush=True)
        return ending

    def save(self, step: int, save: Save) -> None:
        """Save after a step, unless that was done already; the files are written in the background."""
        if self.options.checkpoint is not None and (self.saved is None or self.saved[0] != step):
            self.saved = step, save(self.options.checkpoint, keep=self.options.keep, blocking=False)

    def wait(self) -> None:
        """Wait for the last save, before the process group goes."""
        if self.saved is not None:
            self.saved[1].wait()
