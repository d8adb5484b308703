"""Memory of which each piece ends, or begins, at a page that may not be touched; and who touched one.

What lies between the other end and its page is filled with bytes that make a NaN of every number.
"""

from __future__ import annotations

import ctypes
import linecache
import mmap
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from ppserve.model.compiled.lanes import load_int, store_int
from ppserve.model.cpu.kernels import memory

_PAGE = mmap.PAGESIZE
_JUNK = 0xFF
_PROT_NONE = 0
_LOG_BYTES = 1 << 20
_FAULT, _SEED, _LENGTH, _TEXT = 0, 1, 2, 64
_SIGSEGV, _SA_SIGINFO, _SA_RESETHAND = 11, 4, 0x80000000
_OF_PRODUCT = f"{Path(memory.__file__).parents[3]}/"
_C = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Fault:
    """seed: of the shape. buffer: whose forbidden page was touched. beyond: bytes from its nearer end."""

    seed: int
    buffer: str
    beyond: int

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.beyond} bytes outside of {self.buffer}"


@dataclass(frozen=True)
class Withheld:
    """So many bytes of a buffer's end or beginning lie in a forbidden page, as if it had been sized too small."""

    buffer: str = ""
    at_end: bool = True
    num_bytes: int = 8


NOTHING = Withheld()


