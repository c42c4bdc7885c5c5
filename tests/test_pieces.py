"""What a checkpoint is made of: rectangles, archives, extra, the manifest. One process, no engine."""

import io
import json
import math
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trees import same_bits

from fzero import archive, extra, manifest
from fzero.archive import BLOCK
from fzero.manifest import CheckpointError, Leaf, Manifest, Piece
from fzero.pieces import Entry, cut, rectangles

SHAPES = st.lists(st.sampled_from((1, 1, 2, 3, 5, 7)), max_size=5).map(tuple)


@given(SHAPES, st.data())
def test_a_flat_range_is_at_most_2n_minus_1_rectangles_that_cover_it_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    numbers = torch.arange(numel).view(shape)
    boxes = rectangles(shape, start, stop) if start < stop else []
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    seen: list[int] = []
    for box in boxes:
        inside = numbers[tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))]
        assert box.start == len(seen) + start
        assert inside.numel() == box.numel
        seen += inside.reshape(-1).tolist()
    assert seen == list(range(start, stop))


def test_a_range_beyond_a_gigabyte_is_cut_first() -> None:
    leaf = torch.empty(2**28 + 2**20, dtype=torch.float64, device="meta")
    boxes = [box for box, _ in cut(Entry(("w",), (2**28 + 2**20,), "float64", ((0, leaf),)))]
    assert [box.numel for box in boxes] == [2**27, 2**27, 2**20]
    assert [box.start for box in boxes] == [0, 2**27, 2**28]


DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (1031, 259)], ids=str)
def test_an_archive_is_what_torch_saves(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = (100 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    at = 1000
    written = archive.write(descriptor, at, shape, tensor.reshape(-1))
    os.close(descriptor)
    data = path.read_bytes()[at:]
    nbytes = tensor.numel() * tensor.element_size()
    assert len(data) == written.head + nbytes + written.tail
    assert written.head % archive.ALIGN == 0
    assert data[written.head : written.head + nbytes] == bytes(archive.memory(tensor.contiguous()))
    assert len(written.blocks) == -(-nbytes // BLOCK)
    with zipfile.ZipFile(io.BytesIO(data)) as zipped:
        assert zipped.testzip() is None  # its checksums are right
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert (loaded.dtype, loaded.shape, loaded.stride()) == (dtype, tensor.shape, tensor.stride())
    assert bytes(archive.memory(loaded)) == bytes(archive.memory(tensor.contiguous()))


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TENSORS = st.sampled_from((torch.tensor(1.5), torch.arange(3), torch.zeros(0, 2, dtype=torch.bool)))
EXTRAS = st.recursive(
    PLAIN | TENSORS,
    lambda below: (
        st.lists(below, max_size=3)
        | st.lists(below, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(("tensor", "tuple", "dict")), below, max_size=3)
    ),
    max_leaves=10,
)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and same_bits(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(*pair) for pair in zip(left, right, strict=True))
    return bool(left == right or (left != left and right != right))  # noqa: PLR0124  (NaN)


@given(EXTRAS)
def test_extra_comes_back_as_what_it_was(value: Any) -> None:
    found, tensors = extra.encode(value)
    assert same(extra.decode(json.loads(json.dumps(found)), tensors), value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2}]}, r"extra\['a'\]\[1\] must be JSON-like .* got set; convert it"),
        ({1: 2}, r"extra has the key 1 of type int; use strings"),
        ([object()], r"extra\[0\] must be JSON-like .* got object"),
        ([b"x"], r"extra\[0\] must be JSON-like .* got bytes"),
        ((torch.ones(1, device="meta"),), r"extra\[0\] must be a dense tensor with values"),
    ],
)
def test_other_extra_is_refused_by_place(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        extra.encode(value)


def index(folder: Path) -> Manifest:
    piece = Piece("rank-00000.01234567.distcp", 0, 6, 0, 384, 260, 7, (8,))
    (folder / piece.file).write_bytes(bytes(384 + 24 + 260))
    leaves = {"params.w": Leaf(("params", "w"), (2, 3), "float32", (piece,))}
    found = Manifest(3, 1, {piece.file: 384 + 24 + 260}, leaves, {"again": "w"}, ({"dict": {"epoch": 1}},))
    (folder / "manifest.json").write_text(found.text())
    return found


def test_the_manifest_comes_back(tmp_path: Path) -> None:
    assert index(tmp_path) == manifest.read_manifest(tmp_path)


def test_every_altered_or_missing_byte_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    index(tmp_path)
    path = tmp_path / "manifest.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        for broken in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
            path.write_bytes(broken)
            with pytest.raises(CheckpointError, match=r"manifest\.json"):
                manifest.read_manifest(tmp_path)


def test_a_missing_or_shortened_file_is_named(tmp_path: Path) -> None:
    name = next(iter(index(tmp_path).files))
    (tmp_path / name).write_bytes(bytes(384 + 24 + 259))
    with pytest.raises(CheckpointError, match=rf"{name}: was written with 668 bytes and has 667"):
        manifest.read_manifest(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name}: belongs to the checkpoint but is not there"):
        manifest.read_manifest(tmp_path)


def test_pieces_that_overlap_or_leave_a_gap_are_no_leaf() -> None:
    piece = Piece("f", 0, 3, 0, 0, 0, 0, ())
    for second, whole in ((3, True), (2, False), (4, False)):
        leaf = Leaf(("w",), (6,), "float32", (piece, piece._replace(start=second)))
        assert manifest.incomplete([("w", leaf)]) == ([] if whole else ["w"])
    assert manifest.incomplete([("w", Leaf(("w",), (0, 2), "float32", ()))]) == []


def test_latest_is_the_highest_complete_step(tmp_path: Path) -> None:
    import fzero

    assert fzero.latest(tmp_path / "nowhere") is None
    assert fzero.latest(tmp_path) is None
    for step in (9, 100, 99_999_999, 100_000_000, 200_000_000):
        (tmp_path / f"step-{step:08d}").mkdir()
    (tmp_path / "step-123").mkdir()  # not ours
    assert fzero.latest(tmp_path) is None
    for step in (9, 99_999_999, 100_000_000):
        index(tmp_path / f"step-{step:08d}")
    assert fzero.latest(tmp_path) == tmp_path / "step-100000000"
    (tmp_path / "step-300000000").write_text("a file")
    assert fzero.latest(str(tmp_path)) == tmp_path / "step-100000000"
