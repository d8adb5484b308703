"""Errors of a memory that was too small. For a GPU's no library has a type."""

from __future__ import annotations


def lacks_memory(error: Exception) -> bool:
    """Whether the host's memory was too small, or a GPU's: torch, cuBLAS and Triton share these words."""
    said = str(error)
    is_gpu = "out of memory" in said or "ALLOC_FAILED" in said
    return isinstance(error, MemoryError) or (is_gpu and isinstance(error, RuntimeError))


def in_words(error: Exception) -> str:
    """Say the error, with what helps where a GPU's memory was too small."""
    said = str(error) or type(error).__name__
    if not lacks_memory(error) or isinstance(error, MemoryError):
        return said
    return f"{said}; less is taken with --kv-cache-memory, with a lower --max-num-seqs, or with --cuda-graphs off"
