"""The stage is a memory choice and nothing else: equal bits across stages, and all equal to torch on one process."""

import functools
import hashlib
from typing import Any

import optree
import pytest
import ranks
import torch
from torch import Tensor
from trees import ADAMW, MODELS, STEPS, Moment, combined, differing, far, is_matrix, observe, torch_adamw

import fzero

pytestmark = pytest.mark.ranks

WORLDS = (1, 2, 3, 4)
STAGES = (0, 1, 2, 3)
RATE = 0.01
CLIP = 0.25
"""Below the norm of both models' gradients at the first steps, so that it bites."""

WHOLE, PIECES, SINGLE = 25 * 2**20, 700, 1
"""Bucket caps in bytes: all leaves of a kind in one bucket, a few of them, each in its own."""

F32, F64 = torch.float32, torch.float64
CASES: dict[tuple[str, torch.dtype], dict[str, Any]] = {
    ("plain", F32): {"bucket_bytes": WHOLE},
    ("plain, pieces", F32): {"bucket_bytes": PIECES},
    ("plain, single", F32): {"bucket_bytes": SINGLE},
    ("plain", F64): {"bucket_bytes": WHOLE},
    ("clip", F32): {"clip_norm": CLIP, "bucket_bytes": PIECES},
    ("micro", F32): {"accumulate": 4, "bucket_bytes": PIECES},
    ("micro, clip", F64): {"accumulate": 4, "clip_norm": CLIP, "bucket_bytes": WHOLE},
}


def cases(world: int, name: str) -> list[tuple[str, torch.dtype]]:
    """Return the cases of a world and a model.

    A bucket a leaf is thousands of messages: small model, W < 3. Above that float64 is held in one case.
    """
    left_out = [] if world < 3 and name == "tree" else [("plain, single", F32)]
    left_out += [] if world < 3 else [("plain", F64)]
    return [case for case in CASES if case not in left_out]


def marks(world: int, name: str) -> list[pytest.MarkDecorator]:
    """Mark what takes minutes: all tests that ask for the same results, or one of the others makes them."""
    return [pytest.mark.long] if (world, name) in ((4, "gpt"), (3, "tree")) else []


PAIRS = [pytest.param(world, name, marks=marks(world, name)) for world in WORLDS for name in MODELS]
RUNS = [
    pytest.param(world, name, case, marks=marks(world, name))
    for world in WORLDS
    for name in MODELS
    for case in cases(world, name)
]


def trajectory(name: str, dtype: torch.dtype, stage: int, rank: int, settings: dict[str, Any]) -> list[Moment]:
    """Train one model at one stage for ten steps."""
    model = MODELS[name](dtype)
    opt = fzero.adamw(RATE, decay_mask=is_matrix, **ADAMW)
    engine = fzero.Zero(model.loss_fn, opt, stage, blocks=model.blocks, **settings)
    # only rank 0's values count
    params = model.params if rank == 0 else other_values(model.params)
    state, seen = engine.init(params), []
    for step in range(10):
        state, moment = observe(engine, state, model.batch(rank, step))
        seen.append(moment)
    return seen


def other_values(params: Any) -> Any:
    """Return a tree of the same structure and ties, with values that would be seen."""
    new: dict[int, Tensor] = {}
    return optree.tree_map(lambda leaf: new.setdefault(leaf.data_ptr() or id(leaf), torch.full_like(leaf, 9.0)), params)


def against(ours: list[Moment], theirs: list[Moment], what: str, compare: Any) -> list[str]:
    """Return every leaf that differs, step by step."""
    found = []
    for step, (left, right) in enumerate(zip(ours, theirs, strict=False)):
        there = right.trees()
        for kind, leaves in left.trees().items():
            found += [f"{what}: step {step} {kind} {leaf}" for leaf in compare(leaves, there[kind])]
    return found


