"""Gradients of pure functions, on `torch.func` and `torch.autograd`; knows nothing of ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor


def value_and_grad(
    objective: Callable[[list[Tensor]], tuple[Tensor, Any]], variables: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, Any]:
    """Return (gradients, value, aux) of an objective that returns (0-d value, tree of tensors).

    Under `torch.compile` the transform is `torch.func.grad_and_value`. Eagerly it is `torch.autograd.grad` on detached
    variables: as pure, the same bits (but for operations whose backward takes another formula under ``create_graph``,
    which `torch.func` implies: GroupNorm differs by 2e-8), without the memory of a graph of the backward pass.
    Variables that the value does not depend on have a zero gradient.
    """
    if torch.compiler.is_compiling():
        treespecs: list[Any] = []

        def flat(free: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            # torch.func takes None for a leaf, and its aux may hold tensors only
            value, aux = objective(free)
            leaves, treespec = optree.tree_flatten(aux)
            treespecs.append(treespec)
            return value, leaves

        gradients, (value, leaves) = torch.func.grad_and_value(flat, has_aux=True)(list(variables))
        return gradients, value, optree.tree_unflatten(treespecs[0], leaves)
    with torch.enable_grad():
        leaves = [variable.detach().requires_grad_() for variable in variables]
        value, aux = objective(leaves)
        if leaves and value.requires_grad:
            gradients = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        else:
            gradients = [torch.zeros_like(leaf) for leaf in leaves]
    aux = optree.tree_map(lambda leaf: leaf.detach(), aux)
    return [gradient.detach() for gradient in gradients], value.detach(), aux
