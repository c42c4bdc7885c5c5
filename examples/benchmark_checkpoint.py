r"""Save and load the training state of one model with fzero and with torch's own checkpoints of FSDP2, side by side.

    python examples/benchmark_checkpoint.py --width 1280 --layers 60

starts two ranks on this machine. Both hold the same number of float32 parameters, sharded, with both moments of AdamW
(98 M parameters and 1.2 GB of state with these options), and in every round each saves and loads once. Both sync their
files to the disk, and both put a CRC-32 over every tensor; fzero checks it when it loads.

What the columns say:

save s, load s
            Median over the rounds, each from barrier to barrier; loads come from the page cache.
x fsdp2     The ratio to FSDP2's, median over the rounds.
peak MB     The most memory within one untimed save or load that is in use for the state and its checkpoint: the largest
            of all ranks. FSDP2 loads into the state that it has; fzero makes a new one, for an engine that was set up
            with parameters on meta and so has none.
file MB     Bytes on disk.

The last line says what the checksums cost: the time in which zlib goes over this rank's part once.
"""

from __future__ import annotations

import argparse
import gc
import math
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import add_options, launch, on_all_ranks, positive, settle
from meters import Memory
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import fzero

Work = Callable[[Path], None]


def make(options: argparse.Namespace, device: torch.device) -> nn.Sequential:
    """Make a stack of square layers."""
    torch.manual_seed(options.seed)
    return nn.Sequential(*(nn.Linear(options.width, options.width) for _ in range(options.layers))).to(device)


def of_fzero(module: nn.Sequential, inputs: Tensor) -> tuple[Work, Work]:
    """Take one step with fzero, and return how to save and how to load."""
    loss_fn, params, _ = fzero.from_module(module, lambda output, targets: (output - targets).square().mean())
    engine, empty = (fzero.Zero(loss_fn, fzero.adamw(1e-4), stage=3) for _ in range(2))
    state, _ = engine.step(engine.init(params), (inputs, inputs))
    empty.init({name: leaf.to("meta") for name, leaf in params.items()})

    def save(root: Path) -> None:
        fzero.save(root, engine, state, step=1)

    def load(root: Path) -> None:
        fzero.load(root / "step-00000001", empty)

    return save, load


def of_fsdp2(module: nn.Sequential, inputs: Tensor) -> tuple[Work, Work]:
    """Take one step with FSDP2, and return how to save and how to load."""
    for layer in module:
        fully_shard(layer)
    fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-4)
    module(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

    def save(root: Path) -> None:
        model, moments = get_state_dict(module, optimizer)
        writer = FileSystemWriter(root, sync_files=True)
        state_dict_saver.save({"model": model, "moments": moments}, storage_writer=writer)

    def load(root: Path) -> None:
        model, moments = get_state_dict(module, optimizer)
        state_dict_loader.load({"model": model, "moments": moments}, storage_reader=FileSystemReader(root))
        set_state_dict(module, optimizer, model_state_dict=model, optim_state_dict=moments)

    return save, load


def timed(work: Work, root: Path) -> float:
    """Return the seconds that the slowest rank needs."""
    dist.barrier()
    started = time.perf_counter()
    work(root)
    dist.barrier()
    return time.perf_counter() - started


def added(memory: Memory, work: Work, root: Path) -> float:
    """Return the most MB that one run adds to the memory in use."""
    gc.collect()
    before = memory.in_use()
    dist.barrier()
    peak = memory.peak(lambda: work(root))
    return math.nan if before is None or peak is None else (peak - before) / 1e6


def parameters(options: argparse.Namespace) -> int:
    """Return how many parameters a model has."""
    return int(options.layers * (options.width**2 + options.width))


def train(options: argparse.Namespace, rank: int, world: int, device: torch.device) -> None:
    """Measure on one rank of `world`; rank 0 talks."""
    inputs = torch.randn(4, options.width, device=device)
    peers = {name: use(make(options, device), inputs) for name, use in (("fsdp2", of_fsdp2), ("fzero", of_fzero))}
    memory = Memory(device)
    folder = tempfile.mkdtemp(dir=options.folder) if rank == 0 else ""
    roots = {name: Path(on_all_ranks(folder, world)[0], name) for name in peers}
    times: dict[tuple[str, str], list[float]] = {}
    peaks: dict[tuple[str, str], float] = {}
    for turn in range(options.rounds + 1):
        for name, works in sorted(peers.items(), reverse=turn % 2 == 0):
            for kind, work in zip(("save", "load"), works, strict=True):
                if kind == "save" and rank == 0:
                    shutil.rmtree(roots[name], ignore_errors=True)  # DCP would leave the files of the last round
                if turn == 0:
                    held = 0.0 if (name, kind) == ("fzero", "load") else 12 * parameters(options) / world / 1e6
                    peaks[name, kind] = held + max(on_all_ranks(added(memory, work, roots[name]), world))
                else:
                    times.setdefault((name, kind), []).append(timed(work, roots[name]))
    if rank == 0:
        show(options, times, peaks, roots)
        shutil.rmtree(folder)


def show(
    options: argparse.Namespace,
    times: dict[tuple[str, str], list[float]],
    peaks: dict[tuple[str, str], float],
    roots: dict[str, Path],
) -> None:
    """Print the table."""
    count = parameters(options)
    print(f"{count / 1e6:.1f} M parameters, {12 * count / 1e6:.0f} MB of state, {options.ranks} ranks")
    print("peer   save s  x fsdp2  load s  x fsdp2  peak MB save  load  file MB")
    for name, root in roots.items():
        row: list[Any] = []
        for kind in ("save", "load"):
            pairs = zip(times[name, kind], times["fsdp2", kind], strict=True)
            row += [statistics.median(times[name, kind]), statistics.median(mine / other for mine, other in pairs)]
        size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file()) / 1e6
        assert size >= 12 * count / 1e6, f"{name}: {size:.1f} MB of files are less than parameters and two moments"
        print("{:6} {:6.2f} {:8.3f} {:7.2f} {:8.3f}".format(name, *row), end="")
        print(f" {peaks[name, 'save']:13.0f} {peaks[name, 'load']:5.0f} {size:8.0f}")
    part = bytes(12 * count // options.ranks)
    started = time.perf_counter()
    zlib.crc32(part)
    print(f"checksum of one rank's part: {time.perf_counter() - started:.2f} s", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line and check it, before any rank starts."""
    parser = argparse.ArgumentParser(description="Compare fzero's checkpoints with those of FSDP2.")
    add = parser.add_argument
    add_options(parser)
    add("--width", type=positive, default=512, help="(default: 512)")
    add("--layers", type=positive, default=24, help="(default: 24)")
    add("--rounds", type=positive, default=5, help="(default: 5)")
    add("--folder", type=Path, help="where to write (default: the system's folder for temporary files)")
    options = parser.parse_args(arguments)
    settle(parser, options)
    if options.ranks < 2:
        parser.error("one rank has nothing to shard; use --ranks 2 or more")
    return options


if __name__ == "__main__":
    launch(train, parse())
