"""The training step. A stage says when buckets are gathered and when gradients are scattered, and nothing else.

====== ============================ ============================ =====================================================
stage  at rest on each rank         gathered                     gradients reduced
====== ============================ ============================ =====================================================
0      everything                   never                        once a step (scattered, then gathered again)
1      1/N                          at the head of the step      once a step; full local gradients live until then
2      1/N                          at the head of the step      bucket by bucket inside each micro-batch's backward
3      1/N                          block by block, forward and  bucket by bucket inside each micro-batch's backward
                                    again backward
====== ============================ ============================ =====================================================

The table is ZeRO's (arXiv:1910.02054, sec. 5). `torch.compile` traces `whole`, `micro`, `finish` and `mean_loss`, with
everything that they call.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from fzero.axis import Axis
from fzero.batch import cast_inputs
from fzero.binding import Binding, sharded_entry
from fzero.collectives import share_buffers, sum_over_ranks
from fzero.comm import anchor, gather, new_token, scatter
from fzero.grad import value_and_grad
from fzero.precision import Precision
from fzero.returned import read
from fzero.rule import Optimizer, wide
from fzero.state import Parts
from fzero.trace import forward_done, once
from fzero.tree import Outline, Tree, build
from fzero.turns import Pass, Turns
from fzero.update import accept, update_bucket

RECOMPUTED_OTHERWISE = (
    "loss_fn: a part of it computed something else when it ran again in backward. Inside a module's forward, whose "
    "parameters are not there any more then, use fzero.remat(self.layer)(x), not torch.utils.checkpoint nor a function "
    "that captures self"
)


class Totals(NamedTuple):
    """What a backward pass leaves beside gradients: sums over this rank's micro-batches."""

    total: Tensor
    counted: Tensor
    buffers: Tree
    aux: Tree
    sample: Tensor
    """The loss as the loss function returned it (of the last micro-batch): its dtype is that of the metrics."""


class Given(NamedTuple):
    """What a loss depends on beside the variables."""

    fixed: tuple[Tensor, ...]
    buffers: Tree
    batch: Tree
    sums: Sequence[Tensor] | None = None
    """Where the gradients of a micro-batch are added, in stages 2 and 3 scattered; without, they are returned."""
    turn: Pass | None = None
    """When blocks are gathered, in eager stage 3."""


