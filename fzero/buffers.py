"""A module's buffers: what ranks share of them, and what they were at the end of the last step."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fzero.axis import Axis
from fzero.collectives import from_rank0, share_buffers


class Buffers:
    """The buffers of a module in training; rank 0's win at first.

    Forward writes into them. At the end of a step floating ones are shared by the policy ("rank0", "mean" or "none")
    and all are kept; a skipped step puts back what was kept before.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], policy: str, axis: Axis) -> None:
        self._module, self._names, self._policy, self._axis = module, names, policy, axis
        share(self.now().values(), axis)
        self._kept = [buffer.clone() for buffer in self.now().values()]

    def now(self) -> OrderedDict[str, Tensor]:
        """Return the buffers themselves; looked up each time, since forward may put others there."""
        return OrderedDict((name, self._module.get_buffer(name).detach()) for name in self._names)

    def restore(self) -> None:
        """Put back what was kept: nothing since the last step counts."""
        for kept, buffer in zip(self._kept, self.now().values(), strict=True):
            buffer.copy_(kept)

    def replace(self, values: Mapping[str, Tensor]) -> None:
        """Take other values, as from a checkpoint."""
        for kept, (name, buffer) in zip(self._kept, self.now().items(), strict=True):
            kept.copy_(values[name])
            buffer.copy_(kept)

    def update(self, skipped: Tensor) -> None:
        """End a step. Communicates the floating buffers once (broadcast, or all-gather for the mean)."""
        now = list(self.now().values())
        for kept, buffer, value in zip(self._kept, now, _shared(now, self._policy, self._axis), strict=True):
            kept.copy_(torch.where(skipped, kept, value))
            buffer.copy_(kept)


@torch.no_grad()
def share(tensors: Iterable[Tensor], axis: Axis) -> None:
    """Write rank 0's values into tensors of any strides, on every rank. Communicates each (broadcast)."""
    for tensor in tensors:
        tensor.copy_(from_rank0(tensor.detach().clone(memory_format=torch.contiguous_format), axis))


def _shared(buffers: Sequence[Tensor], policy: str, axis: Axis) -> list[Tensor]:
    new = list(buffers)
    places = [place for place, buffer in enumerate(new) if buffer.is_floating_point() and buffer.numel()]
    if not places or policy == "none" or axis.size == 1:
        return new
    widest = new[places[0]].dtype
    for place in places:
        widest = torch.promote_types(widest, new[place].dtype)
    flat = share_buffers(torch.cat([new[place].reshape(-1).to(widest) for place in places]), policy, axis)
    for place, piece in zip(places, torch.split(flat, [new[place].numel() for place in places]), strict=True):
        new[place] = piece.view(new[place].shape).to(new[place].dtype)
    return new
