from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from trees import specs

from fzero.layout import ALIGN, FIRST_BYTES, Bucket, Layout, LeafSpec, make_layout, pack, shard, split

RANKS = st.integers(1, 64)
CAPS = st.sampled_from((1, 64, 1000, 25 * 2**20))


def values(bucket: Bucket) -> list[Tensor]:
    """Return leaves of values that are all different from zero and from each other within a leaf."""
    return [
        torch.arange(1 + slot.leaf, 1 + slot.leaf + slot.numel, dtype=torch.float64).to(bucket.dtype).view(slot.shape)
        for slot in bucket.slots
    ]


def padded(leaf: LeafSpec) -> int:
    return -(-leaf.numel // ALIGN) * ALIGN * leaf.dtype.itemsize


@given(specs(), RANKS, CAPS)
def test_every_leaf_has_one_slot_in_a_bucket_of_its_kind(leaves: list[LeafSpec], ranks: int, cap: int) -> None:
    layout = make_layout(leaves, ranks, cap)
    slots = [(slot.leaf, bucket) for bucket in layout.buckets for slot in bucket.slots]
    assert sorted(place for place, _ in slots) == list(range(len(leaves)))
    for place, bucket in slots:
        leaf = leaves[place]
        assert (bucket.dtype, bucket.label, bucket.block) == (leaf.dtype, leaf.label, leaf.block)
    for bucket in layout.buckets:
        assert bucket.used == sum(leaves[slot.leaf].numel for slot in bucket.slots)
        assert all(
            (slot.numel, slot.shape) == (leaves[slot.leaf].numel, leaves[slot.leaf].shape) for slot in bucket.slots
        )


@given(specs(), RANKS, CAPS)
def test_offsets_are_aligned_and_lengths_divide_by_the_ranks(leaves: list[LeafSpec], ranks: int, cap: int) -> None:
    for bucket in make_layout(leaves, ranks, cap).buckets:
        assert bucket.length % ranks == 0
        assert bucket.length >= ranks, "no collective may see an empty message"
        end = 0
        for slot in bucket.slots:
            assert slot.offset % ALIGN == 0
            assert 0 <= slot.offset - end < ALIGN
            end = slot.offset + slot.numel
        assert end <= bucket.length < max(end, 1) + ranks


@given(specs(), RANKS, CAPS)
def test_buckets_keep_their_cap_and_the_order_of_leaves(leaves: list[LeafSpec], ranks: int, cap: int) -> None:
    layout = make_layout(leaves, ranks, cap)
    for bucket in layout.buckets:
        places = [slot.leaf for slot in bucket.slots]
        assert places == sorted(places)
        last = len(leaves) - 1 in places
        limit = min(cap, FIRST_BYTES) if last else cap
        assert len(places) == 1 or sum(padded(leaves[place]) for place in places) <= limit
    firsts = [bucket.slots[0].leaf for bucket in layout.buckets]
    assert firsts == sorted(firsts)


@given(specs(), RANKS, CAPS)
def test_every_element_is_owned_by_exactly_one_rank(leaves: list[LeafSpec], ranks: int, cap: int) -> None:
    """O2, on the plan: counted element by element, without the functions that pack."""
    layout = make_layout(leaves, ranks, cap)
    owners = [torch.zeros(leaf.numel, dtype=torch.int64) for leaf in leaves]
    for bucket in layout.buckets:
        for rank in range(ranks):
            pieces = layout.owned(bucket, rank)
            assert sum(length for _, _, length in pieces) <= layout.shard_length(bucket)
            for leaf, start, length in pieces:
                assert 0 <= start < start + length <= leaves[leaf].numel
                owners[leaf][start : start + length] += 1
    assert all(bool((owner == 1).all()) for owner in owners)


@given(specs(), RANKS, CAPS)
def test_what_a_rank_owns_is_what_its_shard_holds(leaves: list[LeafSpec], ranks: int, cap: int) -> None:
    layout = make_layout(leaves, ranks, cap)
    for bucket in layout.buckets:
        given_leaves = values(bucket)
        by_leaf = {slot.leaf: leaf.flatten() for slot, leaf in zip(bucket.slots, given_leaves, strict=True)}
        flat = pack(bucket, given_leaves)
        for rank in range(ranks):
            mine = shard(flat, ranks, rank)
            assert mine.shape == (layout.shard_length(bucket),)
            pieces = [by_leaf[leaf][start : start + length] for leaf, start, length in layout.owned(bucket, rank)]
            assert torch.equal(mine[mine != 0], torch.cat([mine[:0], *pieces]))


@given(specs(), RANKS, CAPS)
def test_split_undoes_pack_and_padding_is_zero(leaves: list[LeafSpec], ranks: int, cap: int) -> None:
    for bucket in make_layout(leaves, ranks, cap).buckets:
        given_leaves = values(bucket)
        flat = pack(bucket, given_leaves)
        assert flat.shape == (bucket.length,)
        assert flat.dtype == bucket.dtype
        back = split(bucket, flat)
        assert all(torch.equal(ours, leaf) for ours, leaf in zip(back, given_leaves, strict=True))
        assert all(leaf.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for leaf in back)
        assert int((flat != 0).sum()) == bucket.used
        together = torch.cat([shard(flat, ranks, rank) for rank in range(ranks)])
        assert torch.equal(together, flat)
        assert torch.equal(pack(bucket, back), flat)


@given(specs(), RANKS, CAPS)
def test_the_gradient_of_split_is_packed_with_zero_padding(leaves: list[LeafSpec], ranks: int, cap: int) -> None:
    for bucket in make_layout(leaves, ranks, cap).buckets:
        wanted = values(bucket)
        flat = torch.zeros(bucket.length, dtype=bucket.dtype, requires_grad=True)
        (gradient,) = torch.autograd.grad(split(bucket, flat), flat, wanted)
        assert torch.equal(gradient, pack(bucket, wanted))


def test_leaves_are_packed_by_logical_order_whatever_their_strides() -> None:
    """B05: channels_last, transposed and expanded leaves."""
    leaves = [
        torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last),
        torch.arange(12.0).view(4, 3).T,
        torch.tensor(5.0).expand(3, 3),
        torch.arange(20.0)[::2],
    ]
    (bucket,) = make_layout([LeafSpec(tuple(leaf.shape), leaf.dtype) for leaf in leaves], 3).buckets
    back = split(bucket, pack(bucket, leaves))
    assert [leaf.tolist() for leaf in back] == [leaf.tolist() for leaf in leaves]
    assert all(leaf.is_contiguous() for leaf in back)


