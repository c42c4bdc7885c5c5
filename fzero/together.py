"""What all ranks do in turn for a checkpoint: a failure of one is an error of all. Beside it, random states."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from fzero.agree import agree
from fzero.axis import Axis
from fzero.manifest import CheckpointError

Found = TypeVar("Found")


def together(
    axis: Axis,
    topic: str,
    work: Callable[[], Found],
    store: Any = None,
    digest: Callable[[Found], str] = lambda _: "",
    note: Callable[[Found], dict[str, Any]] = lambda _: {},
) -> tuple[Found, list[dict[str, Any]]]:
    """Do something on every rank; if it fails on one, or the digests differ, raise `CheckpointError` on all.

    Returns the result and every rank's note. Communicates a short text per rank through the store and ends within its
    time limit.
    """
    try:
        found, _, notes = agree(axis, topic, work, digest, note, store)
    except CheckpointError:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}: {error}"
        raise CheckpointError(text if text.startswith(topic) else f"{topic}: {text}") from error
    return found, notes


# --- random states ---------------------------------------------------------------------------------------------------


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return what torch's generators of this rank are at, by kind: 1-D uint8."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on from there."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def seed_anew(saved: Any, rank: int) -> None:
    """Seed torch's generators of a rank of another world: by the states that were saved and the rank, nothing else."""
    digest = hashlib.sha256(f"{saved} {rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big"))
