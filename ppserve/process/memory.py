"""Free memory of this process, given back to the system."""

from __future__ import annotations

import contextlib
import ctypes


def give_free_memory_back() -> None:
    """Give memory that is free back to the system, where the C library can be told to: glibc keeps it."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
