"""Which device a stage gets, how much of its memory, and what a container lets it use."""

from __future__ import annotations

import math
import os
import platform
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ppserve import Pipeline
from ppserve.config import DeviceSettings, ServeConfig
from ppserve.core.architecture import StageLayout
from ppserve.core.kv_memory import cpu_kv_bytes, sequence_blocks
from ppserve.errors import ConfigError
from ppserve.model.cpu import kv_cache
from ppserve.model.cpu.kernels import variants
from ppserve.model.cuda.backend import DeviceOptions
from ppserve.process.environment import RankEnvironment
from ppserve.process.limits import available_bytes, available_cores, available_tasks
from ppserve.stage.device import DeviceSetup, gpu_share
from ppserve.stage.device_choice import (
    choose,
    devices_here,
)
from tests.architectures import llama

GIB, MIB = 1 << 30, 1 << 20
CPU = torch.device("cpu")


def asking(*devices: str) -> ServeConfig:
    return replace(ServeConfig(), device=DeviceSettings(devices=devices or None))


@pytest.mark.parametrize(
    ("free", "own", "stages", "share"),
    [
        (70, 10, 1, 70),
        (1, 0, 1, 1),
        # Two stages with weights of 10: the first does not take what the second needs for its weights.
        *((70, 10, 2, 30), (60, 10, 2, 30)),
        # Half of the GPU is another program's. All stages have as many blocks as the one with least room.
        *((30, 10, 2, 15), (20, 10, 2, 10)),
        (40, 50, 2, 0),
    ],
)
def test_stages_that_share_a_gpu_share_its_memory(free: int, own: int, stages: int, share: int) -> None:
    assert gpu_share(free * GIB, 80 * GIB, own * GIB, stages) == share * GIB


class Gpu:
    """A GPU of 80 GiB: what torch keeps for no tensor, the driver takes for used until torch gives it back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, kept: int = 0) -> None:
        self.free, self.kept = free, kept
        monkeypatch.setattr(torch.cuda, "empty_cache", self.give_back)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((self.free - self.kept) * GIB, 80 * GIB))

    def give_back(self) -> None:
        self.kept = 0


def test_what_a_gpu_has_left_for_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, rows, vocabulary = torch.device("cuda", 0), 512, 50257
    Gpu(monkeypatch, free=70, kept=5)
    assert DeviceSetup(gpu, "bfloat16", 1).kv_budget_bytes(10 * GIB, 0, GIB) == int(70 * GIB * 0.85)
    Gpu(monkeypatch, free=60)
    shared = DeviceSetup(gpu, "bfloat16", 2, stages_on_gpu=2)
    assert shared.kv_budget_bytes(10 * GIB, 0, GIB) == int(30 * GIB * 0.85)
    draws = DeviceSetup(gpu, "bfloat16", 1, options=DeviceOptions(max_rows=rows))
    logits_bytes = draws.options.logits_bytes(vocabulary)
    assert draws.kv_budget_bytes(10 * GIB, vocabulary, GIB) == int((60 * GIB - logits_bytes) * 0.85)
    assert DeviceOptions(max_rows=4).logits_bytes(vocabulary) == logits_bytes // 2, "the self-test reads 256 rows"


def test_stages_of_one_host_share_its_memory() -> None:
    """Each of a thousand has a thousandth. Others may take or free some meanwhile, but hardly half of all."""
    bytes_now, count = available_bytes(), 1000
    compute = DeviceSetup(CPU, "float32", stages_here=count)
    for sequence_bytes in (0, GIB):
        kv_bytes = count * cpu_kv_bytes(bytes_now // count, sequence_bytes)
        assert kv_bytes / 2 <= count * compute.kv_budget_bytes(0, 0, sequence_bytes) <= 2 * kv_bytes


def test_only_fixed_tiles_make_a_gpu_deterministic() -> None:
    """torch's products are tried with few of the numbers of rows that a step may have."""
    gpu = torch.device("cuda", 0)
    assert "--batch-invariant" in DeviceSetup(gpu, "bfloat16", 1).untestable_reason
    assert DeviceSetup(gpu, "bfloat16", 1, options=DeviceOptions(batch_invariant=True)).untestable_reason is None
    assert DeviceSetup(CPU, "float32", 1, reference=True).untestable_reason is None


OLD, NEW = (7, 5), (8, 0)


@pytest.mark.parametrize(
    ("capability", "stored", "asked", "dtype"),
    [
        (NEW, "float32", "auto", "bfloat16"),
        (NEW, "float16", "auto", "float16"),
        (NEW, "bfloat16", "auto", "bfloat16"),
        (OLD, "float32", "auto", "float16"),
        (OLD, "bfloat16", "auto", "float16"),
        (OLD, "float32", "bfloat16", "bfloat16"),
        (OLD, "float16", "float32", "float32"),
    ],
)
def test_a_gpu_without_bfloat16_gets_float16(
    capability: tuple[int, int], stored: str, asked: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = ServeConfig()
    config = replace(config, model=replace(config.model, dtype=asked))
    compute = choose(config, RankEnvironment(0, 1, 0, 1), stored)
    assert (compute.device, compute.dtype) == (torch.device("cuda", 0), dtype)


def test_int8_is_refused_by_name_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: NEW)
    config = ServeConfig()
    weights = replace(config, model=replace(config.model, quantization="int8"))
    keys = replace(config, cache=replace(config.cache, kv_dtype="int8"))
    for asked, flag in ((weights, "--quantization"), (keys, "--kv-dtype")):
        with pytest.raises(ConfigError, match=f"{flag}: int8 needs a CPU"):
            choose(asked, RankEnvironment(0, 1, 0, 1), "float32")


