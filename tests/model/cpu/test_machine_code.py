"""What the micro-kernels compile to on CPUs that need not be at hand: the instructions, and sums that stay in
registers.
"""

from __future__ import annotations

import pytest

from ppserve.model.cpu.kernels.products import CHOICES
from ppserve.model.cpu.kernels.tile_code import MicroKernel
from tests.model.cpu.assembly import assembly, innermost_loop

CPUS = {"portable": "haswell", "avx2": "alderlake", "avx512": "skylake-avx512", "avx512_bf16": "cooperlake"}
INSTRUCTIONS = {
    "fma": "vfmadd",
    "bf16_fma": "vfmadd",
    "bf16_dot": "vdpbf16ps",
    "int8_pairs": "vpmaddwd",
    "int8_dot": "vpdpbusd",
}
CASES = [
    (choice.kind, "cascadelake" if "avx512vnni" in choice.needs else CPUS[choice.variant])
    for choice in CHOICES
    if choice.variant != "amx"
]


@pytest.mark.parametrize(("kind", "cpu"), CASES)
def test_the_innermost_loop_multiplies_in_registers(kind: MicroKernel, cpu: str) -> None:
    loop = innermost_loop(assembly(kind, cpu), INSTRUCTIONS[kind.operation])
    register = "%zmm" if kind.lanes == 16 else "%ymm"
    multiplied = [line for line in loop if INSTRUCTIONS[kind.operation] in line]
    assert len(multiplied) % (kind.rows[-1] * kind.panels * 16 // kind.lanes) == 0
    assert all(register in line for line in multiplied)
    assert not [line for line in loop if "(%rsp)" in line and "mm" in line], "a sum does not fit the registers"


def test_a_tile_that_is_too_large_is_found() -> None:
    """The control: more sums than registers."""
    loop = innermost_loop(assembly(MicroKernel("fma", 8, 1, (9,)), "haswell"), "vfmadd")
    assert [line for line in loop if "(%rsp)" in line and "mm" in line]


def test_other_architectures_get_their_own_vectors() -> None:
    kind = next(choice.kind for choice in CHOICES if (choice.precision, choice.variant) == ("float32", "portable"))
    loop = innermost_loop(assembly(kind, "neoverse-n1", "aarch64-unknown-linux-gnu"), "fmla")
    assert sum("fmla" in line for line in loop) % (4 * kind.rows[-1]) == 0
