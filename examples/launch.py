"""What the examples share: their ranks, the options of these, and the checks of those options.

A program adds its own options to those of `add_options`, calls `settle` on what was parsed, and hands a function
``train(options, rank, world, device)`` to `launch`, which calls it on every rank: as one of torchrun's ranks, alone in
this process with ``--ranks 1``, or in children that it starts.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

Value = TypeVar("Value")
Train = Callable[[argparse.Namespace, int, int, torch.device], None]


# --- Options -----------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    """Read an integer of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def new_file(text: str) -> Path:
    """Read the name of a file to write, in a folder that exists."""
    folder = Path(text).absolute().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {folder}")
    return Path(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every example has."""
    add = parser.add_argument
    add("--ranks", type=positive, help="processes to start (default: 2 on CPU, one per device on CUDA)")
    add("--threads", type=positive, help="of each rank, on CPU (default: the cores shared out among a machine's ranks)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    add("--seed", type=int, default=0, help="(default: 0)")


def under_torchrun() -> bool:
    """Return whether someone else has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def settle(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Choose the device and the number of ranks where the command line does not, and refuse what cannot run."""
    devices = torch.cuda.device_count()
    if options.device == "auto":
        options.device = "cuda" if devices else "cpu"
    cuda = options.device == "cuda"
    if options.ranks is None:
        options.ranks = max(1, devices) if cuda else 2
    if cuda and devices == 0:
        parser.error("--device cuda: no CUDA device was found; use --device cpu")
    if cuda and not under_torchrun() and options.ranks > devices:
        parser.error(f"--ranks {options.ranks}: each rank needs its own CUDA device, and this machine has {devices}")


# --- Ranks -------------------------------------------------------------------------------------------------


def peak_memory(device: torch.device) -> float:
    """Return the most memory this rank has used so far, in MB: of the device, or of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def on_all_ranks(value: Value, world: int) -> list[Value]:
    """Return every rank's value (picklable), in rank order. Collective."""
    if world == 1:
        return [value]
    found: list[Value | None] = [None] * world
    dist.all_gather_object(found, value)
    return found  # type: ignore[return-value]  # all are filled now


def run_rank(rank: int, train: Train, options: argparse.Namespace, world: int, init_method: str) -> None:
    """Join the process group, if the world has more than one rank, and train."""
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(options.threads or max(1, (os.cpu_count() or 1) // local_world))
    if world > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        limit = timedelta(minutes=5)
        store, _, _ = next(rendezvous(init_method, rank, world, timeout=limit))
        # torchrun's store outlives a restart, and so would the addresses of ranks that are gone
        store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    train(options, rank, world, device)
    if world > 1:
        # Only after success: a rank that fails must be the first to end, as its traceback is the one shown.
        dist.destroy_process_group()


def start_ranks(train: Train, options: argparse.Namespace) -> None:
    """Start the ranks as children; when one fails or Ctrl-C comes, end them all."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = start_processes(  # type: ignore[no-untyped-call]
            run_rank,
            (train, options, options.ranks, f"file://{folder}/rendezvous"),  # a file needs no free port
            options.ranks,
            join=False,
            daemon=True,
            start_method="spawn",
        )
        # what stops this process stops the ranks, which may have something to save first
        before = signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in ranks.processes])
        try:
            while not ranks.join():
                pass
        except (ProcessRaisedException, ProcessExitedException) as failure:
            sys.exit(f"rank {failure.error_index} failed: {failure}")
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            signal.signal(signal.SIGTERM, before)
            for process in ranks.processes:
                process.kill()
                process.join()


def launch(train: Train, options: argparse.Namespace) -> None:
    """Run as one of torchrun's ranks, alone, or as the parent of ranks of its own."""
    if under_torchrun():
        run_rank(int(os.environ["RANK"]), train, options, int(os.environ["WORLD_SIZE"]), "env://")
    elif options.ranks == 1:
        run_rank(0, train, options, 1, "")
    else:
        start_ranks(train, options)
