"""Stage 3: the parts of a module that are gathered for their forward, freed, and gathered again for their backward."""

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from fzero.agree import agree
from fzero.axis import Axis, with_own_group
from fzero.flats import Flat


class Unit:
    """One submodule that is gathered as one."""

    def __init__(self, name: str, flats: Sequence[Flat], places: frozenset[int]) -> None:
        self.name, self.flats, self.places = name, tuple(flats), places
        self.here = False
        self.waiting: set[int] = set()
        """Parameters whose gradient of this backward pass has not landed yet."""
        self.running = 0
        """Calls whose forward runs."""

    def fetch(self, axis: Axis) -> None:
        """Gather all buckets."""
        for flat in self.flats:
            flat.fetch(axis)
        self.here = True

    def free(self) -> None:
        """Give their memory back."""
        for flat in self.flats:
            flat.free()
        self.here = False


class Units:
    """When which unit is gathered.

    A *pass* is one forward or backward pass of the whole module. In forward every unit is gathered exactly once, in the
    order in which the units were given, and stays until the next one is needed. In backward it is gathered exactly
    once, in reverse order, at the first gradient of its output, and stays until the next one is needed and all its
    parameters' gradients have landed (autograd runs first what forward ran last, so nothing of it is left then).

    A unit that this rank's pass skips is gathered, for the others, before the next one or at the end. So all ranks
    gather the same units in the same order, whatever each uses and however often it calls one in a row. Gathers have a
    process group of their own, since gradients are sent at other moments on a rank that skips a unit.

    A unit that is needed again after it was freed in the same pass, or outside a pass, is gathered once more after all
    ranks have agreed to through the store: slow, but never a gather of another unit on another rank.
    """

    def __init__(self, units: Sequence[tuple[str, nn.Module]], flats: Sequence[Flat], axis: Axis) -> None:
        self._axis = with_own_group(axis)
        self._outside = [flat for flat in flats if flat.bucket.block is None]
        self._units: list[Unit] = []
        self._home: dict[int, Unit] = {}
        this = weakref.ref(self)
        for number, (name, module) in enumerate(units):
            mine = [flat for flat in flats if flat.bucket.block == number]
            places = frozenset(slot.leaf for flat in mine for slot in flat.bucket.slots)
            self._units.append(Unit(name, mine, places))
            self._home.update(dict.fromkeys(places, self._units[-1]))
            module.register_forward_pre_hook(_before(this, number), prepend=True)
            module.register_forward_hook(_after(this, number), always_call=True)
        self._mode = ""
        """"forward" or "backward" while such a pass runs."""
        self._next = 0
        """The unit whose turn it is in this pass."""
        self._current: Unit | None = None
        """The unit that was needed last in this pass."""
        self._gathers = 0

    # --- passes ----------------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run a forward pass in it; what lies outside units is gathered before and stays until the step."""
        self._mode, self._next = "forward", 0
        borrowed = not torch.is_grad_enabled() and not all(flat.here for flat in self._outside)
        for flat in self._outside:
            flat.fetch(self._axis)
        with self._ending():
            yield
            self._free_all()
            while self._next < len(self._units):
                self._pass_over()
        if borrowed:
            self.free_outside()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run a backward pass in it."""
        self._mode, self._next = "backward", len(self._units) - 1
        for unit in self._units:
            unit.waiting = set(unit.places)
        with self._ending():
            yield
            for unit in self._units:
                unit.waiting.clear()
            self._free_all()
            while self._next >= 0:
                self._pass_over()

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        finally:
            for unit in self._units:
                unit.running = 0
            self._free_all()
            self._mode, self._current = "", None

    def free_outside(self) -> None:
        """Free what lies outside units."""
        for flat in self._outside:
            flat.free()

    def landed(self, place: int) -> None:
        """Take note that the gradient of a parameter is complete."""
        unit = self._home.get(place)
        if unit is not None:
            unit.waiting.discard(place)
            self._free_if_done(unit)

    def catch_up(self, number: int | None) -> None:
        """Gather, for the others, the units that this rank has skipped before it sends the gradient of one.

        Otherwise it might wait for that bucket's sum, which another rank can only send after such a gather.
        """
        while self._mode == "backward" and number is not None and self._next >= number:
            self._pass_over()

    # --- one unit --------------------------------------------------------------------------------------------------

    def need(self, number: int) -> None:
        """Have a unit here."""
        unit, before = self._units[number], self._current
        self._current = unit
        if before is not None:
            self._free_if_done(before)
        if unit.here:
            return
        if self._mode == "forward":
            self._free_all()
            while self._next < number:
                self._pass_over()
        elif self._mode == "backward":
            while self._next > number:
                self._pass_over()
        if self._mode and self._next == number:
            self._next += 1 if self._mode == "forward" else -1
        else:
            self._agree_on(unit)
        self._fetch(unit)

    def before(self, number: int) -> None:
        """Prepare one call of a unit."""
        self.need(number)
        self._units[number].running += 1

    def after(self, number: int, outputs: Any) -> None:
        """Finish one call of a unit."""
        unit = self._units[number]
        if not unit.running:
            return  # it was not even gathered
        unit.running -= 1
        tensors = (
            [tensor for tensor in _tensors(outputs) if tensor.grad_fn is not None] if torch.is_grad_enabled() else []
        )
        if tensors:
            register_multi_grad_hook(tensors, lambda _: self.need(number), mode="any")
        if not self._mode:
            unit.free()

    def _pass_over(self) -> None:
        unit = self._units[self._next]
        self._next += 1 if self._mode == "forward" else -1
        self._fetch(unit)
        if self._mode == "forward":
            unit.free()
        else:
            self._free_if_done(unit)

    def _free_if_done(self, unit: Unit) -> None:
        if self._mode == "backward" and unit.here and not unit.waiting and unit is not self._current:
            unit.free()

    def _free_all(self) -> None:
        for unit in self._units:
            if unit.here and not unit.running:
                unit.free()

    def _fetch(self, unit: Unit) -> None:
        self._gathers += 1
        unit.fetch(self._axis)

    def _agree_on(self, unit: Unit) -> None:
        agree(self._axis, "a unit gathered once more", lambda: None, lambda _: f"{unit.name!r} after {self._gathers}")


def _before(units: weakref.ref[Units], number: int) -> Any:
    def hook(*_: Any) -> None:
        alive = units()
        if alive is not None:
            alive.before(number)

    return hook


def _after(units: weakref.ref[Units], number: int) -> Any:
    def hook(_: nn.Module, args: Any, outputs: Any) -> None:  # noqa: ARG001  (torch calls it so)
        alive = units()
        if alive is not None:
            alive.after(number, outputs)

    return hook


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    for part in parts:
        yield from _tensors(part)
