"""Settings for which kernels are compiled: frozen records of Python that numba sees as types.

A kernel takes such a record as an argument, reads its fields as constants, and passes it on to intrinsics, which
emit code according to it. For each record there is machine code of its own.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments)

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial

import numba
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_getattr_generic
from numba.core.pythonapi import NativeValue
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, models, register_model, typeof_impl, unbox

from ppserve.model.compiled.together import TypedKernel


class KindType(types.Type):
    """numba's type of one record."""

    def __init__(self, kind: object) -> None:
        self.kind = kind
        super().__init__(repr(kind))


register_model(KindType)(models.OpaqueModel)


@unbox(KindType)
def _unbox(_type, _value, c):
    return NativeValue(c.context.get_dummy_value())


def setting(record: type) -> type:
    """Let kernels take instances of this dataclass and read its fields and properties."""
    typeof_impl.register(record)(lambda value, context: KindType(value))
    return record


@infer_getattr
class _Fields(AttributeTemplate):
    """A field's type. (An `overload_attribute` for each field would be a function to compile for each record.)"""

    key = KindType

    def generic_resolve(self, kind, name):
        return numba.typeof(getattr(kind.kind, name)) if hasattr(kind.kind, name) else None


@lower_getattr_generic(KindType)
def _read(context, builder, kind, _value, name):
    value = getattr(kind.kind, name)
    return context.get_constant_generic(builder, numba.typeof(value), value)


class ForSettings:
    """A kernel for these settings, compiled or loaded at its first call. Its further arguments are integers: the
    addresses of the kernels that it calls, then what it is called with. (numba would look at settings' types in
    Python, which takes longer than the call.)"""

    def __init__(
        self, function: Callable[..., None], *settings: object, calls: Sequence[ForSettings] = ()
    ) -> None:
        count = len(inspect.signature(function.py_func).parameters) - len(settings)
        self.kernel = TypedKernel(function, *map(numba.typeof, settings), *(types.int64,) * count)
        self._settings, self._calls = settings, calls
        self._call: Callable[..., None] | None = None

    def __call__(self, *numbers: int) -> None:
        if self._call is None:
            addresses = (each.kernel.address for each in self._calls)
            self._call = partial(self.kernel.entry, *self._settings, *addresses)
        self._call(*numbers)

    @property
    def kernels(self) -> list[TypedKernel]:
        """All that must be compiled for a call, without repetitions: what is called, then the kernel."""
        called = (kernel for each in self._calls for kernel in each.kernels)
        return list(dict.fromkeys([*called, self.kernel]))


@intrinsic
def call_kernel(typing, address, numbers):
    """Call a kernel for one setting, which is at this `TypedKernel.address`, with a tuple of integers."""

    def generate(context, builder, signature, arguments):
        kinds = types.voidptr, *signature.args[1].types
        kind = context.call_conv.get_function_type(types.none, kinds)
        callee = builder.inttoptr(arguments[0], kind.as_pointer())
        setting = context.get_constant_null(types.voidptr)
        given = [setting, *cgutils.unpack_tuple(builder, arguments[1])]
        context.call_conv.call_function(builder, callee, types.none, kinds, given)
        return context.get_dummy_value()

    return types.none(types.int64, types.UniTuple(types.int64, len(numbers))), generate
