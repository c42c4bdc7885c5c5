r"""Compare the AdamW update of one shard, compiled, with ``torch.optim.AdamW(fused=True)`` on as many elements.

    python examples/benchmark_adamw.py

updates 10 million float32 elements on CPU. A round is one step of each row; the table has
the median time and the median over rounds of the ratio to torch's fused step. The program fails unless parameters and
moments of all rows agree at its end. The compiled update needs about 20 seconds to compile, the rest a few more.

Other ways to run it:

    python examples/benchmark_adamw.py --threads 2 --elements 1000000
    python examples/benchmark_adamw.py --at-most 1.1               # fail if the compiled update is slower than that

The compiled row is what a compiled step of `fzero.Zero` does to each bucket: the update, written into the old state's
memory, unless a flag says that the step is skipped. An update reads 4 floats an element and writes 3.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from launch import positive
from torch import Tensor

import fzero
from fzero.update import accept, update_bucket

if TYPE_CHECKING:
    from collections.abc import Callable

RATE = 1e-3
TOLERANCE = 1e-5  # largest difference from torch's fused step, relative to the largest element
WARMUP = 3


class Row(NamedTuple):
    """One way to update a shard: a step, and what it changes."""

    step: Callable[[], Any]
    tensors: Callable[[], dict[str, Tensor]]


def torch_row(start: Tensor, gradient: Tensor, **kind: bool) -> Row:
    """Return torch's own optimizer, fused or foreach."""
    param = torch.nn.Parameter(start.clone())
    param.grad = gradient
    optimizer = torch.optim.AdamW([param], RATE, **kind)  # type: ignore[arg-type]

    def tensors() -> dict[str, Tensor]:
        state = optimizer.state[param]
        return {"parameters": param.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}

    return Row(optimizer.step, tensors)


def fzero_row(start: Tensor, gradient: Tensor, *, compiled: bool) -> Row:
    """Return fzero's, with the state donated as in a step of the engine."""
    optimizer = fzero.adamw(RATE)
    param, skipped = start.clone(), torch.tensor(False)
    state, label = optimizer.init(param), optimizer.labels(param)

    def update(gradient: Tensor, leaves: list[Tensor], param: Tensor) -> tuple[Tensor, list[Tensor]]:
        new, after = optimizer.update(gradient, type(state)(*leaves), param, labels=label)
        return new, list(after)

    def step(param: Tensor, state: Any, gradient: Tensor, skipped: Tensor) -> None:
        leaves = update_bucket(update, gradient, lambda sums: sums, (param, state), skipped, donate=True)[1]
        for old, value in zip(state, leaves, strict=True):
            if old is not value:  # the count, which all buckets of an engine share
                accept(skipped, old, value, old)

    run = torch.compile(step, fullgraph=True) if compiled else step

    def tensors() -> dict[str, Tensor]:
        return {"parameters": param, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}

    return Row(lambda: run(param, state, gradient, skipped), tensors)


def benchmark(options: argparse.Namespace) -> None:
    """Make all steps, print the table, and check the numbers."""
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(options.seed)
    start, gradient = (torch.randn(options.elements, generator=generator) for _ in range(2))
    rows = {
        "torch, fused": torch_row(start, gradient, fused=True),
        "torch, foreach": torch_row(start, gradient, foreach=True),
        "fzero, compiled": fzero_row(start, gradient, compiled=True),
        "fzero, eager": fzero_row(start, gradient, compiled=False),
    }
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(WARMUP + options.rounds):
        for name, row in rows.items():
            started = time.perf_counter()
            row.step()
            times[name].append(time.perf_counter() - started)
    print(f"AdamW on {options.elements} float32 elements, {options.threads} threads, torch {torch.__version__}")
    print(f"{'update':16} {'ms':>9} {'x fused':>8}")
    ratios = {}
    for name, own in times.items():
        pairs = zip(own[WARMUP:], times["torch, fused"][WARMUP:], strict=True)
        ratios[name] = statistics.median(mine / theirs for mine, theirs in pairs)
        print(f"{name:16} {1e3 * statistics.median(own[WARMUP:]):9.3f} {ratios[name]:8.3f}")
    check({name: row.tensors() for name, row in rows.items()})
    print(f"all rows agree within {TOLERANCE:g} after {WARMUP + options.rounds} steps")
    if options.at_most is not None:
        ratio = ratios["fzero, compiled"]
        assert ratio <= options.at_most, f"the compiled update takes {ratio:.3f} of torch's, above {options.at_most}"


def check(found: dict[str, dict[str, Tensor]]) -> None:
    """Fail unless all rows have the same parameters and moments."""
    wanted = found["torch, fused"]
    for name, tensors in found.items():
        for kind, tensor in tensors.items():
            error = float((tensor - wanted[kind]).abs().max() / wanted[kind].abs().max())
            assert error <= TOLERANCE, f"{name}: {kind} differs from torch's fused step by {error:.1e}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compare fzero's compiled AdamW with torch's fused one.")
    add = parser.add_argument
    add("--elements", type=positive, default=10_000_000, help="of the shard (default: 10 million)")
    add("--threads", type=positive, default=1, help="(default: 1)")
    add("--rounds", type=positive, default=30, help="timed steps of each row (default: 30)")
    add("--seed", type=int, default=0, help="(default: 0)")
    add("--at-most", type=float, metavar="RATIO", help="fail if the compiled update takes more than this of torch's")
    options = parser.parse_args(arguments)
    if options.at_most is not None and not options.at_most > 0:
        parser.error(f"--at-most {options.at_most}: must be above 0")
    return options


if __name__ == "__main__":
    benchmark(parse())
