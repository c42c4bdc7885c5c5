"""The parameters of a module as views into one flat buffer a bucket."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fzero.axis import Axis
from fzero.collectives import from_rank0
from fzero.comm import gather, new_token
from fzero.layout import Bucket, pack, shard, split


class Flat:
    """One bucket of a module's parameters, whose ``.data`` are views into it while it is here.

    ======== =========== ===========================================================================================
    full     (N*C,)      all of it, in the compute dtype
    owned    (C,)        what this rank updates, in the dtype of storage: its shard, or with `whole` (N*C,). A view into
                         `full`, or `full` itself, if that always stays and has the same dtype; else memory of its own
    ======== =========== ===========================================================================================

    A bucket that does not stay is *here* between `fetch` and `free`. Otherwise its memory is given back, but its
    storage lives on: what autograd saved are views of it, which are right again once it is fetched again. Parameters
    then have shape (0,), so that a use fails, and a version that autograd does not accept, so that a backward pass that
    comes too early raises torch's error ("modified by an inplace operation") instead of reading memory that is gone.
    """

    def __init__(
        self, bucket: Bucket, parameters: Sequence[nn.Parameter], axis: Axis, *, stays: bool, whole: bool
    ) -> None:
        self.bucket, self.parameters = bucket, tuple(parameters)
        stored = from_rank0(pack(bucket, [parameter.detach() for parameter in parameters]), axis)
        self.full = stored.to(bucket.compute)
        self._views = split(bucket, self.full)
        self.exact = self.full is stored
        """Whether what is computed with is what is stored, not a rounded copy."""
        own = stored if whole else shard(stored, axis.size, axis.rank)
        self.owned = own if whole or (stays and self.exact) else own.clone()
        self.here = True
        self._show()
        if not stays:
            self.free()

    def fetch(self, axis: Axis) -> None:
        """Gather the bucket over `axis`, the ranks of this bucket by whatever group; nothing if it is here."""
        if self.here:
            return
        with torch.no_grad():
            self.full.untyped_storage().resize_(self.bucket.length * self.full.element_size())
            self.gather(axis)
        self._show()
        self._shift_versions(-1)
        self.here = True

    def gather(self, axis: Axis) -> None:
        """Write what all ranks own into the full bucket."""
        cast = self.owned.to(self.bucket.compute)
        self.full.copy_(gather(cast, new_token(cast), axis)[0])

    def free(self) -> None:
        """Give the memory of the full bucket back; nothing if it is gone."""
        if not self.here:
            return
        for parameter in self.parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self.full.untyped_storage().resize_(0)
        self._shift_versions(1)
        self.here = False

    def changed(self) -> None:
        """Tell autograd that the parameters have new values: graphs made before cannot go backward any more."""
        self._shift_versions(2)

    def leaves(self, full: Tensor | None = None) -> list[Tensor]:
        """Return the leaves of a full buffer like this bucket's (of its own, if it is here) in memory of their own."""
        return [leaf.clone() for leaf in split(self.bucket, self.full if full is None else full)]

    def _show(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view

    def _shift_versions(self, by: int) -> None:
        versions = tuple(parameter._version + by for parameter in self.parameters)  # noqa: SLF001
        torch._C._autograd._unsafe_set_version_counter(self.parameters, versions)  # noqa: SLF001