class Log:
    """Which seed is tried, which pieces of memory there are, and the address of a fault: in memory that a process
    shares with those that it forks. Threads of one process may ask for memory at once."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._memory = mmap.mmap(-1, _LOG_BYTES)
        self._numbers = np.frombuffer(self._memory, np.int64, 3)
        self._mapped: dict[int, list[NDArray[np.uint8]]] = {}
        self._taken: dict[int, int] = {}

    def begin(self, seed: int) -> None:
        """Note that this seed is tried from now on. No memory of the one before is in use any more."""
        self._numbers[:] = 0, seed, 0
        self._taken = {}

    def mapped(self, size: int) -> NDArray[np.uint8]:
        """So many bytes between two forbidden pages. They are mapped once, and taken again for each seed."""
        with self._asking:
            return self._next_mapped(size)

    def _next_mapped(self, size: int) -> NDArray[np.uint8]:
        known, taken = self._mapped.setdefault(size, []), self._taken.get(size, 0)
        self._taken[size] = taken + 1
        if taken == len(known):
            memory = mmap.mmap(-1, size + 2 * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            known.append(np.frombuffer(memory, np.uint8))
            for page in (0, _PAGE + size):
                at = ctypes.c_void_p(known[-1].ctypes.data + page)
                assert _C.mprotect(at, ctypes.c_size_t(_PAGE), _PROT_NONE) == 0
        return known[taken]

    @property
    def seed(self) -> int:
        return int(self._numbers[_SEED])

    def note(self, first: int, begin: int, end: int, last: int, name: str) -> None:
        """A piece: `begin` to `end` may be touched; the pages around it begin at `first` and end at `last`."""
        line = f"{first} {begin} {end} {last} {name}\n".encode()
        with self._asking:
            at = _TEXT + int(self._numbers[_LENGTH])
            self._memory[at : at + len(line)] = line
            self._numbers[_LENGTH] += len(line)

    def names(self) -> list[str]:
        return [name for *_, name in self._pieces()]

    def fault(self) -> Fault | None:
        """None where the fault was in no page of these."""
        at = int(self._numbers[_FAULT])
        for first, begin, end, last, name in reversed(self._pieces()):
            if first <= at < last:
                return Fault(self.seed, name, at - end + 1 if at >= end else begin - at)
        return None

    def _pieces(self) -> list[tuple[int, int, int, int, str]]:
        text = self._memory[_TEXT : _TEXT + int(self._numbers[_LENGTH])].decode()
        lines = (line.split(" ", 4) for line in text.splitlines())
        return [(int(a), int(b), int(c), int(d), name) for a, b, c, d, name in lines]

    def keep_faults(self) -> None:
        """The next fault in this process is noted before it ends the process."""
        place = self._numbers.ctypes.data

        @numba.cfunc("void(int32, intp, intp)")
        def note(_signal, information, _context):  # type: ignore[no-untyped-def]
            store_int(place, _FAULT, load_int(information, 2))

        action = _Action(note.address, (ctypes.c_byte * 128)(), _SA_SIGINFO | _SA_RESETHAND, None)
        assert _C.sigaction(_SIGSEGV, ctypes.byref(action), None) == 0
        self._kept = note


class _Action(ctypes.Structure):
    """`struct sigaction` of Linux's C libraries."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class Guarded(memory.Memory):
    """guards_end: whether pieces end at a forbidden page; else they begin behind one."""

    region_bytes = 0

    def __init__(self, log: Log, guards_end: bool, withheld: Withheld = NOTHING) -> None:
        self._log, self._guards_end, self._withheld = log, guards_end, withheld

    def lines(self, num_bytes: int) -> NDArray[np.uint8]:
        return self.piece(num_bytes, _caller())

    pages = lines

    def piece(self, num_bytes: int, name: str) -> NDArray[np.uint8]:
        """Zeros, on an address that is as round as their number."""
        size = -(-num_bytes // _PAGE) * _PAGE
        whole = self._log.mapped(size)
        first, last = whole.ctypes.data, _PAGE + size
        is_meant = (self._withheld.buffer, self._withheld.at_end) == (name, self._guards_end)
        withheld = self._withheld.num_bytes if is_meant else 0
        begin = last - num_bytes + withheld if self._guards_end else _PAGE - withheld
        end = begin + num_bytes
        whole[_PAGE:last] = 0
        whole[_PAGE:begin] = whole[end:last] = _JUNK
        self._log.note(first, first + max(begin, _PAGE), first + min(end, last), first + len(whole), name)
        return whole[begin:end]

    def copied(self, array: NDArray[Any], name: str) -> NDArray[Any]:
        """Copy the numbers into a piece."""
        held = self.piece(array.nbytes, name).view(array.dtype)
        held[:] = array.reshape(-1)
        return held.reshape(array.shape)


class GuardedTensors(TorchFunctionMode):
    """Each tensor that torch makes lies in a piece."""

    def __init__(self, by: Guarded) -> None:
        super().__init__()
        self._by = by

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if type(result) is not torch.Tensor or function is torch.from_numpy or not result.numel():
            return result
        storage = result.untyped_storage()
        if storage.nbytes() != result.nbytes or storage.data_ptr() in _storages([*args, *(kwargs or {}).values()]):
            return result  # a view
        held = torch.from_numpy(self._by.piece(result.nbytes, f"torch.{function.__name__} {_caller()}"))
        return held.view(result.dtype).view(result.shape).copy_(result)


def _storages(values: list[Any]) -> set[int]:
    found = set()
    for value in values:
        if isinstance(value, (list, tuple)):
            found |= _storages([*value])
        elif isinstance(value, torch.Tensor):
            found.add(value.untyped_storage().data_ptr())
    return found


_names: dict[tuple[int, int], str] = {}


def _caller() -> str:
    """Where in the product memory is asked for; and by which name, of scratch memory."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        not frame.f_code.co_filename.startswith(_OF_PRODUCT) or frame.f_code.co_filename == memory.__file__
    ):
        frame = frame.f_back
    if frame is None:
        return "the harness"
    if frame.f_code.co_name == "_array":
        return f"scratch {frame.f_locals['name']}"
    key = id(frame.f_code), frame.f_lasti
    if key not in _names:
        line, _, begin, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        assert line is not None
        text = linecache.getline(frame.f_code.co_filename, line)
        _names[key] = f"{Path(frame.f_code.co_filename).name}:{line}:{begin} {text[begin:end]}"
    return _names[key]
