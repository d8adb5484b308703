"""What the micro-kernels compile to on CPUs that need not be at hand: the instructions, and sums that stay in
registers.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ppserve.model.cpu.kernels.products import CHOICES
from ppserve.model.cpu.kernels.tile_code import MicroKernel
from tests.model.cpu.compiling import CannotCompile, assembly_by_child

pytestmark = pytest.mark.slow

INSTRUCTIONS = {
    "fma": "vfmadd",
    "bf16_fma": "vfmadd",
    "bf16_dot": "vdpbf16ps",
    "int8_pairs": "vpmaddwd",
    "int8_dot": "vpdpbusd",
    "int4_pairs": "vpmaddwd",
    "int4_dot": "vpdpbusd",
    "bf16_tiles": "vfmadd",
    "int8_tiles": "vpdpbusd",
}
CPUS = {
    "portable": "haswell",
    "avx2": "alderlake",
    "avx512": "skylake-avx512",
    "avx512_bf16": "cooperlake",
    "amx": "sapphirerapids",
}
CASES = [
    (
        replace(of.kind, rows=tuple(rows for rows in of.kind.rows if rows < 16)),  # more are in tiles of AMX
        "cascadelake" if "avx512vnni" in of.needs else CPUS[of.variant],
    )
    for of in CHOICES
]


def innermost_loop(text: str, instruction: str) -> list[str]:
    """The lines of the block with most of these instructions."""
    blocks = re.split(r"\n(?=\.L[^:\s]*:)", text)
    return max(blocks, key=lambda block: block.count(instruction)).splitlines()


@pytest.mark.parametrize(("kind", "cpu"), CASES)
def test_the_innermost_loop_multiplies_in_registers(kind: MicroKernel, cpu: str) -> None:
    loop = innermost_loop(assembly_by_child(kind, cpu), INSTRUCTIONS[kind.operation])
    register = "%zmm" if kind.lanes == 16 else "%ymm"
    multiplied = [line for line in loop if INSTRUCTIONS[kind.operation] in line]
    assert len(multiplied) % (kind.rows[-1] * kind.panels * 16 // kind.lanes) == 0
    assert all(register in line for line in multiplied)
    kept_in_memory = [line for line in loop if "(%rsp)" in line and "mm" in line]
    if kind.has_groups:  # the sums within a group stay; some of those over groups wait in memory meanwhile
        assert len(kept_in_memory) <= 5 * kind.rows[-1] * kind.panels * 16 // kind.lanes
    else:
        assert not kept_in_memory, "a sum does not fit the registers"


def test_a_tile_that_is_too_large_is_found() -> None:
    """The control: more sums than registers."""
    loop = innermost_loop(assembly_by_child(MicroKernel("fma", 8, 1, (9,)), "haswell"), "vfmadd")
    assert [line for line in loop if "(%rsp)" in line and "mm" in line]


def test_what_llvm_cannot_compile_ends_a_child_and_no_test() -> None:
    """`vpdpbusd` of 512 bits, which a CPU of 2013 does not have."""
    kind = next(kind for kind, cpu in CASES if cpu == "cascadelake")
    with pytest.raises(CannotCompile, match=r"LLVM .* ended its process over MicroKernel\(.* for haswell"):
        assembly_by_child(kind, "haswell")
    assert "vpdpbusd" in assembly_by_child(kind, "cascadelake")


def test_other_architectures_get_their_own_vectors() -> None:
    kind = next(choice.kind for choice in CHOICES if (choice.precision, choice.variant) == ("float32", "portable"))
    loop = innermost_loop(assembly_by_child(kind, "neoverse-n1", "aarch64-unknown-linux-gnu"), "fmla")
    assert sum("fmla" in line for line in loop) % (4 * kind.rows[-1]) == 0


@pytest.mark.parametrize(("precision", "instruction"), [("bfloat16", "tdpbf16ps"), ("int8", "tdpbusd")])
def test_amx_has_its_instructions(precision: str, instruction: str) -> None:
    kind = next(choice.kind for choice in CHOICES if (choice.precision, choice.variant) == (precision, "amx"))
    text = assembly_by_child(kind, "sapphirerapids")
    loop = innermost_loop(text, instruction)
    assert sum(instruction in line for line in loop) == 4
    assert sum("tileloadd" in line for line in loop) == 4
    for name in ("ldtilecfg", "tilestored", "tilerelease"):
        assert name in text
