"""How much memory keys and values may take on a stage whose operator does not say."""

from __future__ import annotations

_SHARE = 1 / 4
_MOST_BYTES = 2 << 30
# The rest is for what steps compute with, and for other programs.
_SEQUENCE_SHARE = 7 / 8


def cpu_kv_bytes(left_bytes: int, sequence_bytes: int) -> int:
    """Return the bytes K that keys and values may take on a CPU stage. Weights have left it L bytes of its part of
    the host's memory, and a sequence of full length has S bytes:

        K <= max(min(L / 4, 2 GiB), min(S, 7/8 L))

    A quarter leaves other programs room for theirs. One sequence may take more, as its memory is taken only as far
    as it is written."""
    usual_bytes = min(int(left_bytes * _SHARE), _MOST_BYTES)
    return max(usual_bytes, min(sequence_bytes, int(left_bytes * _SEQUENCE_SHARE)))


def sequence_blocks(context: int, block_size: int) -> int:
    """The KV blocks of a sequence of full length."""
    return -(-context // block_size)
