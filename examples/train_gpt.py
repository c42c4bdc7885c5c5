r"""Train a small GPT on the bytes of English text that every Python carries, sharded over the ranks.

    python examples/train_gpt.py --plot loss.png

starts two ranks on this machine. With the default settings (6 layers, width 192, 500 steps) two free CPU cores
need about two minutes. The validation loss starts near 5.45 nats per byte (the model knows nothing: ln 256 is
5.55). You should see it end near 2.15, and a sample that has the look of English but few real words.

Other ways to run it:

    python examples/train_gpt.py --stage 3 --compile
    python examples/train_gpt.py --ranks 1                      # one process, no process group
    python examples/train_gpt.py --precision bf16               # half the bytes on the link; it ends near 2.15 too
    python examples/train_gpt.py --text my.txt --steps 2000
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --stage 3
    torchrun --nproc-per-node 2 --max-restarts 2 examples/train_gpt.py --checkpoint runs/1 --save-every 50

The last one goes on from its latest checkpoint when a rank dies, to the bits of a run that nothing happened to;
started again, with any number of ranks, it goes on too. SIGTERM makes it save and end (`resume.py`).

The model is an ordinary ``nn.Module`` that knows nothing of ranks. ``fzero.from_module`` turns it into a pure
loss function and a tree of parameters; what a stage changes is only where `fzero.Zero` keeps their parts.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import sys
import time
from pathlib import Path
from typing import Any

import resume
import torch
import torch.nn.functional as F
from launch import add_options, launch, new_file, on_all_ranks, peak_memory, positive, settle
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm

import fzero

VOCABULARY = 256  # one token per byte
HEAD_WIDTH = 32
EVALUATIONS = 8  # validation points of one run, beside the first
EVALUATION_WINDOWS = 32  # per rank
PROMPT, SAMPLE_BYTES = b"The ", 300
# A run of at least this many steps must lower the validation loss by at least this many nats per byte.
PROOF_STEPS, PROOF_FALL = 30, 1.0
PRECISIONS = {"fp32": fzero.Precision.fp32, "bf16": fzero.Precision.bf16}


# --- The model ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream: (batch, time, width) to the same."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        """Attend from each position to itself and those before it."""
        heads = self.query_key_value(x).unflatten(-1, (3, -1, HEAD_WIDTH))  # (batch, time, 3, head, HEAD_WIDTH)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        x = x + F.dropout(self.attend(self.attention_norm(x)), self.dropout, self.training)
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)))
        return x + F.dropout(self.mlp_out(hidden), self.dropout, self.training)


class GPT(nn.Module):
    """A causal language model on bytes: (batch, time) integers to (batch, time, 256) logits."""

    def __init__(self, layers: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        # fzero shards these one by one in stage 3: the largest ModuleList of a module holds its blocks
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                # what is added to the residual stream starts smaller: its variance must not grow with depth
                residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)
        self.head.weight = self.embedding.weight  # tied: fzero keeps one shard and sums the two gradients

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next byte at every position."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def criterion(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- The data ----------------------------------------------------------------------------------------------


def read_text(file: Path | None) -> bytes:
    """Read the file, or join what ``help()`` can say about the language (about 465 kB of English)."""
    if file is None:
        return "\n\n".join(pydoc_data.topics.topics.values()).encode()
    return file.read_bytes()


def split_text(text: bytes) -> tuple[Tensor, Tensor]:
    """Split into training data and the last tenth, which is never trained on."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    held_out = len(data) // 10
    return data[:-held_out], data[-held_out:]


