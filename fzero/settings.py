"""What both engines are told, checked."""

from typing import Any, NamedTuple

from fzero.precision import Precision

POLICIES = ("none", "rank0", "mean")


class Settings(NamedTuple):
    """What all ranks must agree on beside the module or the tree."""

    stage: int
    bucket_bytes: int
    clip_norm: float | None
    buffer_policy: str
    precision: Precision


def check_settings(settings: Settings) -> None:
    """Refuse what breaks the rules.

    Raises
    ------
    TypeError, ValueError
        Naming the argument.
    """
    stage, bucket_bytes, clip, policy, precision = settings
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in (0, 1, 2, 3):
        raise ValueError(f"stage: must be 0, 1, 2 or 3, got {stage!r}")
    number = isinstance(clip, (int, float)) and not isinstance(clip, bool)
    if clip is not None and not (number and 0 < clip < float("inf")):
        raise ValueError(f"clip_norm: must be a positive finite number or None, got {clip!r}")
    check_count("bucket_bytes", bucket_bytes)
    if policy not in POLICIES:
        raise ValueError(f"buffer_policy: must be one of {', '.join(POLICIES)}, got {policy!r}")
    if not isinstance(precision, Precision):
        raise TypeError(f"precision: must be a fzero.Precision such as fzero.Precision.bf16, got {precision!r}")


def check_count(name: str, value: Any) -> None:
    """Refuse what is no positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: must be an integer of at least 1, got {value!r}")


def check_flags(flags: dict[str, Any]) -> None:
    """Refuse what is neither True nor False."""
    if isinstance(flags.get("compile"), str):
        raise TypeError(
            f"compile: must be True or False, got {flags['compile']!r}. Modes of torch.compile are not taken; "
            "reduce-overhead (CUDA graphs) would hand out tensors that the next step overwrites"
        )
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: must be True or False, got {value!r}")
