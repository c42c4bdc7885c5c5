r"""Train one GPT with fzero and with its peers, side by side, and compare time, memory, bytes sent and loss.

    python examples/benchmark.py --plot times.png --json times.json

starts two ranks on this machine. ``--only ddp,fsdp2,zero-2-compiled`` chooses some of the peers (`peers.py` has them);
ddp always runs, as the others are compared with it. All have the same model, first weights, batches and optimizer, in
float32, live in the same processes, and train the same number of steps; the program fails unless their losses agree.
Two free CPU cores need about a quarter of an hour for the default peers at the default size.

Other ways to run it:

    python examples/benchmark.py --layers 2 --width 128 --only hooked-3,zero-3,fsdp2
    GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes 2 --nproc-per-node 1 --node-rank ... examples/benchmark.py --gbit 1

What the columns say:

step ms, x ddp
            Median of all timed steps, each as slow as its slowest rank, and its ratio to ddp's. In every round each
            peer makes --steps steps, after a barrier; the order rotates from round to round.
first s     Seconds until the first step is finished: building, compiling and the step itself. It is less when
            inductor's cache has the code already; an empty TORCHINDUCTOR_CACHE_DIR shows the first time.
rest, peak  MB per rank: what a peer added to the memory in use, between steps and at most within two untimed steps; the
            largest of all ranks. On CPU the C library says how much it has handed out, asked every millisecond by a
            thread: what lives for less may be missed, and what compiling leaves behind, about 10 MB, counts too. On
            CUDA, torch's allocator says it.
sent MB     Per rank and step, as counted by the network interface, headers included: loopback for ranks on one host,
            that of GLOO_SOCKET_IFNAME between hosts. Whatever else the host sends there counts too, so it is the least
            of all rounds; take more rounds on a busy host. "-" where the system has no such count, and on CUDA, whose
            ranks need no network interface.
wire ms     With --gbit: how long the bytes sent take at that rate.
loss        Of the last step, mean over ranks.

The floor is what one process needs alone, without communication: rank 0 trains the same model while the others wait.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from launch import add_options, launch, new_file, on_all_ranks, positive, settle, under_torchrun
from meters import Link, Memory
from peers import FLOORS, PEERS, Batch, Step, installed
from torch import Tensor
from torch._dynamo import config as dynamo
from train_gpt import GPT, HEAD_WIDTH, VOCABULARY

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT = (
    "ddp,ddp-compiled,zero-redundancy,fsdp2,fsdp2-compiled,deepspeed-2,deepspeed-3,hooked-2,hooked-3,"
    "zero-2,zero-2-compiled,zero-3,zero-3-compiled"
)
BATCHES = 4  # so few that the loss falls, although they are random
PEAK_STEPS = 2
TOLERANCE = 1e-3  # relative, of the losses after the last step


# --- What is measured --------------------------------------------------------------------------------------


@dataclass
class Result:
    """What is known of a peer; until `Bench.merge`, only by this rank."""

    first: float = 0.0
    rest: int | None = None
    peak: int | None = None
    times: list[float] = field(default_factory=list)
    sent: list[float | None] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.times)

    @property
    def least_sent(self) -> float | None:
        """Bytes per rank and step."""
        known = [count for count in self.sent if count is not None]
        return min(known) if len(known) == len(self.sent) else None


class Bench:
    """All peers on one rank of `world`."""

    def __init__(self, options: argparse.Namespace, rank: int, world: int, device: torch.device) -> None:
        self.options, self.rank, self.world, self.device = options, rank, world, device
        self.memory, self.link = Memory(device), Link(world, device)
        self.batches = self.make_batches()
        self.steps: dict[str, Step] = {}
        self.results: dict[str, Result] = {}

    def module(self) -> GPT:
        """Make the model with the same values every time."""
        torch.manual_seed(self.options.seed)
        return GPT(self.options.layers, self.options.width, self.options.context, 0.0).to(self.device)

    def make_batches(self) -> list[Batch]:
        """Make this rank's batches of random tokens."""
        generator = torch.Generator().manual_seed(self.options.seed * 65536 + self.rank)
        shape = (BATCHES, self.options.batch, self.options.context + 1)
        tokens = torch.randint(VOCABULARY, shape, generator=generator).to(self.device)
        return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens]

    def runs(self, name: str) -> bool:
        """Return whether this rank trains a peer; the floors are rank 0's alone."""
        return self.rank == 0 or name not in FLOORS

    def barrier(self) -> None:
        """Wait for the device, then for all ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def train(self, name: str, steps: int) -> None:
        """Make steps of a peer and keep their times and losses."""
        result = self.results[name]
        for _ in range(steps if self.runs(name) else 0):
            started = time.perf_counter()
            loss: Tensor = self.steps[name](self.batches[len(result.losses) % BATCHES])
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            result.times.append(time.perf_counter() - started)
            result.losses.append(float(loss))

    def prepare(self, name: str) -> None:
        """Build a peer, make its first steps, and measure its memory."""
        result = self.results[name] = Result()
        gc.collect()
        self.barrier()
        before, started = self.memory.in_use(), time.perf_counter()
        if self.runs(name):
            self.steps[name] = (FLOORS | PEERS)[name](self.module())
        self.train(name, 1)
        result.first = time.perf_counter() - started
        self.train(name, self.options.warmup)
        gc.collect()
        rest = self.memory.in_use()
        peak = self.memory.peak(lambda: self.train(name, PEAK_STEPS))
        if before is not None and rest is not None and peak is not None:
            result.rest, result.peak = rest - before, peak - before
        result.times.clear()

    def round(self, name: str) -> None:
        """Make the timed steps of one round."""
        gc.collect()
        self.barrier()
        before = self.link.sent()
        self.barrier()
        self.train(name, self.options.steps)
        self.barrier()
        after = self.link.sent()
        sent = None if before is None or after is None else (after - before) / self.options.steps
        self.results[name].sent.append(sent)

    def merge(self, name: str) -> Result:
        """Return what all ranks know of a peer. Collective."""
        found = [result for result in on_all_ranks(self.results[name], self.world) if result.losses]
        merged = Result(max(result.first for result in found))
        if all(result.peak is not None for result in found):
            merged.rest = max(result.rest or 0 for result in found)
            merged.peak = max(result.peak or 0 for result in found)
        merged.times = [max(times) for times in zip(*(result.times for result in found), strict=True)]
        merged.losses = [statistics.mean(some) for some in zip(*(result.losses for result in found), strict=True)]
        for some in zip(*(result.sent for result in found), strict=True):
            merged.sent.append(None if None in some else sum(some) / self.world)
        return merged


# --- The program -------------------------------------------------------------------------------------------


def benchmark(options: argparse.Namespace, rank: int, world: int, device: torch.device) -> None:
    """Measure all peers on one rank of `world`; rank 0 prints and writes what all found."""
    bench = Bench(options, rank, world, device)
    say = print if rank == 0 else lambda *_args, **_options: None
    size = sum(leaf.numel() * leaf.element_size() for leaf in bench.module().parameters())
    PEERS["ddp"](bench.module())(bench.batches[0])  # what torch sets up once, before anything is measured
    names = [*options.only, "alone"]
    if any("compiled" in name for name in names):
        names.append("alone-compiled")
        dynamo.recompile_limit = 64  # several peers compile the same functions
        torch.compile(lambda x: x + 1)(torch.ones(1, device=device))  # loads the compiler before it is measured
    say(f"torch {torch.__version__}, {world} ranks on {device.type}, {torch.get_num_threads()} threads each")
    say(
        f"{size / 1e6:.1f} MB of parameters ({options.layers} blocks, width {options.width}), "
        f"{options.batch} windows of {options.context} tokens per rank"
    )
    if options.missing:
        say(f"deepspeed is not installed, so it is left out: {', '.join(options.missing)}")
    for name in names:
        bench.prepare(name)
        say(f"  {name}: first step after {bench.results[name].first:.1f} s", flush=True)
    gc.freeze()  # what the compiler has left would make every collection slow
    for turn in range(options.rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            bench.round(name)
    results = {name: bench.merge(name) for name in names}
    if rank == 0:
        show(options, results, size, world)
        if options.json is not None:
            write(options, results, size, world, device)
        if options.plot is not None:
            plot(options.plot, options.only, results, world)
    check({name: results[name].losses for name in options.only})
    say(f"the losses of all peers agree within {TOLERANCE:g} after {len(results['ddp'].losses)} steps")


def show(options: argparse.Namespace, results: dict[str, Result], size: int, world: int) -> None:
    """Print the table and the floor."""

    def scaled(value: float | None, factor: float, digits: int) -> str:
        return "-" if value is None else f"{value * factor:.{digits}f}"

    def wire(count: float | None) -> float | None:
        return None if count is None or options.gbit is None else count * 8 / (options.gbit * 1e9)

    heads = ("step ms", "x ddp", "first s", "rest MB", "peak MB", "sent MB", "wire ms", "loss")
    kept = [head for head in heads if head != "wire ms" or options.gbit is not None]
    print(f"{'peer':16}", *(f"{head:>8}" for head in kept))
    for name in options.only:
        result = results[name]
        cells = {
            "step ms": scaled(result.median, 1e3, 1),
            "x ddp": scaled(result.median / results["ddp"].median, 1, 3),
            "first s": scaled(result.first, 1, 1),
            "rest MB": scaled(result.rest, 1e-6, 1),
            "peak MB": scaled(result.peak, 1e-6, 1),
            "sent MB": scaled(result.least_sent, 1e-6, 2),
            "wire ms": scaled(wire(result.least_sent), 1e3, 1),
            "loss": scaled(result.losses[-1], 1, 4),
        }
        print(f"{name:16}", *(f"{cells[head]:>8}" for head in kept))
    floors = [f"{name} {results[name].median * 1e3:.1f} ms" for name in FLOORS if name in results]
    least = 2 * size * (world - 1) / world
    line = f"floor: one process {', '.join(floors)}; 2S(N-1)/N = {least / 1e6:.2f} MB"
    print(line if options.gbit is None else f"{line}, {scaled(wire(least), 1e3, 1)} ms at {options.gbit:g} Gbit/s")


def write(options: argparse.Namespace, results: dict[str, Result], size: int, world: int, device: torch.device) -> None:
    """Write everything as JSON: seconds and bytes."""
    settings = ("layers", "width", "context", "batch", "warmup", "rounds", "steps", "seed", "gbit")
    rows: dict[str, Any] = {}
    for name, result in results.items():
        rows[name] = asdict(result) | {"median": result.median, "least_sent": result.least_sent}
        rows[name]["ratio"] = result.median / results["ddp"].median
    about = {"torch": torch.__version__, "device": device.type, "ranks": world, "threads": torch.get_num_threads()}
    chosen = {key: getattr(options, key) for key in settings}
    floors = {name: rows.pop(name) for name in FLOORS if name in rows}
    report = about | {"options": chosen, "parameter_bytes": size, "left_out": options.missing}
    options.json.write_text(json.dumps(report | {"peers": rows, "floor": floors}, indent=1) + "\n")
    print(f"results: {options.json}")


def plot(file: Path, names: list[str], results: dict[str, Result], world: int) -> None:
    """Draw the step times relative to ddp into a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 1 + 0.35 * len(names)), layout="constrained")
    ratios = [results[name].median / results["ddp"].median for name in names]
    ours = [name.startswith(("hooked-", "zero-")) and name != "zero-redundancy" for name in names]
    colors = ["tab:orange" if own else "tab:blue" for own in ours]
    axes.bar_label(axes.barh(names, ratios, color=colors), fmt="%.2f", padding=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(
        xlabel=f"step time relative to ddp, {world} ranks (shorter is faster; orange: fzero)",
        xlim=(0, 1.12 * max(ratios)),
    )
    axes.invert_yaxis()
    figure.savefig(file, dpi=120, format="png")
    plt.close(figure)
    print(f"plot: {file}")


def check(losses: dict[str, list[float]]) -> None:
    """Fail unless all peers trained the same number of steps to the same loss, and that is lower than the first."""
    wanted = losses["ddp"]
    for name, found in losses.items():
        assert len(found) == len(wanted), f"{name} made {len(found)} steps, ddp {len(wanted)}"
        worst = abs(found[-1] / wanted[-1] - 1)
        assert worst <= TOLERANCE, f"{name}: loss {found[-1]} after the last step, ddp has {wanted[-1]}"
        assert found[-1] < found[0], f"{name}: the loss went from {found[0]} to {found[-1]}"


# --- The command line --------------------------------------------------------------------------------------


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line and check it, before any rank starts."""
    parser = argparse.ArgumentParser(description="Compare fzero with torch's own data parallel, in one run.")
    add = parser.add_argument
    add("--only", metavar="PEER,...", help=f"which peers, of: {', '.join(PEERS)} (default: {DEFAULT})")
    add_options(parser)
    add("--layers", type=positive, default=6, help="(default: 6)")
    add("--width", type=positive, default=384, help=f"a multiple of {HEAD_WIDTH} (default: 384)")
    add("--context", type=positive, default=128, help="tokens per window (default: 128)")
    add("--batch", type=positive, default=8, help="windows per rank and step (default: 8)")
    add("--warmup", type=positive, default=3, help="untimed steps after the first one (default: 3)")
    add("--rounds", type=positive, default=5, help="(default: 5)")
    add("--steps", type=positive, default=4, help="timed steps of each peer in each round (default: 4)")
    add("--gbit", type=float, metavar="RATE", help="show how long the bytes take at this rate (Gbit/s per rank)")
    add("--json", type=new_file, metavar="FILE", help="write all numbers")
    add("--plot", type=new_file, metavar="FILE.png", help="draw the step times relative to ddp")
    options = parser.parse_args(arguments)

    settle(parser, options)
    chosen = list(dict.fromkeys(["ddp", *(DEFAULT if options.only is None else options.only).split(",")]))
    options.missing = [name for name in chosen if not installed(name)]
    if unknown := [name for name in chosen if name not in PEERS]:
        parser.error(f"--only: unknown: {', '.join(unknown)}; choose from: {', '.join(PEERS)}")
    if options.missing and options.only:
        parser.error(f"--only {options.missing[0]}: deepspeed is not installed")
    options.only = [name for name in chosen if name not in options.missing]
    if options.width % HEAD_WIDTH:
        parser.error(f"--width {options.width}: must be a multiple of {HEAD_WIDTH}")
    if options.gbit is not None and options.gbit <= 0:
        parser.error(f"--gbit {options.gbit}: must be above 0")
    if (int(os.environ["WORLD_SIZE"]) if under_torchrun() else options.ranks) < 2:
        parser.error("one rank has nobody to talk to; use --ranks 2 or more")
    return options


if __name__ == "__main__":
    launch(benchmark, parse())
