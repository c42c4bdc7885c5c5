"""The functional engine: `init`, `step`, and the full trees on demand."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import optree
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch.distributed.device_mesh import DeviceMesh

from fzero.agree import agree
from fzero.axis import axis_of, with_own_group
from fzero.batch import describe_batch, leading_dim, micro_batches, placed
from fzero.binding import Binding, bind
from fzero.comm import gather, new_token
from fzero.compiling import Queue, with_own_code
from fzero.given import Inspected, block_names, inspect
from fzero.initial import first_state
from fzero.overlap import Overlap, compile_options
from fzero.precision import Precision
from fzero.rule import Choice, Optimizer, described
from fzero.settings import Settings, check_count, check_flags, check_settings
from fzero.stages import Program, Totals, call_in_the_open, divided, loss_dtype
from fzero.state import Metrics, Parts, State, to_parts, to_state
from fzero.tree import Tree, build, outline, paths_and_leaves, show_path, structure
from fzero.turns import Turns

UNDER_FUNC = (
    "loss_fn: saved tensor hooks, such as those of torch.utils.checkpoint, do not work under torch.func, by which "
    "compiled steps differentiate; use fzero.remat, or compile=False"
)


class Zero:
    """ZeRO for a pure loss function: parameters, gradients and optimizer state in shards, one step function.

    ``loss_fn(params, batch) -> loss``; with buffers ``loss_fn(params, buffers, batch) -> (loss, new_buffers)``; with
    `has_aux` one more element at the end. The loss is the mean over ranks and micro-batches of what `loss_fn` returns,
    or with `fzero.Mean` the mean over all counted items. The stage never changes the numbers: eagerly on CPU all four
    give the same bits.

    Parameters
    ----------
    loss_fn
        A pure function; it gets this rank's own batch.
    opt
        The optimizer, `fzero.adamw(...)` for one.
    stage
        0: everything replicated. 1: optimizer state and parameters sharded at rest. 2: gradients sharded too.
        3: parameters gathered block by block.
    mesh
        A 1-D `DeviceMesh` over all ranks, or None for the default process group, or none at all for a world of one.
    blocks
        Path prefixes of what stage 3 gathers as one (plain paths such as ``"layers.0"`` or tuples of keys); a `loss_fn`
        from `fzero.from_module` brings its own.
    precision
        In which dtypes parameters are stored, computed with and reduced, `fzero.Precision.bf16` for one.
    clip_norm
        Largest global L2 norm of the mean gradient; it is scaled by min(1, clip_norm / (norm + 1e-6)).
    accumulate
        Micro-batches a step; the leading dim of every batch leaf is split evenly.
    bucket_bytes
        Cap of a bucket, in bytes. On gloo buckets are kept smaller than the default: its large messages are slower.
    buffer_policy
        What happens to floating buffers across ranks at the end of a step: "rank0" (rank 0's values everywhere),
        "mean", or "none" (every rank keeps its own). Others are never averaged.
    compile
        Compile the step with ``torch.compile(fullgraph=True)``, without CUDA graphs: what they return is overwritten.
        Random numbers that `loss_fn` draws are then other ones than eagerly, from the same distribution.
    overlap
        Where the compiled step has its collectives; it never changes the numbers.
    has_aux
        Whether `loss_fn` returns something of its own as its last element.
    donate
        Write the new state into the old one's memory (the old one must not be used again), or leave the old one intact.
    trainable
        Which leaves of `params` are trained: None (all floating ones), a tree of bools, or a function of (path, leaf).
        The others are carried unchanged, whole on every rank: no gradient, no moments, no decay, not in the norm. A
        `loss_fn` from `from_module` brings its own: what does not require a gradient is not trained.

    Raises
    ------
    TypeError, ValueError
        Naming the argument; for example if ``WORLD_SIZE`` is above 1 and there is no process group.

    Examples
    --------
    >>> import fzero, torch
    >>> engine = fzero.Zero(lambda params, x: (params["w"] * x).square().mean(), fzero.sgd(0.1))
    >>> state = engine.init({"w": torch.tensor(1.0)})
    >>> state, metrics = engine.step(state, torch.ones(4))
    >>> engine.params(state)["w"], int(metrics.step)
    (tensor(0.8000), 1)
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        opt: Optimizer,
        stage: int = 2,
        *,
        mesh: DeviceMesh | None = None,
        blocks: Sequence[Any] | None = None,
        precision: Precision = Precision(),  # noqa: B008  (frozen)
        clip_norm: float | None = None,
        accumulate: int = 1,
        bucket_bytes: int = 25 * 2**20,
        buffer_policy: str = "rank0",
        compile: bool = False,  # noqa: A002  (the public contract's name)
        overlap: Overlap = Overlap(),  # noqa: B008  (frozen)
        has_aux: bool = False,
        donate: bool = True,
        trainable: Choice = None,
    ) -> None:
        if not callable(loss_fn):
            raise TypeError(f"loss_fn: must be a function, got {type(loss_fn).__name__}")
        if not isinstance(opt, Optimizer):
            raise TypeError(f"opt: must be a fzero.Optimizer such as fzero.adamw(...), got {type(opt).__name__}")
        settings = Settings(stage, bucket_bytes, clip_norm, buffer_policy, precision)
        check_settings(settings)
        check_count("accumulate", accumulate)
        check_flags({"compile": compile, "has_aux": has_aux, "donate": donate})
        own_blocks = getattr(loss_fn, "blocks", ())
        if blocks is not None and own_blocks:
            raise ValueError("blocks: this loss_fn brings its own; pass blocks to fzero.from_module instead")
        self._blocks = block_names(own_blocks if blocks is None else blocks)
        if stage == 3 and not self._blocks:
            raise ValueError("blocks: stage 3 needs the parts that are gathered as one; pass blocks=, path prefixes")
        self._trainable = getattr(loss_fn, "trainable", None) if trainable is None else trainable
        self._shared = frozenset(getattr(loss_fn, "shared", ()))
        self._loss_fn, self._opt, self._stage, self._settings = loss_fn, opt, stage, settings
        if not isinstance(overlap, Overlap):
            raise TypeError(f"overlap: must be a fzero.Overlap, got {overlap!r}")
        self._overlap = overlap
        self._accumulate, self._compile, self._has_aux, self._donate = accumulate, compile, has_aux, donate
        self._axis = axis_of(mesh)
        self._queue = Queue(self._axis)
        self._bound: tuple[str, Program] | None = None
        self._batch_agreed = False
        self._stop = False
        self._expected: Any = None
        self._compiled: dict[tuple[int, str], tuple[Any, Callable[..., Any]]] = {}
        self._saving: Any = None
        """The handle of a save in the background."""

    # --- init ------------------------------------------------------------------------------------------------------

    def init(self, params: Tree, buffers: Tree = None) -> State:
        """Bind the layout to a tree of parameters and return the first state. Collective.

        Rank 0's values win on every rank. Leaves are floating tensors of any shape, dtype and stride; they are copied
        by logical order and come back contiguous. Integer and bool leaves are carried unchanged. Tied leaves (the same
        memory, shape and strides) are one leaf. Leaves may be on meta on the ranks other than 0; if they are on all
        ranks, the state has no values, takes no memory, and serves for `fzero.load` only.

        Communicates a digest of tree and settings through the store, then every bucket, from rank 0 (broadcast). In
        stage 3 on NCCL it first makes a process group over the same ranks, for gathers.

        Raises
        ------
        TypeError, ValueError
            On every rank, if any rank's tree is refused, if the ranks' trees, settings or kinds of device differ, if
            the process group does not communicate there, or if the structure is not that of an earlier `init`.
        """

        def check() -> Inspected:
            for path, buffer in paths_and_leaves(buffers):
                if not isinstance(buffer, Tensor):
                    raise TypeError(f"buffers: leaf {show_path(path)} must be a tensor, got {type(buffer).__name__}")
            return inspect(params, self._opt, self._axis, self._blocks, self._shared, self._trainable)

        def describe(inspected: Inspected) -> str:
            kinds = [(path, leaf.dtype, tuple(leaf.shape)) for path, leaf in paths_and_leaves(buffers)]
            optimizer = described(self._opt, (leaf.label for leaf in inspected.leaves))
            return (
                f"{inspected.digest()}; buffers {structure(buffers)} {kinds}; "
                f"{self._settings}; optimizer {optimizer}; {self._overlap}; "
                f"accumulate {self._accumulate}, compile {self._compile}, has_aux {self._has_aux}, "
                f"donate {self._donate}"
            )

        self._axis.check()
        inspected, digest, notes = agree(self._axis, "init", check, describe, Inspected.notes)
        if notes[0]["meta"] and not all(note["meta"] for note in notes):
            raise ValueError(
                "params: all leaves of rank 0 are on meta, so there are no values to start from; give rank 0 values, "
                "or no rank, and load a checkpoint"
            )
        ties = tuple(notes[0]["ties"])
        for rank, note in enumerate(notes):
            if not note["meta"] and tuple(note["ties"]) != ties:
                raise ValueError(f"params: rank {rank} ties leaves {note['ties']}, rank 0 {notes[0]['ties']}")
        inspected = inspected.on_one_kind(notes)
        if self._bound is None:
            gathers = with_own_group(self._axis) if self._gathers_apart(inspected.device) else None
            cap, precision = self._settings.bucket_bytes, self._settings.precision
            binding = bind(inspected, ties, self._axis, outline(params), cap, precision, gathers)
            self._bound = (digest, self._program(binding, buffers))
        elif self._bound[0] != digest or self._bound[1].binding.ties != ties:
            raise ValueError(
                "params: another structure than at this engine's first init, which fixed its layout; "
                f"build a new engine for it. First: {self._bound[0]}; now: {digest}"
            )
        state = first_state(self._bound[1], params, buffers, meta=notes[0]["meta"])
        self._expected = _kinds(state)
        return state

    def _gathers_apart(self, device: torch.device) -> bool:
        """Return whether blocks are gathered over a group of their own, to overlap with scatters.

        NCCL runs the collectives of one group one after the other.
        """
        return self._stage == 3 and self._axis.scatters_natively(device)

    def _program(self, binding: Binding, buffers: Tree) -> Program:
        probe = torch.empty(7)  # a shape that no scalar of an optimizer has
        example = self._opt.init(probe)
        return Program(
            self._loss_fn,
            self._opt,
            self._stage,
            binding,
            opt_outline=outline(example),
            opt_like=tuple(leaf.shape == probe.shape for leaf in optree.tree_leaves(example)),
            clip_norm=self._settings.clip_norm,
            buffer_policy=self._settings.buffer_policy,
            has_aux=self._has_aux,
            has_buffers=buffers is not None,
            donate=self._donate,
            buffer_outline=outline(buffers),
            turns=Turns([block.name for block in binding.blocks], self._axis),
            precision=self._settings.precision,
        )

    # --- step ------------------------------------------------------------------------------------------------------

    def step(self, state: State, batch: Tree) -> tuple[State, Metrics]:
        """Run one training step. Collective.

        `batch` is this rank's own: a tree of tensors with one leading dim, split evenly into `accumulate`
        micro-batches. Leaves on CPU are moved to the state's device, from pinned memory without waiting: do not write
        there before the step is done. A gradient that is not finite on any rank makes the step the identity on all of
        them, and ``metrics.skipped`` true. With `donate` the old state's memory holds the new state.

        Communicates, for S bytes of buckets and A micro-batches, times (N-1)/N: stages 0 and 1 2S, stage 2 (A+1)S,
        stage 3 3A times the block buckets and A+1 times the rest; besides one all-gather of 40 bytes and one
        collective for floating buffers.

        Raises
        ------
        TypeError, ValueError
            If the state is not of this engine, or the batch is not a tree of tensors with one leading dim that
            `accumulate` divides, on CPU or on the state's device, or `loss_fn` does not return what it must. At the
            first step a fault in one rank's batch is raised on all ranks.
        """
        program = self._ready(state)
        micros = self._micro_batches(batch, state.step.device)
        parts = to_parts(state, program.opt_like)
        # a tensor, filled on the device: a bool would compile once more when it changes, a copy would wait
        stop = torch.full((), self._stop, dtype=torch.float64, device=state.step.device)
        if len(micros) == 1:
            new, *found, aux = self._run(program, "whole", parts, stop, micros[0])
        else:
            sums, totals, auxes = self._accumulated(program, parts, micros)
            aux = optree.tree_map(lambda *leaves: torch.stack(leaves), auxes[0], *auxes[1:])
            new, *found = self._run(program, "finish", parts, stop, sums, totals)
        return (state if new is None else to_state(state, new)), Metrics._make((*found, aux))

    def request_stop(self) -> None:
        """Let ``metrics.stop`` be true on all ranks from this rank's next step on. Not collective.

        It only sets a flag, as a signal handler may, which the step's own all-gather carries to the others. The flag is
        no part of the state and stays set; steps go on as before, and it is for the caller to save and end.
        """
        self._stop = True

    def _accumulated(
        self, program: Program, parts: Parts, micros: Sequence[Tree]
    ) -> tuple[list[Tensor], Totals, list[Tree]]:
        """Run all micro-batches; gather once at the head, sum their gradients and totals."""
        fulls = program.head(parts.shards)
        sums = program.no_sums(parts.shards, fulls)
        # tensors of their own from the start: an input that is another one in disguise would compile once more
        zero, none, sample = torch.zeros(3, dtype=torch.float64, device=parts.step.device).unbind()
        totals = Totals(zero.clone(), none.clone(), optree.tree_map(Tensor.clone, parts.buffers), None, sample)
        auxes = []
        for micro in micros:
            carried = (sums, totals.total, totals.counted, totals.buffers)
            totals = self._run(program, "micro", parts, fulls, carried, micro)
            auxes.append(totals.aux)
        return sums, totals._replace(aux=None), auxes

    def _run(self, program: Program, name: str, *args: Any) -> Any:
        """Call a part of the program, compiled if so asked."""
        if not self._compile:
            return getattr(program, name)(*args)
        key = (id(program.loss_fn), name)
        first = key not in self._compiled
        compiled = self._compiled_part(program, name) if first else self._compiled[key][1]
        try:
            with self._queue(name, first=first):
                result = compiled(*args)
        except Exception as error:
            if self._queue.refusal is not None:
                raise self._queue.refusal from None
            if not first and not isinstance(error, TorchDynamoException):
                raise
            plain = error
            if name != "finish":
                try:
                    call_in_the_open(program, name, args[0], args[-1])
                except Exception as found:  # noqa: BLE001  (what loss_fn raises)
                    plain = found
            self._queue.tell(plain)
            if "saved tensor hooks" in str(plain):
                raise ValueError(UNDER_FUNC) from error
            if plain is error:
                raise
            raise plain from None
        self._compiled[key] = (program.loss_fn, compiled)  # kept, so that no other one gets its id
        return result

    def _compiled_part(self, program: Program, name: str) -> Callable[..., Any]:
        buckets = program.binding.layout.buckets
        # a micro-batch is handed what lies outside blocks
        outside = 0 if name == "micro" else sum(bucket.block is None for bucket in buckets)
        overlap = self._overlap.settled(self._stage, program.binding.layout, self._settings.bucket_bytes)
        options = {**compile_options(self._stage, overlap, outside), **self._queue.options()}
        return torch.compile(with_own_code(getattr(program, name)), fullgraph=True, options=options)

    def grads(self, state: State, batch: Tree) -> tuple[Tree, Tensor]:
        """Return the full tree of the mean gradient (before clipping) and the loss, without an update. Collective.

        Leaves that are carried unchanged have None. Communicates what a step does and gathers every bucket once more.
        """
        program = self._ready(state)
        micros = self._micro_batches(batch, state.step.device)
        parts = to_parts(state, program.opt_like)
        sums, totals, _ = self._accumulated(program, parts, micros)
        reduced = program.reduce(sums)
        loss, _, _, count, _ = program.control(reduced, totals)
        means = [divided(gradient, count) for gradient in reduced]
        gathered = [gather(mean, new_token(mean), self._axis)[0] for mean in means]
        return program.binding.full_tree(gathered), loss.to(loss_dtype(totals))

    def evaluate(self, state: State, batch: Tree, loss_fn: Callable[..., Any] | None = None) -> tuple[Tensor, Tree]:
        """Return (mean loss over ranks, this rank's aux or None); no gradient, no change. Collective.

        `loss_fn` replaces the training one (dropout off, running statistics), with the same arguments and results. Pass
        the same object every time: a compiled engine compiles each once, and keeps it.
        The batch is taken whole, not in micro-batches.
        """
        program = self._ready(state)
        if loss_fn is not None:
            if not callable(loss_fn):
                raise TypeError(f"loss_fn: must be a function, got {type(loss_fn).__name__}")
            program = replace(program, loss_fn=loss_fn)
        leading_dim(batch, 1)
        batch = placed(batch, state.step.device)
        return self._run(program, "mean_loss", to_parts(state, program.opt_like), batch)  # type: ignore[no-any-return]

    # --- full trees ------------------------------------------------------------------------------------------------

    def params(self, state: State) -> Tree:
        """Return the full tree: structure, shapes, dtypes and ties as given to `init`, own memory. Collective."""
        program = self._ready(state)
        return program.binding.full_tree(self._gathered(state.params), state.fixed)

    def buffers(self, state: State) -> Tree:
        """Return a copy of this rank's buffers; equal on all ranks unless the policy is "none"."""
        self._ready(state)
        return optree.tree_map(lambda buffer: buffer.clone(), state.buffers)

    def opt_state(self, state: State) -> Any:
        """Return the optimizer's state with full trees in place of buckets. Collective."""
        program = self._ready(state)
        leaves = [
            program.binding.full_tree(self._gathered(leaf)) if like else leaf.clone()
            for like, leaf in zip(program.opt_like, to_parts(state, program.opt_like).opt_leaves, strict=True)
        ]
        return build(program.opt_outline, leaves)

    def _gathered(self, buckets: Sequence[Tensor]) -> list[Tensor]:
        if self._stage == 0:
            return list(buckets)
        return [gather(leaf, new_token(leaf), self._axis)[0] for leaf in buckets]

    # --- checks ----------------------------------------------------------------------------------------------------

    def _ready(self, state: State) -> Program:
        if self._bound is None:
            raise ValueError("engine: call init(params) first")
        self._axis.check()
        program = self._bound[1]
        if torch.is_inference_mode_enabled():
            raise ValueError("engine: does not work under torch.inference_mode(), where nothing has a gradient")
        if not isinstance(state, State):
            raise TypeError(f"state: must be what init or step returned, got {type(state).__name__}")
        if _kinds(state) != self._expected:
            raise ValueError(
                "state: was not made by this engine (its structure, shapes or dtypes differ); "
                "use the engine that made it"
            )
        if state.step.is_meta:
            raise ValueError("state: has no values, since all leaves were on meta at init; call fzero.load first")
        return program

    def _micro_batches(self, batch: Tree, device: torch.device) -> list[Tree]:
        def check() -> tuple[int, Tree]:
            return leading_dim(batch, self._accumulate), placed(batch, device)

        if self._batch_agreed:
            size, here = check()
        else:
            (size, here), _, _ = agree(self._axis, "the first step", check, lambda _: describe_batch(batch))
            self._batch_agreed = True
        return micro_batches(here, size, self._accumulate)


def _kinds(state: State) -> tuple[Any, list[tuple[torch.Size, torch.dtype]]]:
    """Return what two states of one engine have in common."""
    leaves, treespec = optree.tree_flatten(cast("Any", state))
    return treespec, [(leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)]