def windows(data: Tensor, starts: Tensor, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cut one window a start: inputs and the same shifted by one byte, both (len(starts), context)."""
    cut = data[starts[:, None] + torch.arange(context + 1)].to(device, torch.int64)
    return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()


def validation_batch(data: Tensor, context: int, rank: int, world: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Spread the validation windows of all ranks evenly over the held-out text; return this rank's."""
    last_start = len(data) - context - 1
    starts = torch.linspace(0, last_start, world * EVALUATION_WINDOWS).long()
    return windows(data, starts[rank::world], context, device)


# --- Training ----------------------------------------------------------------------------------------------


class Run:
    """What one rank of `world` trains, and how far it is."""

    def __init__(self, options: argparse.Namespace, rank: int, world: int, device: torch.device) -> None:
        self.options, self.rank, self.device = options, rank, device
        torch.manual_seed(options.seed)
        self.module = GPT(options.layers, options.width, options.context, options.dropout).to(device)
        loss_fn, params, buffers = fzero.from_module(self.module.train(), criterion)
        self.eval_loss_fn, _, _ = fzero.from_module(self.module.eval(), criterion)
        optimizer = fzero.adamw(
            fzero.warmup_cosine(options.rate, max(1, options.steps // 10), options.steps),
            betas=(0.9, 0.95),
            weight_decay=0.1,
            decay_mask=lambda _path, leaf: leaf.ndim >= 2,
        )
        self.engine = fzero.Zero(
            loss_fn,
            optimizer,
            stage=options.stage,
            clip_norm=1.0,
            accumulate=options.accumulate,
            precision=PRECISIONS[options.precision],
            compile=options.compile,
        )
        self.state = self.engine.init(params, buffers)
        self.training, held_out = split_text(read_text(options.text))
        self.validation = validation_batch(held_out, options.context, rank, world, device)
        self.windows = torch.Generator().manual_seed(options.seed * 65536 + rank)  # other windows on every rank
        torch.manual_seed(options.seed * 65536 + rank)  # and other dropout
        self.done = 0  # steps
        self.losses: list[Tensor] = []
        self.evaluated: list[tuple[int, float]] = []
        if rank == 0:
            size = sum(parameter.numel() for parameter in self.module.parameters()) / 1e6
            text = (len(self.training) + len(held_out)) / 1e3
            print(
                f"{size:.2f} M parameters, {text:.0f} kB of text, stage {options.stage}, {options.precision}, "
                f"{world} ranks on {device}"
            )

    def save(self, root: Path, **how: Any) -> Any:
        """Save everything that the rest of the run depends on; dropout's random state is in it anyway. Collective."""
        losses = torch.stack(self.losses) if self.losses else torch.zeros(0)
        extra = {"windows": self.windows.get_state(), "losses": losses, "evaluated": self.evaluated}
        return fzero.save(root, self.engine, self.state, step=self.done, extra={"done": self.done, **extra}, **how)

    def go_on(self, directory: Path) -> None:
        """Go on from a checkpoint. Collective."""
        self.state, extra = fzero.load(directory, self.engine)
        same_world = not isinstance(extra, list)  # else it is that of all ranks there were
        mine = extra if same_world else extra[0]
        self.done, self.losses, self.evaluated = mine["done"], list(mine["losses"]), mine["evaluated"]
        if same_world:
            self.windows.set_state(mine["windows"])
        else:  # windows that no rank has drawn
            self.windows.manual_seed(self.options.seed * 65536 + self.rank + self.done * 2**32)
        if self.rank == 0:
            print(f"resumed from {directory}", flush=True)

    def step(self) -> fzero.Metrics:
        """Train on one batch of windows. Collective."""
        context = self.options.context
        starts = torch.randint(len(self.training) - context, (self.options.batch,), generator=self.windows)
        batch = windows(self.training, starts, context, self.device)
        self.state, metrics = self.engine.step(self.state, batch)
        self.losses.append(metrics.loss)
        self.done += 1
        return metrics

    def evaluate(self) -> float:
        """Return the loss on the held-out text, and keep it, once a step. Collective."""
        if not self.evaluated or self.evaluated[-1][0] < self.done:
            loss, _ = self.engine.evaluate(self.state, self.validation, loss_fn=self.eval_loss_fn)
            self.evaluated.append((self.done, float(loss)))
        return self.evaluated[-1][1]


def train(options: argparse.Namespace, rank: int, world: int, device: torch.device) -> None:
    """Train one rank of `world`; every rank runs the same lines, and rank 0 also talks."""
    run = Run(options, rank, world, device)
    checkpoints = resume.Checkpoints(options, world, run.engine)
    directory = checkpoints.latest()
    if directory is not None:
        run.go_on(directory)
    first = run.done
    milestones = {round(options.steps * part / EVALUATIONS) for part in range(EVALUATIONS + 1)}
    started = time.perf_counter()
    with tqdm(total=options.steps, initial=first, unit="step", disable=None if rank == 0 else True) as bar:

        def report() -> None:
            if run.done in milestones:
                loss = run.evaluate()
                if rank == 0:
                    bar.write(f"step {run.done:5d} {time.perf_counter() - started:7.1f} s   validation loss {loss:.3f}")
                    sys.stdout.flush()

        report()
        while run.done < options.steps:
            metrics = run.step()
            if run.done % 10 == 1 and rank == 0:  # reading the loss waits for the device, so not at every step
                tokens = (run.done - first) * options.batch * options.context * world
                speed = tokens / (time.perf_counter() - started)
                bar.set_postfix_str(
                    f"loss {float(metrics.loss):.3f}, {speed:.0f} tokens/s, {peak_memory(device):.0f} MB per rank"
                )
            bar.update()
            report()
            if checkpoints.after(run.done, metrics, run.save):
                return
    checkpoints.save(run.done, run.save)
    checkpoints.wait()
    finish(run, world, time.perf_counter() - started)


def finish(run: Run, world: int, seconds: float) -> None:
    """Print what came out. Collective."""
    options = run.options
    full = run.engine.params(run.state)  # collective: every rank calls it
    memory = on_all_ranks(peak_memory(run.device), world)
    if run.rank == 0:
        text = sample(run.module, full, SAMPLE_BYTES, options.seed)
        print(f"--- sample ---\n{text}\n--------------")
        print(f"parameters: SHA-256 {resume.digest(full)}")
        print(f"{options.steps} steps in {seconds:.0f} s; peak memory per rank in MB:", *(f"{mb:.0f}" for mb in memory))
        if options.plot is not None:
            plot(options.plot, [float(loss) for loss in run.losses], run.evaluated)
            print(f"loss curve: {options.plot}")
    check(options, run.evaluated[0][1], run.evaluated[-1][1], run.rank)


def check(options: argparse.Namespace, before: float, after: float, rank: int) -> None:
    """Print the result and fail when the run did not do its job."""
    if rank == 0:
        print(f"validation loss: {before:.3f} before, {after:.3f} after (nats per byte)", flush=True)
    if options.steps >= PROOF_STEPS:
        assert after < before - PROOF_FALL, f"{options.steps} steps should lower {before:.3f} by {PROOF_FALL}"
    if options.below is not None:
        assert after < options.below, f"the validation loss ended at {after:.3f}, not below {options.below}"


@torch.no_grad()
def sample(module: GPT, params: dict[str, Tensor], count: int, seed: int, temperature: float = 0.8) -> str:
    """Continue the prompt by `count` bytes, with whatever is not printable shown as "?"."""
    device = params["embedding.weight"].device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(PROMPT)
    for _ in range(count):
        window = torch.tensor([tokens[-module.context :]], device=device)
        logits = functional_call(module, params, (window,))[0, -1].float().cpu()
        chances = (logits / temperature).softmax(0)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    text = bytes(tokens).decode(errors="replace").replace("\N{REPLACEMENT CHARACTER}", "?")
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def plot(file: Path, losses: list[float], evaluated: list[tuple[int, float]]) -> None:
    """Draw the training loss of every step and the validation loss into a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8, alpha=0.7, label="training, one batch")
    axes.plot(*zip(*evaluated, strict=True), marker="o", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120, format="png")
    plt.close(figure)


# --- The command line --------------------------------------------------------------------------------------


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line and check it, before any rank starts."""
    parser = argparse.ArgumentParser(description="Train a small GPT on bytes with fzero.")
    add = parser.add_argument
    add("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="what is sharded (default: 2)")
    add_options(parser)
    add("--steps", type=positive, default=500, help="(default: 500)")
    add("--batch", type=positive, default=2, help="windows per rank and step (default: 2)")
    add("--accumulate", type=positive, default=1, help="micro-batches that a batch is split into (default: 1)")
    add("--context", type=positive, default=128, help="bytes per window (default: 128)")
    add("--layers", type=positive, default=6, help="(default: 6)")
    add("--width", type=positive, default=192, help=f"a multiple of {HEAD_WIDTH} (default: 192)")
    add("--dropout", type=float, default=0.0, help="(default: 0)")
    add("--rate", type=float, default=2e-3, help="peak learning rate (default: 0.002)")
    add("--precision", choices=sorted(PRECISIONS), default="fp32", help="what is computed in (default: fp32)")
    add("--compile", action="store_true", help="compile the step (the first one then takes a minute)")
    add("--text", type=Path, metavar="FILE", help="train on this file (default: the texts of Python's help())")
    add("--plot", type=new_file, metavar="FILE.png", help="draw the loss curve")
    resume.add_options(parser)
    add("--below", type=float, metavar="NATS", help="fail unless the validation loss ends below this")
    options = parser.parse_args(arguments)

    settle(parser, options)
    resume.check(parser, options)
    try:
        size = len(read_text(options.text))
    except OSError as error:
        parser.error(f"--text {options.text}: {error.strerror}")
    needed = 10 * (options.context + 1)  # so that the last tenth still holds a window and the byte after it
    for wrong, message in (
        (options.width % HEAD_WIDTH, f"--width {options.width}: must be a multiple of {HEAD_WIDTH}"),
        (
            options.batch % options.accumulate,
            f"--batch {options.batch}: does not divide into --accumulate {options.accumulate} equal parts",
        ),
        (not 0 <= options.dropout < 1, f"--dropout {options.dropout}: must be at least 0 and below 1"),
        (
            size < needed,
            f"--text {options.text}: too short: {size} bytes, and --context {options.context} needs {needed}",
        ),
    ):
        if wrong:
            parser.error(message)
    return options


if __name__ == "__main__":
    launch(train, parse())
