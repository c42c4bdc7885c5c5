"""Memory as the C library counts it: the most that lives within a call."""

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

AT_LEAST = 20
"""Times that the C library is asked within any call that is measured; fewer would miss its peak."""

PATIENCE = 10
"""Times that a new peak is looked at before it counts; a busy machine lets gloo's threads wait for their turn."""

SMALL = 2**12
"""Bytes that are not worth the wait."""


class Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that malloc had handed out, above those at the start, as the C library itself counts them.

    It is asked after every operation, and inside inductor's code after every allocation. torch's profiler would not
    do: it does not see what gloo's threads release. They release it a moment after the wait for it has ended: a new
    peak counts if it is still there `PATIENCE` times two milliseconds later.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.library = ctypes.CDLL(None)
        self.library.mallinfo2.restype = Mallinfo
        self.start = self.peak = self.samples = 0

    def in_use(self) -> int:
        info = self.library.mallinfo2()
        return int(info.uordblks + info.hblkhd)

    def sample(self) -> None:
        self.samples += 1
        for _ in range(PATIENCE):
            if self.in_use() - self.start <= self.peak + SMALL:
                break
            time.sleep(0.002)
        self.peak = max(self.peak, self.in_use() - self.start)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.sample()
        return result

    def of(self, function: Callable[[], Any], *, compiled: bool) -> int:
        gc.collect()
        gc.disable()
        self.samples, self.peak, self.start = 0, 0, self.in_use()
        if compiled:  # a dispatch mode would make Dynamo stand back
            function()
        else:
            with self:
                function()
        gc.enable()
        assert self.samples > AT_LEAST
        return self.peak

    @contextmanager
    def inside_inductor(self) -> Iterator[None]:
        guards: Any = torch._C._dynamo.guards
        real = guards._empty_strided_cpu

        def allocate(*args: Any) -> Tensor:
            result: Tensor = real(*args)
            self.sample()
            return result

        with mock.patch.object(guards, "_empty_strided_cpu", allocate):
            yield
