"""Settings for which kernels are compiled: frozen records of Python that numba sees as types.

A kernel takes such a record as an argument, reads its fields as constants, and passes it on to intrinsics, which
emit code according to it. For each record there is machine code of its own.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial

import numba
from numba import types
from numba.core.pythonapi import NativeValue
from numba.extending import models, overload_attribute, register_model, typeof_impl, unbox


class KindType(types.Type):
    """numba's type of one record."""

    def __init__(self, kind: object) -> None:
        self.kind = kind
        super().__init__(repr(kind))


register_model(KindType)(models.OpaqueModel)


@unbox(KindType)
def _unbox(_type, _value, c):
    return NativeValue(c.context.get_dummy_value())


_readable: set[str] = set()


def setting(record: type) -> type:
    """Let kernels take instances of this dataclass, and read its fields and properties. Returns the class."""
    typeof_impl.register(record)(lambda value, context: KindType(value))
    properties = {name for name, value in vars(record).items() if isinstance(value, property)}
    for name in ({field.name for field in fields(record)} | properties) - _readable:
        _readable.add(name)
        _let_read(name)
    return record


def _let_read(name: str) -> None:
    @overload_attribute(KindType, name)
    def read(of):
        value = getattr(of.kind, name)
        return lambda of: value


class ForSettings:
    """A kernel for certain settings. Its other arguments are integers. It is compiled or loaded at the first call.
    Without this, numba would look up the settings' types in Python, which takes longer than the call."""

    def __init__(self, function: Callable[..., None], *settings: object) -> None:
        self._function, self._settings = function, settings
        self._call: Callable[..., None] | None = None

    def __call__(self, *numbers: int) -> None:
        if self._call is None:
            signature = *map(numba.typeof, self._settings), *(types.int64,) * len(numbers)
            self._function.compile(signature)
            self._call = partial(self._function.get_overload(signature), *self._settings)
        self._call(*numbers)
