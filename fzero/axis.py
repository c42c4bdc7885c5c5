"""The axis of ranks that an engine shards over."""

import os
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # its functions keep the default group there is when they are first imported
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

MESSAGE_BYTES = 5 * 2**18
"""How large a message of gloo's should be at most: it sends and receives larger ones after each other."""


@dataclass(frozen=True)
class Axis:
    """A group of ranks: its size, this process's rank in it, and how it communicates."""

    size: int = 1
    rank: int = 0
    group: str = ""
    backends: str = ""
    """Which backend tensors on a type of device have, as torch writes it: ``"cpu:gloo,cuda:nccl"``."""

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group itself. Nothing here keeps it: one that outlives `destroy_process_group` keeps gloo's threads.

        A thread that then lets go of a tensor while Python ends, takes the process down (SIGABRT, "terminate called
        without an active exception").
        """
        return named_group(self.group)

    @property
    def device(self) -> torch.device:
        """Where tensors live on this rank if nothing else says so."""
        if self.backend("cuda") in ("", "gloo") or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def backend(self, kind: str) -> str:
        """Return the backend of tensors on a type of device; nothing if there is none, or no other rank."""
        for pair in self.backends.split(","):
            device, _, backend = pair.partition(":")
            if device == kind:
                return backend
        return ""

    def check(self) -> None:
        """Refuse to communicate over another process group than the one that this was made of.

        Groups are found by name, and the default one has the same name again when it is made again.
        """
        if self.size == 1:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                raise ValueError(
                    f"engine: was built before there was a process group, for a world of one, and now there are "
                    f"{dist.get_world_size()} ranks; build it after torch.distributed.init_process_group()"
                )
            return
        try:
            group = self.process_group
        except RuntimeError as error:
            raise ValueError("engine: its process group was destroyed; build a new engine after making one") from error
        if (group.size(), group.rank()) != (self.size, self.rank):
            raise ValueError(
                f"engine: was built as rank {self.rank} of {self.size}, and this is rank {group.rank()} of "
                f"{group.size()}; build a new engine after making another process group"
            )

    def scatters_natively(self, device: torch.device) -> bool:
        """Return whether tensors there have a reduce-scatter of the backend's own; gloo's runs an all-reduce."""
        return device.type == "cuda" and self.backend("cuda") != "gloo"

    def bucket_bytes(self, cap: int, device: torch.device) -> int:
        """Return how large buckets should be at most if the user allows `cap` bytes: on gloo, several messages."""
        if self.size == 1 or self.scatters_natively(device):
            return cap
        return min(cap, self.size * MESSAGE_BYTES)

    def check_device(self, device: torch.device) -> None:
        """Refuse tensors on a device for which the group has no backend."""
        if self.size > 1 and not self.backend(device.type):
            known = ", ".join(pair.split(":")[0] for pair in self.backends.split(","))
            raise ValueError(
                f"params: are on {device}, but the process group communicates on {known} only; move them there, "
                'or name a backend for each device: init_process_group("cpu:gloo,cuda:nccl")'
            )


def named_group(name: str) -> dist.ProcessGroup:
    """Return the process group of this name."""
    return c10d._resolve_process_group(name)  # type: ignore[arg-type]  # noqa: SLF001


def with_own_group(axis: Axis) -> Axis:
    """Return an axis over the same ranks with a new process group: its collectives wait for nobody else's. Collective.

    The default group is never created.
    """
    if axis.size == 1:
        return axis
    group = dist.new_group(dist.get_process_group_ranks(axis.process_group))
    return replace(axis, group=group.group_name)  # type: ignore[union-attr]


def axis_of(mesh: DeviceMesh | None) -> Axis:
    """Return the axis of a 1-D mesh, or of the default group, or of a world of one.

    Raises
    ------
    ValueError
        If ``WORLD_SIZE`` is above 1 and no process group exists; if the mesh has more than one dim; or if it leaves
        ranks out, which would then train on their own without a word.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: must be a torch.distributed.DeviceMesh or None, got {type(mesh).__name__}")
    if not (dist.is_available() and dist.is_initialized()):
        world = os.environ.get("WORLD_SIZE", "1")
        if world != "1":
            raise ValueError(
                f"WORLD_SIZE is {world} but there is no process group: "
                "call torch.distributed.init_process_group() before building the engine"
            )
        return Axis()
    if mesh is None:
        group = dist.group.WORLD
    else:
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh: a mesh of {mesh.ndim} dims (hybrid sharding) is not supported yet; pass a 1-D mesh"
            )
        group = mesh.get_group()
    size, world_size = dist.get_world_size(group), dist.get_world_size()
    if size != world_size:
        raise ValueError(
            f"mesh: has {size} of the {world_size} ranks; the ranks outside it would train on other gradients. "
            "Pass a mesh over all ranks, or none"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("mesh: this rank is not in it; pass a mesh over all ranks, or none")
    if size == 1:
        return Axis()
    # not get_backend: of a group made without naming one it says "undefined", and of gloo that it does CUDA too
    return Axis(size, rank, group.group_name, dist.get_backend_config(group))  # type: ignore[union-attr]
