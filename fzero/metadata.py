"""The index of a checkpoint as torch.distributed.checkpoint plans and pickles it, for torch's own tools."""

import pickle

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from fzero.manifest import Leaf, Manifest, Piece
from fzero.pieces import rectangles


def metadata(manifest: Manifest) -> bytes:
    """Return the content of ``.metadata``.

    Every piece is a `WriteItem` of type SHARD with the rectangle that it is of its leaf, and the global plan is the one
    that DCP makes of them. Names are those of the manifest; `planner_data` nests them as in ``{"params": {"w": ...}}``.
    """
    items, storage = [], {}
    for name, leaf in manifest.leaves.items():
        for piece in leaf.pieces:
            item = _item(name, leaf, piece)
            items.append(item)
            length = piece.head + piece.numel * _dtype(leaf).itemsize + piece.tail
            storage[item.index] = _StorageInfo(piece.file, piece.at, length)
    _, found = create_default_global_save_plan([SavePlan(items)])
    for name, leaf in manifest.leaves.items():
        if not leaf.pieces:  # a leaf without elements
            found.state_dict_metadata[name] = TensorStorageMetadata(_properties(leaf), torch.Size(leaf.shape), [])
    found.storage_data, found.storage_meta = storage, StorageMeta()
    found.planner_data = {name: leaf.path for name, leaf in manifest.leaves.items()}
    found.version = CURRENT_DCP_VERSION
    return pickle.dumps(found)


def _item(name: str, leaf: Leaf, piece: Piece) -> WriteItem:
    (box,) = rectangles(leaf.shape, piece.start, piece.start + piece.numel)
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk, _properties(leaf), torch.Size(leaf.shape))
    return WriteItem(MetadataIndex(name, box.offsets), WriteItemType.SHARD, tensor_data=data)


def _properties(leaf: Leaf) -> TensorProperties:
    return TensorProperties(_dtype(leaf))


def _dtype(leaf: Leaf) -> torch.dtype:
    return getattr(torch, leaf.dtype)  # type: ignore[no-any-return]
