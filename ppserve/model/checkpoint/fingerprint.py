"""A hash by which ranks see that they opened the same weights, without reading all of them.

It covers three squares of each matrix and all of every vector. Weights that were trained further differ there,
even by adapters of queries or values alone. Weights of which a few numbers were changed may not. Equal weights in
another format have the same fingerprint.
"""

from __future__ import annotations

import hashlib

import torch

from ppserve.model.checkpoint import WHOLE, Checkpoint, TensorPart
from ppserve.model.checkpoint.names import tensor_shapes

_SIDE = 8


def fingerprint(checkpoint: Checkpoint) -> str:
    """Covers all layers, also those that other ranks compute. Raises CheckpointError."""
    digest = hashlib.sha256()
    for name, shape in tensor_shapes(checkpoint.architecture).items():
        sample = checkpoint.tensor(name, _squares(shape) if len(shape) > 1 else WHOLE)
        digest.update(f"{name} {shape} {sample.dtype}".encode())
        digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _squares(shape: tuple[int, ...]) -> TensorPart:
    """In the middle of each third of the rows: queries, keys and values, where these are joined. Squares are quick
    to read also from a transposed matrix."""
    rows, columns = shape
    thirds = tuple(_around(rows * sixths // 6, rows) for sixths in (1, 3, 5))
    return TensorPart(thirds, _around(columns // 2, columns))


def _around(middle: int, size: int) -> slice:
    return slice(max(0, middle - _SIDE // 2), min(size, middle + _SIDE // 2))
