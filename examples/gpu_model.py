"""What gpu_report.py trains, and how: a GPT for matrix units, torch's way to train it, and fzero's.

It needs torch and fzero only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero

HEAD_WIDTH = 64
RATE = 3e-4

Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], Tensor]
"""Makes one training step and returns its loss."""

# Dense FLOP/s of matrix products with sums in float32, by what torch calls the device. NVIDIA's H200 datasheet (and
# that of the H100 SXM, whose chip it has) gives 1979e12 in bfloat16 and 989e12 in TF32 with sparsity, which is twice
# the dense rate; the A100's datasheet gives 312e12 and 156e12 without it.
PEAKS = {
    "NVIDIA H200": {"bf16": 1979e12 / 2, "tf32": 989e12 / 2},
    "NVIDIA H100 80GB HBM3": {"bf16": 1979e12 / 2, "tf32": 989e12 / 2},
    "NVIDIA A100-SXM4-40GB": {"bf16": 312e12, "tf32": 156e12},
    "NVIDIA A100-SXM4-80GB": {"bf16": 312e12, "tf32": 156e12},
}


# --- The model ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """How large the model and a batch are."""

    layers: int
    width: int
    vocabulary: int
    context: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.context

    @property
    def weights(self) -> int:
        """Weights of all matrix products: those of the layers, and the head."""
        return 12 * self.layers * self.width**2 + self.vocabulary * self.width

    @property
    def flops(self) -> float:
        """FLOPs of a step that the model needs, whoever computes it: (6 weights + 12 layers width context) a token.

        Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B. Attention counts in full although it is causal;
        norms, softmax, bias and optimizer do not count.
        """
        return self.tokens * (6.0 * self.weights + 12.0 * self.layers * self.width * self.context)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend causally; in float64 by the formula, since torch 2.11 compiles its kernel for that wrongly on CPU."""
    if query.dtype != torch.float64:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    out: Tensor = scores.masked_fill(later, float("-inf")).softmax(-1) @ value
    return out


class Block(nn.Module):
    """Pre-norm attention and MLP: (batch, time, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD_WIDTH))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = attend(query, key, value)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return out


class GPT(nn.Module):
    """A causal language model, (batch, time) integers to (batch, time, vocabulary) logits; its head is not tied."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next token at every position."""
        x = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def criterion(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, computed in float32 (in float64 for float64)."""
    logits = logits.flatten(0, 1)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets.flatten())


def make(size: Size, device: torch.device) -> GPT:
    """Make the model with the same weights every time."""
    torch.manual_seed(0)
    with device:
        return GPT(size)


def batches(size: Size, device: torch.device, count: int) -> list[Batch]:
    """Make random batches; few, so that the loss falls."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(size.vocabulary, (count, size.batch, size.context + 1), generator=generator).to(device)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens]


# --- Who trains it -----------------------------------------------------------------------------------------


def with_torch(module: GPT, *, compiled: bool, autocast: bool = False) -> Step:
    """Train as PyTorch users do: ``torch.compile(module)``, AdamW(fused=True), and for bfloat16 autocast."""
    device = next(module.parameters()).device
    forward = cast("nn.Module", torch.compile(module)) if compiled else module
    optimizer = torch.optim.AdamW(module.parameters(), RATE, fused=True)

    def step(batch: Batch) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = criterion(forward(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def with_masters(module: GPT) -> Step:
    """Train what fzero's bf16 preset trains: all compute in bfloat16, float32 masters and moments. Compiled."""
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in module.parameters()]
    weights = list(module.to(torch.bfloat16).parameters())
    plain = [weight.detach() for weight in weights], [master.detach() for master in masters]
    forward = cast("nn.Module", torch.compile(module))
    optimizer = torch.optim.AdamW(masters, RATE, fused=True)

    def step(batch: Batch) -> Tensor:
        loss = criterion(forward(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        for master, weight in zip(masters, weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_copy_(*plain)
        return loss.detach()

    return step


def with_fzero(module: GPT, *, stage: int, compiled: bool, precision: fzero.Precision = fzero.Precision()) -> Step:  # noqa: B008
    """Train with `fzero.Zero`."""
    loss_fn, params, buffers = fzero.from_module(module, criterion)
    engine = fzero.Zero(loss_fn, fzero.adamw(RATE), stage, compile=compiled, precision=precision)
    state = engine.init(params, buffers)
    del params, buffers  # the state has its own

    def step(batch: Batch) -> Tensor:
        nonlocal state
        state, metrics = engine.step(state, batch)
        return metrics.loss

    return step