@pytest.mark.parametrize("variant", ["avx2", "avx512_bf16"])
def test_int8_means_float32_for_the_rest_on_every_cpu(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if the CPU multiplies bfloat16 and the checkpoint holds it: answers do not differ between
    CPUs."""
    if variant not in variants.available(variants.features()):
        pytest.skip(f"this CPU has no {variant}")
    monkeypatch.setenv(variants.VARIABLE, variant)
    variants.in_use.cache_clear()
    config, place = replace(ServeConfig(), device=DeviceSettings(devices=("cpu",))), RankEnvironment(0, 1, 0, 1)
    computes = [
        choose(replace(config, model=replace(config.model, quantization=weights, dtype=asked)), place, "bfloat16")
        for weights, asked in (("int8", "auto"), ("int8", "bfloat16"), ("none", "auto"))
    ]
    variants.in_use.cache_clear()
    by_itself = "bfloat16" if variant == "avx512_bf16" else "float32"
    assert [compute.dtype for compute in computes] == ["float32", "bfloat16", by_itself]
    assert computes[0].kv_dtype == "bfloat16"


def test_a_files_own_four_bits_are_served_on_cpus_unless_another_type_is_asked_for() -> None:
    config, place = replace(ServeConfig(), device=DeviceSettings(devices=("cpu",))), RankEnvironment(0, 1, 0, 1)

    def chosen(stored: str, **asked: str) -> str:
        model = replace(config.model, **asked)
        return choose(replace(config, model=model), place, "float32", stored).quantization

    assert (chosen("int4"), chosen("none")) == ("int4", "none")
    assert chosen("int4", dtype="float32") == "none"
    assert chosen("int4", quantization="none") == "none"
    assert chosen("int4", quantization="int8") == "int8"


def test_devices_are_those_that_were_asked_for() -> None:
    assert devices_here(asking("cpu", "cpu:0"), 2) == (CPU, CPU)
    with pytest.raises(ConfigError, match="1 devices for 2 stages"):
        devices_here(asking("cpu"), 2)
    with pytest.raises(ConfigError, match="'gpu' is not a device such as"):
        devices_here(asking("gpu"), 1)
    absent = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ConfigError, match=f"'{absent}' is not here"):
        devices_here(asking(absent), 1)


def test_a_pipeline_has_a_stage_for_each_device() -> None:
    with Pipeline("tiny", devices=["cpu", "cpu"], dtype="float32", threads=1) as pipeline:
        name = f"cpu ({platform.machine()}, {variants.in_use()}, 1 thread)"
        assert [stage.device for stage in pipeline.topology().stages] == [name, name]
        assert pipeline.complete("Once upon a time", max_tokens=3, temperature=0).text
    with pytest.raises(ConfigError, match="2 devices for 3 stages"):
        Pipeline("tiny", 3, devices=["cpu", "cpu"])


@pytest.mark.parametrize(("reference", "expected"), [(False, 1), (True, 2)])
def test_torch_has_threads_only_where_it_computes(reference: bool, expected: int) -> None:
    """Its threads would spin after each of its operators, on the cores of our kernels."""
    num_threads = torch.get_num_threads()
    try:
        DeviceSetup(torch.device("cpu"), "float32", 1, threads=2, reference=reference).bind_this_thread()
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize(
    ("threads", "stages", "warns"),
    [(9999, 1, True), (None, 9999, False), (1, 9999, False), (2, 9999, True)],
)
def test_more_threads_than_cores_are_warned_of(
    threads: int | None, stages: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Stages without a core of their own have a thread each, whatever is asked for."""
    config = ServeConfig()
    config = replace(config, pipeline=replace(config.pipeline, threads=threads))
    assert choose(config, RankEnvironment(0, stages, 0, stages), "float32").threads == (threads or 1)
    assert (f"--threads {threads}" in caplog.text) == warns


# ---- a container's limits, in files as Linux writes them ----------------------------------------------------


def tree(root: Path, **files: str) -> Path:
    for name, text in ({"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 << 20} kB\n"} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("limit", "limit_within", "cores"),
    [
        ("max", "max", 16),
        ("350000", "max", 3),
        ("20000", "max", 1),
        ("6400000", "max", 16),
        ("200000", "800000", 2),
    ],
)
def test_cores_are_those_of_the_container(
    tmp_path: Path, limit: str, limit_within: str, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The narrowest of a group and those around it counts."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    assert available_cores(tree(tmp_path / "without")) == 16
    limits = {"sys/fs/cgroup/cpu.max": f"{limit} 100000\n", "sys/fs/cgroup/a/cpu.max": f"{limit_within} 100000\n"}
    assert available_cores(tree(tmp_path / "within", **{"proc/self/cgroup": "0::/a\n"}, **limits)) == cores
    assert available_cores(tree(tmp_path / "around", **{"proc/self/cgroup": "0::/\n"}, **limits)) >= cores
    of_version_1 = {"proc/self/cgroup": "7:name=systemd:/b\n3:cpu,cpuacct:/a\n"}
    for group, quota in (("", limit), ("a/", limit_within)):
        place = f"sys/fs/cgroup/cpu/{group}cpu.cfs_"
        of_version_1 |= {f"{place}quota_us": quota.replace("max", "-1"), f"{place}period_us": "100000\n"}
    assert available_cores(tree(tmp_path / "first", **of_version_1)) == cores


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 64),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n",
          "sys/fs/cgroup/memory.current": f"{GIB}\n"}, 64),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
          "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
          "sys/fs/cgroup/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{GIB}\n",
          "sys/fs/cgroup/memory.current": f"{2 * GIB}\n"}, 0),
        # Version 1 has a folder for each controller. In a container, the path is that of the host.
        ({"proc/self/cgroup": "4:memory:/docker/a\n1:cpu:/\n0::/\n",
          "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
          "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
          "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n"}, 2),
        ({"proc/self/cgroup": "4:memory:/a\n",
          "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
          "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{90 * GIB}\n",
          "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{8 * GIB}\n",
          "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{GIB}\n"}, 7),
    ],
)  # fmt: skip
def test_memory_is_that_of_the_container(tmp_path: Path, files: dict[str, str], gib: int) -> None:
    assert available_bytes(tree(tmp_path, **files)) == gib * GIB


