r"""Train torchvision's ResNet-18 on small images, with either engine, sharded over the ranks.

    python examples/train_resnet.py --plot resnet.png

starts two ranks on this machine. Without CIFAR-10 at hand it trains on the 1797 handwritten digits (8 x 8 grey pixels)
that scikit-learn carries, of which every fifth, picked at random, is held out. Two free CPU cores need about a minute.
You should see the top-1 accuracy on the held-out digits end near 0.98.

Other ways to run it:

    python examples/train_resnet.py --engine functional --stage 3 --compile
    python examples/train_resnet.py --data cifar10 --root DIR   # downloads CIFAR-10 to DIR if it is not there
    torchrun --standalone --nproc-per-node 4 examples/train_resnet.py --stage 3
    torchrun --nproc-per-node 2 --max-restarts 2 examples/train_resnet.py --checkpoint runs/1 --save-every 50

The last one goes on from its latest checkpoint when a rank dies; started again, with any number of ranks and either
engine, it goes on too (`resume.py`).

The two engines differ in how a step is written (`Functional` and `Hooked` below) and in nothing else: on CPU they give
the same bits. Batch normalization uses each rank's own batch; its running statistics are rank 0's on every rank at
the end of a step (``buffer_policy="rank0"``), and the run ends by checking that they are.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import resume
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision  # type: ignore[import-untyped]
from launch import add_options, launch, new_file, on_all_ranks, peak_memory, positive, settle
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DistributedSampler
from torchvision.models.resnet import BasicBlock, ResNet  # type: ignore[import-untyped]
from tqdm import tqdm

import fzero

STANDARD_WIDTH = 64
HELD_OUT_BATCH = 256
NETWORK_LIMIT = 30.0  # seconds that a download may stand still
# A run of at least this many steps must lower the training loss, averaged over its first and last steps.
PROOF_STEPS = 8


# --- The model ---------------------------------------------------------------------------------------------


class ResNet18(ResNet):  # type: ignore[misc]  # torchvision has no types
    """ResNet-18 for small images: (batch, channels, height, width) to (batch, classes) logits.

    The stem is a 3 x 3 convolution of stride 1 without pooling, as usual for CIFAR. `width` is the number of channels
    behind it, and of the first of the four groups of blocks; the standard is 64.
    """

    def __init__(self, channels: int, classes: int, width: int = STANDARD_WIDTH) -> None:
        self.width = width
        super().__init__(BasicBlock, [2, 2, 2, 2])
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity()
        self.fc = nn.Linear(8 * width, classes)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")

    def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
        if planes == STANDARD_WIDTH:  # the first group
            self.inplanes = self.width
        group: nn.Sequential = super()._make_layer(block, planes * self.width // STANDARD_WIDTH, *args, **kwargs)
        return group

    def parts(self) -> list[nn.Module]:
        """Return the eight residual blocks, which stage 3 gathers one by one."""
        return [block for group in (self.layer1, self.layer2, self.layer3, self.layer4) for block in group]


# --- The data ----------------------------------------------------------------------------------------------


class Images(NamedTuple):
    """Images (count, channels, height, width), uint8, and their classes (count,), int64."""

    pixels: Tensor
    targets: Tensor


class Data(NamedTuple):
    """Training and held-out images, and how they may be changed without changing their class."""

    training: Images
    held_out: Images
    classes: int
    pad: int
    """Largest random shift, in pixels."""
    flip: bool
    """Whether a mirror image is of the same class."""
    mean: Tensor
    """Of each channel of the training images: (1, channels, 1, 1)."""
    deviation: Tensor
    """The same."""

    def normalized(self, pixels: Tensor) -> Tensor:
        """Return images with mean 0 and deviation 1 in each channel, float32."""
        return (pixels.float() - self.mean) / self.deviation


def make_data(training: Images, held_out: Images, classes: int, pad: int, *, flip: bool) -> Data:
    """Add the mean and the deviation of the training images."""
    pixels = training.pixels.float()
    mean, deviation = pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True)
    return Data(training, held_out, classes, pad, flip, mean, deviation)


def digits() -> Data:
    """Load scikit-learn's handwritten digits; every fifth of a fixed random order is held out."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    pixels = torch.as_tensor(found.images).to(torch.uint8).unsqueeze(1)
    targets = torch.as_tensor(found.target).to(torch.int64)
    # in random order: as they come, the last digits are by other writers than the first
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    unseen = torch.arange(len(pixels)) % 5 == 0
    training, held_out = (Images(pixels[part], targets[part]) for part in (order[~unseen], order[unseen]))
    return make_data(training, held_out, 10, 1, flip=False)


