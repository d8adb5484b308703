"""Errors that say that memory was too small. Libraries have no type of their own for a GPU's memory."""

from __future__ import annotations


def lacks_memory(error: Exception) -> bool:
    """Return whether the host's memory was too small, or a GPU's, which torch, cuBLAS and Triton say in these
    words."""
    said = str(error)
    is_gpu = "out of memory" in said or "ALLOC_FAILED" in said
    return isinstance(error, MemoryError) or (is_gpu and isinstance(error, RuntimeError))


def in_words(error: Exception) -> str:
    """Return the error in words. If a GPU's memory was too small, they say what helps."""
    said = str(error) or type(error).__name__
    if not lacks_memory(error) or isinstance(error, MemoryError):
        return said
    return f"{said}; less is taken with --kv-cache-memory, with a lower --max-num-seqs, or with --cuda-graphs off"
