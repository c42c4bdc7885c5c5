"""Which operations communicate, for the modes that count them."""

from typing import Any

import torch


def is_collective(operation: Any) -> bool:
    """Return whether an operation communicates or waits for it; fzero's own gather is one of them."""
    own = torch.ops.fzero.all_gather.default
    return getattr(operation, "namespace", "") in ("_c10d_functional", "c10d") or operation is own