def cifar10(root: Path, *, download: bool = False) -> Data:
    """Load CIFAR-10 from a folder, in its own Python format, or download it there first.

    Raises
    ------
    RuntimeError, OSError
        If it is not there, or a file is not what it should be (torchvision knows the MD5 sums), or there is no network.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(NETWORK_LIMIT)
    try:
        with warnings.catch_warnings():
            # the files are of 2009 and say 0 where numpy 2.4.0 to 2.4.4 want False
            warnings.simplefilter("ignore", np.exceptions.VisibleDeprecationWarning)
            parts = [torchvision.datasets.CIFAR10(root, train=train, download=download) for train in (True, False)]
    finally:
        socket.setdefaulttimeout(before)
    training, held_out = (
        Images(torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets))
        for part in parts
    )
    return make_data(training, held_out, 10, 4, flip=True)


def augmented(inputs: Tensor, pad: int, *, flip: bool) -> Tensor:
    """Cut a random window out of each padded image, and mirror every other one if `flip`; the same shape."""
    count, channels, height, width = inputs.shape
    padded = F.pad(inputs, [pad] * 4)
    rows = torch.randint(2 * pad + 1, (count, 1)) + torch.arange(height)
    columns = torch.randint(2 * pad + 1, (count, 1)) + torch.arange(width)
    if flip:
        mirrored = torch.rand(count, 1) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    picture, channel = torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1)
    return padded[picture, channel, rows[:, None, :, None], columns[:, None, None, :]]


# --- The two engines ---------------------------------------------------------------------------------------


Criterion = Callable[[Tensor, Tensor], Tensor]


class Functional:
    """A training step as a pure function of a state: `fzero.Zero`.

    `parts` are the submodules that stage 3 gathers one by one; `options` has stage, accumulate and compile.
    """

    def __init__(
        self,
        module: nn.Module,
        criterion: Criterion,
        parts: Sequence[nn.Module],
        optimizer: fzero.Optimizer,
        options: argparse.Namespace,
    ) -> None:
        loss_fn, params, buffers = fzero.from_module(module, criterion, parts)
        accumulate, compiled = options.accumulate, options.compile
        self.engine = fzero.Zero(loss_fn, optimizer, options.stage, accumulate=accumulate, compile=compiled)
        self.state = self.engine.init(params, buffers)

    def step(self, inputs: Tensor, targets: Tensor) -> fzero.Metrics:
        """Train on one batch of this rank."""
        self.state, metrics = self.engine.step(self.state, (inputs, targets))
        return metrics

    def save(self, root: Path, **how: Any) -> Any:
        """Save under a root, with what else `fzero.save` takes. Collective."""
        return fzero.save(root, self.engine, self.state, **how)

    def load(self, directory: Path) -> Any:
        """Go on from a checkpoint, by either engine; return what was saved beside the state. Collective."""
        self.state, extra = fzero.load(directory, self.engine)
        return extra

    def params(self) -> dict[str, Tensor]:
        """Return all parameters in full. Collective."""
        return dict(self.engine.params(self.state))

    def buffers(self) -> dict[str, Tensor]:
        """Return this rank's buffers."""
        return dict(self.engine.buffers(self.state) or {})


class Hooked:
    """A training step as PyTorch users know it, forward, backward, step: `fzero.HookedZero`. As `Functional`."""

    def __init__(
        self,
        module: nn.Module,
        criterion: Criterion,
        parts: Sequence[nn.Module],
        optimizer: fzero.Optimizer,
        options: argparse.Namespace,
    ) -> None:
        self.criterion, self.options = criterion, options
        self.engine = fzero.HookedZero(module, optimizer, options.stage, units=parts)

    def backward(self, inputs: Tensor, targets: Tensor) -> None:
        """Add the gradients of one batch of this rank, in micro-batches."""
        count = self.options.accumulate
        for place, (some, wanted) in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True)):
            # stages 2 and 3 reduce every micro-batch, for what they need not hold; the others only the sum
            early = place < count - 1 and self.options.stage < 2
            with self.engine.no_sync() if early else nullcontext():
                self.engine.backward(self.criterion(self.engine(some), wanted))

    def step(self, inputs: Tensor, targets: Tensor) -> fzero.Metrics:
        """Train on one batch of this rank."""
        self.backward(inputs, targets)
        return self.engine.step()

    def save(self, root: Path, **how: Any) -> Any:
        """Save under a root, with what else `fzero.save` takes. Collective."""
        return fzero.save(root, self.engine, **how)

    def load(self, directory: Path) -> Any:
        """Go on from a checkpoint, by either engine; return what was saved beside the state. Collective."""
        return fzero.load(directory, self.engine)

    def params(self) -> dict[str, Tensor]:
        """Return all parameters in full. Collective."""
        return dict(self.engine.params())

    def buffers(self) -> dict[str, Tensor]:
        """Return this rank's buffers."""
        return dict(self.engine.buffers())


