"""From an `nn.Module` to a pure loss function, its parameters and its buffers."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList

from fzero.block import SLOT, Sharded, block
from fzero.called import call_module, call_on_copies, write_back

AGAIN = (
    "from_module: part of the module ran again, in backward, when its parameters had left it; "
    "in the module's forward use fzero.remat instead of torch.utils.checkpoint"
)


class ModuleLoss:
    """The loss of a module as a pure function of its parameters (and buffers) and a batch.

    Made by `from_module`. `blocks` are the names of the submodules that stage 3 gathers as one; `shared` are the
    parameters inside them that are reachable from elsewhere too and therefore count as outside; `ties` are the other
    names of parameters, with the first of each.
    """

    casts_inputs = True
    """An engine with a compute dtype of its own casts floating inputs to it."""

    def __init__(self, module: nn.Module, criterion: Callable[..., Any], blocks: Iterable[str]) -> None:
        self._skeleton = _skeleton(module)
        self._criterion = criterion
        self._has_buffers = next(iter(module.named_buffers()), None) is not None
        self._units = _skeleton(module)
        names = tuple(blocks)
        shared = shared_parameters(self._units, names)
        self.ties = tied_names(module)
        frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
        self.trainable = (lambda path, _: path[0] not in frozen) if frozen else None
        self.shared = frozenset(name for name, parameter in self._units.named_parameters() if parameter in shared)
        # a block whose parameters all count as outside (a module that stands in the list twice) is none
        self.blocks = tuple(
            name for name in names if any(p not in shared for p in self._units.get_submodule(name).parameters())
        )
        for name in self.blocks:
            _make_unit(self._units.get_submodule(name), shared)

    def __call__(self, params: dict[str, Any], *rest: Any) -> Any:
        """Return the loss, or (loss, new buffers) for a module with buffers; the old buffers are not changed."""
        if len(rest) != 1 + self._has_buffers:
            have = "has" if self._has_buffers else "has no"
            raise ValueError(f"init: buffers must be what from_module returned (this module {have} buffers)")
        if not self._has_buffers:
            (batch,) = rest
            return self._loss(params, {}, batch)[0]
        buffers, batch = rest
        loss, updated = self._loss(params, {name: buffer.clone() for name, buffer in buffers.items()}, batch)
        return loss, OrderedDict([(name, updated[name]) for name in buffers])

    def _loss(self, params: dict[str, Any], buffers: dict[str, Tensor], batch: Any) -> tuple[Any, dict[str, Tensor]]:
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            raise ValueError(f"batch: must be the pair (inputs, targets) here, got {type(batch).__name__}")
        inputs, targets = batch
        args = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
        kwargs = inputs if isinstance(inputs, dict) else {}
        plain = {name: leaf for name, leaf in params.items() if not isinstance(leaf, Sharded)}
        if len(plain) == len(params):
            output, buffers = call_module(self._skeleton, plain, buffers, args, kwargs)
            return self._criterion(output, targets), buffers
        sharded = {name: leaf for name, leaf in params.items() if isinstance(leaf, Sharded)}
        for name, leaf in sharded.items():
            setattr(self._units.get_submodule(name), SLOT, leaf)
        try:
            output, buffers = call_module(self._units, plain, buffers, args, kwargs)
        finally:
            for name in sharded:
                setattr(self._units.get_submodule(name), SLOT, None)
        return self._criterion(output, targets), buffers


def _skeleton(module: nn.Module) -> nn.Module:
    """Copy a module, its flags and its ties, but none of its parameters and buffers: those are on meta."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        empty = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, memo)


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return every further name of a parameter, with its first."""
    first: dict[nn.Parameter, str] = {}
    names = [(name, first.setdefault(leaf, name)) for name, leaf in module.named_parameters(remove_duplicate=False)]
    return {name: source for name, source in names if name != source}


def shared_parameters(module: nn.Module, blocks: tuple[str, ...]) -> set[nn.Parameter]:
    """Return the parameters that are reachable from a block and from outside it too."""
    homes: dict[nn.Parameter, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        home = next((prefix for prefix in blocks if name.startswith(f"{prefix}.")), "")
        homes.setdefault(parameter, set()).add(home)
    return {parameter for parameter, where in homes.items() if len(where) > 1}


def _make_unit(unit: nn.Module, shared: set[nn.Parameter]) -> None:
    """Turn a block of the skeleton into one whose forward gathers its sharded parameters."""
    inner = copy.deepcopy(unit)
    for kind in vars(inner):
        if kind.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and "state_dict" not in kind:
            vars(inner)[kind].clear()  # the unit itself runs them, once
    buffer_names = [name for name, _ in unit.named_buffers()]
    shared_names = [name for name, parameter in unit.named_parameters() if parameter in shared]

    def run(sharded: dict[str, Tensor], others: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
        buffers = {name: others[name] for name in buffer_names}
        constants = {name: others[name] for name in shared_names}
        return call_on_copies(inner, {**constants, **sharded}, buffers, args, kwargs)

    gathered = block(run)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, SLOT) is None:
            raise RuntimeError(AGAIN)
        others = {name: _current(self, name) for name in shared_names}
        # copies: the recomputation in backward must see the buffers as they were
        others.update({name: _current(self, name).clone() for name in buffer_names})
        output, seen, rest = gathered(getattr(self, SLOT), others, args, kwargs)
        for name in buffer_names:
            write_back(_current(self, name), (seen if name in seen else rest)[name], seen=name in seen)
        return output

    for name, parameter in list(unit.named_parameters(remove_duplicate=False)):
        if parameter not in shared:  # a use outside the unit's own forward must not find an empty parameter
            path, _, last = name.rpartition(".")
            home = unit.get_submodule(path)
            delattr(home, last)
            setattr(home, last, Sharded(name, ((), (), ()), _nothing))
    unit.__class__ = type(type(unit).__name__, (type(unit),), {"forward": forward, SLOT: None})


def _nothing(*_: Any) -> NoReturn:
    raise TypeError("from_module: a block's parameters are gathered by calling the block, not by passing them on")


def _current(module: nn.Module, name: str) -> Tensor:
    """Return the tensor that stands under a parameter's name now (functional_call may have put a plain one there)."""
    *path, last = name.split(".")
    for step in path:
        module = getattr(module, step)
    return getattr(module, last)  # type: ignore[no-any-return]


