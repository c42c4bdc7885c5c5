"""The state of either engine as checkpoints see it, out of it and into it. The engines know nothing of checkpoints."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import optree
import torch
from torch import Tensor

from fzero.contents import Held, Static, opt_outline, unwrapped_name
from fzero.hooked import HookedZero
from fzero.module import tied_names
from fzero.state import State, to_parts
from fzero.zero import Zero


class Insides(Protocol):
    """An engine, seen from a checkpoint."""

    static: Static

    def held(self, state: Any) -> Held:
        """Return the state; refuse one that is not this engine's."""

    def blank(self) -> tuple[Any, Held]:
        """Return a new state of zeros, for `adopt`, and how to fill it."""

    def adopt(self, blank: Any) -> Any:
        """Go on from a state made by `blank`, on every rank; returns what `load` returns."""

    def export_ties(self) -> dict[str, str]:
        """Return all ties by plain path, those too that the engine's tree does not show."""

    def given(self) -> dict[str, torch.dtype]:
        """Return the dtype in which each parameter was given."""


def insides(engine: Any) -> Insides:
    """Return an engine seen from a checkpoint."""
    if isinstance(engine, Zero):
        return OfZero(engine)
    if isinstance(engine, HookedZero):
        return OfHooked(engine)
    raise TypeError(f"engine: must be a fzero.Zero or a fzero.HookedZero, got {type(engine).__name__}")


def settle(engine: Any, handle: Any = None) -> None:
    """Wait for the save of an engine in the background and raise what nobody was told of; remember another one."""
    before, engine._saving = engine._saving, handle
    if before is not None:
        before.finish()


class OfZero:
    """The functional engine."""

    def __init__(self, engine: Zero) -> None:
        if engine._bound is None:
            raise ValueError("engine: call init(params) first")
        self._engine, self._program = engine, engine._bound[1]
        binding = self._program.binding
        self._leaves = leaves = [leaf._replace(name=unwrapped_name(leaf.name)) for leaf in binding.inspected.leaves]
        names, _ = opt_outline(self._program.opt)
        ties = {leaves[at].name: leaves[source].name for at, source in enumerate(binding.ties) if at != source}
        self._fixed = [leaves[place].name for place in binding.fixed]
        trained = tuple(leaves[place].name for place in binding.trained)
        whole, device = self._program.stage == 0, binding.inspected.device
        self.static = Static(binding.axis, binding.layout, trained, names, ties, whole, device)

    def held(self, state: Any) -> Held:
        """Return the state; refuse one that is not this engine's."""
        self._engine._ready(state)
        return self._held(state)

    def _held(self, state: State) -> Held:
        parts = to_parts(state, self._program.opt_like)
        fixed = dict(zip(self._fixed, parts.fixed, strict=True))
        return Held(parts.shards, parts.opt_leaves, fixed, parts.buffers, parts.step)

    def blank(self) -> tuple[State, Held]:
        """Return a new state of zeros, and how to fill it."""
        treespec, kinds = self._engine._expected
        leaves = [torch.zeros(shape, dtype=dtype, device=self.static.device) for shape, dtype in kinds]
        state = cast("State", optree.tree_unflatten(treespec, leaves))
        return state, self._held(state)

    def adopt(self, blank: State) -> State:
        """Return the state."""
        return blank

    def export_ties(self) -> dict[str, str]:
        """Return all ties by plain path: those of the tree and those inside the module that it came from."""
        return _unwrapped({**getattr(self._program.loss_fn, "ties", {}), **self.static.ties})

    def given(self) -> dict[str, torch.dtype]:
        """Return the dtype in which each parameter was given."""
        return {leaf.name: leaf.dtype for leaf in self._leaves}


class OfHooked:
    """The hook engine, whose state is in itself."""

    def __init__(self, engine: HookedZero) -> None:
        self._engine = engine
        names, self._like = opt_outline(engine._opt)
        trained = tuple(unwrapped_name(name) for name in engine._taken.trained_names)
        whole = engine._stage == 0
        self.static = Static(engine._axis, engine._layout, trained, names, {}, whole, engine._device)

    def held(self, state: Any) -> Held:
        """Return the state; refuse one from outside, and a step that is half done."""
        if state is not None:
            raise ValueError(f"state: the hook engine has its own; leave it out, got {type(state).__name__}")
        if self._engine._kind is not None:
            raise ValueError("engine: has gradients that are not in parameters yet; call step() before a save")
        engine = self._engine
        shards = [flat.owned for flat in engine._flats]
        return self._held(shards, engine._opt_states, engine._frozen, engine._buffers.now(), engine._step)

    def _held(
        self,
        shards: Sequence[Tensor],
        states: Sequence[Any],
        fixed: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        step: Tensor,
    ) -> Held:
        by_bucket = [optree.tree_leaves(state) for state in states]
        leaves = [
            tuple(state[at] for state in by_bucket) if like else by_bucket[0][at] for at, like in enumerate(self._like)
        ]
        return Held(shards, leaves, {unwrapped_name(name): leaf for name, leaf in fixed.items()}, buffers, step)

    def blank(self) -> tuple[Any, Held]:
        """Return a new state of zeros, and how to fill it."""
        engine = self._engine
        parts = (
            [torch.zeros_like(flat.owned) for flat in engine._flats],
            [optree.tree_map(torch.zeros_like, state) for state in engine._opt_states],
            {name: torch.zeros_like(leaf, memory_format=_PLAIN) for name, leaf in engine._frozen.items()},
            {name: torch.zeros_like(leaf, memory_format=_PLAIN) for name, leaf in engine._buffers.now().items()},
            torch.zeros_like(engine._step),
        )
        return parts, self._held(*parts)

    @torch.no_grad()
    def adopt(self, blank: Any) -> None:
        """Take the values over. Collective in stages 1 and 2, whose parameters are gathered again."""
        engine, (shards, states, fixed, buffers, step) = self._engine, blank
        for flat, new in zip(engine._flats, shards, strict=True):
            flat.owned.copy_(new)
            engine._refresh(flat)
        if engine._units is not None:
            engine._units.free_outside()
        for old, new in zip(engine._opt_states, states, strict=True):
            pairs = zip(*(optree.tree_leaves(tree) for tree in (old, new, states[0])), self._like, strict=True)
            for to, own, first, like in pairs:
                to.copy_(own if like else first)  # what all buckets share was read once
        parameters = dict(engine.module.named_parameters())
        for name, leaf in fixed.items():
            engine._frozen[name].copy_(leaf)
            parameters[name].data.copy_(leaf)
        engine._buffers.replace(buffers)
        engine._step = step
        engine._begin_step()

    def export_ties(self) -> dict[str, str]:
        """Return all ties by plain path."""
        return _unwrapped(tied_names(self._engine.module))

    def given(self) -> dict[str, torch.dtype]:
        """Return the dtype in which each parameter was given."""
        return {unwrapped_name(name): dtype for name, dtype in self._engine._taken.dtypes.items()}


def _unwrapped(ties: dict[str, str]) -> dict[str, str]:
    return {unwrapped_name(name): unwrapped_name(source) for name, source in ties.items()}


_PLAIN = torch.contiguous_format
