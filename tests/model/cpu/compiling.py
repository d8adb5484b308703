"""Compiles micro-kernels for CPUs that need not be here.

Where LLVM cannot compile something it ends its process, so `assembly_by_child` has a child process compile.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context

import pytest
from llvmlite import binding, ir

from ppserve.model.cpu.kernels.amx_tile import AmxTile
from ppserve.model.cpu.kernels.products import TILE_CODES
from ppserve.model.cpu.kernels.tile_code import MicroKernel, TileArguments

X86 = "x86_64-unknown-linux-gnu"

LONGEST_S = 60
"""Compiling one takes less than a second; the first also waits for the child's imports."""


class CannotCompile(Exception):
    """LLVM ended the child."""


def assembly_by_child(kind: MicroKernel, cpu: str, triple: str = X86) -> str:
    """What `assembly` returns. Raise CannotCompile; skip the test where this LLVM lacks the architecture."""
    try:
        return _child().submit(assembly, kind, cpu, triple).result(LONGEST_S)
    except LookupError as lacking:
        pytest.skip(str(lacking))
    except BrokenProcessPool:
        _child.cache_clear()
        raise CannotCompile(f"LLVM {version()} ended its process over {kind} for {cpu}") from None


def version() -> str:
    return ".".join(map(str, binding.llvm_version_info))


@cache
def _child() -> ProcessPoolExecutor:
    """One child for all, whose imports take longer than compiling."""
    return ProcessPoolExecutor(1, get_context("spawn"))


def assembly(kind: MicroKernel, cpu: str, triple: str = X86) -> str:
    """Return the code of the tile with the most rows, optimised as numba does."""
    module = ir.Module("tile")
    module.triple = triple
    number = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [number] * len(TileArguments._fields)), "tile")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    code = TILE_CODES[kind.operation](builder, kind, TileArguments(*function.args))
    uses_tiles = isinstance(code, AmxTile)
    if uses_tiles:
        code.unit(builder).configure()
    code.tile(kind.rows[-1])
    if uses_tiles:
        code.unit(builder).release()
    builder.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        target = binding.Target.from_triple(triple)
    except RuntimeError:
        raise LookupError(f"LLVM {version()} is built without {triple}") from None
    machine = target.create_target_machine(cpu=cpu, opt=3, reloc="pic", codemodel="small")
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))
