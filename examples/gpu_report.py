r"""Measure fzero on one CUDA device, in less than five minutes, and write one dated table.

    python examples/gpu_report.py

needs torch (2.11 or newer) and optree, no installation; `--device cpu` runs the same at a tiny size, to check this
program. Pieces that would start after `--budget` seconds are left out, and the table says so. The parts:

numbers  Float64, a small model: parameters after a few steps with `fzero.Zero`, at all stages eagerly and at stage 2
         compiled, against the plain module with ``torch.optim.AdamW``. Each must agree, or the program fails.
time     One model, the same first weights and batches for all, trained side by side: torch eagerly,
         ``torch.compile(module)`` with ``AdamW(fused=True)``, and fzero compiled, alone and in a process group of one
         (NCCL). In float32 (TF32 on CUDA), and in bfloat16, where torch runs under autocast and, as "bf16 weights",
         computes all in bfloat16 with float32 masters: that is the work of `fzero.Precision.bf16`.
memory   One rank of 8 and of 64, at all stages, beside what ZeRO's accounting says; in float32, eagerly, and for stages
         2 and 3 compiled. The other ranks are a fake process group (`gpu_shards.py`).

What the columns of time say:

step ms, x compile  Median over all timed steps of a trainer, and its ratio to ``torch.compile``'s in the same
                    precision. In every round each trainer makes a few steps; the order rotates.
first s             Building, compiling, and the first step. What inductor has in its cache is not compiled again.
tokens/s, MFU       Model FLOPs (`gpu_model.Size.flops`) over time and over the device's dense peak, where
                    `gpu_model.PEAKS` or `--peak-flops` knows it.
rest, peak MB       What a trainer added to the memory in use between steps, and at most within one.
loss                Of the last step. It must have fallen, and those of a precision must agree, or the program fails.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import platform
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import checkout
import torch
import torch.distributed as dist
from gpu_model import (
    GPT,
    HEAD_WIDTH,
    PEAKS,
    Batch,
    Size,
    Step,
    batches,
    criterion,
    make,
    with_fzero,
    with_masters,
    with_torch,
)
from gpu_shards import Held, held
from launch import new_file, positive
from meters import Memory

import fzero

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZES = {
    "cuda": Size(layers=8, width=2048, vocabulary=32768, context=1024, batch=8),
    "cpu": Size(layers=2, width=64, vocabulary=128, context=32, batch=2),
}
SMALL = Size(layers=2, width=128, vocabulary=256, context=64, batch=4)  # of the numbers
BATCHES = 4
NUMBER_STEPS, NUMBER_TOLERANCE = 3, {False: 1e-12, True: 1e-10}  # by whether compiled
LOSS_TOLERANCE = {"fp32": 1e-3, "tf32": 5e-3, "bf16": 2e-2}  # relative
GROUP = "fzero, process group of one"
MB = 1e6


@dataclass
class Trainer:
    """One way to train, and what was measured of it."""

    precision: str
    name: str
    build: Callable[[GPT], Step]
    step: Step | None = None
    first: float = 0.0
    rest: int | None = None
    peak: int | None = None
    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.times)


class Report:
    """Measures, and collects the lines of the table."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        given = {name: getattr(options, name) for name in ("layers", "width", "batch")}
        self.size = replace(SIZES[options.device], **{name: value for name, value in given.items() if value})
        self.device = torch.device(options.device, torch.cuda.current_device() if options.device == "cuda" else 0)
        self.started, self.memory = time.monotonic(), Memory(self.device)
        self.lines: list[str] = []
        self.left_out: list[str] = []
        self.faults: list[str] = []

    # --- the table -----------------------------------------------------------------------------------------

    def say(self, line: str = "") -> None:
        """Print a line, and keep it for the file."""
        print(line, flush=True)
        self.lines.append(line)

    def row(self, *cells: str) -> None:
        """Add a row of a table."""
        self.say(f"| {' | '.join(cells)} |")

    def heads(self, *cells: str) -> None:
        """Begin a table."""
        self.say()
        self.row(*cells)
        self.row(*("---" for _ in cells))

    def has_time(self, what: str) -> bool:
        """Return whether a piece may still begin; note it if not."""
        late = time.monotonic() - self.started > float(self.options.budget)
        if late:
            self.left_out.append(what)
        return not late

    def title(self) -> None:
        """Say what is measured, where and when."""
        now = dt.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
        if self.device.type == "cuda":
            where = torch.cuda.get_device_name(self.device)
        else:
            where = f"CPU ({platform.machine()}, {torch.get_num_threads()} threads): these are no figures of a GPU"
        self.say(f"# fzero {checkout.version()} on {where}, {now}")
        size = self.size
        self.say(
            f"\ntorch {torch.__version__}, Python {platform.python_version()}. GPT of {size.layers} blocks, width "
            f"{size.width}, vocabulary {size.vocabulary}; {size.batch} windows of {size.context} tokens a step, "
            f"{size.flops / 1e12:.3g} TFLOP a step (6 weights + 12 layers width context a token)."
        )

    # --- numbers -------------------------------------------------------------------------------------------

    def numbers(self) -> None:
        """Compare parameters after a few steps in float64 with torch's own."""
        self.heads("numbers, float64", "largest difference of a parameter / its largest element", "allowed")
        data = batches(SMALL, self.device, NUMBER_STEPS)
        oracle = make(SMALL, self.device).double()
        optimizer = torch.optim.AdamW(oracle.parameters(), 1e-3, eps=1e-3, foreach=False)
        for inputs, targets in data:
            optimizer.zero_grad()
            criterion(oracle(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        right = {key: leaf.detach() for key, leaf in oracle.named_parameters()}
        for stage, compiled in [*((stage, False) for stage in range(4)), (2, True)]:
            name = f"stage {stage}, {'compiled' if compiled else 'eager'}"
            if not self.has_time(name):
                continue
            loss_fn, params, _ = fzero.from_module(make(SMALL, self.device).double(), criterion)
            engine = fzero.Zero(loss_fn, fzero.adamw(1e-3, eps=1e-3), stage, compile=compiled)
            state = engine.init(params)
            for batch in data:
                state, _ = engine.step(state, batch)
            found = engine.params(state)
            apart = max(float((found[key] - leaf).abs().max() / leaf.abs().max()) for key, leaf in right.items())
            allowed = NUMBER_TOLERANCE[compiled]
            self.row(name, f"{apart:.1e}", f"{allowed:g}")
            if not apart <= allowed:
                self.faults.append(f"numbers: {name} differs by {apart:.1e}, allowed is {allowed:g}")

    # --- time ----------------------------------------------------------------------------------------------

    def trainers(self) -> list[Trainer]:
        """Return all ways to train."""
        single = "tf32" if self.device.type == "cuda" else "fp32"
        found = []
        for precision, chosen in ((single, fzero.Precision.fp32), ("bf16", fzero.Precision.bf16)):
            low = precision == "bf16"
            ours = partial(with_fzero, stage=2, compiled=True, precision=chosen)
            ways: dict[str, Callable[[GPT], Step]] = {
                "torch.compile": partial(with_torch, compiled=True, autocast=low),
                "fzero": ours,
                "torch, eager": partial(with_torch, compiled=False, autocast=low),
                **({"torch.compile, bf16 weights": with_masters} if low else {}),
                GROUP: ours,
            }
            found += [Trainer(precision, name, way) for name, way in ways.items()]
        return found

    def time(self) -> list[Trainer]:
        """Train with all, side by side."""
        data = batches(self.size, self.device, BATCHES)
        torch.set_float32_matmul_precision("high")
        ready = []
        # alone first: what a process group changes must not be there yet
        with ExitStack() as stack:
            for trainer in sorted(self.trainers(), key=lambda trainer: trainer.name == GROUP):
                if not self.has_time(f"time of {trainer.name} in {trainer.precision}"):
                    continue
                if trainer.name == GROUP and not dist.is_initialized():
                    stack.enter_context(group_of_one(self.device))
                self.prepare(trainer, data)
                print(f"  {trainer.precision} {trainer.name}: first step after {trainer.first:.1f} s", flush=True)
                ready.append(trainer)
            for turn in range(self.options.rounds if ready else 0):
                shift = turn % len(ready)
                for trainer in ready[shift:] + ready[:shift]:
                    self.run(trainer, data, self.options.steps)
        torch.set_float32_matmul_precision("highest")
        return ready

    def prepare(self, trainer: Trainer, data: list[Batch]) -> None:
        """Build a trainer, make its first steps and measure its memory."""
        gc.collect()
        before, started = self.memory.in_use(), time.monotonic()
        trainer.step = trainer.build(make(self.size, self.device))
        self.run(trainer, data, 1)
        trainer.first = time.monotonic() - started
        self.run(trainer, data, 2)
        gc.collect()
        rest = self.memory.in_use()
        peak = self.memory.peak(lambda: self.run(trainer, data, 1))
        if self.device.type == "cuda":  # (on CPU what compiling leaves behind is more than the model)
            assert before is not None
            assert rest is not None
            assert peak is not None
            trainer.rest, trainer.peak = rest - before, peak - before
        trainer.times.clear()

    def run(self, trainer: Trainer, data: list[Batch], steps: int) -> None:
        """Make steps, each waited for."""
        assert trainer.step is not None
        for _ in range(steps):
            started = time.perf_counter()
            loss = trainer.step(data[len(trainer.losses) % len(data)])
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            trainer.times.append(time.perf_counter() - started)
            trainer.losses.append(float(loss))

    def show_time(self, ready: list[Trainer]) -> None:
        """Write the table of time, and compare losses."""
        heads = ("precision", "trainer", "step ms", "x compile", "first s", "tokens/s", "MFU", "rest MB", "peak MB")
        self.heads(*heads, "loss")
        for trainer in sorted(ready, key=lambda trainer: trainer.precision, reverse=True):
            same = [other for other in ready if other.precision == trainer.precision]
            against = same[0]  # torch.compile, if there was time for anything
            peak = self.peak_flops(trainer.precision)
            self.row(
                trainer.precision,
                trainer.name,
                f"{trainer.median * 1e3:.2f}",
                f"{trainer.median / against.median:.3f}",
                f"{trainer.first:.1f}",
                f"{self.size.tokens / trainer.median:.0f}",
                "-" if peak is None else f"{self.size.flops / trainer.median / peak:.1%}",
                "-" if trainer.rest is None else f"{trainer.rest / MB:.1f}",
                "-" if trainer.peak is None else f"{trainer.peak / MB:.1f}",
                f"{trainer.losses[-1]:.4f}",
            )
            apart = abs(trainer.losses[-1] / against.losses[-1] - 1)
            if not apart <= LOSS_TOLERANCE[trainer.precision]:
                self.faults.append(f"time: {trainer.precision} {trainer.name}: loss differs by {apart:.1e}, relative")
            if not trainer.losses[-1] < trainer.losses[(len(trainer.losses) - 1) % BATCHES]:  # of the same batch
                self.faults.append(f"time: {trainer.precision} {trainer.name}: the loss does not fall")
        for precision in dict.fromkeys(trainer.precision for trainer in ready):
            peak = self.peak_flops(precision)
            if peak is not None:
                self.say(f"\nMFU in {precision} is of {peak / 1e12:.1f} TFLOP/s.")

    def peak_flops(self, precision: str) -> float | None:
        """Return the FLOP/s that the device has at most in a precision, if known."""
        if self.options.peak_flops is not None:
            return float(self.options.peak_flops)
        return PEAKS.get(torch.cuda.get_device_name(), {}).get(precision) if self.device.type == "cuda" else None

    # --- memory --------------------------------------------------------------------------------------------

    def shards(self, *, compiled: bool) -> None:
        """Measure one rank of many."""
        self.heads("one rank of", "stage", "", "rest MB", "formula", "peak MB", "formula of state", "beyond it")
        cases = [(8, 2), (8, 3)] if compiled else [(ranks, stage) for ranks in (8, 64) for stage in range(4)]
        for ranks, stage in cases:
            way = "compiled" if compiled else "eager"
            if self.has_time(f"memory of one rank of {ranks}, stage {stage}, {way}"):
                self.show_shard(held(self.size, ranks, stage, self.memory, compiled=compiled), way)
        self.say("\nBeyond the formula of state: activations, temporaries, and buckets or blocks under way.")
        if compiled and self.device.type == "cpu":
            self.say("On CPU what compiling leaves behind, some MB, counts too.")

    def show_shard(self, found: Held, way: str) -> None:
        """Write one row."""
        numbers = (found.rest, found.rest_formula, found.peak, found.peak_formula, found.peak - found.peak_formula)
        self.row(str(found.ranks), str(found.stage), way, *(f"{number / MB:.1f}" for number in numbers))


# --- The program -------------------------------------------------------------------------------------------


@contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """Be the only rank of a process group."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line and check it."""
    parser = argparse.ArgumentParser(description="Measure fzero on one CUDA device; write one dated table.")
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is tiny, to check this program (default: cuda)")
    add("--only", choices=("numbers", "time", "memory"), help="one part (default: all)")
    add("--layers", type=positive, help=f"(default: {SIZES['cuda'].layers}, on CPU {SIZES['cpu'].layers})")
    add("--width", type=positive, help=f"a multiple of {HEAD_WIDTH} (default: {SIZES['cuda'].width}, on CPU 64)")
    add("--batch", type=positive, help=f"windows a step (default: {SIZES['cuda'].batch}, on CPU {SIZES['cpu'].batch})")
    add("--rounds", type=positive, default=5, help="(default: 5)")
    add("--steps", type=positive, default=4, help="timed steps of each trainer in each round (default: 4)")
    add("--budget", type=float, default=240.0, metavar="SECONDS", help="begin nothing after this (default: 240)")
    add("--peak-flops", type=float, metavar="FLOP/s", help="the device's dense peak, for MFU in every precision")
    add("--out", type=new_file, metavar="FILE.md", help="(default: gpu-report-DATE.md in this folder)")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device was found; --device cpu checks the program at a tiny size")
    if options.width and options.width % HEAD_WIDTH:
        parser.error(f"--width {options.width}: must be a multiple of {HEAD_WIDTH}")
    for name in ("budget", "peak_flops"):
        if getattr(options, name) is not None and not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: must be above 0")
    if options.out is None:
        options.out = Path(f"gpu-report-{dt.datetime.now().astimezone():%Y-%m-%d}-{options.device}.md")
    return options


def main(options: argparse.Namespace) -> None:
    """Measure, write, and fail if numbers or losses do not agree."""
    report = Report(options)
    report.title()
    wanted = [options.only] if options.only else ["numbers", "memory", "time"]
    if "numbers" in wanted:
        report.numbers()
    if "memory" in wanted:
        report.shards(compiled=False)
    if "time" in wanted:
        report.show_time(report.time())
    if "memory" in wanted:
        report.shards(compiled=True)
    if report.left_out:
        report.say(f"\nLeft out, for it would have begun after {options.budget:g} s: {'; '.join(report.left_out)}.")
    report.say(f"\nMeasured in {time.monotonic() - report.started:.0f} s.")
    report.lines += [f"\nFAILED: {fault}" for fault in report.faults]
    options.out.write_text("\n".join(report.lines) + "\n")
    print(f"table: {options.out}")
    if report.faults:
        sys.exit("\n".join(report.faults))


if __name__ == "__main__":
    main(parse())
