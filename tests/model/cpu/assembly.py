"""The machine code of a tile for a CPU that need not be at hand."""

from __future__ import annotations

import re

from llvmlite import binding, ir

from ppserve.model.cpu.kernels.amx_tile import AmxTile
from ppserve.model.cpu.kernels.products import TILE_CODES
from ppserve.model.cpu.kernels.tile_code import MicroKernel, TileArguments

X86 = "x86_64-unknown-linux-gnu"


def assembly(kind: MicroKernel, cpu: str, triple: str = X86) -> str:
    """Of the tile with the most rows, optimised as numba does."""
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
    target = binding.Target.from_triple(triple)
    machine = target.create_target_machine(cpu=cpu, opt=3, reloc="pic", codemodel="small")
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))


def innermost_loop(text: str, instruction: str) -> list[str]:
    """The lines of the block with most of these instructions."""
    blocks = re.split(r"\n(?=\.L[^:\s]*:)", text)
    return max(blocks, key=lambda block: block.count(instruction)).splitlines()
