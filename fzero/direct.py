"""The all-gather of CPU tensors on gloo, from sends and receives.

`_c10d_functional.all_gather_into_tensor` runs gloo's coalesced all-gather. While several are under way, that one
corrupts the heap (torch 2.14.1: with 18 of 1.2 MB most runs of half a minute end by SIGABRT or SIGSEGV; neither
all-to-all nor sends and receives do). It also gathers into a second buffer and copies that: 17 buckets of 2.5 MiB took
two ranks 23 ms, and take 15 ms here.
"""

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from fzero.axis import MESSAGE_BYTES, named_group

TAG = 26234
"""Of the messages here. Those of one tag from one rank to another arrive in the order in which they are sent."""


AVAILABLE = hasattr(c10d, "_register_work")
"""Whether this torch lets `wait_tensor` wait for work of others; it is private, and in 2.11 to 2.14."""


@torch.library.custom_op("fzero::all_gather", mutates_args=())
def all_gather(shard: Tensor, size: int, group: str) -> Tensor:
    """Launch the all-gather of (C,): what is returned is (N*C,) once `wait_tensor` was called on it."""
    ranks = named_group(group)
    full = shard.new_empty(size * shard.numel())
    pieces = full.view(size, -1).unbind()
    if not shard.numel():
        return full
    mine = pieces[ranks.rank()].copy_(shard)  # and sent from there: the shard itself may change meanwhile
    parts = -(-mine.nbytes // MESSAGE_BYTES)
    for distance in range(1, size):
        source, target = (ranks.rank() - distance) % size, (ranks.rank() + distance) % size
        for part in pieces[source].chunk(parts):
            c10d._register_work(full, ranks.recv([part], source, TAG))  # noqa: SLF001
        for part in mine.chunk(parts):
            c10d._register_work(full, ranks.send([part], target, TAG))  # noqa: SLF001
    return full


@all_gather.register_fake
def _(shard: Tensor, size: int, group: str) -> Tensor:  # noqa: ARG001
    return shard.new_empty(size * shard.numel())
