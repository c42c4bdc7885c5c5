"""What all ranks agree on before any collective, through the store of the process group, within its time limit."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from fzero.axis import Axis

if TYPE_CHECKING:
    from datetime import timedelta

Found = TypeVar("Found")


def agree(
    axis: Axis,
    topic: str,
    check: Callable[[], Found],
    digest: Callable[[Found], str],
    note: Callable[[Found], dict[str, Any]] = lambda _: {},
    store: Any = None,
) -> tuple[Found, str, list[dict[str, Any]]]:
    """Run a check on every rank and raise everywhere if it fails anywhere or gives different digests.

    Communicates a short text per rank through the store, never a collective, and ends within the store's time limit.

    Parameters
    ----------
    axis
        The ranks that take part; all of them must call this in the same order.
    topic
        What is agreed on, for the messages ("init", "the first step").
    check
        Returns what the digest is taken of, or raises ``ValueError`` or ``TypeError``.
    digest
        Turns the result into a text that must be the same on all ranks.
    note
        Turns the result into JSON-like data that may differ and that all ranks get to know.
    store
        A client of the store of one's own, for another thread; None: the default one.

    Returns
    -------
    tuple
        The result of `check` on this rank, the common digest, and every rank's note.
    """
    try:
        found = check()
    except Exception as error:
        if axis.size > 1:
            _exchange(axis, topic, _fault(error), store)
        raise
    text = digest(found)
    # through JSON in a world of one too, so that notes look the same in every world
    report = json.loads(json.dumps({"fault": None, "digest": text, "note": note(found)}))
    reports = [report] if axis.size == 1 else _exchange(axis, topic, report, store)
    for rank, other in enumerate(reports):
        if other["fault"]:
            raise ValueError(f"{topic}: rank {rank} failed with {other['fault']}")
    for rank, other in enumerate(reports):
        if other["digest"] != reports[0]["digest"]:
            raise ValueError(
                f"{topic}: the ranks differ, and none of them goes on. "
                f"Rank 0: {reports[0]['digest']}. Rank {rank}: {other['digest']}"
            )
    return found, text, [other["note"] for other in reports]


def fail(axis: Axis, topic: str, error: Exception) -> None:
    """Let `agree` on a topic raise an error of this rank on the others. Waits for none of them."""
    report = _fault(error)
    base = _report(axis, topic, report, default_store())
    if axis.rank == 0:
        default_store().set(f"{base}/all", json.dumps([report]))


def default_store() -> Any:
    """Return the store of the default process group: a collective could hang, the store has a limit."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001


def own_store() -> Any:
    """Return another client of the default store: one that waits blocks all threads that use the same."""
    store = default_store()
    clone = store.clone()
    clone.set_timeout(store.timeout)
    return clone


def _exchange(axis: Axis, topic: str, report: dict[str, Any], store: Any = None) -> list[dict[str, Any]]:
    """Return every rank's report: each rank writes its own, rank 0 collects them and writes the list."""
    store = default_store() if store is None else store
    base = _report(axis, topic, report, store)
    if axis.rank == 0:
        reports = [json.loads(_fetch(store, f"{base}/{rank}", topic, f"rank {rank}")) for rank in range(axis.size)]
        store.set(f"{base}/all", json.dumps(reports))
        return reports
    return json.loads(_fetch(store, f"{base}/all", topic, "some rank"))  # type: ignore[no-any-return]


def _fault(error: Exception) -> dict[str, Any]:
    """Return the report of a rank that raises."""
    return {"fault": f"{type(error).__name__}: {error}", "digest": "", "note": {}}


def _report(axis: Axis, topic: str, report: dict[str, Any], store: Any) -> str:
    """Write this rank's report and return under what name it and the others' are."""
    # counted in the store itself: how often this rank has come to this topic
    turn = store.add(f"fzero/{axis.group}/{topic}/turn/{axis.rank}", 1)
    base = f"fzero/{axis.group}/{topic}/{turn}"
    store.set(f"{base}/{axis.rank}", json.dumps(report))
    return base


def _fetch(store: Any, key: str, topic: str, who: str) -> bytes:
    limit: timedelta = store.timeout
    try:
        store.wait([key], limit)
    except (RuntimeError, dist.DistError) as error:
        raise RuntimeError(
            f"{topic}: {who} did not arrive within {limit.total_seconds():.0f} s; see its own output. "
            "All ranks must call this together"
        ) from error
    return store.get(key)  # type: ignore[no-any-return]
