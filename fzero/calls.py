"""Which parameters may get several gradients in one backward pass."""

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class Calls:
    """Counts the calls of modules in a forward pass, by parameter.

    Reentrant activation checkpointing runs forward without a graph, and backward passes inside the backward pass: a
    parameter of a module that is called there, and called more than once, gets several gradients in one pass, and
    nothing says which is the last. Any other parameter gets one.
    """

    def __init__(self, module: nn.Module, place: Mapping[nn.Parameter, int]) -> None:
        self.counting = False
        self._calls: Counter[int] = Counter()
        self._nested: set[int] = set()
        this = weakref.ref(self)
        for child in module.modules():
            places = [place[parameter] for parameter in child.parameters(recurse=False) if parameter in place]
            if places:
                child.register_forward_pre_hook(_counter(this, places))

    def clear(self) -> None:
        """Start again."""
        self._calls.clear()
        self._nested.clear()

    def called(self, places: list[int]) -> None:
        """Count a call."""
        if self.counting:
            self._calls.update(places)
            if not torch.is_grad_enabled():
                self._nested.update(places)

    @property
    def nested(self) -> frozenset[int]:
        """Parameters that a graph inside the graph may reach."""
        return frozenset(self._nested)

    @property
    def repeated(self) -> frozenset[int]:
        """Parameters that may get several gradients in one backward pass."""
        return frozenset(place for place in self._nested if self._calls[place] > 1)


def _counter(calls: weakref.ref[Calls], places: list[int]) -> Any:
    def hook(*_: Any) -> None:
        alive = calls()
        if alive is not None:
            alive.called(places)

    return hook
