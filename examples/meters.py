"""What benchmark.py measures with: the memory in use on a rank, and the bytes that leave a host."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable


class Mallinfo(ctypes.Structure):
    """What the C library says about the memory it has handed out."""

    # arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks, keepcost
    _fields_ = (("counts", ctypes.c_size_t * 10),)

    @property
    def in_use(self) -> int:
        """The bytes handed out: mapped one by one (hblkhd), and of the heaps (uordblks)."""
        return int(self.counts[4] + self.counts[7])


class Memory:
    """The bytes in use on a device, or in this process on CPU; None where the C library does not tell."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.ask = device, None
        if device.type == "cpu" and sys.platform == "linux":
            self.ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if self.ask is not None:
            self.ask.restype = Mallinfo

    def in_use(self) -> int | None:
        """Return the bytes in use now."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        if self.ask is None:
            return None
        info: Mallinfo = self.ask()
        return info.in_use

    def peak(self, function: Callable[[], None]) -> int | None:
        """Return the most bytes in use while a function runs."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            function()
            return torch.cuda.max_memory_allocated(self.device)
        if self.ask is None:
            function()
            return None
        peak, done, interval = 0, threading.Event(), sys.getswitchinterval()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.001):
                peak = max(peak, self.in_use() or 0)

        thread = threading.Thread(target=watch)
        sys.setswitchinterval(0.0005)  # the thread needs the interpreter every millisecond
        thread.start()
        try:
            function()
        finally:
            done.set()
            thread.join()
            sys.setswitchinterval(interval)
        return peak


class Link:
    """The bytes that left this host on the interfaces over which ranks talk."""

    def __init__(self, world: int, device: torch.device) -> None:
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        self.names = ["lo"] * (local_world > 1)
        if world > local_world:
            self.names.append(os.environ.get("GLOO_SOCKET_IFNAME", "?"))
        self.files = [Path("/sys/class/net", name, "statistics", "tx_bytes") for name in self.names]
        self.counts = device.type == "cpu" and all(file.exists() for file in self.files)
        self.speaks = int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0  # for its host

    def sent(self) -> float | None:
        """Return the bytes so far, on one rank of each host; 0 on the others, None where nothing counts them."""
        if not self.counts:
            return None
        return float(sum(int(file.read_text()) for file in self.files)) if self.speaks else 0.0
