"""AMX's instructions, and `vpdpbusd` beside them, done by plain code: tile code with them runs on any machine.

What stays untested without an AMX machine is that the instructions do what is written here. Nothing here may ask
LLVM for an instruction that this CPU lacks: LLVM ends the process then.
"""
# mypy: ignore-errors

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from llvmlite import ir
from numba.core import cgutils

from ppserve.model.compiled.llvm import call, constant
from ppserve.model.cpu.kernels.amx_tile import TileUnit
from ppserve.model.cpu.kernels.operations import F32, I8, I32, I64, OPERATIONS, Int8Tiles
from ppserve.model.cpu.kernels.products import TILE_CODES
from ppserve.model.cpu.kernels.tile_code import MicroKernel

WORDS, REGISTER_WORDS = 16, 256


class EmulatedUnit(TileUnit):
    """Registers are memory of the calling function."""

    def __init__(self, builder) -> None:
        super().__init__(builder)
        self.registers = cgutils.alloca_once(builder, ir.ArrayType(I32, 8 * REGISTER_WORDS))

    def configure(self) -> None:
        pass

    def release(self) -> None:
        pass

    def _word(self, register: int, row, word):
        index = self.builder.add(self.builder.mul(row, I64(WORDS)), word)
        index = self.builder.add(index, I64(register * REGISTER_WORDS))
        return self.builder.gep(self.registers, [I64(0), index])

    def _each(self, address, stride):
        """Row and word of every place of a register, and the place in memory that belongs to it."""
        with cgutils.for_range(self.builder, I64(16)) as row, cgutils.for_range(self.builder, I64(WORDS)) as word:
            offset = self.builder.add(self.builder.mul(row.index, stride), self.builder.mul(word.index, I64(4)))
            place = self.builder.inttoptr(self.builder.add(address, offset), I32.as_pointer())
            yield row.index, word.index, place

    def load(self, register: int, address, stride) -> None:
        for row, word, place in self._each(address, stride):
            self.builder.store(self.builder.load(place, align=4), self._word(register, row, word))

    def store(self, register: int, address, stride) -> None:
        for row, word, place in self._each(address, stride):
            self.builder.store(self.builder.load(self._word(register, row, word)), place, align=4)

    def multiply(self, instruction: str, sums: int, rows: int, weights: int) -> None:
        """Sum up each output as the instruction does: the first inputs of all words, the second and so on."""
        builder, is_integer = self.builder, instruction == "tdpbusd"
        kind, inputs = (I32, range(4)) if is_integer else (F32, range(2))
        with cgutils.for_range(builder, I64(16)) as row, cgutils.for_range(builder, I64(WORDS)) as output:
            parts = [cgutils.alloca_once_value(builder, kind(0)) for _ in inputs]
            for i in inputs:
                builder.store(kind(0), parts[i])
            with cgutils.for_range(builder, I64(WORDS)) as k:
                x = builder.load(self._word(rows, row.index, k.index))
                w = builder.load(self._word(weights, k.index, output.index))
                for i in inputs:
                    step = self._integers if is_integer else self._bfloat16s
                    builder.store(step(builder.load(parts[i]), x, w, i), parts[i])
            place, add = self._word(sums, row.index, output.index), builder.add if is_integer else builder.fadd
            total = builder.bitcast(builder.load(place), kind)
            added = add(total, reduce(add, map(builder.load, parts)))
            builder.store(builder.bitcast(added, I32), place)

    def _integers(self, total, x, w, i: int):
        x, w = (self.builder.trunc(self.builder.lshr(word, I32(8 * i)), I8) for word in (x, w))
        return self.builder.add(total, self.builder.mul(self.builder.zext(x, I32), self.builder.sext(w, I32)))

    def _bfloat16s(self, total, x, w, i: int):
        upper = ((self.builder.shl(word, I32(16)) if i == 0 else word) for word in (x, w))
        x, w = (self.builder.bitcast(self.builder.and_(word, I32(0xFFFF0000)), F32) for word in upper)
        return call(self.builder, "llvm.fma.f32", F32, x, w, total)


class EmulatedDot(Int8Tiles):
    """`vpdpbusd` of few rows: four products of an unsigned and a signed byte, added to each sum."""

    def step(self, builder, total, row, weights):
        for shift in (0, 8, 16, 24):
            x = builder.and_(builder.lshr(row, self._all(shift)), self._all(0xFF))
            w = builder.ashr(builder.shl(weights, self._all(24 - shift)), self._all(24))
            total = builder.add(total, builder.mul(x, w))
        return total

    def _all(self, value: int):
        return constant(I32, self.lanes, value)


def emulated(kind: MicroKernel) -> MicroKernel:
    """Return a micro-kernel that does the same by instructions that every CPU has."""
    name, code = f"emulated {kind.operation}", TILE_CODES[kind.operation]
    OPERATIONS[name] = EmulatedDot if kind.operation == "int8_tiles" else OPERATIONS[kind.operation]
    TILE_CODES[name] = type(name, (code,), {"unit": EmulatedUnit})
    return replace(kind, operation=name)
