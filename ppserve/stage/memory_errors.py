"""Errors of a device whose memory was too small, which no library has a type for."""

from __future__ import annotations


def lacks_memory(error: Exception) -> bool:
    """Whether a GPU's memory was too small: torch, cuBLAS and Triton share these words."""
    said = str(error)
    is_memory = "out of memory" in said or "ALLOC_FAILED" in said
    return is_memory and isinstance(error, RuntimeError)


def in_words(error: Exception) -> str:
    """Say the error, with what helps where a GPU's memory was too small."""
    said = str(error) or type(error).__name__
    if not lacks_memory(error):
        return said
    return f"{said}; less is taken with --kv-cache-memory, with a lower --max-num-seqs, or with --cuda-graphs off"
