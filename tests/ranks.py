"""Starts ranks: processes on gloo with a file rendezvous, a hard time limit, and the failing rank's traceback."""

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

COLLECTIVE_LIMIT = 20.0
"""Seconds after which a collective or a wait on the store gives up; more in a long run, where ranks compile."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a result, or with an error (its type and message, then the traceback)."""

    result: Any = None
    error: str | None = None
    exitcode: int | None = None


class RanksFailedError(AssertionError):
    """A rank failed or did not end in time."""


def _child(
    rank: int, world: int, folder: str, patience: float, job: tuple[Callable[..., Any], tuple[Any, ...]]
) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.enable()
    torch.set_num_threads(1)
    function, args = job
    os.environ.pop("WORLD_SIZE", None)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=patience),
        )
        outcome = Outcome(result=function(rank, world, *args))
    except BaseException as error:  # noqa: BLE001  (whatever it is, the parent reports it)
        outcome = Outcome(error=f"{type(error).__name__}: {error}\n{traceback.format_exc()}", exitcode=1)
    path = Path(folder, f"{rank}.pickle")
    path.with_suffix(".part").write_bytes(pickle.dumps(outcome))
    path.with_suffix(".part").rename(path)
    if outcome.error is not None:
        os._exit(1)
    dist.destroy_process_group()


def outcomes(function: Callable[..., Any], world: int, *args: Any, limit: float = 60.0) -> list[Outcome]:
    """Run ``function(rank, world, *args)`` on every rank and return how each ended; raise if one does not end."""
    patience = max(COLLECTIVE_LIMIT, limit / 4)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "fzero"])
    with tempfile.TemporaryDirectory() as folder:
        children: list[ForkServerProcess] = []
        for rank in range(world):
            child = context.Process(target=_child, args=(rank, world, folder, patience, (function, args)))
            child.start()
            children.append(child)
        deadline = time.monotonic() + limit
        for child in children:
            child.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, child in enumerate(children) if child.is_alive()]
        for rank in late:
            children[rank].kill()
            children[rank].join()
        ended = []
        for rank, child in enumerate(children):
            path = Path(folder, f"{rank}.pickle")
            outcome = Outcome(error=f"no result, exit code {child.exitcode}", exitcode=child.exitcode)
            if path.exists():
                outcome = pickle.loads(path.read_bytes())  # noqa: S301  (written by our own child)
                if outcome.error is None and child.exitcode and rank not in late:
                    outcome = Outcome(error=f"exit code {child.exitcode} after its result", exitcode=child.exitcode)
            ended.append(outcome)
    if late:
        errors = "\n".join(f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(ended) if outcome.error)
        raise RanksFailedError(f"ranks {late} were still running after {limit:.0f} s\n{errors}")
    return ended


def run(function: Callable[..., Any], world: int, *args: Any, limit: float = 60.0) -> list[Any]:
    """Run a function on every rank and return the results; raise with the tracebacks if any rank fails."""
    ended = outcomes(function, world, *args, limit=limit)
    errors = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(ended) if outcome.error]
    if errors:
        raise RanksFailedError("\n".join(errors))
    return [outcome.result for outcome in ended]