ENGINES: dict[str, type[Functional | Hooked]] = {"hooked": Hooked, "functional": Functional}


# --- Training ----------------------------------------------------------------------------------------------


def load(options: argparse.Namespace) -> Data:
    """Load the data set that the options name."""
    return digits() if options.data == "digits" else cifar10(options.root)


def build(options: argparse.Namespace, data: Data, steps: int, device: torch.device) -> Functional | Hooked:
    """Build the model and the engine that trains it for so many steps."""
    module = ResNet18(data.mean.numel(), data.classes, options.width).to(device)
    optimizer = fzero.adamw(
        fzero.warmup_cosine(options.rate, max(1, steps // 10), steps),
        weight_decay=0.05,
        decay_mask=lambda _path, leaf: leaf.ndim >= 2,
    )
    return ENGINES[options.engine](module.train(), F.cross_entropy, module.parts(), optimizer, options)


class Run:
    """What one rank of `world` trains, and how far it is."""

    def __init__(self, options: argparse.Namespace, rank: int, world: int, device: torch.device) -> None:
        self.options, self.rank, self.world, self.device = options, rank, world, device
        self.data = load(options)
        places: Any = range(len(self.data.training.targets))
        # as many images, and so as many steps, for every rank
        self.sampler: DistributedSampler[Any] = DistributedSampler(
            places, world, rank, seed=options.seed, drop_last=True
        )
        self.steps = min(len(self.sampler) // options.batch, options.batches or len(self.sampler))
        """In an epoch."""
        if self.steps == 0:
            raise ValueError(
                f"--batch {options.batch}: each of {world} ranks has only {len(self.sampler)} training images"
            )
        torch.manual_seed(options.seed)
        self.engine = build(options, self.data, options.epochs * self.steps, device)
        # a module to evaluate with: it only lends its code, to the engine's parameters and buffers
        self.judge = ResNet18(self.data.mean.numel(), self.data.classes, options.width).to(device).eval()
        torch.manual_seed(options.seed * 65536 + rank)  # other shifts on every rank
        self.epoch, self.place = 0, 0
        """Where the next batch is: after so many steps of that epoch."""
        self.losses: list[Tensor] = []
        self.accuracies: list[tuple[int, float]] = []
        if rank == 0:
            size = sum(parameter.numel() for parameter in self.judge.parameters()) / 1e6
            counts = f"{len(places)} training and {len(self.data.held_out.targets)} held-out images"
            print(f"{options.data}: {counts}; {size:.2f} M parameters")
            print(f"{options.engine} engine, stage {options.stage}, {world} ranks on {device}", flush=True)

    def save(self, root: Path, **how: Any) -> Any:
        """Save everything that the rest of the run depends on; the random state of the shifts is in it. Collective."""
        losses = torch.stack(self.losses) if self.losses else torch.zeros(0)
        position = {"epoch": self.epoch, "place": self.place, "steps": self.steps}
        return self.engine.save(
            root,
            step=len(self.losses),
            extra={**position, "losses": losses, "accuracies": self.accuracies},
            **how,
        )

    def go_on(self, directory: Path) -> None:
        """Go on from a checkpoint. Collective."""
        extra = self.engine.load(directory)
        mine = extra[0] if isinstance(extra, list) else extra  # a list if there were more, or fewer, ranks
        self.epoch, self.losses, self.accuracies = mine["epoch"], list(mine["losses"]), mine["accuracies"]
        self.place = mine["place"] * self.steps // mine["steps"]  # the same part of the epoch
        if self.rank == 0:
            print(f"resumed from {directory}", flush=True)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the rest of this epoch's batches of this rank."""
        self.sampler.set_epoch(self.epoch)  # another order every time
        order = torch.tensor(list(self.sampler))
        for mine in torch.split(order, self.options.batch)[self.place : self.steps]:
            pixels = self.data.normalized(self.data.training.pixels[mine])
            inputs = augmented(pixels, self.data.pad, flip=self.data.flip)
            yield inputs.to(self.device), self.data.training.targets[mine].to(self.device)

    def end_epoch(self) -> float:
        """Return the accuracy on the held-out images, and keep it. Collective."""
        values = self.engine.params(), self.engine.buffers()
        self.accuracies.append((len(self.losses), top1(self.judge, values, self.data, self.rank, self.world)))
        self.epoch, self.place = self.epoch + 1, 0
        return self.accuracies[-1][1]


def train(options: argparse.Namespace, rank: int, world: int, device: torch.device) -> None:
    """Train one rank of `world`; every rank runs the same lines, and rank 0 also talks."""
    run = Run(options, rank, world, device)
    checkpoints = resume.Checkpoints(options, world, run.engine.engine)
    directory = checkpoints.latest()
    if directory is not None:
        run.go_on(directory)
    first = len(run.losses)
    started = time.perf_counter()
    total = (options.epochs - run.epoch) * run.steps - run.place
    with tqdm(total=total, unit="step", disable=None if rank == 0 else True) as bar:
        while run.epoch < options.epochs:
            for inputs, targets in run.batches():
                metrics = run.engine.step(inputs, targets)
                run.losses.append(metrics.loss)
                run.place += 1
                bar.update()
                if checkpoints.after(len(run.losses), metrics, run.save):
                    return
            accuracy = run.end_epoch()
            if rank == 0:
                seconds = time.perf_counter() - started
                loss = float(torch.stack(run.losses[-run.steps :]).mean())
                bar.write(f"epoch {run.epoch:3d} {seconds:7.1f} s   training loss {loss:.3f}   top-1 {accuracy:.3f}")
                speed = seconds / max(1, len(run.losses) - first)
                bar.set_postfix_str(f"{speed:.2f} s/step, {peak_memory(device):.0f} MB per rank")
                sys.stdout.flush()
    checkpoints.save(len(run.losses), run.save)
    checkpoints.wait()
    finish(run, time.perf_counter() - started)


def finish(run: Run, seconds: float) -> None:
    """Print what came out. Collective."""
    memory = on_all_ranks(peak_memory(run.device), run.world)
    digests = on_all_ranks(resume.digest(run.engine.buffers()), run.world)
    assert len(set(digests)) == 1, f"the running statistics differ between ranks: {digests}"
    losses = [float(loss) for loss in run.losses]
    if run.rank == 0:
        print(f"running statistics: equal on all ranks, SHA-256 {digests[0][:16]}")
        print(f"{len(losses)} steps in {seconds:.0f} s; peak memory per rank in MB:", *(f"{mb:.0f}" for mb in memory))
        if run.options.plot is not None:
            plot(run.options.plot, losses, run.accuracies)
            print(f"curves: {run.options.plot}")
    check(run.options, losses, run.accuracies[-1][1], run.rank)


def check(options: argparse.Namespace, losses: list[float], accuracy: float, rank: int) -> None:
    """Print the result and fail when the run did not do its job."""
    part = max(1, len(losses) // 4)
    before, after = sum(losses[:part]) / part, sum(losses[-part:]) / part
    if rank == 0:
        print(f"training loss: {before:.3f} in the first quarter, {after:.3f} in the last")
        print(f"top-1: {accuracy:.3f}", flush=True)
    if len(losses) >= PROOF_STEPS:
        assert after < before, f"{len(losses)} steps should lower the training loss {before:.3f}, got {after:.3f}"
    if options.at_least is not None:
        assert accuracy >= options.at_least, f"top-1 ended at {accuracy:.3f}, not at least {options.at_least}"


@torch.no_grad()
def top1(
    judge: nn.Module, values: tuple[dict[str, Tensor], dict[str, Tensor]], data: Data, rank: int, world: int
) -> float:
    """Return the part of the held-out images whose class the model puts first; each is judged by one rank."""
    device = next(judge.parameters()).device
    mine = Images(*(part[rank::world] for part in data.held_out))
    counts = torch.zeros(2, dtype=torch.int64, device=device)  # right, judged
    for at in range(0, len(mine.targets), HELD_OUT_BATCH):
        inputs = data.normalized(mine.pixels[at : at + HELD_OUT_BATCH]).to(device)
        targets = mine.targets[at : at + HELD_OUT_BATCH].to(device)
        best = functional_call(judge, values, (inputs,)).argmax(1)
        counts += torch.stack([(best == targets).sum(), torch.tensor(len(targets), device=device)])
    if world > 1:
        dist.all_reduce(counts)
    right, judged = counts.tolist()
    assert judged == len(data.held_out.targets), f"{judged} images were judged, not {len(data.held_out.targets)}"
    return float(right / judged)


def plot(file: Path, losses: list[float], accuracies: list[tuple[int, float]]) -> None:
    """Draw the training loss of every step and the accuracy of every epoch into a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, left = plt.subplots(figsize=(7, 4), layout="constrained")
    left.plot(range(1, len(losses) + 1), losses, linewidth=0.8, alpha=0.7, label="training loss, one batch")
    left.set(xlabel="step", ylabel="loss (nats)", ylim=(0, None))
    right = left.twinx()
    right.plot(*zip(*accuracies, strict=True), marker="o", color="tab:orange", label="top-1, held out")
    right.set(ylabel="top-1", ylim=(0, 1.02))
    left.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(file, dpi=120, format="png")
    plt.close(figure)


# --- The command line --------------------------------------------------------------------------------------


class Habits(NamedTuple):
    """What suits a data set: epochs, and images per rank and step."""

    epochs: int
    batch: int


HABITS = {"digits": Habits(6, 32), "cifar10": Habits(30, 128)}


def choose_data(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Find the data set, or download it; where it cannot be had, say what to do."""
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0  # the other ranks of this machine meet it later
    if options.data == "auto":
        try:
            cifar10(options.root)
            options.data = "cifar10"
        except (RuntimeError, OSError):
            options.data = "digits"
            if first:
                print(f"CIFAR-10 is not in {options.root}; --data cifar10 downloads it. Taking the digits.", flush=True)
    elif options.data == "cifar10" and first:
        try:
            cifar10(options.root, download=True)
        except (RuntimeError, OSError) as error:
            parser.error(
                f"--data cifar10: it is not in --root {options.root} and cannot be downloaded ({error}); unpack "
                "cifar-10-python.tar.gz there by other means, or use --data digits, which needs no network"
            )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line and check it, before any rank starts."""
    parser = argparse.ArgumentParser(description="Train ResNet-18 on small images with fzero.")
    add = parser.add_argument
    add("--data", choices=("auto", "digits", "cifar10"), default="auto", help="(default: CIFAR-10 if it is there)")
    add("--root", type=Path, default=Path("data"), metavar="DIR", help="where CIFAR-10 lies (default: data)")
    add("--engine", choices=sorted(ENGINES), default="hooked", help="(default: hooked)")
    add("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="what is sharded (default: 2)")
    add_options(parser)
    add("--epochs", type=positive, help="(default: 6 for the digits, 30 for CIFAR-10)")
    add("--batch", type=positive, help="images per rank and step (default: 32 for the digits, 128 for CIFAR-10)")
    add("--batches", type=positive, help="at most so many steps an epoch (default: all)")
    add("--accumulate", type=positive, default=1, help="micro-batches that a batch is split into (default: 1)")
    add("--width", type=positive, default=STANDARD_WIDTH, help=f"channels of the stem (default: {STANDARD_WIDTH})")
    add("--rate", type=float, default=1e-3, help="peak learning rate (default: 0.001)")
    add(
        "--compile", action="store_true", help="compile the functional engine's step (the first one then takes minutes)"
    )
    add("--plot", type=new_file, metavar="FILE.png", help="draw loss and accuracy")
    resume.add_options(parser)
    add("--at-least", type=float, metavar="ACC", help="fail unless the top-1 accuracy ends at or above this")
    options = parser.parse_args(arguments)

    settle(parser, options)
    resume.check(parser, options)
    if options.compile and options.engine == "hooked":
        parser.error("--compile: the hook engine runs eagerly; use --engine functional")
    choose_data(parser, options)
    habits = HABITS[options.data]
    options.epochs = options.epochs or habits.epochs
    options.batch = options.batch or habits.batch
    if options.batch % options.accumulate:
        parser.error(f"--batch {options.batch}: does not divide into --accumulate {options.accumulate} equal parts")
    return options


if __name__ == "__main__":
    launch(train, parse())
