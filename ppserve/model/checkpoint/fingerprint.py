"""By what ranks tell that they found the same weights, without reading all of them.

Of each matrix three squares, of everything else all. A checkpoint that was trained further, even by adapters of
its queries or values alone, differs there; one in which only a few numbers of a matrix were changed may not. Equal
weights in another format, or of another name, are the same.
"""

from __future__ import annotations

import hashlib

import torch

from ppserve.model.checkpoint import WHOLE, Checkpoint, Part
from ppserve.model.checkpoint.names import tensor_shapes

_SIDE = 8


def fingerprint(checkpoint: Checkpoint) -> str:
    """Of all layers, whichever a rank is to compute. Reads little of a large model. Raises CheckpointError."""
    digest = hashlib.sha256()
    for name, shape in tensor_shapes(checkpoint.architecture).items():
        sample = checkpoint.tensor(name, _squares(shape) if len(shape) > 1 else WHOLE)
        digest.update(f"{name} {shape} {sample.dtype}".encode())
        digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _squares(shape: tuple[int, ...]) -> Part:
    """In the middle of each third of the rows: of queries, keys and values, where those are joined. Quick to read
    however the file has turned the matrix."""
    rows, columns = shape
    return Part(tuple(_around(rows * sixths // 6, rows) for sixths in (1, 3, 5)), _around(columns // 2, columns))


def _around(middle: int, size: int) -> slice:
    return slice(max(0, middle - _SIDE // 2), min(size, middle + _SIDE // 2))
