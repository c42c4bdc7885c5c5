"""What goes in and out of a step: state, metrics, and the loss as a mean of its own."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fzero.tree import Tree


class State(NamedTuple):
    """Everything that training carries from step to step: a tree of tensors, nothing else.

    In stages 1 to 3 every rank holds 1/N of each bucket and of each moment; in stage 0 all of them. `engine.params`,
    `engine.buffers` and `engine.opt_state` give the full trees.
    """

    params: tuple[Tensor, ...]
    """One flat buffer a bucket: this rank's shard (C,), or in stage 0 the bucket (N*C,)."""
    opt_state: Any
    """The optimizer's state on the tuple of buckets."""
    buffers: Tree
    """The user's buffers, replicated."""
    fixed: tuple[Tensor, ...]
    """Integer and bool leaves of the parameters, carried unchanged."""
    step: Tensor
    """0-d int64: how many updates have been applied (a skipped step does not count)."""


class Metrics(NamedTuple):
    """What a step reports: 0-d tensors, equal on all ranks, but for `aux`."""

    loss: Tensor
    """Mean over ranks and micro-batches, of the parameters before the update."""
    grad_norm: Tensor
    """Global L2 norm of the mean gradient, before clipping."""
    skipped: Tensor
    """bool: a gradient was not finite, and nothing was changed."""
    step: Tensor
    """int64: how many updates have been applied, this one included."""
    stop: Tensor
    """bool: a rank had called ``engine.request_stop()`` before it began this step, or an earlier one."""
    aux: Tree = None
    """What the loss function returned beside the loss, on this rank, stacked over micro-batches."""


class Mean(NamedTuple):
    """A loss that is a sum and a count; its mean is taken over all ranks and micro-batches together.

    A loss function that averages over its own valid tokens gives a token on a rank with few of them more weight than
    one on a rank with many. Returning ``Mean(total, count)`` makes loss and gradient those of
    sum(total) / sum(count). A rank may have count 0; if all have, loss and gradient are zero.

    >>> import torch
    >>> Mean(torch.tensor(6.0), torch.tensor(6)).count
    tensor(6)
    """

    total: Tensor
    """0-d floating: the sum of the losses."""
    count: Tensor | float  # type: ignore[assignment]  # the contract's name hides tuple.count
    """0-d: how many of them."""


def counted_by(count: Tensor | float, device: torch.device) -> Tensor:
    """Return a count, a tensor or a number, as a float64 tensor on a device, and without a graph."""
    if isinstance(count, Tensor):
        return count.detach().to(device, torch.float64)
    # filled on the device: a copy from CPU could not be recorded in a CUDA graph
    return torch.full((), count, dtype=torch.float64, device=device)


class Parts(NamedTuple):
    """The state as flat lists, which is what Dynamo traces best."""

    shards: tuple[Tensor, ...]
    opt_leaves: tuple[Any, ...]
    """The leaves of one bucket's optimizer state: a tuple with one tensor a bucket, or one tensor that all share."""
    buffers: Tree
    fixed: tuple[Tensor, ...]
    step: Tensor


def to_parts(state: State, like: Sequence[bool]) -> Parts:
    """Take a state apart; `like` says which leaves of an optimizer's state are of a bucket's shape."""
    flat = iter(optree.tree_leaves(state.opt_state))
    leaves = tuple(tuple(next(flat) for _ in state.params) if is_like else next(flat) for is_like in like)
    return Parts(state.params, leaves, state.buffers, state.fixed, state.step)


def to_state(old: State, parts: Parts) -> State:
    """Put a state together again, the optimizer's part in the structure that it had."""
    flat: list[Tensor] = []
    for leaf in parts.opt_leaves:
        flat += list(leaf) if isinstance(leaf, tuple) else [leaf]
    opt_state = optree.tree_unflatten(optree.tree_structure(old.opt_state), flat)
    return State(parts.shards, opt_state, parts.buffers, parts.fixed, parts.step)
