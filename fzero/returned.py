"""What a loss function returned, taken apart and checked."""

from typing import Any

import optree
import torch
from torch import Tensor

from fzero.state import Mean, counted_by
from fzero.tree import Tree, paths_and_leaves, show_path, structure


def read(result: Any, buffers: Tree, *, has_buffers: bool, has_aux: bool) -> tuple[Tensor, Tensor, Tree, Tree]:
    """Take apart what the loss function returned: total, count, new buffers, aux."""
    names = ["loss", *(["new_buffers"] if has_buffers else []), *(["aux"] if has_aux else [])]
    if len(names) == 1:
        parts: tuple[Any, ...] = (result,)
    elif isinstance(result, tuple) and len(result) == len(names) and not isinstance(result, Mean):
        parts = result
    else:
        raise TypeError(f"loss_fn: must return ({', '.join(names)}), got {_describe(result)}")
    loss = parts[0]
    total, count = (loss.total, loss.count) if isinstance(loss, Mean) else (loss, 1.0)
    if not isinstance(total, Tensor):
        raise TypeError(
            f"loss_fn: the loss must be a 0-d floating tensor or fzero.Mean, got {_describe(total)}"
            + ("; for (loss, aux) set has_aux=True" if isinstance(total, tuple) else "")
        )
    if not total.is_floating_point():
        raise TypeError(f"loss_fn: the loss must be floating, got {total.dtype}; it has no gradient")
    if total.ndim:
        raise ValueError(f"loss_fn: the loss must be 0-d, got shape {tuple(total.shape)}; take its mean")
    if not isinstance(count, (Tensor, int, float)):
        raise TypeError(f"loss_fn: Mean.count must be a 0-d tensor or a number, got {_describe(count)}")
    counted = counted_by(count, total.device)
    if counted.ndim:
        raise ValueError(f"loss_fn: Mean.count must be 0-d, got shape {tuple(counted.shape)}")
    new_buffers = parts[1] if has_buffers else buffers
    _check_buffers(buffers, new_buffers)
    aux: Tree = parts[-1] if has_aux else None
    for leaf in optree.tree_leaves(aux):
        if not isinstance(leaf, Tensor):
            raise TypeError(f"loss_fn: every leaf of aux must be a tensor, got {_describe(leaf)}")
    return total, counted, new_buffers, aux


def _check_buffers(old: Tree, new: Tree) -> None:
    before, after = optree.tree_leaves(old), optree.tree_leaves(new)
    # (Dynamo's own idea of equal structures is stricter about dicts; a compiled step is checked by its leaves)
    if not torch.compiler.is_compiling() and optree.tree_structure(old) != optree.tree_structure(new):
        raise ValueError(
            f"loss_fn: new_buffers must have the structure of the buffers: {structure(old)}, got {structure(new)}"
        )
    if len(before) != len(after):
        raise ValueError(f"loss_fn: new_buffers must have the {len(before)} leaves of the buffers, got {len(after)}")
    for place, (mine, value) in enumerate(zip(before, after, strict=True)):
        if not isinstance(value, Tensor) or value.shape != mine.shape or value.dtype != mine.dtype:
            got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else _describe(value)
            raise ValueError(
                f"loss_fn: new_buffers leaf {show_path(paths_and_leaves(old)[place][0])} must have shape "
                f"{tuple(mine.shape)} and dtype {mine.dtype} as before, got {got}"
            )


def _describe(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
