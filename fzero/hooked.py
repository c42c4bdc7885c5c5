"""The classic engine: a plain `nn.Module`, hooks, and asynchronous collectives launched while backward runs.

====== ============================ ============================ =====================================================
stage  at rest on each rank         gathered                     gradients reduced
====== ============================ ============================ =====================================================
0      everything                   never                        in backward, bucket by bucket; gathered for the update
1      parameters, 1/N of state     by `step`                    in backward; the local sum lives until the step
2      parameters, 1/N of state     by `step`                    in backward; each bucket is freed when it has been sent
3      1/N                          unit by unit, in forward     as in stage 2
                                    and again in backward
====== ============================ ============================ =====================================================

It shares layout, optimizers and collectives with `fzero.Zero` and gives the same bits: each is the other's test.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fzero.agree import agree
from fzero.axis import axis_of
from fzero.buffers import Buffers, share
from fzero.calls import Calls
from fzero.comm import gather, new_token
from fzero.flats import Flat
from fzero.hooks import Collector
from fzero.layout import make_layout
from fzero.means import clip_factor, control, divided, read_loss
from fzero.precision import Precision
from fzero.rule import Optimizer
from fzero.settings import Settings
from fzero.state import Mean, Metrics
from fzero.taken import Taken, take
from fzero.units import Units
from fzero.update import accept, update_bucket


class HookedZero:
    """ZeRO for a plain `nn.Module`, with hooks: ``backward(loss)``, then ``step()``.

    The loss is the mean over ranks and `backward` calls of what is handed to `backward`, or with `fzero.Mean` the mean
    over all counted items; nobody divides beforehand. Parameters that a pass does not reach have a zero gradient: decay
    and old momentum keep moving them, as in `fzero.Zero`, whose gradients, parameters, moments, buffers, loss and norm
    this engine reproduces bit for bit (eagerly, on CPU).

    The engine takes the module over: its parameters become views into flat buffers (in stage 3 they have shape (0,)
    outside their unit's forward and backward), and ``p.grad`` is the engine's own. Use `params` for values, `grads` for
    gradients, one engine a module, and `backward` instead of ``loss.backward()``. Parameters with ``requires_grad``
    False are carried unchanged: rank 0's values, replicated, no gradient, no moments, no decay.

    Parameters
    ----------
    module
        Any module; rank 0's parameters and buffers win on every rank.
    opt
        The optimizer, `fzero.adamw(...)` for one; masks and factors see a dict of full parameters by name.
    stage
        0: everything replicated. 1: optimizer state sharded. 2: gradients too. 3: parameters too.
    mesh
        A 1-D `DeviceMesh` over all ranks, or None for the default process group, or none at all for a world of one.
    units
        Submodules that stage 3 gathers as one, in the order in which forward calls them; what such a submodule computes
        leaves it as its return value, and a gradient taken inside forward must not reach it. Default: the entries of
        the `nn.ModuleList` or `nn.Sequential` with the most parameters. Parameters that are reachable from elsewhere
        too count as outside.
    bucket_bytes
        Cap of a bucket, in bytes.
    clip_norm
        Largest global L2 norm of the mean gradient; it is scaled by min(1, clip_norm / (norm + 1e-6)).
    buffer_policy
        What happens to floating buffers across ranks in `step`: "rank0" (rank 0's values everywhere), "mean", "none".
    precision
        In which dtypes parameters are stored, computed with and reduced, `fzero.Precision.bf16` for one.

    Raises
    ------
    TypeError, ValueError
        On every rank, naming the argument or parameter, if any rank's are refused or the ranks' differ.

    Examples
    --------
    >>> import fzero, torch
    >>> engine = fzero.HookedZero(torch.nn.Linear(2, 1), fzero.adamw(0.01))
    >>> engine.backward(engine(torch.ones(4, 2)).square().mean())
    >>> metrics = engine.step()
    >>> int(metrics.step), list(engine.params())
    (1, ['weight', 'bias'])
    """

    def __init__(
        self,
        module: nn.Module,
        opt: Optimizer,
        stage: int = 2,
        *,
        mesh: DeviceMesh | None = None,
        units: Iterable[nn.Module] | None = None,
        bucket_bytes: int = 25 * 2**20,
        clip_norm: float | None = None,
        buffer_policy: str = "rank0",
        precision: Precision = Precision(),  # noqa: B008  (frozen)
    ) -> None:
        self._axis = axis_of(mesh)
        settings = Settings(stage, bucket_bytes, clip_norm, buffer_policy, precision)

        def check() -> Taken:
            taken = take(module, opt, units, settings)
            self._axis.check_device(taken.trained[0].device)
            return taken

        taken, _, _ = agree(self._axis, "HookedZero", check, lambda found: found.digest(settings))
        self.module = module
        self._opt, self._settings, self._taken, self._stage = opt, settings, taken, stage
        self._device = taken.trained[0].device
        self._layout = make_layout(taken.specs, self._axis.size, self._axis.bucket_bytes(bucket_bytes, self._device))
        share(taken.frozen.values(), self._axis)
        self._buffers = Buffers(module, taken.buffer_names, buffer_policy, self._axis)
        self._flats = [
            Flat(
                bucket,
                [taken.trained[slot.leaf] for slot in bucket.slots],
                self._axis,
                stays=stage < 3,
                whole=stage == 0,
            )
            for bucket in self._layout.buckets
        ]
        self._frozen = {name: parameter.detach() for name, parameter in taken.frozen.items()}
        for parameter in taken.frozen.values():
            if parameter.is_floating_point():
                parameter.data = parameter.detach().to(precision.computed(parameter.dtype))
        self._opt_states = [opt.init(flat.owned) for flat in self._flats]
        self._units = Units(taken.units, self._flats, self._axis) if stage == 3 else None
        self._collector = Collector(
            self._layout,
            taken.trained,
            taken.trained_names,
            self._axis,
            keeps=stage < 2,
            precision=precision,
            units=self._units,
        )
        self._calls = Calls(module, {parameter: place for place, parameter in enumerate(taken.trained)})
        self._step = torch.zeros((), dtype=torch.int64, device=self._device)
        self._syncs, self._in_backward, self._fresh, self._stop = True, False, True, False
        self._saving: Any = None
        """The handle of a save in the background."""
        self._begin_step()

    def _begin_step(self) -> None:
        self._collector.reset()
        self._total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._count = torch.zeros((), dtype=torch.float64, device=self._device)
        self._kind: type | None = None
        """The type of this step's losses; None before the first."""
        self._loss_dtype = torch.float32

    # --- forward and backward --------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output. With a compute dtype in `precision`, floating inputs are cast to it."""
        compute = self._settings.precision.compute
        if compute is not None:
            args, kwargs = _cast(args, compute), _cast(kwargs, compute)
        if self._in_backward:  # recomputed by activation checkpointing
            return self.module(*args, **kwargs)
        self._axis.check()
        if self._fresh:
            self._calls.clear()
            self._fresh = False
        self._calls.counting = torch.is_grad_enabled()
        try:
            if self._units is None:
                return self.module(*args, **kwargs)
            with self._units.forward():
                return self.module(*args, **kwargs)
        except BaseException:
            if self._kind is None:  # else earlier micro-batches of the step still count, with what they did to buffers
                self._buffers.restore()
            raise
        finally:
            self._calls.counting = False

    def backward(self, loss: Tensor | Mean) -> None:
        """Add the gradient of a loss, this rank's own, 0-d and floating. Collective outside `no_sync`.

        It is not divided: `step` divides once. Called several times before a step it accumulates: stages 0 and 1 sum
        locally and reduce the sum again in each call (`no_sync` around all but the last call saves those bytes);
        stages 2 and 3 reduce, then sum.

        Communicates, for S bytes of buckets, times (N-1)/N: S, and in stage 3 S more for the units.

        Raises
        ------
        TypeError, ValueError
            If the loss is not a 0-d floating tensor (or a `Mean` of one) with a graph that reaches a parameter.
        RuntimeError
            If a backward pass inside this one gives a parameter a gradient after its bucket was sent. After any error
            what was accumulated since the last step is dropped, buffers included.
        """
        self._axis.check()
        total, count = read_loss(loss, self._kind)
        self._collector.begin(syncs=self._syncs, held=self._calls.repeated)
        self._in_backward = True
        try:
            if self._units is None:
                total.backward()  # type: ignore[no-untyped-call]
            else:
                nested = self._calls.nested
                total.register_hook(lambda _: self._collector.arrive_unreached(nested))  # type: ignore[no-untyped-call]
                with self._units.backward():
                    total.backward()  # type: ignore[no-untyped-call]
            self._collector.end()
        except BaseException:
            self._begin_step()
            self._buffers.restore()
            raise
        finally:
            self._in_backward, self._fresh = False, True
        self._kind = type(loss)
        self._total = self._total + total.detach().to(torch.float64)
        self._count = self._count + count
        self._loss_dtype = torch.float64 if total.dtype == torch.float64 else torch.float32

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, `backward` sums gradients locally, without communication.

        The next `backward` outside, or `step`, or `grads`, reduces the sum. In stages 2 and 3 a full local gradient
        lives until then.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    # --- step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> Metrics:
        """Update parameters, moments and buffers with the gradients since the last step. Collective.

        A gradient that is not finite on any rank makes the step the identity on all of them, and ``metrics.skipped``
        true; buffers are those of the last step then. Nothing waits for the device.

        Communicates S (N-1)/N bytes for S bytes of buckets, in stage 3 none, besides one all-gather of 40 bytes and one
        collective for floating buffers.

        Raises
        ------
        ValueError
            If there was no `backward` since the last step.
        """
        self._need_gradients("step")
        reduced = self._collector.finished()
        loss, norm, bad, count, asked = control(reduced, (self._total, self._count), self._axis, stop=self._stop)
        skipped = bad > 0
        clip = clip_factor(norm, self._settings.clip_norm)
        norm_dtype = torch.float64 if any(leaf.dtype == torch.float64 for leaf in reduced) else torch.float32
        for number, flat in enumerate(self._flats):

            def mean(gradient: Tensor, dtype: torch.dtype = flat.owned.dtype) -> Tensor:
                return divided(gradient, count, clip).to(dtype)

            self._update(number, flat, reduced[number], mean, skipped)
        if self._units is not None:
            self._units.free_outside()
        self._buffers.update(skipped)
        self._step = torch.where(skipped, self._step, self._step + 1)
        metrics = Metrics(loss.to(self._loss_dtype), norm.to(norm_dtype), skipped, self._step.clone(), asked > 0)
        self._begin_step()
        return metrics

    def request_stop(self) -> None:
        """Let ``metrics.stop`` be true on all ranks from this rank's next step on. Not collective.

        It only sets a flag, as a signal handler may, which stays set. As `fzero.Zero.request_stop`.
        """
        self._stop = True

    def _need_gradients(self, what: str) -> None:
        if self._kind is None:
            raise ValueError(f"{what}: there is no gradient since the last step; call backward(loss) first")
        self._axis.check()

    def _update(
        self, number: int, flat: Flat, gradient: Tensor, mean: Callable[[Tensor], Tensor], skipped: Tensor
    ) -> None:
        """Run the optimizer on one bucket, given its summed gradient, and gather it if parameters stay gathered."""
        leaves, treespec = optree.tree_flatten(self._opt_states[number])

        def update(gradient: Tensor, leaves: list[Tensor], param: Tensor) -> tuple[Tensor, list[Tensor]]:
            state = optree.tree_unflatten(treespec, leaves)
            param, state = self._opt.update(gradient, state, param, labels=flat.bucket.label)
            return param, optree.tree_leaves(state)

        if self._stage == 0:
            gradient = mean(gradient)
            gradient, mean = gather(gradient, new_token(gradient), self._axis)[0], lambda whole: whole
        _, new = update_bucket(update, gradient, mean, (flat.owned, leaves), skipped, donate=True)
        for old, value in zip(leaves, new, strict=True):
            if old is not value:  # what all buckets share
                accept(skipped, old, value, old)
        self._refresh(flat)

    def _refresh(self, flat: Flat) -> None:
        """Let the parameters be what is owned of them, which has changed; gathers them where they stay gathered."""
        if self._stage == 0 and not flat.exact:
            flat.full.copy_(flat.owned)
        elif self._stage in (1, 2) and not (flat.exact and self._axis.size == 1):
            flat.gather(self._axis)
        flat.changed()

    # --- full trees ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def params(self) -> OrderedDict[str, Tensor]:
        """Return all parameters by name, full, in the dtype given and in memory of their own; a tied one once.

        Collective in stage 3, and in stages 1 and 2 if they are stored in another dtype than they are computed with.
        """
        fulls = []
        for flat in self._flats:
            if self._stage == 0 or not (flat.here and flat.exact):
                fulls.append(flat.owned if self._stage == 0 else self._gathered(flat.owned))
            else:
                fulls.append(flat.full)
        tree = self._tree(fulls, {name: parameter.clone() for name, parameter in self._frozen.items()})
        return OrderedDict((name, leaf.to(self._taken.dtypes[name])) for name, leaf in tree.items())

    def buffers(self) -> OrderedDict[str, Tensor]:
        """Return a copy of this rank's buffers by name; equal on all ranks after a step unless the policy is "none"."""
        return OrderedDict((name, buffer.clone()) for name, buffer in self._buffers.now().items())

    @torch.no_grad()
    def opt_state(self) -> Any:
        """Return the optimizer's state, with a dict by name in place of each moment (None where frozen). Collective."""
        size = self._flats[0].owned.shape

        def full(*leaves: Tensor) -> Any:
            if leaves[0].shape != size:
                return leaves[0].clone()  # what all buckets share, such as the step count
            return self._tree([leaf if self._stage == 0 else self._gathered(leaf) for leaf in leaves])

        return optree.tree_map(full, *self._opt_states)

    @torch.no_grad()
    def grads(self) -> OrderedDict[str, Tensor | None]:
        """Return the full mean gradient by name, before clipping; None where frozen. Collective.

        Between `backward` and `step`; what was summed locally under `no_sync` is reduced first.
        """
        self._need_gradients("grads")
        reduced = self._collector.finished()
        _, _, _, count, _ = control(reduced, (self._total, self._count), self._axis)
        return self._tree([self._gathered(divided(gradient, count)) for gradient in reduced])

    def _gathered(self, part: Tensor) -> Tensor:
        self._axis.check()
        return gather(part, new_token(part), self._axis)[0]

    def _tree(self, fulls: list[Tensor], frozen: dict[str, Tensor] | None = None) -> OrderedDict[str, Any]:
        found: dict[str, Any] = dict.fromkeys(self._taken.frozen) if frozen is None else dict(frozen)
        for flat, full in zip(self._flats, fulls, strict=True):
            for slot, leaf in zip(flat.bucket.slots, flat.leaves(full), strict=True):
                found[self._taken.trained_names[slot.leaf]] = leaf
        return OrderedDict((name, found[name]) for name in self._taken.names)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return optree.tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, tree
    )
