"""Which kernel variant a CPU gets, and what a person is told who forces another."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ppserve.errors import ConfigError
from ppserve.model.compiled.jit import bounded
from ppserve.model.cpu.kernels.products import CHOICES, micro_kernels, multiplies_bfloat16
from ppserve.model.cpu.kernels.variants import NEEDS, VARIABLE, available, choose, enabled, features

PIPED: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 100}
HASWELL = frozenset({"sse2", "avx2", "fma"})
SKYLAKE = HASWELL | NEEDS["avx512"]
CASCADE_LAKE = SKYLAKE | {"avx512vnni"}
COOPER_LAKE = CASCADE_LAKE | NEEDS["avx512_bf16"]
ZEN_5 = COOPER_LAKE | {"avxvnni", "sse4a"}
SAPPHIRE_RAPIDS = COOPER_LAKE | NEEDS["amx"] | {"avxvnni"}
ALDER_LAKE = HASWELL | {"avxvnni"}
NEON = frozenset({"neon"})


@pytest.mark.parametrize(
    ("found", "best"),
    [
        (NEON, "portable"),
        (HASWELL, "avx2"),
        (ALDER_LAKE, "avx2"),
        (SKYLAKE, "avx512"),
        (CASCADE_LAKE, "avx512"),
        (ZEN_5, "avx512_bf16"),
        (SAPPHIRE_RAPIDS, "amx"),
        (HASWELL | NEEDS["avx512_bf16"], "avx2"),  # none without those before it
    ],
)
def test_the_best_that_the_cpu_can_run(found: frozenset[str], best: str) -> None:
    assert choose({}, found) == best
    assert available(found) == tuple(NEEDS)[: tuple(NEEDS).index(best) + 1]
    assert choose({"PPSERVE_CPU_KERNELS": "portable"}, found) == "portable"


def unforced() -> dict[str, str]:
    """The environment without a variant or a CPU under which these tests may themselves run."""
    return {name: of for name, of in os.environ.items() if name != VARIABLE and not name.startswith("NUMBA_CPU_")}


@pytest.mark.slow
def test_numbas_settings_bound_the_variant() -> None:
    assert enabled("+avx2,-avx512f,+fma") == {"avx2", "fma"}
    assert available(SKYLAKE & enabled("")) == ("portable",)
    code = "from ppserve.model.cpu.kernels import variants; print(variants.in_use())"
    for name, value in (("NUMBA_CPU_NAME", "generic"), ("NUMBA_ENABLE_AVX", "0")):
        told = subprocess.run([sys.executable, "-c", code], env={**unforced(), name: value}, **PIPED)
        assert told.stdout == "portable\n"


def test_what_an_operator_tells_llvm_is_bounded_by_what_the_cpu_has() -> None:
    host = {"64bit": True, "sse2": True, "avx2": True, "avx512f": False}
    assert bounded("", host) == "+64bit,+sse2,-avx512f"
    told = bounded("+avx512f,,+avx2", host)
    assert enabled(told) == {"64bit", "sse2", "avx2"}
    assert bounded(told, host) == told, "a process passes its own on to its children"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sapphirerapids", "no-such-cpu"])
def test_kernels_run_whatever_cpu_numba_is_told(name: str, tmp_path: Path) -> None:
    """What uses what its CPU lacks is ended, and so is a process whose LLVM knows less than what all CPUs have."""
    if platform.machine() != "x86_64":
        pytest.skip("these are names of x86-64 CPUs")
    told = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    code = "from tests.model.cpu import test_activation as floats, test_thread_pool as atomics\n"
    code += "floats.test_what_is_not_finite_stays_so()\n"
    code += "atomics.test_threads_do_jobs_together_asleep_or_not(2)"
    ran = subprocess.run([sys.executable, "-c", code], env=unforced() | told, **PIPED)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sse9", "unknown kernel variant 'sse9' (known: portable, avx2, avx512, avx512_bf16, amx)"),
        ("amx", "this CPU cannot run 'amx' (it can: portable, avx2, avx512)"),
    ],
)
def test_a_variant_that_is_unknown_or_that_the_cpu_lacks_is_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        choose({"PPSERVE_CPU_KERNELS": name}, SKYLAKE)
    assert str(refused.value) == f"PPSERVE_CPU_KERNELS: {says}"


@pytest.mark.parametrize(
    ("precision", "variant", "found", "operation"),
    [
        ("float32", "amx", SAPPHIRE_RAPIDS, "fma"),
        ("bfloat16", "amx", SAPPHIRE_RAPIDS, "bf16_tiles"),
        ("bfloat16", "avx512_bf16", SAPPHIRE_RAPIDS, "bf16_dot"),
        ("bfloat16", "avx512", ZEN_5, "bf16_fma"),
        ("bfloat16", "avx2", HASWELL, "bf16_fma"),
        ("bfloat16", "portable", NEON, "bf16_fma"),
        ("int8", "amx", SAPPHIRE_RAPIDS, "int8_tiles"),
        ("int8", "avx512_bf16", ZEN_5, "int8_dot"),
        ("int8", "avx512", CASCADE_LAKE, "int8_dot"),
        ("int8", "avx512", SKYLAKE, "int8_pairs"),
        ("int8", "avx2", ALDER_LAKE, "int8_dot"),
        ("int8", "avx2", HASWELL, "int8_pairs"),
        ("int8", "portable", SAPPHIRE_RAPIDS, "int8_pairs"),
        ("int4", "amx", SAPPHIRE_RAPIDS, "int4_dot"),
        ("int4", "avx512", SKYLAKE, "int4_pairs"),
    ],
)
def test_micro_kernels_by_variant(precision: str, variant: str, found: frozenset[str], operation: str) -> None:
    assert micro_kernels(precision, variant, found)[0].operation == operation
    if precision == "bfloat16":  # which `--dtype auto` takes only where the kernels multiply it as such
        assert multiplies_bfloat16(variant, found) == (operation != "bf16_fma")


def test_products_of_one_tile_fetch_unless_the_cpu_is_better_at_it() -> None:
    assert all(kind.reads_alone == (kind.lanes == 16) for kind in micro_kernels("int8", "avx512", ZEN_5))
    assert not any(kind.reads_alone for kind in micro_kernels("int8", "amx", SAPPHIRE_RAPIDS))


def test_every_precision_runs_everywhere() -> None:
    for precision in {choice.precision for choice in CHOICES}:
        assert micro_kernels(precision, "portable", frozenset())
    assert choose({}, features()) in NEEDS
