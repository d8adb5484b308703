"""AMX's instructions, done by plain code: the tile code that uses them runs on any machine.

What stays untested without an AMX machine is that the instructions do what is written here.
"""
# mypy: ignore-errors

from __future__ import annotations

from dataclasses import replace

from llvmlite import ir
from numba.core import cgutils

from ppserve.model.cpu.kernels.amx_tile import AmxTile, TileUnit
from ppserve.model.cpu.kernels.operations import F32, I8, I16, I32, I64, OPERATIONS
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
        builder = self.builder
        with cgutils.for_range(builder, I64(16)) as row, cgutils.for_range(builder, I64(WORDS)) as output:
            with cgutils.for_range(builder, I64(WORDS)) as k:
                x = builder.load(self._word(rows, row.index, k.index))
                w = builder.load(self._word(weights, k.index, output.index))
                place = self._word(sums, row.index, output.index)
                builder.store(getattr(self, instruction)(builder.load(place), x, w), place)

    def tdpbssd(self, total, x, w):
        for shift in (0, 8, 16, 24):
            values = [self.builder.trunc(self.builder.lshr(word, I32(shift)), I8) for word in (x, w)]
            first, second = (self.builder.sext(value, I32) for value in values)
            total = self.builder.add(total, self.builder.mul(first, second))
        return total

    def tdpbf16ps(self, total, x, w):
        """In float32, but not in the instruction's order of sums."""
        total = self.builder.bitcast(total, F32)
        for shift in (0, 16):
            halves = [self.builder.trunc(self.builder.lshr(word, I32(shift)), I16) for word in (x, w)]
            first, second = (
                self.builder.bitcast(self.builder.shl(self.builder.zext(half, I32), I32(16)), F32)
                for half in halves
            )
            total = self.builder.fadd(total, self.builder.fmul(first, second))
        return self.builder.bitcast(total, I32)


class EmulatedTile(AmxTile):
    unit = EmulatedUnit


def emulated(kind: MicroKernel) -> MicroKernel:
    """The same micro-kernel without AMX."""
    name = f"emulated {kind.operation}"
    OPERATIONS[name], TILE_CODES[name] = OPERATIONS[kind.operation], EmulatedTile
    return replace(kind, operation=name)
