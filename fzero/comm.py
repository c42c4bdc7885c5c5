"""`gather` (all-gather) and `scatter` (reduce-scatter), linear maps and each other's transpose.

Legend: N ranks, C elements of a shard, N*C elements of a bucket.

Differentiating through one runs the other. Both carry a *token*, a zero-size tensor that chains them: a bucket that
this rank's data does not use still scatters, and on every rank in the same order. The pair is differentiable under
plain autograd, under `torch.func`, and under `torch.compile(fullgraph=True)`, where Dynamo must not look inside
(`allow_in_graph`).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.axis import Axis
from fzero.collectives import add_pieces, all_gather, finish_scatter, pieces_of, start_scatter
from fzero.trace import opaque


class Static(NamedTuple):
    """What the operations have to know of an axis; Dynamo hands it over as three constants."""

    size: int
    group: str
    backends: str

    def ranks(self) -> Axis:
        """Return it as an axis."""
        return Axis(size=self.size, group=self.group, backends=self.backends)


Cuts = tuple[tuple[int, int, tuple[int, ...]], ...]
"""Where the leaves of a bucket are: start and number of elements, shape."""

# --- the differentiable pair -----------------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(shard: Tensor, token: Tensor, axis: Static) -> tuple[Tensor, Tensor]:
        return all_gather(shard, axis.ranks()), token.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.axis, ctx.dtype = inputs[2], inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, full: Tensor, token: Tensor) -> Any:
        shard, token = _Scatter.apply(full, token, ctx.dtype, ctx.axis)
        return shard, token, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(full: Tensor, token: Tensor, dtype: torch.dtype, axis: Static) -> tuple[Tensor, Tensor]:
        ranks = axis.ranks()
        return finish_scatter(start_scatter(full, ranks, dtype), ranks, dtype), token.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.axis, ctx.dtype = inputs[3], inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, shard: Tensor, token: Tensor) -> Any:
        full, token = _Gather.apply(shard.to(ctx.dtype), token, ctx.axis)
        return full, token, None, None


class _ScatterInto(torch.autograd.Function):
    """Scatter, and add to a tensor in place. It ends the chain: there is no way back through it."""

    @staticmethod
    def forward(full: Tensor, token: Tensor, sums: Tensor, axis: Static) -> Tensor:
        ranks = axis.ranks()
        add_pieces(sums, pieces_of(start_scatter(full, ranks, sums.dtype), ranks))
        return token.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        raise NotImplementedError("gradients that are summed in place cannot be differentiated again")


class _Anchor(torch.autograd.Function):
    """Forward: a stand-in for the gathered bucket that takes no memory. Backward: scatter of its gradient."""

    @staticmethod
    def forward(
        shard: Tensor,
        token: Tensor,
        sums: Tensor | None,  # noqa: ARG004
        dtype: torch.dtype,
        axis: Static,
    ) -> tuple[Tensor, Tensor]:
        return shard.new_zeros((), dtype=dtype).expand(shard.numel() * axis.size), token.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        # not saved as a tensor: it must stay the very one that is added to
        ctx.sums, ctx.axis, ctx.dtype = inputs[2], inputs[4], inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, full: Tensor, token: Tensor) -> Any:
        if ctx.sums is not None:
            token = _ScatterInto.apply(full, token, ctx.sums, ctx.axis)
            return full.new_zeros((), dtype=ctx.dtype).expand(full.numel() // ctx.axis.size), token, None, None, None
        if ctx.axis.size == 1:
            return full.to(ctx.dtype, copy=True), token.clone(), None, None, None
        shard, token = _Scatter.apply(full, token, ctx.dtype, ctx.axis)
        return shard, token, None, None, None


class _Attach(torch.autograd.Function):
    """Forward: the leaves of the gathered bucket. Backward: their gradients, packed, go to the stand-in."""

    @staticmethod
    def forward(full: Tensor, proxy: Tensor, cuts: Cuts) -> tuple[Tensor, ...]:  # noqa: ARG004
        return tuple(full[start : start + numel].view(shape) for start, numel, shape in cuts)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.cuts, ctx.length = inputs[2], inputs[0].numel()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        parts, end = [], 0
        for (start, numel, _), gradient in zip(ctx.cuts, gradients, strict=True):
            parts += [gradient.new_zeros(start - end)] if start > end else []
            parts.append(gradient.reshape(-1))
            end = start + numel
        parts += [gradients[0].new_zeros(ctx.length - end)] if ctx.length > end else []
        return None, torch.cat(parts), None


def _at_once(*outputs: Tensor) -> None:
    """Let the backward of what made these run as soon as it can; autograd else runs first what was made last.

    Anchors are made before everything else: without this every scatter would wait for the end of backward.
    """
    for output in outputs:
        # private, and only a matter of order: without it the numbers are the same
        set_priority = getattr(output.grad_fn, "_set_sequence_nr", None)
        if set_priority is not None:
            set_priority(2**62)


@opaque
def _gather(shard: Tensor, token: Tensor, size: int, group: str, backends: str) -> Any:
    return _Gather.apply(shard, token, Static(size, group, backends))


@opaque
def _scatter(full: Tensor, token: Tensor, dtype: torch.dtype, size: int, group: str, backends: str) -> Any:
    return _Scatter.apply(full, token, dtype, Static(size, group, backends))


@opaque
def _anchor(
    shard: Tensor, token: Tensor, sums: Tensor | None, dtype: torch.dtype, size: int, group: str, backends: str
) -> Any:
    proxy, token = _Anchor.apply(shard, token, sums, dtype, Static(size, group, backends))
    _at_once(proxy, token)
    return proxy, token


@opaque
def attach(full: Tensor, proxy: Tensor, cuts: Cuts) -> tuple[Tensor, ...]:
    """Return the leaves of a gathered bucket (N*C,), given as (start, numel, shape), as views.

    Their gradients are packed, and flow to `proxy`, the stand-in made by `anchor`.
    """
    leaves = _Attach.apply(full, proxy, cuts)
    _at_once(*leaves)
    return leaves  # type: ignore[no-any-return]


def new_token(like: Tensor) -> Tensor:
    """Return a token to start a chain with: shape (0,), float32, on the device of `like`."""
    return torch.zeros(0, device=like.device)


def gather(shard: Tensor, token: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """All-gather a shard (C,) to (N*C,), rank 0's piece first; its transpose is `scatter`.

    Communicates C elements from every rank to every other. In a world of one the shard itself is returned. On gloo it
    is made of sends and receives (`fzero.direct` says why).
    """
    if axis.size == 1:
        return shard, token
    return _gather(shard, token, axis.size, axis.group, axis.backends)  # type: ignore[no-any-return]


def scatter(full: Tensor, token: Tensor, axis: Axis, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Reduce-scatter (N*C,) to this rank's (C,) of the sum over ranks, in `dtype`; its transpose is `gather`.

    Communicates C elements from every rank to every other. On gloo it is an all-to-all and a local sum in rank order:
    half the bytes of gloo's own, and an order of summation that does not depend on the size of the message. 16-bit
    floats travel as they are there and are summed in float32. NCCL's own reduce-scatter is used on NCCL.
    """
    dtype = full.dtype if dtype is None else dtype
    if axis.size == 1:
        return full.to(dtype), token
    return _scatter(full, token, dtype, axis.size, axis.group, axis.backends)  # type: ignore[no-any-return]


def anchor(
    shard: Tensor, token: Tensor, axis: Axis, sums: Tensor | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return a stand-in (N*C,) for the gathered bucket, whose gradient is scattered to the shard exactly once.

    The stand-in, and so its gradient, has `dtype` (the shard's own); the sum over ranks has the shard's.

    The stand-in takes no memory and is never read. Wherever the bucket's values come from (gathered at the head of the
    step, or again and again inside blocks), `attach` ties them to it: the gradients of all uses are summed locally,
    then scattered, even if there was no use at all.

    With `sums` (C,) the scattered gradient is added to it in place, as soon as it is there, and the shard's own
    gradient is zero (and takes no memory).
    """
    dtype = shard.dtype if dtype is None else dtype
    return _anchor(shard, token, sums, dtype, axis.size, axis.group, axis.backends)  # type: ignore[no-any-return]
