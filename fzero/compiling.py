"""One rank of a machine compiles first; the others then find what it compiled in inductor's cache."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch._dynamo import callback
from torch._inductor import config

from fzero.agree import default_store
from fzero.axis import Axis


class Queue:
    """Lets ranks of one machine compile one after the other.

    All ranks compile the same graphs. The first that has traced one goes on, and the others of its machine wait, at
    most the time limit of the store, before they look into the cache. It only saves time: where torch has no pass
    before the cache or no callbacks after compilation, or the other is gone, everybody compiles.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._done: list[str] = []
        self._compiled = 0
        self._number = 0
        """Of this engine among those of this rank."""
        if axis.size > 1:
            self._number = default_store().add(f"fzero/{axis.group}/compile/engines/{axis.rank}", 1)

    def __deepcopy__(self, memo: Any) -> "Queue":
        """Return the queue itself: some versions of torch copy the options that they are given."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Stand for every queue alike in the keys of caches; it is never read back."""
        return (str, ("fzero.compiling.Queue",))

    def options(self) -> dict[str, Any]:
        """Return inductor options that make a compilation wait for its turn."""
        known = config.get_config_copy()
        if self._axis.size == 1 or "pre_grad_custom_pass" not in known or not hasattr(callback, "callback_handler"):
            return {}
        timing = {"pre_grad_pass_timing": "early"} if "pre_grad_pass_timing" in known else {}
        return {"pre_grad_custom_pass": self.wait, **timing}

    def wait(self, _: Any) -> None:
        """Go first, or wait for who does. Called by inductor with a graph, before it looks into its cache."""
        self._compiled += 1
        base = f"fzero/{self._axis.group}/compile/{socket.gethostname()}/{self._number}/{self._compiled}"
        if default_store().add(f"{base}/turn", 1) == 1:
            self._done.append(f"{base}/done")
            return
        with contextlib.suppress(RuntimeError, dist.DistError):  # too late: the step itself will tell
            default_store().wait([f"{base}/done"], default_store().timeout)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Call a compiled function in it: the others go on as soon as it is compiled, or has failed."""
        handler = getattr(callback, "callback_handler", None)
        if self._axis.size == 1 or handler is None:
            yield
            return
        handler.end_callbacks.append(self._end)
        try:
            yield
        finally:
            handler.end_callbacks.remove(self._end)
            self._end(None)

    def _end(self, _: Any) -> None:
        while self._done:
            default_store().set(self._done.pop(), "")