def job(rank: int, world: int, name: str) -> dict[str, Any]:
    """Run every case at every stage on this rank; report what differs between stages, and what stages 0 and 2 gave."""
    bits, pairs, kept = [], [], {}
    for case in cases(world, name):
        settings = CASES[case]
        runs = [trajectory(name, case[1], stage, rank, settings) for stage in STAGES]
        accumulates = "accumulate" in settings
        for stage in (1, 2, 3):
            first = stage - stage % 2 if accumulates else 0
            bits += against(runs[stage], runs[first], f"{case} stage {stage} != {first}", differing)
        if accumulates:
            steps = STEPS[case[1]]
            pairs += against(runs[2][:steps], runs[0][:steps], f"{case} stage 2 != 0", far)
        kept[case, 0], kept[case, 2] = runs[0], runs[2]
    plain = kept[("plain", F32), 0]
    for cut in ("plain, pieces", "plain, single"):
        if ((cut, F32), 0) in kept:
            bits += against(kept[(cut, F32), 0], plain, f"{cut} != plain", without_norm)
    # one rank's leaves are enough beside the fingerprints of the others'
    return {"bits": bits, "pairs": pairs, "print": fingerprint(kept), "kept": kept if rank == 0 else None}


def fingerprint(kept: dict[Any, list[Moment]]) -> str:
    """Return a hash of every value of every run."""
    digest = hashlib.sha256()
    for key, run in kept.items():
        digest.update(str(key).encode())
        for moment in run:
            for leaves in moment.trees().values():
                for leaf, value in sorted(leaves.items()):
                    digest.update(leaf.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def without_norm(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Compare bits, but leave the norm out: it is summed shard by shard and may depend on how buckets are cut."""
    return [leaf for leaf in differing(ours, theirs) if leaf != "norm"]


@functools.cache
def outcome(world: int, name: str) -> list[dict[str, Any]]:
    """Run once, and if that fails, fail every test that asks."""
    try:
        return ranks.run(job, world, name, limit=400.0)
    except ranks.RanksFailedError as error:
        return [{"error": str(error)}]


def results(world: int, name: str) -> list[dict[str, Any]]:
    found = outcome(world, name)
    assert "error" not in found[0], found[0]["error"]
    return found


@functools.cache
def oracle(world: int, name: str, dtype: torch.dtype, clip: float | None) -> list[Moment]:
    model = MODELS[name](dtype)

    def loss_of(params: Any, step: int) -> Tensor:
        return model.plain(params, combined([model.batch(rank, step) for rank in range(world)]))

    return list(torch_adamw(model.params, loss_of, STEPS[dtype], lr=RATE, clip=clip, decay_mask=is_matrix))


@pytest.mark.parametrize(("world", "name"), PAIRS)
def test_stages_and_bucket_caps_give_the_same_bits(world: int, name: str) -> None:
    """Ten steps: gradients, parameters, both moments, loss and norm; with four micro-batches 0 = 1 and 2 = 3."""
    for rank, result in enumerate(results(world, name)):
        assert not result["bits"], f"rank {rank}: {len(result['bits'])} differ, first {result['bits'][:5]}"


@pytest.mark.parametrize(("world", "name"), PAIRS)
def test_with_micro_batches_the_two_pairs_of_stages_agree(world: int, name: str) -> None:
    for result in results(world, name):
        assert not result["pairs"], f"{len(result['pairs'])} differ, first {result['pairs'][:5]}"


@pytest.mark.parametrize(("world", "name"), PAIRS[len(MODELS) :])
def test_all_ranks_hold_the_same_bits(world: int, name: str) -> None:
    assert len({result["print"] for result in results(world, name)}) == 1


@pytest.mark.parametrize(("world", "name", "case"), RUNS)
def test_equal_to_torch_adamw_on_the_combined_batch(world: int, name: str, case: tuple[str, torch.dtype]) -> None:
    """O1: one process, the ranks' batches concatenated, torch.optim.AdamW and clip_grad_norm_."""
    clip = CASES[case].get("clip_norm")
    theirs = oracle(world, name, case[1], clip)
    assert len(theirs) == STEPS[case[1]]
    assert clip is None or all(moment.norm > clip for moment in theirs[:3]), "the test must clip"
    for stage in (0, 2):
        ours = results(world, name)[0]["kept"][case, stage]
        assert len(ours) == 10
        found = against(ours[: len(theirs)], theirs, f"stage {stage}", far)
        assert not found, f"{len(found)} differ, first {found[:5]}"
