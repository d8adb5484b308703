"""How much memory keys and values may take on a stage if the operator has not said it."""

from __future__ import annotations

_SHARE = 1 / 4
_MOST_BYTES = 2 << 30
# The rest is left for the computation of steps, and for other programs.
_SEQUENCE_SHARE = 7 / 8


def cpu_kv_bytes(left_bytes: int, sequence_bytes: int) -> int:
    """Return the bytes K that keys and values may take on a CPU stage. left_bytes: L, what the weights have left
    of the stage's part of the host's memory. sequence_bytes: S, those of a sequence of full length.

        K <= max(min(L / 4, 2 GiB), min(S, 7/8 L))

    A quarter leaves room for other programs. One sequence may take more, because memory is taken only as it is
    written."""
    usual_bytes = min(int(left_bytes * _SHARE), _MOST_BYTES)
    return max(usual_bytes, min(sequence_bytes, int(left_bytes * _SEQUENCE_SHARE)))


def sequence_blocks(context: int, block_size: int) -> int:
    """Return how many KV blocks a sequence of full length takes."""
    return -(-context // block_size)
