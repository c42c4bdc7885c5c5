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

The table is ZeRO's (arXiv:1910.02054, sec. 5). Everything in this file is traced by `torch.compile`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fzero.binding import Binding, sharded_entry
from fzero.comm import anchor, gather, new_token, scatter, share_buffers, sum_over_ranks
from fzero.grad import value_and_grad
from fzero.rule import Optimizer, wide
from fzero.state import Mean, Parts
from fzero.tree import Outline, Tree, build, paths_and_leaves, show_path, structure


class Totals(NamedTuple):
    """What a backward pass leaves beside gradients: sums over this rank's micro-batches."""

    total: Tensor
    counted: Tensor
    buffers: Tree
    aux: Tree
    sample: Tensor
    """The loss as the loss function returned it (of the last micro-batch): its dtype is that of the metrics."""


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

    # --- forward and backward --------------------------------------------------------------------------------------

    def head(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Gather what the whole step needs. Buckets that stay as they are stand there as they are."""
        fulls = []
        for bucket, shard in zip(self.binding.layout.buckets, shards, strict=True):
            stays = self.stage == 0 or self.binding.is_sharded(bucket, self.stage)
            fulls.append(shard if stays else gather(shard, new_token(shard), self.binding.axis)[0])
        return fulls

    def objective(
        self, variables: Sequence[Tensor], shards: Sequence[Tensor], fulls: Sequence[Tensor], rest: tuple[Any, ...]
    ) -> tuple[Tensor, Totals]:
        """Return this rank's loss as a function of the variables: buckets in stages 0 and 1, shards in 2 and 3."""
        fixed, buffers, batch, sums = rest
        binding = self.binding
        gathered: dict[int, Tensor] = {}
        proxies: dict[int, Tensor] = {}
        token = new_token(variables[0]) if variables else None
        for number, (bucket, variable) in enumerate(zip(binding.layout.buckets, variables, strict=True)):
            if self.stage < 2:
                gathered[number] = variable
                continue
            into = None if sums is None else sums[number]
            proxies[number], token = anchor(variable, token, binding.axis, into)  # type: ignore[arg-type]
            if not binding.is_sharded(bucket, self.stage):
                gathered[number] = fulls[number]
        leaves = binding.leaves_of(gathered, fixed, proxies if self.stage >= 2 else None)
        tree = self.tree(leaves, shards, proxies)
        result = self.loss_fn(tree, buffers, batch) if self.has_buffers else self.loss_fn(tree, batch)
        total, count, new_buffers, aux = self.read(result, buffers)
        if token is not None:
            total = total + token.sum().to(total.dtype)
        return total, Totals(total.detach().to(torch.float64), count, new_buffers, aux, total.detach())

    def tree(self, leaves: Mapping[int, Tensor], shards: Sequence[Tensor], proxies: Mapping[int, Tensor]) -> Tree:
        """Return the tree that the loss function gets."""
        if self.stage < 3:
            return build(self.binding.plain, leaves)
        count = len(self.binding.inspected.leaves)
        entries: dict[int, Any] = dict(leaves)
        for number, block in enumerate(self.binding.blocks):
            entries[count + number] = sharded_entry(block, shards, proxies, leaves)
        return build(self.binding.inspected.outline, entries)

    def read(self, result: Any, buffers: Tree) -> tuple[Tensor, Tensor, Tree, Tree]:
        """Take apart what the loss function returned: total, count, new buffers, aux."""
        names = ["loss", *(["new_buffers"] if self.has_buffers else []), *(["aux"] if self.has_aux else [])]
        if len(names) == 1:
            parts: tuple[Any, ...] = (result,)
        elif isinstance(result, tuple) and len(result) == len(names) and not isinstance(result, Mean):
            parts = result
        else:
            raise TypeError(f"loss_fn: must return ({', '.join(names)}), got {_describe(result)}")
        loss = parts[0]
        total, count = (loss.total, loss.count) if isinstance(loss, Mean) else (loss, 1.0)
        if not isinstance(total, Tensor):
            raise TypeError(
                f"loss_fn: the loss must be a 0-d floating tensor or fzero.Mean, got {_describe(total)}"
                + ("; for (loss, aux) set has_aux=True" if isinstance(total, tuple) else "")
            )
        if not total.is_floating_point():
            raise TypeError(f"loss_fn: the loss must be floating, got {total.dtype}; it has no gradient")
        if total.ndim:
            raise ValueError(f"loss_fn: the loss must be 0-d, got shape {tuple(total.shape)}; take its mean")
        if not isinstance(count, (Tensor, int, float)):
            raise TypeError(f"loss_fn: Mean.count must be a 0-d tensor or a number, got {_describe(count)}")
        counted = torch.as_tensor(count, device=total.device).detach().to(torch.float64)
        if counted.ndim:
            raise ValueError(f"loss_fn: Mean.count must be 0-d, got shape {tuple(counted.shape)}")
        new_buffers = parts[1] if self.has_buffers else buffers
        _check_buffers(buffers, new_buffers)
        aux: Tree = parts[-1] if self.has_aux else None
        for leaf in optree.tree_leaves(aux):
            if not isinstance(leaf, Tensor):
                raise TypeError(f"loss_fn: every leaf of aux must be a tensor, got {_describe(leaf)}")
        return total, counted, new_buffers, aux

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
        variables = parts.shards if self.stage >= 2 else fulls
        # the loss function may write into its buffers; the state's own stay as they are until the step is accepted
        own = optree.tree_map(lambda buffer: buffer.clone(), buffers)
        rest = (parts.fixed, own, batch, sums)
        gradients, _, aux = value_and_grad(
            lambda free: self.objective(free, parts.shards, fulls, rest), list(variables)
        )
        return gradients, aux

    # --- reduction and update --------------------------------------------------------------------------------------

    def reduce(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the sum over ranks of this rank's shard of every gradient; the last bucket's first."""
        if self.stage >= 2:
            return list(gradients)
        reduced = [
            scatter(gradient, new_token(gradient), self.binding.axis)[0] for gradient in reversed(list(gradients))
        ]
        return reduced[::-1]

    def finish(self, parts: Parts, gradients: Sequence[Tensor], totals: Totals) -> tuple[Any, ...]:
        """Reduce, agree, clip, update; return (new parts or None when donated, loss, norm, skipped, step)."""
        reduced = self.reduce(gradients)
        loss, norm, bad, count = self.control(reduced, totals)
        skipped = bad > 0
        clip = None if self.clip_norm is None else (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        shards: list[Tensor] = []
        moments: list[list[Tensor]] = [[] for _ in self.opt_like]
        shared = list(parts.opt_leaves)
        for number, gradient in enumerate(reduced):
            mean = divided(gradient, count, clip)
            if self.stage == 0:
                mean = gather(mean, new_token(mean), self.binding.axis)[0]
            shard, leaves = self.update(number, mean, parts)
            shards.append(self.accept(skipped, parts.shards[number], shard))
            for place, like in enumerate(self.opt_like):
                if like:
                    moments[place].append(self.accept(skipped, parts.opt_leaves[place][number], leaves[place]))
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
        return new, loss.to(loss_dtype(totals)), norm.to(norm_dtype), skipped, step.clone()

    def control(self, reduced: Sequence[Tensor], totals: Totals) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Agree over all ranks, with one all-gather of 32 bytes, on loss, gradient norm, faults and count.

        The squares are summed in float64, so that for float32 parameters the norm does not depend on how they are cut.
        """
        device = totals.total.device
        square = torch.zeros((), dtype=torch.float64, device=device)
        bad = torch.zeros((), dtype=torch.float64, device=device)
        for gradient in reduced:
            square = square + torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            bad = bad + (~torch.isfinite(gradient).all()).to(torch.float64)
        mine = torch.stack([totals.total, totals.counted, square, bad])
        total, count, square, bad = sum_over_ranks(mine, self.binding.axis).unbind()
        count = torch.where(count > 0, count, torch.ones_like(count))
        return total / count, square.sqrt() / count, bad, count

    def update(self, number: int, gradient: Tensor, parts: Parts) -> tuple[Tensor, list[Tensor]]:
        """Run the optimizer on one bucket."""
        bucket = self.binding.layout.buckets[number]
        mine = [leaf[number] if like else leaf for like, leaf in zip(self.opt_like, parts.opt_leaves, strict=True)]
        state = build(self.opt_outline, mine)
        shard, state = self.opt.update(gradient, state, parts.shards[number], labels=bucket.label)
        return shard, optree.tree_leaves(state)

    def accept(self, skipped: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Keep the old value of a skipped step; write into the old tensor if the state is donated."""
        value = torch.where(skipped, old, new)
        return old.copy_(value) if self.donate else value

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

    def whole(self, parts: Parts, batch: Tree) -> tuple[Any, ...]:
        """One step of one micro-batch."""
        gradients, totals = self.backward(parts, self.head(parts.shards), parts.buffers, batch)
        # a copy: what is handed out must not be a view of the parameters that are written next
        aux = optree.tree_map(lambda leaf: leaf[None].clone(), totals.aux)
        return (*self.finish(parts, gradients, totals), aux)

    def micro(self, parts: Parts, fulls: Sequence[Tensor], carried: tuple[Any, ...], batch: Tree) -> Totals:
        """One micro-batch: its gradients are added in place to those carried; the new totals are returned."""
        sums, total, count, buffers = carried
        if self.stage >= 2:
            # bucket by bucket, where each is scattered: all shards' gradients never live at once
            _, totals = self.backward(parts, fulls, buffers, batch, sums)
        else:
            gradients, totals = self.backward(parts, fulls, buffers, batch)
            for old, gradient in zip(sums, gradients, strict=True):
                old.add_(gradient)
        # (torch 2.11's Dynamo cannot trace _replace)
        return Totals(total + totals.total, count + totals.counted, *totals[2:])

    def mean_loss(self, parts: Parts, batch: Tree) -> tuple[Tensor, Tree]:
        """Return the mean loss over ranks and this rank's aux, without a gradient."""
        with torch.no_grad():
            fulls = self.head(parts.shards)
            variables = parts.shards if self.stage >= 2 else fulls
            own = optree.tree_map(lambda buffer: buffer.clone(), parts.buffers)
            _, totals = self.objective(variables, parts.shards, fulls, (parts.fixed, own, batch, None))
            mine = torch.stack([totals.total, totals.counted])
            total, count = sum_over_ranks(mine, self.binding.axis).unbind()
            loss = total / torch.where(count > 0, count, torch.ones_like(count))
            return loss.to(loss_dtype(totals)), optree.tree_map(Tensor.clone, totals.aux)


def divided(gradient: Tensor, count: Tensor, clip: Tensor | None = None) -> Tensor:
    """Return the mean gradient from a sum and its count, clipped; 16-bit floats are rounded once, at the end.

    A count of tokens would overflow in float16, and be rounded in bfloat16.
    """
    own = wide(gradient.dtype)
    mean = gradient.to(own) / count.to(own)
    if clip is not None:
        mean = mean * clip.to(own)
    return mean.to(gradient.dtype)


def loss_dtype(totals: Totals) -> torch.dtype:
    """Return the dtype in which the loss is reported: float64 if it was computed so, else float32."""
    return torch.float64 if totals.sample.dtype == torch.float64 else torch.float32


def _check_buffers(old: Tree, new: Tree) -> None:
    before, after = optree.tree_leaves(old), optree.tree_leaves(new)
    # (Dynamo's own idea of equal structures is stricter about dicts; a compiled step is checked by its leaves)
    if not torch.compiler.is_compiling() and optree.tree_structure(old) != optree.tree_structure(new):
        raise ValueError(
            f"loss_fn: new_buffers must have the structure of the buffers: {structure(old)}, got {structure(new)}"
        )
    if len(before) != len(after):
        raise ValueError(f"loss_fn: new_buffers must have the {len(before)} leaves of the buffers, got {len(after)}")
    for place, (mine, value) in enumerate(zip(before, after, strict=True)):
        if not isinstance(value, Tensor) or value.shape != mine.shape or value.dtype != mine.dtype:
            got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else _describe(value)
            raise ValueError(
                f"loss_fn: new_buffers leaf {show_path(paths_and_leaves(old)[place][0])} must have shape "
                f"{tuple(mine.shape)} and dtype {mine.dtype} as before, got {got}"
            )


def _describe(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
