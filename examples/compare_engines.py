r"""Compare both engines at every stage with DistributedDataParallel and torch.optim.AdamW, in one table.

    python examples/compare_engines.py --model resnet

starts two ranks on this machine, trains the same model on the same batches once for every row, and asserts at its end
that the table adds up. Two free CPU cores need less than half a minute for each of the three models.

Other ways to run it:

    python examples/compare_engines.py --model gpt --ranks 4 --steps 10
    torchrun --standalone --nproc-per-node 2 examples/compare_engines.py

What the columns say:

loss        of the last of K steps (K is --steps), float64.
gradient, parameters, moments
            Largest difference from the first row: of the mean gradient of the last step, and of parameters and both
            moments after it. A difference is in units of the largest element of its leaf (plus 1e-6 of the largest of
            all, for leaves that are nearly zero). In float64, so that rounding is all there is.
rest, peak  MB per rank, float32: what lives between steps, and the most that lived while the row was built and made
            two steps; the largest of all ranks. A TorchDispatchMode follows every tensor's storage from the operation
            that returns it until it is freed; what an operation allocates for itself alone is not seen.
sent        kB per rank and step, float32: the same mode sees each collective and counts what a ring sends: N-1 shards
            for an all-gather, (N-1)/N of the whole for a reduce-scatter, an all-to-all or a broadcast, twice that for
            an all-reduce.
step        Median of K steps in ms, float32, without that mode. On busy cores it says little.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import weakref
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
import train_gpt
import train_resnet
from launch import add_options, launch, on_all_ranks, positive, settle
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import fzero

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TOLERANCE = 1e-9  # of every difference from the first row
# What is allowed beside the bytes that a row should send and keep: a part of them, and bytes.
SENT_SLACK = 0.02, 4096  # padding of shards, loss, norm
REST_SLACK = 0.05, 65536  # padding, step counts, buffers, the last loss
RATE = 1e-3

Batch = tuple[Tensor, Tensor]
Tree = dict[str, Tensor]


# --- The models --------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """A model, its loss, the parts that stage 3 gathers one by one, and its data."""

    make: Callable[[], nn.Module]
    criterion: Callable[[Tensor, Tensor], Tensor]
    parts: Callable[[Any], Sequence[nn.Module]]
    batch: Callable[[torch.Generator], Batch]


def random_images(generator: torch.Generator) -> Batch:
    """Make 16 images of 8 x 8 pixels, and a class for each."""
    return torch.randn(16, 3, 8, 8, generator=generator), torch.randint(10, (16,), generator=generator)


def random_tokens(generator: torch.Generator) -> Batch:
    """Make 4 windows of 32 tokens, and the same shifted by one."""
    tokens = torch.randint(train_gpt.VOCABULARY, (4, 33), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def random_vectors(generator: torch.Generator) -> Batch:
    """Make 32 vectors, and vectors to predict."""
    return torch.randn(32, 64, generator=generator), torch.randn(32, 16, generator=generator)


def mlp() -> nn.Module:
    """Make an MLP with three hidden layers."""
    widths = (64, 384, 384, 384)
    hidden = [nn.Sequential(nn.Linear(before, after), nn.Tanh()) for before, after in pairwise(widths)]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], 16))


TASKS = {
    "mlp": Task(mlp, F.mse_loss, list, random_vectors),
    "gpt": Task(
        lambda: train_gpt.GPT(4, 96, 32, 0.0), train_gpt.criterion, lambda gpt: list(gpt.blocks), random_tokens
    ),
    "resnet": Task(
        lambda: train_resnet.ResNet18(3, 10, 16), F.cross_entropy, train_resnet.ResNet18.parts, random_images
    ),
}


# --- The rows ----------------------------------------------------------------------------------------------


class Reference:
    """DistributedDataParallel and torch.optim.AdamW."""

    def __init__(self, task: Task, module: nn.Module, world: int) -> None:
        self.module, self.criterion = module, task.criterion
        self.parallel = DistributedDataParallel(module, gradient_as_bucket_view=True) if world > 1 else module
        self.optimizer = torch.optim.AdamW(module.parameters(), RATE, foreach=False, fused=False)

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch of this rank and return its loss."""
        self.optimizer.zero_grad()
        loss: Tensor = self.criterion(self.parallel(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def last(self, batch: Batch) -> tuple[float, Tree]:
        """Make a step and return the mean loss of all ranks and the mean gradient."""
        losses = on_all_ranks(float(self.step(batch)), world_of(self.parallel))
        named = self.module.named_parameters()
        return statistics.mean(losses), {name: leaf.grad.clone() for name, leaf in named if leaf.grad is not None}

    def trees(self) -> dict[str, Tree]:
        """Return parameters and moments."""
        named = dict(self.module.named_parameters())
        found = {"parameters": {name: leaf.detach().clone() for name, leaf in named.items()}}
        for moment in ("exp_avg", "exp_avg_sq"):
            found[moment] = {name: self.optimizer.state[leaf][moment].clone() for name, leaf in named.items()}
        return found


def world_of(module: nn.Module) -> int:
    """Return how many ranks share a module."""
    return torch.distributed.get_world_size() if isinstance(module, DistributedDataParallel) else 1


class Engine:
    """One of the two engines, with `fzero.adamw`."""

    def __init__(self, kind: str, task: Task, module: nn.Module, stage: int) -> None:
        options = argparse.Namespace(stage=stage, accumulate=1, compile=False)
        optimizer = fzero.adamw(RATE)
        self.row = train_resnet.ENGINES[kind](module, task.criterion, task.parts(module), optimizer, options)

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch of this rank and return the mean loss of all ranks."""
        return self.row.step(*batch).loss

    def last(self, batch: Batch) -> tuple[float, Tree]:
        """Make a step and return the mean loss of all ranks and the mean gradient."""
        if isinstance(self.row, train_resnet.Functional):
            grads, _ = self.row.engine.grads(self.row.state, batch)
            loss = self.step(batch)
        else:
            self.row.backward(*batch)
            grads = self.row.engine.grads()
            loss = self.row.engine.step().loss
        return float(loss), dict(grads)

    def trees(self) -> dict[str, Tree]:
        """Return parameters and moments."""
        if isinstance(self.row, train_resnet.Functional):
            moments = self.row.engine.opt_state(self.row.state)
        else:
            moments = self.row.engine.opt_state()
        return {"parameters": self.row.params(), "exp_avg": moments.exp_avg, "exp_avg_sq": moments.exp_avg_sq}


class Name(NamedTuple):
    """What a row runs: "DDP", or an engine and its stage."""

    kind: str
    stage: int | None

    def build(self, task: Task, module: nn.Module, world: int) -> Reference | Engine:
        """Build the row; it takes the module over."""
        if self.stage is None:
            return Reference(task, module, world)
        return Engine(self.kind, task, module, self.stage)


REFERENCE = Name("DDP", None)


# --- Measuring ---------------------------------------------------------------------------------------------


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows, on one rank of `world`, the storage that lives and the bytes that collectives send, within it."""

    def __init__(self, world: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.world, self.peak, self.sent = world, 0, 0.0
        self.before: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.made: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; count what it sends, and what it returns that was not there before."""
        self.before.update(storage for storage in storages((args, kwargs)) if storage not in self.made)
        space, _, name = func.name().partition("::")
        if space in ("c10d", "_c10d_functional") or func.name() == "fzero::all_gather":
            self.sent += self.ring(name.split(".")[0], args[0])
        result = func(*args, **(kwargs or {}))
        self.made.update(storage for storage in storages(result) if storage not in self.before)
        self.peak = max(self.peak, self.live())
        return result

    def live(self) -> int:
        """Return the bytes that live now; a storage may have been resized since it was made."""
        return sum(storage.nbytes() for storage in self.made)

    def ring(self, name: str, given: Any) -> float:
        """Return the bytes that a ring sends for a collective, per rank; an unknown one is an error."""
        whole = (self.world - 1) / self.world
        factor = {
            "wait_tensor": 0.0,
            "broadcast": whole,
            "broadcast_": whole,
            "allreduce_": 2 * whole,
            "allgather_": whole,  # of what it fills
            "all_gather_into_tensor": self.world - 1,
            "all_gather": self.world - 1,
            "reduce_scatter_tensor": whole,
            "all_to_all_single": whole,
        }[name]
        return factor * sum(bytes_of(tensor) for tensor in leaves(given))


def storages(tree: Any) -> list[torch.UntypedStorage]:
    """Return the memory of all tensors in arguments or results of an operation; tensors on meta have none."""
    return [leaf.untyped_storage() for leaf in leaves(tree) if not leaf.is_meta]


def leaves(tree: Any) -> list[Tensor]:
    """Return all tensors in arguments or results of an operation."""
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def bytes_of(tensor: Tensor) -> int:
    """Return the size of a tensor."""
    return tensor.numel() * tensor.element_size()


def difference(ours: Tree, theirs: Tree) -> float:
    """Return the largest difference of any element from the reference, in units of the largest of its leaf."""
    assert list(ours) == list(theirs), "other leaves than the reference"
    largest = {name: float(leaf.abs().max()) for name, leaf in theirs.items()}
    floor = 1e-6 * max(largest.values())
    return max(float((ours[name] - leaf).abs().max()) / (largest[name] + floor) for name, leaf in theirs.items())


class Row(NamedTuple):
    """What was measured of one row, equal on all ranks; the differences only on rank 0."""

    name: Name
    loss: float
    gradient: float
    parameters: float
    moments: float
    rest: float
    peak: float
    sent: float
    seconds: float


class Bench:
    """One model on one rank of `world`, with the first row's results once it has run."""

    def __init__(self, options: argparse.Namespace, rank: int, world: int, device: torch.device) -> None:
        self.options, self.task, self.rank, self.world = options, TASKS[options.model], rank, world
        self.device = device
        self.reference: dict[str, Tree] = {}

    def module(self, dtype: torch.dtype) -> nn.Module:
        """Make the model with the same values every time."""
        torch.manual_seed(self.options.seed)
        return self.task.make().to(self.device, dtype)

    def batches(self, dtype: torch.dtype) -> list[Batch]:
        """Make this rank's batches, the same every time."""
        generator = torch.Generator().manual_seed(self.options.seed * 65536 + self.rank)
        pairs = [self.task.batch(generator) for _ in range(self.options.steps)]

        def placed(part: Tensor) -> Tensor:
            return part.to(self.device, dtype if part.is_floating_point() else part.dtype)

        return [(placed(inputs), placed(targets)) for inputs, targets in pairs]

    def compared(self, name: Name) -> tuple[float, float, float, float]:
        """Train in float64 and return the last loss and how far the row is from the reference."""
        row = name.build(self.task, self.module(torch.float64), self.world)
        *batches, last = self.batches(torch.float64)
        for batch in batches:
            row.step(batch)
        loss, grads = row.last(last)
        trees = {"gradient": grads, **row.trees()}
        self.reference = self.reference or trees
        found = {kind: difference(tree, self.reference[kind]) for kind, tree in trees.items()}
        return loss, found["gradient"], found["parameters"], max(found["exp_avg"], found["exp_avg_sq"])

    def run(self, name: Name) -> Row:
        """Measure one row."""
        loss, *differences = self.compared(name)
        batches = self.batches(torch.float32)
        gc.collect()
        with Meter(self.world) as meter:
            row = name.build(self.task, self.module(torch.float32), self.world)
            row.step(batches[0])
            meter.sent = 0.0
            row.step(batches[0])
            gc.collect()
        rest, peak = meter.live(), meter.peak
        times = []
        for batch in batches:
            started = time.perf_counter()
            float(row.step(batch))  # waits for the device
            times.append(time.perf_counter() - started)
        everywhere = on_all_ranks((rest, peak, meter.sent, statistics.median(times)), self.world)
        return Row(name, loss, *differences, *(max(part) for part in zip(*everywhere, strict=True)))


# --- The table ---------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace, rank: int, world: int, device: torch.device) -> None:
    """Measure all rows, one after the other, on one rank of `world`; rank 0 prints the table."""
    bench = Bench(options, rank, world, device)
    names = [REFERENCE, *(Name(kind, stage) for kind in options.engines for stage in options.stages)]
    if rank == 0:
        print(f"{options.model}, {world} ranks on {device}, {options.steps} steps; differences are from the first row")
        print(
            "engine     stage      loss  gradient parameters   moments  rest MB  peak MB   sent kB  step ms", flush=True
        )
    rows = []
    for name in names:
        row = bench.run(name)
        rows.append(row)
        if rank == 0:
            stage = "-" if name.stage is None else name.stage
            print(
                f"{name.kind:10} {stage!s:>5} {row.loss:9.6f} {row.gradient:9.1e} {row.parameters:10.1e} "
                f"{row.moments:9.1e} {row.rest / 1e6:8.2f} {row.peak / 1e6:8.2f} {row.sent / 1e3:9.1f} "
                f"{row.seconds * 1e3:8.1f}",
                flush=True,
            )
    check(bench, rows)
    if rank == 0:
        print(
            f"the table adds up: every difference is below {TOLERANCE:g}, bytes sent and kept are what the stages say"
        )


def expected_sent(bench: Bench, stage: int | None) -> float:
    """Return what a step should send, for S bytes of parameters: 2S, in stage 3 3S for its parts, times (N-1)/N."""
    module = bench.module(torch.float32)
    inside = {leaf for part in bench.task.parts(module) for leaf in part.parameters()}
    rounds = [3 if stage == 3 and leaf in inside else 2 for leaf in module.parameters()]
    sizes = [bytes_of(leaf) for leaf in module.parameters()]
    total = sum(count * size for count, size in zip(rounds, sizes, strict=True))
    total += sum(bytes_of(leaf) for leaf in module.buffers() if leaf.is_floating_point())
    return total * (bench.world - 1) / bench.world


def check(bench: Bench, rows: Sequence[Row]) -> None:
    """Fail unless all rows agree, and send and keep what their stages say."""
    first = rows[0]
    size = sum(bytes_of(leaf) for leaf in bench.module(torch.float32).parameters())
    for row in rows:
        what = f"{row.name.kind}, stage {row.name.stage}"
        assert abs(row.loss - first.loss) <= TOLERANCE * abs(first.loss), f"{what}: loss {row.loss}, not {first.loss}"
        worst = max(row.gradient, row.parameters, row.moments)
        assert worst <= TOLERANCE, f"{what}: differs from {first.name.kind} by {worst:.1e}, more than {TOLERANCE:g}"
        sent, (part, some) = expected_sent(bench, row.name.stage), SENT_SLACK
        assert sent <= row.sent <= sent * (1 + part) + some, f"{what}: sent {row.sent:.0f} bytes, not about {sent:.0f}"
        kept, (part, some) = expected_rest(row.name, bench.world) * size, REST_SLACK
        assert kept <= row.rest <= kept * (1 + part) + some, f"{what}: keeps {row.rest} bytes, not about {kept:.0f}"


def expected_rest(name: Name, world: int) -> float:
    """Return what a row should keep between steps, in units of the parameters' bytes."""
    if name.stage is None:
        return 4  # parameters, gradients and two moments
    if name.stage == 0:
        return 3
    # the hook engine keeps parameters gathered below stage 3, the functional engine gathers them at the head of a step
    return 1 + 2 / world if name.kind == "hooked" and name.stage < 3 else 3 / world


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line and check it, before any rank starts."""
    parser = argparse.ArgumentParser(description="Compare the engines of fzero with torch's own, in one table.")
    add = parser.add_argument
    add("--model", choices=sorted(TASKS), default="mlp", help="(default: mlp)")
    add("--engines", nargs="+", choices=sorted(train_resnet.ENGINES), default=["hooked", "functional"])
    add("--stages", nargs="+", type=int, choices=(0, 1, 2, 3), default=[0, 1, 2, 3])
    add("--steps", type=positive, default=5, help="(default: 5)")
    add_options(parser)
    options = parser.parse_args(arguments)
    settle(parser, options)
    return options


if __name__ == "__main__":
    launch(compare, parse())