def default_blocks(module: nn.Module) -> list[str]:
    """Return the names of the entries of the `ModuleList` or `Sequential` that holds the most parameters."""
    best: list[str] = []
    most = 0
    for name, child in module.named_modules():
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and not isinstance(child, ParametrizationList):
            count = sum(parameter.numel() for parameter in child.parameters())
            if count > most:
                most = count
                prefix = f"{name}." if name else ""
                best = [f"{prefix}{key}" for key, entry in child.named_children() if _has_parameters(entry)]
    return best


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def from_module(
    module: nn.Module, criterion: Callable[..., Any], blocks: Iterable[nn.Module] | None = None
) -> tuple[ModuleLoss, dict[str, Tensor], dict[str, Tensor] | None]:
    """Return (loss_fn, params, buffers) of a module; the module is never changed.

    ``loss_fn(params, batch)`` is ``criterion(module(inputs), targets)`` with ``batch = (inputs, targets)``; `inputs` is
    the module's argument, a tuple of arguments, or a dict of keyword arguments. With buffers it is
    ``loss_fn(params, buffers, batch) -> (loss, new_buffers)``. `criterion` returns a scalar, a mean over the batch, or
    `fzero.Mean`. `params` and `buffers` are dicts by name in registration order that share memory with the module until
    an engine copies them. In stage 3 a block's parameters exist only inside a call of the block, and what it sets
    on itself stays there. For activation checkpointing write ``fzero.remat(self.layer)(x)`` in the module's
    forward; `torch.utils.checkpoint` would run the layer again when its parameters have left the module, and is
    refused. A tied parameter stands there once, under its first name. `buffers` is None for a module without any. The
    ``training`` flag of every submodule is frozen at this call, so ``from_module(module.eval(), ...)`` gives the loss
    function for `evaluate`.

    Parameters
    ----------
    module
        Any module that `torch.func.functional_call` can run.
    criterion
        ``criterion(output, targets)``.
    blocks
        Submodules that stage 3 gathers as one, each called through its forward. Default: the entries of the
        `nn.ModuleList` or `nn.Sequential` with the most parameters.

    Raises
    ------
    ValueError
        If a block is not a submodule, has no parameters or lies inside another one.

    Examples
    --------
    >>> loss_fn, params, buffers = from_module(nn.Linear(2, 1), nn.functional.mse_loss)
    >>> list(params), buffers is None
    (['weight', 'bias'], True)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"from_module: module must be an nn.Module, got {type(module).__name__}")
    if not callable(criterion):
        raise TypeError(f"from_module: criterion must be a function of (output, targets), got {criterion!r}")
    module = _unwrapped(module)
    names = default_blocks(module) if blocks is None else _names(module, blocks)
    params = OrderedDict((name, parameter.detach()) for name, parameter in module.named_parameters())
    buffers = OrderedDict((name, buffer.detach()) for name, buffer in module.named_buffers())
    return ModuleLoss(module, criterion, names), params, buffers or None


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside what torch.compile or DistributedDataParallel made of it, with the plain names."""
    while True:
        inner = module.module if isinstance(module, DistributedDataParallel) else getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def _names(module: nn.Module, blocks: Iterable[nn.Module]) -> list[str]:
    known = {id(child): name for name, child in module.named_modules()}
    names: list[str] = []
    for place, entry in enumerate(blocks):
        name = known.get(id(entry), "")
        if not name:
            raise ValueError(
                f"from_module: blocks[{place}] must be a submodule of the module, got {type(entry).__name__}"
            )
        if not _has_parameters(entry):
            raise ValueError(f"from_module: block {name!r} has no parameters; leave it out")
        names.append(name)
    for inner in names:
        for outer in names:
            if inner.startswith(f"{outer}."):
                raise ValueError(f"from_module: block {inner!r} lies inside block {outer!r}; pass one of them")
    return list(dict.fromkeys(names))
