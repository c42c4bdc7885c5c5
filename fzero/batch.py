"""Batches: each rank has its own, a tree of tensors with one leading dim."""

import optree
import torch
from torch import Tensor

from fzero.tree import Tree, paths_and_leaves, show_path, structure


def leading_dim(batch: Tree, divisor: int) -> int:
    """Return the leading dim of a batch, which a number of micro-batches must divide; refuse anything else by path."""
    found = paths_and_leaves(batch)
    if not found:
        raise ValueError("batch: has no leaves; pass a tree of tensors with one leading dim")
    for path, leaf in found:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"batch: leaf {show_path(path)} must be a tensor, got {type(leaf).__name__}")
        if leaf.ndim == 0:
            raise ValueError(f"batch: leaf {show_path(path)} is 0-d; every leaf needs the leading (batch) dim")
    size = int(found[0][1].shape[0])
    for path, leaf in found:
        if leaf.shape[0] != size:
            raise ValueError(
                f"batch: leaf {show_path(path)} has leading dim {leaf.shape[0]}, "
                f"leaf {show_path(found[0][0])} has {size}; they must be equal"
            )
    if size % divisor:
        raise ValueError(f"accumulate: {divisor} micro-batches do not divide the batch's leading dim {size}")
    return size


def placed(batch: Tree, device: torch.device) -> Tree:
    """Return a batch on the device of the state: leaves on CPU are moved there, those on another device are refused.

    No gradient goes back into it: leaves are detached.

    From pinned memory the copy is not waited for, so what lies there must not be written to before the step is done (a
    `DataLoader` with ``pin_memory=True`` never does).
    """
    if any(leaf.requires_grad for leaf in optree.tree_leaves(batch)):
        batch = optree.tree_map(lambda leaf: leaf.detach(), batch)
    if all(leaf.device == device for leaf in optree.tree_leaves(batch)):
        return batch
    for path, leaf in paths_and_leaves(batch):
        if leaf.device != device and leaf.device.type != "cpu":
            raise ValueError(
                f"batch: leaf {show_path(path)} is on {leaf.device}, the state on {device}; "
                "a batch must be there too, or on CPU, from where it is moved"
            )
    return optree.tree_map(lambda leaf: leaf.to(device, non_blocking=leaf.is_pinned()), batch)


def describe_batch(batch: Tree) -> str:
    """Return what all ranks' batches must have in common: the structure and the dtypes, not the sizes."""
    return f"batch {structure(batch)} of {[str(leaf.dtype) for leaf in optree.tree_leaves(batch)]}"


def micro_batches(batch: Tree, size: int, count: int) -> list[Tree]:
    """Split a batch of leading dim `size` evenly into micro-batches, as views."""
    if count == 1:
        return [batch]
    part = size // count
    return [optree.tree_map(lambda leaf, at=at: leaf[at * part : (at + 1) * part], batch) for at in range(count)]


def cast_inputs(batch: Tree, dtype: torch.dtype) -> Tree:
    """Return (inputs, targets) with the floating tensors among the inputs in another dtype."""
    inputs, targets = batch
    return optree.tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, inputs), targets
