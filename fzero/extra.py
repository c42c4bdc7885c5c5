"""What a user adds to a checkpoint: JSON-like data with tensors in it, as JSON and a list of tensors, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def encode(extra: Any) -> tuple[Any, list[Tensor]]:
    """Take JSON-like data apart: JSON in which tensors are numbered, and the tensors.

    None, bools, numbers and strings stand for themselves and lists are lists; a dict, a tuple and a tensor are objects
    of one key, so that each comes back as what it was.

    >>> encode({"epoch": 3, "order": torch.arange(2)})
    ({'dict': {'epoch': 3, 'order': {'tensor': 0}}}, [tensor([0, 1])])

    Raises
    ------
    TypeError
        Naming the place of anything else.
    """
    tensors: list[Tensor] = []

    def walk(node: Any, where: str) -> Any:
        if node is None or type(node) in (bool, int, float, str):
            return node
        if isinstance(node, Tensor):
            kind = type(node).__name__
            if type(node) not in (Tensor, Parameter) or node.is_quantized or node.is_nested:
                kind = f"a quantized {node.dtype}" if node.is_quantized else kind
                raise TypeError(f"{where} must be a plain tensor, got {kind}; convert it")
            if node.is_meta or node.layout != torch.strided:
                raise TypeError(f"{where} must be a dense tensor with values, got {node.layout} on {node.device}")
            # conjugation and negation may be put off: the memory has other values then
            tensors.append(node.detach().resolve_conj().resolve_neg())
            return {"tensor": len(tensors) - 1}
        if type(node) is dict:
            for key in node:
                if type(key) is not str:
                    raise TypeError(f"{where} has the key {key!r} of type {type(key).__name__}; use strings")
            return {"dict": {key: walk(value, f"{where}[{key!r}]") for key, value in node.items()}}
        if type(node) in (list, tuple):
            parts = [walk(value, f"{where}[{place}]") for place, value in enumerate(node)]
            return parts if type(node) is list else {"tuple": parts}
        raise TypeError(
            f"{where} must be JSON-like (None, bool, int, float, str, list, tuple, dict) or a tensor, "
            f"got {type(node).__name__}; convert it"
        )

    return walk(extra, "extra"), tensors


def decode(found: Any, tensors: Sequence[Tensor]) -> Any:
    """Put together what `encode` took apart."""
    if isinstance(found, list):
        return [decode(part, tensors) for part in found]
    if not isinstance(found, Mapping):
        return found
    if "tensor" in found:
        return tensors[found["tensor"]]
    if "tuple" in found:
        return tuple(decode(part, tensors) for part in found["tuple"])
    return {key: decode(value, tensors) for key, value in found["dict"].items()}