@pytest.mark.parametrize(("ranks", "length", "padding"), [(2, 1073741827, 1), (3, 715827885, 2)])
def test_a_leaf_above_2_to_31_elements_is_planned_exactly(ranks: int, length: int, padding: int) -> None:
    """B06: meta tensors only."""
    leaf = torch.empty(2147483653, device="meta")
    layout = make_layout([LeafSpec(tuple(leaf.shape), leaf.dtype)], ranks)
    (bucket,) = layout.buckets
    assert layout.shard_length(bucket) == length
    assert bucket.length - bucket.used == padding
    assert ranks * length == 2147483653 + padding
    pieces = [piece for rank in range(ranks) for piece in layout.owned(bucket, rank)]
    assert pieces == [(0, rank * length, min(length, 2147483653 - rank * length)) for rank in range(ranks)]
    flat = torch.empty(bucket.length, device="meta")
    assert split(bucket, flat)[0].shape == leaf.shape
    assert shard(flat, ranks, ranks - 1).shape == (length,)
    assert shard(flat, ranks, ranks - 1).storage_offset() == (ranks - 1) * length


def test_offsets_above_2_to_31_are_exact() -> None:
    """B06: three leaves of 2^30 + 3 elements in one bucket."""
    size = 2**30 + 3
    small = LeafSpec((5,), torch.float32)  # the bucket whose gradient is complete first is small; this fills it
    layout = make_layout([*[LeafSpec((size,), torch.float32)] * 3, small], 2, 2**40)
    (bucket, last) = layout.buckets
    assert [slot.leaf for slot in last.slots] == [3]
    offsets = [0, 2**30 + 64, 2**31 + 128]
    assert [slot.offset for slot in bucket.slots] == offsets
    assert all(type(slot.offset) is int for slot in bucket.slots)
    assert bucket.length == 2**31 + 128 + size + 1
    views = split(bucket, torch.empty(bucket.length, device="meta"))
    assert [view.storage_offset() for view in views] == offsets
    mine = bucket.length // 2 - offsets[1]
    assert pieces_of(layout, bucket) == [[(0, 0, size), (1, 0, mine)], [(1, mine, size - mine), (2, 0, size)]]


def pieces_of(layout: Layout, bucket: Bucket) -> list[list[tuple[int, int, int]]]:
    return [layout.owned(bucket, rank) for rank in range(layout.ranks)]


def test_shards_balance_to_the_element() -> None:
    """B01: (3,), (1,), (2, 1000): no rank holds more than its part of the flat buffer."""
    leaves = [LeafSpec((3,), torch.float32), LeafSpec((1,), torch.float32), LeafSpec((2, 1000), torch.float32)]
    for ranks in (4, 8):
        (bucket,) = make_layout(leaves, ranks).buckets
        owned = [sum(length for _, _, length in part) for part in pieces_of(make_layout(leaves, ranks), bucket)]
        assert sum(owned) == 2004
        # two gaps of up to 63 elements in front of aligned leaves, and the end
        assert max(owned) <= -(-(2004 + 2 * (ALIGN - 1)) // ranks)


def test_the_first_bucket_to_be_complete_is_small() -> None:
    leaf = LeafSpec((2**16,), torch.float32)
    sizes = [bucket.used * 4 for bucket in make_layout([leaf] * 100, 2, 2**22).buckets]
    assert sizes[-1] == FIRST_BYTES
    assert all(size == 2**22 for size in sizes[1:-1])
    assert sizes[0] <= 2**22
    assert all(left >= right for left, right in pairwise(sizes[1:]))


def test_a_world_or_a_cap_below_one_is_refused() -> None:
    for ranks, cap in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(ValueError, match="make_layout"):
            make_layout([], ranks, cap)


def test_an_empty_tree_has_no_buckets() -> None:
    assert make_layout([], 3).buckets == ()


def test_a_bucket_of_zero_size_leaves_has_one_element_a_rank() -> None:
    (bucket,) = make_layout([LeafSpec((0, 4), torch.float32), LeafSpec((2, 0), torch.float32)], 3).buckets
    assert (bucket.length, bucket.used) == (3, 0)
    back = split(bucket, pack(bucket, [torch.empty(0, 4), torch.empty(2, 0)]))
    assert [leaf.shape for leaf in back] == [(0, 4), (2, 0)]
