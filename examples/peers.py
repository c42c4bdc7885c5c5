"""The peers of benchmark.py: ways to train one GPT on all ranks, each a function that takes a batch and makes a step.

All use AdamW with the same settings and drop their gradients as soon as a step is done. A step returns this rank's
loss, or the mean over all ranks.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from train_gpt import GPT, criterion

import fzero

RATE = 3e-4  # at 1e-3 the loss soon has spikes that rounding alone moves

Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], Tensor]


# --- torch -------------------------------------------------------------------------------------------------


def loop(forward: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Make the step that PyTorch users know: forward, backward, update."""

    def step(batch: Batch) -> Tensor:
        loss = criterion(forward(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fused(module: nn.Module) -> torch.optim.Optimizer:
    """Make torch's fastest AdamW."""
    return torch.optim.AdamW(module.parameters(), RATE, fused=True)


def compiled_if(module: nn.Module, *, compiled: bool) -> nn.Module:
    """Return the module, or what torch.compile makes of it."""
    return cast("nn.Module", torch.compile(module)) if compiled else module


def alone(module: GPT, *, compiled: bool) -> Step:
    """Compute without communication: no peer, but what all are compared with."""
    return loop(compiled_if(module, compiled=compiled), fused(module))


def ddp(module: GPT, *, compiled: bool) -> Step:
    """DistributedDataParallel; Dynamo splits a compiled module where DDP's buckets end."""
    parallel = DistributedDataParallel(compiled_if(module, compiled=compiled), gradient_as_bucket_view=True)
    return loop(parallel, fused(module))


def zero_redundancy(module: GPT) -> Step:
    """DistributedDataParallel, with the optimizer's state sharded (ZeRO 1)."""
    parallel = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=RATE, fused=True)
    return loop(parallel, optimizer)


def fsdp2(module: GPT, *, compiled: bool) -> Step:
    """Shard every block and the rest of the module (ZeRO 3); compiled block by block, as torch recommends."""
    mesh = init_device_mesh(module.head.weight.device.type, (dist.get_world_size(),))
    for block in module.blocks:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return loop(module, fused(module))


# --- DeepSpeed ---------------------------------------------------------------------------------------------


def deepspeed(module: GPT, *, stage: int) -> Step:
    """DeepSpeed's ZeRO with torch's AdamW and buckets as large as all others have; on CPU it first builds C++ code."""
    if module.head.weight.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    library: Any = importlib.import_module("deepspeed")
    bucket = 25 * 2**20 // 4  # elements; DeepSpeed's own default allocates 2 GB
    settings = {
        "train_micro_batch_size_per_gpu": 1,  # it only counts samples with this
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = library.initialize(model=module, optimizer=fused(module), config=settings)

    def step(batch: Batch) -> Tensor:
        loss = criterion(engine(batch[0]), batch[1])
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


# --- fzero -------------------------------------------------------------------------------------------------


def hooked(module: GPT, *, stage: int) -> Step:
    """Train with `fzero.HookedZero`."""
    engine = fzero.HookedZero(module, fzero.adamw(RATE), stage)

    def step(batch: Batch) -> Tensor:
        engine.backward(criterion(engine(batch[0]), batch[1]))
        return engine.step().loss

    return step


def zero(module: GPT, *, stage: int, compiled: bool) -> Step:
    """Train with `fzero.Zero`."""
    loss_fn, params, buffers = fzero.from_module(module, criterion)
    engine = fzero.Zero(loss_fn, fzero.adamw(RATE), stage, compile=compiled)
    state = engine.init(params, buffers)
    del params, buffers  # the state has its own

    def step(batch: Batch) -> Tensor:
        nonlocal state
        state, metrics = engine.step(state, batch)
        return metrics.loss

    return step


# --- All of them -------------------------------------------------------------------------------------------

FLOORS: dict[str, Callable[[GPT], Step]] = {
    "alone": partial(alone, compiled=False),
    "alone-compiled": partial(alone, compiled=True),
}
PEERS: dict[str, Callable[[GPT], Step]] = {
    "ddp": partial(ddp, compiled=False),
    "ddp-compiled": partial(ddp, compiled=True),
    "zero-redundancy": zero_redundancy,
    "fsdp2": partial(fsdp2, compiled=False),
    "fsdp2-compiled": partial(fsdp2, compiled=True),
    **{f"deepspeed-{stage}": partial(deepspeed, stage=stage) for stage in (1, 2, 3)},
    **{f"hooked-{stage}": partial(hooked, stage=stage) for stage in range(4)},
    **{f"zero-{stage}": partial(zero, stage=stage, compiled=False) for stage in range(4)},
    **{f"zero-{stage}-compiled": partial(zero, stage=stage, compiled=True) for stage in range(4)},
}


def installed(name: str) -> bool:
    """Return whether this machine has what a peer needs."""
    return not name.startswith("deepspeed") or importlib.util.find_spec("deepspeed") is not None
