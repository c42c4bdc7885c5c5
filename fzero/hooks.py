"""Gradients of a backward pass, collected bucket by bucket by hooks and reduced while it still runs."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from fzero.axis import Axis
from fzero.collectives import Pending, finish_scatter, start_scatter
from fzero.layout import Layout, split
from fzero.precision import Precision
from fzero.units import Units


class Collector:
    """Collects the gradients of a list of parameters and reduces each bucket as soon as its last one has landed.

    A gradient *lands* when autograd has accumulated it. Buckets are sent in reverse layout order, on all ranks: one
    that is complete early waits for those before it. With `units` those outside units come last: they may be used
    anywhere, or on some ranks only, and a rank that waits for their sum must not keep another from gathering a unit.
    At the end of a backward pass the rest is sent; a parameter without a gradient has a zero gradient.

    With `keeps` (stages 0 and 1) ``p.grad`` are views into one flat buffer a bucket, which holds the local sum until
    the step (if sums have a wider dtype, gradients are moved there when they land); each synchronising pass sends that
    sum, and what an earlier one sent is discarded. Without (stages 2 and 3) a gradient moves into its bucket when it
    lands and ``p.grad`` is None again; the reduced shards are summed. At most two buckets are then alive, of which one
    may be in flight, but for those that fill at the same time, and those outside units.

    Parameters
    ----------
    layout
        Its leaves are the parameters, by position.
    parameters, names
        The parameters and what messages call them.
    axis
        The ranks that reduce.
    keeps
        Whether local gradients are kept.
    precision
        Local sums have the dtype of the reduction. They travel in the compute dtype, which is exact, when they are of
        one pass.
    units
        Stage 3's, which have to know what is complete and what is about to be sent.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        axis: Axis,
        *,
        keeps: bool,
        precision: Precision,
        units: Units | None = None,
    ) -> None:
        self._dtypes = [precision.reduced(bucket.compute) for bucket in layout.buckets]
        self._buckets, self._parameters, self._names, self._axis = layout.buckets, parameters, names, axis
        self._keeps, self._units = keeps, units
        numbers = reversed(range(len(self._buckets)))
        # the order in which buckets are sent, and the place of each in it
        self._order = sorted(numbers, key=lambda number: units is not None and self._buckets[number].block is None)
        self._turn = {number: turn for turn, number in enumerate(self._order)}
        self._home = {
            slot.leaf: (number, index)
            for number, bucket in enumerate(layout.buckets)
            for index, slot in enumerate(bucket.slots)
        }
        self._held: frozenset[int] = frozenset()
        self.reset()
        # weak: the parameters outlive the engine and must not keep it alive
        this = weakref.ref(self)
        for place, parameter in enumerate(parameters):
            _watch(this, place, parameter)

    def reset(self) -> None:
        """Drop everything collected since the last step."""
        self._running = self._syncs = self._unsent = False
        self._passes = 0
        """How many are in the local sums."""
        self._kept: list[tuple[Tensor, list[Tensor]]] = []
        """Of every bucket: the flat local sum and its views. Only with `keeps`."""
        self._filling: dict[int, tuple[Tensor, list[Tensor]]] = {}
        """The same, of buckets that fill in this pass. Only without."""
        self._flying: list[tuple[int, Pending]] = []
        """What has been sent and not waited for, oldest first."""
        self._sums: dict[int, Tensor] = {}
        """This rank's shard of every bucket's sum over ranks and passes."""
        self._arrived: set[int] = set()
        for parameter in self._parameters:
            parameter.grad = None

    # --- one backward pass -----------------------------------------------------------------------------------------

    def begin(self, *, syncs: bool, held: frozenset[int] = frozenset()) -> None:
        """Start a pass. Buckets with a leaf of `held`, whose gradient may land several times, are sent at its end."""
        if self._keeps:
            # the local sums are about to change, so what has been sent of them is of no use
            self._finish(0)
            self._sums = {}
            if not self._kept:
                self._keep()
        self._running, self._syncs, self._held = True, syncs, held
        self._passes += 1
        self._arrived = set()
        self._missing = [len(bucket.slots) for bucket in self._buckets]
        self._next = 0

    def arrive(self, place: int) -> None:
        """Count a parameter's gradient of this pass as complete (it has landed, or the pass does not reach it)."""
        if place in self._arrived or place in self._held:
            return
        self._arrived.add(place)
        self._missing[self._home[place][0]] -= 1
        while self._syncs and self._next < len(self._order) and self._missing[self._order[self._next]] == 0:
            self._send()
        if self._units is not None:
            self._units.landed(place)

    def arrive_unreached(self, nested: frozenset[int]) -> None:
        """Count as complete what the pass that runs does not reach; graphs inside the graph may reach `nested`."""
        for place, parameter in enumerate(self._parameters):
            if place not in nested and not _is_reached(parameter):
                self.arrive(place)

    def end(self) -> None:
        """Finish a pass: send what has not been sent, in order."""
        self._running = False
        if self._syncs:
            self._send_rest()
        else:
            self._unsent = True

    def finished(self) -> list[Tensor]:
        """Wait, and return this rank's shard of every bucket's sum over ranks and passes; sends what is unsent."""
        if self._unsent:
            self._next = 0
            self._send_rest()
        self._finish(0)
        return [self._sums[number] for number in range(len(self._buckets))]

    def land(self, place: int) -> None:
        """Take a gradient that autograd has just accumulated."""
        name, (number, index) = self._names[place], self._home[place]
        if not self._running:
            raise RuntimeError(
                f"engine: parameter {name!r} got a gradient outside engine.backward; "
                "call engine.backward(loss), not loss.backward()"
            )
        if self._syncs and self._turn[number] < self._next:
            raise RuntimeError(
                f"backward: parameter {name!r} got one more gradient after its bucket was sent, from a backward pass "
                "inside the backward pass; use torch.utils.checkpoint with use_reentrant=False there"
            )
        if self._keeps:
            self._put_back(self._parameters[place], self._kept[number][1][index])
        elif self._syncs or self._is_wide(number):
            self._take(place)
        self.arrive(place)

    # --- local gradients -------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        for number, bucket in enumerate(self._buckets):
            self._kept.append(self._zeros(number))
            for slot, view in zip(bucket.slots, self._kept[-1][1], strict=True):
                self._parameters[slot.leaf].grad = None if self._is_wide(number) else view

    def _is_wide(self, number: int) -> bool:
        """Return whether sums of a bucket have another dtype than its gradients."""
        return self._dtypes[number] != self._buckets[number].compute

    @staticmethod
    def _put_back(parameter: nn.Parameter, view: Tensor) -> None:
        """Have a gradient in its bucket, which has another dtype, or even if someone has set ``p.grad`` to None."""
        gradient = parameter.grad
        if gradient is None or gradient is view:
            return
        if gradient.dtype != view.dtype:
            view.add_(gradient)
            parameter.grad = None
        else:
            parameter.grad = view.copy_(gradient)

    def _take(self, place: int) -> None:
        """Move a gradient into its bucket."""
        parameter, (number, index) = self._parameters[place], self._home[place]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if number not in self._filling:
            self._make_room()
            self._filling[number] = self._zeros(number)
        self._filling[number][1][index].add_(gradient)

    def _make_room(self) -> None:
        filling = [number for number in self._filling if self._units is None or self._buckets[number].block is not None]
        while self._flying and len(self._flying) + len(filling) > 1:
            self._finish(len(self._flying) - 1)

    def _zeros(self, number: int) -> tuple[Tensor, list[Tensor]]:
        bucket = self._buckets[number]
        device = self._parameters[bucket.slots[0].leaf].device
        flat = torch.zeros(bucket.length, dtype=self._dtypes[number], device=device)
        return flat, split(bucket, flat)

    # --- reduction -------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Launch the reduction of the next bucket."""
        number = self._order[self._next]
        if self._units is not None:
            self._units.catch_up(self._buckets[number].block)
        if self._keeps:
            flat = self._kept[number][0]
        else:
            if number not in self._filling:
                self._make_room()
                self._filling[number] = self._zeros(number)
            flat = self._filling.pop(number)[0]
        if self._passes == 1:
            flat = flat.to(self._buckets[number].compute)
        self._flying.append((number, start_scatter(flat, self._axis, self._dtypes[number])))
        self._next += 1

    def _send_rest(self) -> None:
        while self._next < len(self._order):
            if not self._keeps:
                for slot in self._buckets[self._order[self._next]].slots:
                    self._take(slot.leaf)
            self._send()
        self._unsent = False
        if not self._keeps:
            self._passes = 0

    def _finish(self, leave: int) -> None:
        """Wait for the oldest in flight, until `leave` of them are left."""
        while len(self._flying) > leave:
            number, pending = self._flying.pop(0)
            reduced = finish_scatter(pending, self._axis, self._dtypes[number])
            self._sums[number] = self._sums[number].add_(reduced) if number in self._sums else reduced


def _watch(collector: weakref.ref[Collector], place: int, parameter: nn.Parameter) -> None:
    def landed(_: Tensor) -> None:
        alive = collector()
        if alive is not None:
            alive.land(place)

    parameter.register_post_accumulate_grad_hook(landed)  # type: ignore[no-untyped-call]


def _is_reached(parameter: nn.Parameter) -> bool:
    """Return whether the backward pass that runs will give a parameter a gradient."""
    if not parameter.requires_grad:
        return False
    with torch.enable_grad():
        node = get_gradient_edge(parameter).node
    return torch._C._will_engine_execute_node(node)  # noqa: SLF001  (register_multi_grad_hook is built on it)
