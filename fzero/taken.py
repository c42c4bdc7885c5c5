"""What the hook engine takes over: checks of a module and settings, names, labels, units. No communication."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero.layout import LeafSpec
from fzero.module import default_blocks, shared_parameters
from fzero.rule import Optimizer
from fzero.settings import Settings, check_settings


class Taken(NamedTuple):
    """A module as the engine sees it, checked."""

    names: tuple[str, ...]
    """Of all parameters, in registration order; a tied one stands there once, under its first name."""
    trained_names: tuple[str, ...]
    trained: tuple[nn.Parameter, ...]
    specs: tuple[LeafSpec, ...]
    """Of the trained parameters, for the layout."""
    frozen: OrderedDict[str, nn.Parameter]
    dtypes: dict[str, torch.dtype]
    """In which every parameter was given."""
    buffer_names: tuple[str, ...]
    units: tuple[tuple[str, nn.Module], ...]
    structure: str

    def digest(self, settings: Settings) -> str:
        """Return what all ranks must agree on."""
        return (
            f"on {self.trained[0].device.type}; {self.structure}; units {[name for name, _ in self.units]}; {settings}"
        )


def take(module: Any, opt: Any, units: Any, settings: Settings) -> Taken:
    """Check what the engine was given and take the module apart.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, the parameter or the buffer.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: must be an nn.Module, got {type(module).__name__}")
    if not isinstance(opt, Optimizer):
        raise TypeError(f"opt: must be a fzero.Optimizer such as fzero.adamw(...), got {type(opt).__name__}")
    check_settings(settings)
    params = OrderedDict(module.named_parameters())
    buffers = OrderedDict(module.named_buffers())
    _check_tensors(params, buffers)
    names = default_blocks(module) if units is None else _unit_names(module, units)
    if settings.stage == 3 and not names:
        raise ValueError("units: stage 3 needs the submodules that are gathered as one; pass units=")
    shared = shared_parameters(module, tuple(names))
    labels = opt.labels(OrderedDict((name, parameter.detach()) for name, parameter in params.items()))
    specs = {
        name: LeafSpec(
            tuple(parameter.shape),
            settings.precision.stored(parameter.dtype),
            labels[name],
            _home(name, parameter, names, shared),
            settings.precision.computed(parameter.dtype),
        )
        for name, parameter in params.items()
        if parameter.requires_grad
    }
    if not specs:
        raise ValueError("module: has no parameter with requires_grad, so there is nothing to train")
    leaves = [
        f"{name} {parameter.dtype} {tuple(parameter.shape)} {specs.get(name)}" for name, parameter in params.items()
    ]
    kinds = [f"{name} {buffer.dtype} {tuple(buffer.shape)}" for name, buffer in buffers.items()]
    return Taken(
        tuple(params),
        tuple(specs),
        tuple(params[name] for name in specs),
        tuple(specs.values()),
        OrderedDict((name, parameter) for name, parameter in params.items() if name not in specs),
        {name: parameter.dtype for name, parameter in params.items()},
        tuple(buffers),
        tuple((name, module.get_submodule(name)) for name in names),
        f"parameters {leaves}; buffers {kinds}",
    )


def _check_tensors(params: OrderedDict[str, nn.Parameter], buffers: OrderedDict[str, Tensor]) -> None:
    device: tuple[str, torch.device] | None = None
    for kind, found in (("parameter", params), ("buffer", buffers)):
        for name, tensor in found.items():
            where = f"module: {kind} {name!r}"
            if tensor.device.type == "meta":
                raise ValueError(f"{where} is on meta and has no values; call module.to_empty(device=...) first")
            if tensor.is_complex() and tensor.requires_grad:
                raise TypeError(f"{where} is complex ({tensor.dtype}), which is not supported yet")
            if tensor.layout != torch.strided:
                raise TypeError(f"{where} must be a dense tensor, got layout {tensor.layout}")
            device = device or (where, tensor.device)
            if tensor.device != device[1]:
                raise ValueError(
                    f"{where} is on {tensor.device}, {device[0].removeprefix('module: ')} on {device[1]}; "
                    "move the module to one device"
                )
    _check_overlap(params)


def _check_overlap(params: OrderedDict[str, nn.Parameter]) -> None:
    """Refuse parameters that share memory without being one: taken over, they would drift apart."""
    spans = []
    for name, parameter in params.items():
        if parameter.numel():
            last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
            start = parameter.data_ptr()
            spans.append((start, start + (last + 1) * parameter.element_size(), name))
    end, before = 0, ""
    for start, stop, name in sorted(spans):
        if start < end:
            raise ValueError(
                f"module: parameters {before!r} and {name!r} share memory without being one parameter; tie them by "
                "assigning the same nn.Parameter to both"
            )
        end, before = stop, name


def _home(name: str, parameter: nn.Parameter, names: list[str], shared: set[nn.Parameter]) -> int | None:
    """Return the unit of a parameter; None outside, or if it is reachable from two units or also from outside."""
    if parameter in shared:
        return None
    return next((number for number, unit in enumerate(names) if name.startswith(f"{unit}.")), None)


def _unit_names(module: nn.Module, units: Any) -> list[str]:
    if not isinstance(units, Iterable):
        raise TypeError(f"units: must be a sequence of submodules, got {type(units).__name__}")
    known = {id(child): name for name, child in module.named_modules()}
    names: list[str] = []
    for place, entry in enumerate(units):
        name = known.get(id(entry), "")
        if not name:
            raise ValueError(f"units[{place}]: must be a submodule of the module, got {type(entry).__name__}")
        if next(entry.parameters(), None) is None:
            raise ValueError(f"units[{place}]: {name!r} has no parameters; leave it out")
        if name not in names:
            names.append(name)
    for inner in names:
        for outer in names:
            if inner.startswith(f"{outer}."):
                raise ValueError(f"units: {inner!r} lies inside {outer!r}; pass one of them")
    return names
