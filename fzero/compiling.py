"""Compiling on several ranks: all must have the same collectives, and one rank of a machine compiles first.

The others then find what it compiled in inductor's cache.
"""

import contextlib
import itertools
import socket
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any, cast

import torch.distributed as dist
from torch import fx
from torch._dynamo import callback
from torch._inductor import config

from fzero.agree import agree, default_store, fail
from fzero.axis import Axis


class Queue:
    """Lets ranks of one machine compile one after the other, what all have found to have the same collectives.

    The first that has traced a graph goes on, and the others of its machine and device wait, at most the time limit of
    the store, before they look into the cache. (On CUDA every rank has a device of its own, unless each sees only its
    own and calls it ``cuda:0``.) That only saves time: where torch has no pass before the cache or no callbacks after
    compilation, or the other is gone, everybody compiles.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._done: list[str] = []
        self._compiled = 0
        self._part = ""
        self._is_first = False
        self._compares = False
        self.refusal: Exception | None = None
        """What is raised because ranks differ or one of them did not come to compile."""
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
        self._compares = True
        timing = {"pre_grad_pass_timing": "early"} if "pre_grad_pass_timing" in known else {}
        return {"pre_grad_custom_pass": self.wait, **timing}

    def wait(self, graph: fx.Graph) -> None:
        """Go first, or wait for who does. Called by inductor with a graph, before it looks into its cache.

        Raises
        ------
        ValueError
            On all ranks, if they do not have the same collectives the first time that they compile a part of the step.
            Communicates their names through the store.
        """
        if self._is_first:
            self._is_first = False
            try:
                self._compare(collectives(graph))
            except Exception as error:
                self.refusal = error
                raise
        self._compiled += 1
        # code for one device is not in the cache for another: ranks on other devices have no reason to wait
        place = f"{socket.gethostname()}/{self._axis.device}"
        base = f"fzero/{self._axis.group}/compile/{place}/{self._number}/{self._compiled}"
        if default_store().add(f"{base}/turn", 1) == 1:
            self._done.append(f"{base}/done")
            return
        with contextlib.suppress(RuntimeError, dist.DistError):  # too late: the step itself will tell
            default_store().wait([f"{base}/done"], default_store().timeout)

    def tell(self, error: Exception) -> None:
        """Let the others raise an error of this rank, if they wait for it to have traced what they have."""
        if self._is_first and self._compares:
            self._is_first = False
            fail(self._axis, f"compiling {self._part}", error)

    def _compare(self, mine: list[str]) -> None:
        topic = f"compiling {self._part}"
        _, _, everyone = agree(self._axis, topic, lambda: mine, lambda _: "", lambda found: {"collectives": found})
        first = everyone[0]["collectives"]
        for rank, note in enumerate(everyone):
            other = note["collectives"]
            if other != first:
                pairs = enumerate(itertools.zip_longest(first, other, fillvalue="none"))
                at, here, there = next((at, here, there) for at, (here, there) in pairs if here != there)
                raise ValueError(
                    f"{topic}: the ranks differ, and none of them goes on. Call {at} that communicates is "
                    f"{here!r} on rank 0 and {there!r} on rank {rank}. A compiled step must call the same blocks in "
                    "the same order on all ranks; compile=False allows ranks to leave some out"
                )

    @contextlib.contextmanager
    def __call__(self, part: str, *, first: bool) -> Iterator[None]:
        """Call a compiled part of the step in it: the others go on as soon as it is compiled, or has failed."""
        self._part, self._is_first, self.refusal = part, first, None
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


def with_own_code(method: MethodType) -> MethodType:
    """Return a bound method with a code object of its own.

    Dynamo compiles a code object for at most eight sets of shapes and compilers; all engines would share those.
    """
    function = cast("FunctionType", method.__func__)
    code = function.__code__.replace()
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    return MethodType(own, method.__self__)


def collectives(graph: fx.Graph) -> list[str]:
    """Return what communicates in a graph as Dynamo traced it, in order: functions and their inputs."""
    found = []
    for node in graph.nodes:
        if node.op == "call_function" and str(getattr(node.target, "__module__", "")).startswith("fzero."):
            inputs = [_origin(source) for source in node.all_input_nodes]
            shards = [name for name in inputs if "shards" in name]
            found.append(f"{node.target.__name__.strip('_')}({', '.join(shards)})")
    return found


def _origin(node: fx.Node) -> str:
    """Return the name of the input that a node is computed from, as far as that is one."""
    while node.op != "placeholder" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.name.strip("_")
