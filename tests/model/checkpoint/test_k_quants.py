"""Blocks of K-quants, made by hand: the gguf package has no quantizer for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from ppserve.model.checkpoint.gguf import Quantized

ONE, SCALES = np.float16(1).tobytes(), bytes([1, 2, 3, 4, 1, 1, 1, 1, 0x25, 0x26, 0x27, 0x28])
"""Scales 1 to 8 of eight groups, minima 1 of the first four and 2 of the others, packed as ggml does."""
QS = b"\x33" * 128


@pytest.mark.parametrize(
    ("kind", "block", "groups"),
    [
        (Type.Q2_K, bytes(range(16, 32)) + b"\xff" * 64 + ONE + ONE, [3 * i - 1 for i in range(16)]),
        (Type.Q3_K, b"\xff" * 96 + bytes(range(0x80, 0x100, 17)) + b"\xaa" * 4 + ONE, [3 * i for i in range(16)]),
        (Type.IQ4_NL, (ONE + b"\x88" * 16) * 8, [1] * 8),
        (Type.IQ4_XS, ONE + b"\xaa\xaa\x10\x32\x54\x76" + b"\x88" * 128, list(range(8))),
        (Type.Q4_K, ONE + ONE + SCALES + QS, [3 * i - 1 - (i > 4) for i in range(1, 9)]),
        (Type.Q5_K, ONE + ONE + SCALES + b"\xff" * 32 + QS, [19 * i - 1 - (i > 4) for i in range(1, 9)]),
        (Type.Q6_K, b"\x11" * 128 + b"\xaa" * 64 + bytes(range(16)) + ONE, list(range(16))),
    ],
)
def test_blocks_of_k_quants(kind: Type, block: bytes, groups: list[int]) -> None:
    numbers = Quantized(np.frombuffer(block * 6, np.uint8).reshape(3, -1), kind)
    row = torch.tensor(groups, dtype=torch.float32).repeat_interleave(256 // len(groups)).repeat(2)
    assert torch.equal(numbers[1:3, 40:300], row[40:300].expand(2, -1))
