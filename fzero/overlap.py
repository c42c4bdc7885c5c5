"""What `torch.compile` is told: where collectives stand in the compiled step, and what may be cached."""

import warnings
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from torch._inductor import config

from fzero.layout import Layout
from fzero.ordering import Ordering, source

ORDER_KEPT = {
    # each of these moves waits or packing away from where they were put, and full gradients then pile up
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
}
CACHEABLE = (
    *(f"fzero.comm.{name}" for name in ("_gather", "_scatter", "_anchor", "attach")),
    "fzero.trace.forward_done",
)
"""Functions that Dynamo puts into the graph as they are; AOTAutograd would not cache a graph that has one."""


@dataclass(frozen=True)
class Overlap:
    """Where a compiled step has its collectives. It never changes the numbers, only time and memory.

    Parameters
    ----------
    prefetch
        How many gathers are launched ahead of the one that is needed next. None: all as soon as they can be, in stages
        0 to 2; in stage 3, where what is gathered takes memory, as many as the block with most buckets has.
    in_flight
        How many scatters may be under way while backward goes on; each keeps one full bucket of gradients alive (on
        gloo two, what is sent and what comes). 0: every scatter is waited for where it is launched. None: 1, or on
        gloo, where buckets are kept small, as many as else were one, at most 4.

    Raises
    ------
    ValueError
        If one of them is neither None nor an integer of at least 0.
    """

    prefetch: int | None = None
    in_flight: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("prefetch", self.prefetch), ("in_flight", self.in_flight)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"overlap: {name} must be None or an integer of at least 0, got {value!r}")

    def settled(self, stage: int, layout: Layout, bucket_bytes: int) -> "Overlap":
        """Return what is meant where it says None, for buckets that the user allows `bucket_bytes` each."""
        prefetch, in_flight = self.prefetch, self.in_flight
        if prefetch is None and stage == 3:
            prefetch = _most(bucket.block for bucket in layout.buckets if bucket.block is not None)
        if in_flight is None:
            alike = _most((bucket.dtype, bucket.compute, bucket.label, bucket.block) for bucket in layout.buckets)
            largest = max((bucket.length * bucket.dtype.itemsize for bucket in layout.buckets), default=1)
            in_flight = max(1, min(4, alike, bucket_bytes // largest))
        return Overlap(prefetch, in_flight)


def _most(kinds: Iterable[Hashable]) -> int:
    """Return how often the most frequent kind is there."""
    return max(Counter(kinds).values(), default=1)


def compile_options(stage: int, overlap: Overlap, outside: int) -> dict[str, Any]:
    """Return the inductor options of a stage, those that this torch knows; say so once if it cannot overlap.

    `overlap` is settled; `outside` is how many gathers at the head of the graph are not of blocks.
    """
    known = config.get_config_copy() if hasattr(config, "get_config_copy") else {}
    options: dict[str, Any] = {key: value for key, value in ORDER_KEPT.items() if key in known and stage > 1}
    # whatever is set for all compilations: a graph that is replayed would overwrite what earlier steps returned
    options["triton.cudagraphs"] = False
    if "unsafe_marked_cacheable_functions" in known:
        options["unsafe_marked_cacheable_functions"] = dict.fromkeys(CACHEABLE, source())
    if "post_grad_custom_post_pass" in known:
        options["post_grad_custom_post_pass"] = Ordering(stage, overlap.prefetch, overlap.in_flight or 0, outside)
    else:
        warnings.warn(
            "fzero: this torch has no post_grad_custom_post_pass; compiled steps are right but do not overlap",
            stacklevel=2,
        )
    return options