@dataclass(frozen=True, eq=False)
class Program:
    """One training step for every stage, as functions of tensors."""

    loss_fn: Callable[..., Any]
    opt: Optimizer
    stage: int
    binding: Binding
    opt_outline: Outline
    opt_like: tuple[bool, ...]
    """For every leaf of one bucket's optimizer state, whether it has the bucket's shape."""
    clip_norm: float | None
    buffer_policy: str
    has_aux: bool
    has_buffers: bool
    donate: bool
    buffer_outline: Outline
    turns: Turns
    precision: Precision

    # --- forward and backward --------------------------------------------------------------------------------------

    def head(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Gather what the whole step needs. Buckets that stay as they are stand there as they are."""
        fulls = []
        for bucket, shard in zip(self.binding.layout.buckets, shards, strict=True):
            if self.binding.is_sharded(bucket, self.stage):
                fulls.append(shard)
                continue
            cast = shard.to(bucket.compute)
            fulls.append(cast if self.stage == 0 else gather(cast, new_token(cast), self.binding.axis)[0])
        return fulls

    def variables(self, shards: Sequence[Tensor], fulls: Sequence[Tensor]) -> list[Tensor]:
        """Return what is differentiated for: buckets as computed with, or in stages 2 and 3 shards as reduced."""
        if self.stage < 2:
            return list(fulls)
        buckets = self.binding.layout.buckets
        return [shard.to(self.precision.reduced(bucket.compute)) for bucket, shard in zip(buckets, shards, strict=True)]

    def no_sums(self, shards: Sequence[Tensor], fulls: Sequence[Tensor]) -> list[Tensor]:
        """Return zeros to which the gradients of micro-batches are added, in the dtype of the reduction."""
        buckets = self.binding.layout.buckets
        return [
            torch.zeros_like(variable, dtype=self.precision.reduced(bucket.compute))
            for bucket, variable in zip(buckets, shards if self.stage >= 2 else fulls, strict=True)
        ]

    def objective(
        self, variables: Sequence[Tensor], shards: Sequence[Tensor], fulls: Sequence[Tensor], given: Given
    ) -> tuple[Tensor, Totals]:
        """Return this rank's loss as a function of the variables: buckets in stages 0 and 1, shards in 2 and 3."""
        fixed, buffers, batch, sums, turn = given
        if self.precision.compute is not None and getattr(self.loss_fn, "casts_inputs", False):
            batch = cast_inputs(batch, self.precision.compute)
        binding = self.binding
        gathered: dict[int, Tensor] = {}
        proxies: dict[int, Tensor] = {}
        token = new_token(variables[0]) if variables else None
        for number in self.scatter_order(turn):
            bucket, variable = binding.layout.buckets[number], variables[number]
            into = None if sums is None else sums[number]
            if self.stage < 2 and into is None:
                gathered[number] = variable
                continue
            # stages 0 and 1 add to their sums bucket by bucket too, among no other ranks than this one
            ranks = binding.axis if self.stage >= 2 else Axis()
            proxies[number], token = anchor(variable, token, ranks, into, bucket.compute)  # type: ignore[arg-type]
            if not binding.is_sharded(bucket, self.stage):
                gathered[number] = fulls[number]
            elif turn is not None and proxies[number].grad_fn is not None:
                block = cast("int", bucket.block)
                proxies[number].grad_fn.register_prehook(lambda _, block=block: turn.catch_up(block))  # type: ignore[union-attr]
        leaves = binding.leaves_of(gathered, fixed, proxies or None)
        tree = self.tree(leaves, shards, proxies, turn)
        result = self.loss_fn(tree, buffers, batch) if self.has_buffers else self.loss_fn(tree, batch)
        if turn is not None:
            turn.turn()
        total, count, new_buffers, aux = read(result, buffers, has_buffers=self.has_buffers, has_aux=self.has_aux)
        if token is not None:
            total = total + token.sum().to(total.dtype)
        if torch.compiler.is_compiling():
            total = forward_done(total)
        return total, Totals(total.detach().to(torch.float64), count, new_buffers, aux, total.detach())

    def scatter_order(self, turn: Pass | None) -> Sequence[int]:
        """Return the buckets in reverse of the order in which their gradients are scattered.

        In eager stage 3 the blocks' are scattered in the order in which backward gathers them, and those outside
        blocks last: what does not lie in a block may be used anywhere, or on some ranks only. A scatter must not come
        before a gather on one rank and after it on another.
        """
        buckets = self.binding.layout.buckets
        if turn is None:
            return range(len(buckets))

        def place(number: int) -> tuple[bool, int]:
            block = buckets[number].block
            return (False, 0) if block is None else (True, -self.turns.last_in_backward(block))

        return sorted(range(len(buckets)), key=place)

    def new_pass(self, shards: Sequence[Tensor]) -> Pass | None:
        """Return what says when blocks are gathered; compiled, the graph's own order does."""
        if self.stage < 3 or self.binding.axis.size == 1 or torch.compiler.is_compiling():
            return None
        blocks = self.binding.blocks
        return Pass(
            self.turns, lambda number: blocks[number].gather([shards[place] for place in blocks[number].buckets])
        )

    def tree(
        self,
        leaves: Mapping[int, Tensor],
        shards: Sequence[Tensor],
        proxies: Mapping[int, Tensor],
        turn: Pass | None,
    ) -> Tree:
        """Return the tree that the loss function gets."""
        if self.stage < 3:
            return build(self.binding.plain, leaves)
        count = len(self.binding.inspected.leaves)
        entries: dict[int, Any] = dict(leaves)
        for number, block in enumerate(self.binding.blocks):
            in_turn = None if turn is None else functools.partial(turn.gather, number)
            entries[count + number] = sharded_entry(block, shards, proxies, leaves, in_turn)
        return build(self.binding.inspected.outline, entries)

    def backward(
        self,
        parts: Parts,
        fulls: Sequence[Tensor],
        buffers: Tree,
        batch: Tree,
        sums: Sequence[Tensor] | None = None,
    ) -> tuple[list[Tensor], Totals]:
        """Return the gradients of one micro-batch's loss, not yet divided, and its totals.

        With `sums` they are added there in place, and zeros are returned.
        """
        variables = self.variables(parts.shards, fulls)
        # the loss function may write into its buffers; the state's own stay as they are until the step is accepted
        own = optree.tree_map(lambda buffer: buffer.clone(), buffers)
        given = Given(self.carried(parts), own, batch, sums, self.new_pass(parts.shards))
        try:
            gradients, _, aux = value_and_grad(
                lambda free: self.objective(free, parts.shards, fulls, given), list(variables)
            )
        except RuntimeError as error:
            if isinstance(error, CheckpointError) or "device meta" in str(error):
                raise RuntimeError(RECOMPUTED_OTHERWISE) from error
            raise
        if given.turn is not None:
            given.turn.end()
        return gradients, aux

    def carried(self, parts: Parts) -> tuple[Tensor, ...]:
        """Return the leaves that are not trained, as the loss function sees them."""
        return tuple(
            leaf.to(self.precision.computed(leaf.dtype)) if leaf.is_floating_point() else leaf for leaf in parts.fixed
        )

    # --- reduction and update --------------------------------------------------------------------------------------

    def reduce(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return the sum over ranks of this rank's shard of every gradient; takes them, the last bucket's first."""
        if self.stage >= 2:
            return list(gradients)
        reduced = []
        for bucket in reversed(self.binding.layout.buckets):
            gradient = gradients.pop()  # and its memory is free once it is scattered
            dtype = self.precision.reduced(bucket.compute)
            reduced.append(scatter(gradient, new_token(gradient), self.binding.axis, dtype)[0])
        return reduced[::-1]

    def finish(self, parts: Parts, stop: Tensor, gradients: list[Tensor], totals: Totals) -> tuple[Any, ...]:
        """Reduce, agree, clip, update; return (new parts or None when donated, loss, norm, skipped, step, stop)."""
        reduced = self.reduce(gradients)
        loss, norm, bad, count, asked = self.control(reduced, totals, stop)
        skipped = bad > 0
        clip = None if self.clip_norm is None else (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        shards: list[Tensor] = []
        moments: list[list[Tensor]] = [[] for _ in self.opt_like]
        shared = list(parts.opt_leaves)
        for number, gradient in enumerate(reduced):
            shard, leaves = self.update(number, gradient, parts, (count, clip, skipped))
            shards.append(shard)
            for place, like in enumerate(self.opt_like):
                if like:
                    moments[place].append(leaves[place])
                else:
                    shared[place] = leaves[place]
        # what all buckets share (the step count) is written after the last of them has read it
        opt_leaves = tuple(
            tuple(moments[place]) if like else self.accept(skipped, parts.opt_leaves[place], shared[place])
            for place, like in enumerate(self.opt_like)
        )
        buffers = self.new_buffers(skipped, parts.buffers, totals.buffers)
        step = self.accept(skipped, parts.step, parts.step + 1)
        norm_dtype = torch.float64 if any(leaf.dtype == torch.float64 for leaf in reduced) else torch.float32
        new = None if self.donate else Parts(tuple(shards), opt_leaves, buffers, parts.fixed, step)
        return new, loss.to(loss_dtype(totals)), norm.to(norm_dtype), skipped, step.clone(), asked > 0

    def control(self, reduced: Sequence[Tensor], totals: Totals, stop: Tensor | None = None) -> tuple[Tensor, ...]:
        """Agree over all ranks, with one all-gather of 40 bytes, on (loss, norm, faults, count, requests to stop).

        `stop` is 0-d float64: 1 if this rank was asked to stop, else 0 or None.
        The squares are summed in float64, so that for float32 parameters the norm does not depend on how they are cut.
        """
        device = totals.total.device
        square = torch.zeros((), dtype=torch.float64, device=device)
        bad = torch.zeros((), dtype=torch.float64, device=device)
        for gradient in reduced:
            square = square + torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            bad = bad + (~torch.isfinite(gradient).all()).to(torch.float64)
        stop = torch.zeros_like(bad) if stop is None else stop
        mine = torch.stack([totals.total, totals.counted, square, bad, stop])
        total, count, square, bad, stop = sum_over_ranks(mine, self.binding.axis).unbind()
        count = torch.where(count > 0, count, torch.ones_like(count))
        return total / count, square.sqrt() / count, bad, count, stop

    def update(
        self, number: int, gradient: Tensor, parts: Parts, control: tuple[Tensor, Tensor | None, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the optimizer on one bucket, given its summed gradient, and (count, clip, skipped)."""
        count, clip, skipped = control
        label, param = self.binding.layout.buckets[number].label, parts.shards[number]

        def mean(gradient: Tensor) -> Tensor:
            return divided(gradient, count, clip).to(param.dtype)

        def update(gradient: Tensor, leaves: list[Tensor], param: Tensor) -> tuple[Tensor, list[Tensor]]:
            param, state = self.opt.update(gradient, build(self.opt_outline, leaves), param, labels=label)
            return param, optree.tree_leaves(state)

        mine = [leaf[number] if like else leaf for like, leaf in zip(self.opt_like, parts.opt_leaves, strict=True)]
        if self.stage == 0:
            gradient = mean(gradient)
            gradient = gather(gradient, new_token(gradient), self.binding.axis)[0]
            return update_bucket(update, gradient, lambda whole: whole, (param, mine), skipped, donate=self.donate)
        return update_bucket(update, gradient, mean, (param, mine), skipped, donate=self.donate)

    def accept(self, skipped: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Keep the old value of a skipped step; write into the old tensor if the state is donated."""
        return accept(skipped, old, new, old if self.donate else None)

    def new_buffers(self, skipped: Tensor, old: Tree, new: Tree) -> Tree:
        """Apply the buffer policy to floating buffers, with one collective, and the rule for skipped steps."""
        before, after = optree.tree_leaves(old), optree.tree_leaves(new)
        shared = [place for place, buffer in enumerate(after) if buffer.is_floating_point() and buffer.numel()]
        if shared and self.buffer_policy != "none" and self.binding.axis.size > 1:
            widest = after[shared[0]].dtype
            for place in shared:
                widest = torch.promote_types(widest, after[place].dtype)
            flat = torch.cat([after[place].reshape(-1).to(widest) for place in shared])
            flat = share_buffers(flat, self.buffer_policy, self.binding.axis)
            pieces = torch.split(flat, [after[place].numel() for place in shared])
            for place, piece in zip(shared, pieces, strict=True):
                after[place] = piece.view(after[place].shape).to(after[place].dtype)
        accepted = [self.accept(skipped, mine, value) for mine, value in zip(before, after, strict=True)]
        return build(self.buffer_outline, accepted)

    # --- what is compiled ------------------------------------------------------------------------------------------

    def whole(self, parts: Parts, stop: Tensor, batch: Tree) -> tuple[Any, ...]:
        """One step of one micro-batch."""
        gradients, totals = self.backward(parts, self.head(parts.shards), parts.buffers, batch)
        # a copy: what is handed out must not be a view of the parameters that are written next
        aux = optree.tree_map(lambda leaf: leaf[None].clone(), totals.aux)
        return (*self.finish(parts, stop, gradients, totals), aux)

    def micro(self, parts: Parts, fulls: Sequence[Tensor], carried: tuple[Any, ...], batch: Tree) -> Totals:
        """One micro-batch: its gradients are added in place to those carried; the new totals are returned."""
        sums, total, count, buffers = carried
        if self.stage >= 2 or not torch.compiler.is_compiling():
            # bucket by bucket, where each is complete (and scattered): all gradients never live at once
            _, totals = self.backward(parts, fulls, buffers, batch, sums)
        else:
            # inductor packs and adds in one pass, which saves time; more gradients live meanwhile
            gradients, totals = self.backward(parts, fulls, buffers, batch)
            for old, gradient in zip(sums, gradients, strict=True):
                old.add_(gradient)
        # (torch 2.11's Dynamo cannot trace _replace)
        return Totals(total + totals.total, count + totals.counted, *totals[2:])

    def mean_loss(self, parts: Parts, batch: Tree) -> tuple[Tensor, Tree]:
        """Return the mean loss over ranks and this rank's aux, without a gradient."""
        with torch.no_grad():
            fulls = self.head(parts.shards)
            variables = self.variables(parts.shards, fulls)
            own = optree.tree_map(lambda buffer: buffer.clone(), parts.buffers)
            given = Given(self.carried(parts), own, batch, turn=self.new_pass(parts.shards))
            _, totals = self.objective(variables, parts.shards, fulls, given)
            mine = torch.stack([totals.total, totals.counted])
            total, count = sum_over_ranks(mine, self.binding.axis).unbind()
            loss = total / torch.where(count > 0, count, torch.ones_like(count))
            return loss.to(loss_dtype(totals)), optree.tree_map(Tensor.clone, totals.aux)


def call_in_the_open(program: Program, name: str, parts: Parts, batch: Tree) -> None:
    """Call the loss function as in a part of the step, for what it raises: not compiled, on zeros, by this rank alone.

    Dynamo buries what it raises, and the other ranks may not come to communicate.
    """
    alone = replace(program, stage=0, binding=replace(program.binding, axis=Axis()))
    buckets = program.binding.layout.buckets
    zeros = [torch.zeros(bucket.length, dtype=bucket.compute, device=parts.step.device) for bucket in buckets]
    parts = parts._replace(shards=tuple(zeros))
    if name == "mean_loss":
        alone.mean_loss(parts, batch)
    else:
        alone.backward(parts, zeros, parts.buffers, batch)


def divided(gradient: Tensor, count: Tensor, clip: Tensor | None = None) -> Tensor:
    """Return the mean gradient from a sum and its count, clipped; 16-bit floats are rounded once, at the end.

    A count of tokens would overflow in float16, and be rounded in bfloat16.
    """
    own = wide(gradient.dtype)
    mean = gradient.to(own) / once(count.to(own))
    if clip is not None:
        mean = mean * once(clip.to(own))
    return mean.to(gradient.dtype)


def loss_dtype(totals: Totals) -> torch.dtype:
    """Return the dtype in which the loss is reported: float64 if it was computed so, else float32."""
    return torch.float64 if totals.sample.dtype == torch.float64 else torch.float32
