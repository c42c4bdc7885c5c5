"""What `torch.compile` is told, so that inductor keeps the order in which collectives were traced."""

from typing import Any

from torch._inductor import config

ORDER_KEPT = {
    # each of these moves waits or packing away from where they were traced, and full gradients then pile up
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
}


def compile_options(stage: int) -> dict[str, Any]:
    """Return the inductor options of a stage, those that this torch knows.

    In stages 2 and 3 a bucket's gradient must be scattered before the next one is complete. Stages 0 and 1 reduce after
    backward, where inductor's own reordering needs less memory.
    """
    if stage < 2:
        return {}
    known = config.get_config_copy() if hasattr(config, "get_config_copy") else {}
    return {key: value for key, value in ORDER_KEPT.items() if key in known}
