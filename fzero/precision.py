"""In which dtypes parameters are stored, computed with and reduced."""

from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class Precision:
    """The dtypes of storage, compute and reduction, for every floating leaf.

    A shard is cast to the compute dtype before it is gathered, so the bytes sent follow that dtype. The gradient comes
    in the compute dtype; on gloo it travels so and is widened before the sum, on NCCL it travels in the dtype of the
    sum. Sums over micro-batches, norm, clipping and the update see the reduced gradient. There is no loss scaling:
    float16 gradients may underflow. The defaults keep float32 masters and moments of 16-bit leaves, and compute
    in the dtype in which a leaf was given; `engine.params` gives it back in that dtype.

    Parameters
    ----------
    param
        The narrowest dtype in which parameters and moments are stored (masters): a leaf of a narrower one is stored in
        this. None: every leaf, and its moments, in the dtype in which it was given.
    compute
        What the loss function sees of every floating leaf; None: the leaf's own dtype. Under `fzero.from_module`, and
        in `fzero.HookedZero`, floating inputs of the module are cast to it too; another loss function casts what it
        needs.
    reduce
        The narrowest dtype in which gradients are summed over micro-batches and ranks. None: the compute dtype.

    Raises
    ------
    TypeError
        If one of them is not a real floating dtype.

    Examples
    --------
    >>> Precision.bf16
    Precision(param=torch.float32, compute=torch.bfloat16, reduce=torch.float32)
    """

    param: torch.dtype | None = torch.float32
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = torch.float32

    fp32: ClassVar["Precision"]
    """Compute in float32."""
    bf16: ClassVar["Precision"]
    """Compute in bfloat16; masters, moments and sums in float32."""

    def __post_init__(self) -> None:
        for name in ("param", "compute", "reduce"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"precision: {name} must be a floating dtype such as torch.float32, got {dtype!r}")

    def stored(self, given: torch.dtype) -> torch.dtype:
        """Return the dtype in which a leaf given in `given` is stored, and its moments."""
        return given if self.param is None else torch.promote_types(given, self.param)

    def computed(self, given: torch.dtype) -> torch.dtype:
        """Return the dtype in which the loss function sees it."""
        return given if self.compute is None else self.compute

    def reduced(self, computed: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of dtype `computed` are summed."""
        return computed if self.reduce is None else torch.promote_types(computed, self.reduce)


Precision.fp32 = Precision(compute=torch.float32)
Precision.bf16 = Precision(compute=torch.bfloat16)