# Keys and values have 3 heads of 64, as in SmolLM2 135M: 15 layers take 22.5 KiB for a token in float32.
SMOL = llama(30, 576, 9, 3, 64, 8192, 49152, 1536)


@pytest.mark.parametrize(
    ("limit_mib", "used_mib", "stages", "kv_dtype", "tokens"),
    [
        # Without a limit a quarter of the 64 GiB of the machine would be more than the 2 GiB that are taken.
        (None, 0, 2, torch.float32, 93_200),
        # What a new user met: 575 MiB are left to two stages. A quarter is room for 3,270 tokens.
        (2200, 1625, 2, torch.float32, 8192),
        (2200, 1625, 1, torch.float32, 8192),
        # 7/8 of a quarter are 126 MiB, and of a half of 360 MiB they are 157: one sequence takes 180.
        (2200, 1625, 4, torch.float32, 5712),
        (2200, 1840, 2, torch.float32, 7168),
        # A quarter of the type takes a quarter of the memory, and its scales.
        (2200, 1625, 4, torch.int8, 8192),
        (2200, 2150, 2, torch.int8, 3744),
        # A quarter is more than a sequence takes.
        (4096, 1024, 2, torch.float32, 17_472),
        (2200, 2200, 2, torch.float32, 0),
    ],
)
def test_where_memory_has_room_for_a_sequence_it_is_let_in(
    tmp_path: Path, limit_mib: int | None, used_mib: int, stages: int, kv_dtype: torch.dtype, tokens: int
) -> None:
    """A stage of 15 layers counts like this. The sequence may take 8,192 tokens, in blocks of 16."""
    limit = (1 << 63) - 4096 if limit_mib is None else limit_mib * MIB
    group = "sys/fs/cgroup/memory/a/memory."
    files = {f"{group}limit_in_bytes": f"{limit}\n", f"{group}usage_in_bytes": f"{used_mib * MIB}\n"}
    left = available_bytes(tree(tmp_path, **{"proc/self/cgroup": "4:memory:/a\n"}, **files)) // stages
    block = kv_cache.block_bytes(SMOL, StageLayout(0, 2, 0, 30), 16, kv_dtype)
    assert cpu_kv_bytes(left, sequence_blocks(8192, 16) * block) // block * 16 == tokens


def test_processes_are_those_of_the_container_and_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"proc/self/cgroup": "8:pids:/a\n", "sys/fs/cgroup/pids/pids.max": "max\n"}
    files |= {"sys/fs/cgroup/pids/a/pids.max": "100\n", "sys/fs/cgroup/pids/a/pids.current": "58\n"}
    assert available_tasks(tree(tmp_path, **files)) == 42
    assert available_tasks(tree(tmp_path, **{"proc/self/cgroup": "0::/\n"})) > 1 << 10
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (1, 1))
    for uid, available in ((os.getuid() or 1, 0 if os.getuid() else 1), (0, math.inf)):
        monkeypatch.setattr(os, "getuid", lambda uid=uid: uid)
        assert available_tasks(tmp_path) == available


def test_where_nothing_says_so_memory_is_unknown(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 0
