"""Mistakes that are told before any process is started."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import click
import pytest

from ppserve.cli.check import check, check_devices
from ppserve.cli.flags import FLAGS
from ppserve.config import CacheSettings, ModelSettings, PipelineSettings, ServeConfig, ServerSettings
from ppserve.core.architecture import Split
from ppserve.errors import ConfigError, UsageError
from ppserve.process import torchrun
from tests.commands import run

FREE = ServerSettings(port=0, http_port=0, metrics_port=0)
FINE = ServeConfig(server=FREE)


def test_the_defaults_are_fine() -> None:
    check(FINE, 2)


@pytest.mark.parametrize(
    ("change", "says", "world"),
    [
        ({}, "--stages: 9 stages cannot share 8 layers", 9),
        ({"pipeline": PipelineSettings(tensor_parallel=64)}, "--tensor-parallel: 64 is more than the model's", 64),
        ({"model": ModelSettings(path="/no/such/place")}, "no/such/place: no such file or directory", 2),
        ({"model": ModelSettings(max_model_len=99_999)}, "--max-model-len: 99999 is beyond the model's", 2),
        ({"pipeline": PipelineSettings(layers=Split.parse("4,5"))}, "--layers: 4,5 adds up to 9", 2),
        ({"pipeline": PipelineSettings(microbatches=4)}, "--microbatches: 4 is more than 2 stages", 2),
        ({"pipeline": PipelineSettings(transport="local")}, "--transport: local connects stages within one", 2),
        (
            {"server": dataclasses.replace(FREE, trace=Path("/no/such/place"))},
            "--trace: cannot write /no/such/pl",
            2,
        ),
        ({"pipeline": PipelineSettings(tensor_parallel=3)}, "--tensor-parallel: 3 tensor ranks x 1", 2),
        ({"pipeline": PipelineSettings(replicas=4)}, "--replicas: 1 tensor ranks x 4 replicas do not", 2),
    ],
)
def test_what_the_model_cannot_do(change: dict[str, object], says: str, world: int) -> None:
    with pytest.raises(UsageError, match=says):
        check(dataclasses.replace(FINE, **change), world)  # type: ignore[arg-type]


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UsageError, match=r"config\.json"):
        check(dataclasses.replace(FINE, model=ModelSettings(path=str(tmp_path))), 1)
    nonsense, no_keys = tmp_path / "cert.pem", tmp_path / "keys"
    nonsense.write_text("nonsense")
    no_keys.write_text("# nobody\n")
    for settings, flag in (
        (dataclasses.replace(FREE, tls_cert=nonsense, tls_key=nonsense), "--tls-cert"),
        (dataclasses.replace(FREE, api_key_file=no_keys), "--api-key-file"),
    ):
        with pytest.raises(UsageError, match=flag):
            check(ServeConfig(server=settings), 1)


def test_a_port_in_use_or_wanted_twice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for field in ("port", "metrics_port", "http_port"):
            with pytest.raises(UsageError, match=f"^--{field.replace('_', '-')}: .*{port}"):
                check(ServeConfig(server=dataclasses.replace(FREE, **{field: port})), 1)
        settings = ServerSettings(port=port, metrics_port=0, http_port=port)
        with pytest.raises(UsageError, match=r"^--http-port: .* is taken by --port"):
            check(ServeConfig(server=settings), 1)
        with socket.create_server(("127.0.0.1", 0)) as other:
            settings = dataclasses.replace(FREE, port=port, http_port=other.getsockname()[1])
            says = "in use, and so are the ports of --http-port; this takes what is free: --port 0 --http-port 0$"
            with pytest.raises(UsageError, match=f"^--port: .*{port}: .*{says}"):
                check(ServeConfig(server=settings), 1)
    with pytest.raises(UsageError, match=r"--metrics-port: .* is taken by --port"):
        check(ServeConfig(server=ServerSettings(port=port, metrics_port=port)), 1)


def test_a_number_of_ranks_that_cannot_be() -> None:
    done = run("serve", "--stages", "2", "--tensor-parallel", "2", RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2
    assert "--stages: 2 stages need 4 ranks, but torchrun started 2" in done.one_line
    # The model, which is refused too, only keeps a failing test from filling the host with processes.
    done = run("serve", "--stages", "2", "--replicas", "1000000", "--model", "/no/such/place")
    assert done.returncode == 2
    assert "--replicas: 2000000 ranks; on" in done.one_line


def test_float16_is_refused_where_there_is_no_gpu(tmp_path: Path) -> None:
    config = dataclasses.replace(ServeConfig(), model=ModelSettings(dtype="float16"))
    with pytest.raises(ConfigError, match="--dtype: float16 needs a GPU"):
        check_devices(config, tmp_path)
    (tmp_path / "nvidia0").touch()
    check_devices(config, tmp_path)
    with pytest.raises(ConfigError, match="float16 needs a GPU"):
        check_devices(
            dataclasses.replace(config, model=dataclasses.replace(config.model, force_cpu=True)), tmp_path
        )


def test_nccl_is_refused_where_there_is_no_gpu(tmp_path: Path) -> None:
    config = ServeConfig(pipeline=PipelineSettings(transport="nccl"))
    with pytest.raises(ConfigError, match="--transport: nccl needs a GPU of its own"):
        check_devices(config, tmp_path)
    (tmp_path / "nvidia0").touch()
    check_devices(config, tmp_path)
    with pytest.raises(ConfigError, match="nccl needs a GPU"):
        check_devices(dataclasses.replace(config, model=ModelSettings(force_cpu=True)), tmp_path)


@pytest.mark.parametrize("layers", [None, Split.parse("4,4")])
@pytest.mark.parametrize(("kv_dtype", "element_bytes"), [("auto", 2), ("float32", 4), ("int8", 1)])
def test_kv_memory_without_room_for_one_sequence(layers: Split | None, kv_dtype: str, element_bytes: int) -> None:
    """tiny has 8 layers of 5 heads with 32 numbers; 100 tokens are 7 blocks of 16."""
    needed = 7 * 16 * 4 * 2 * 5 * 32 * element_bytes
    config = dataclasses.replace(
        FINE, model=ModelSettings(max_model_len=100), pipeline=PipelineSettings(layers=layers)
    )
    check(dataclasses.replace(config, cache=CacheSettings(kv_cache_memory=needed, kv_dtype=kv_dtype)), 2)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory: .* too little: one sequence of 100 tokens takes"):
        check(dataclasses.replace(config, cache=CacheSettings(kv_cache_memory=needed - 1, kv_dtype=kv_dtype)), 2)


def test_a_hub_id_without_a_network_is_refused_before_processes_start(tmp_path: Path) -> None:
    code = "from ppserve.cli.check import _architecture; _architecture('someone/model')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert "someone/model: no such file or directory, not in the local hub cache" in done.stderr.splitlines()[-1]


FREE_PORTS = ("--port", "0", "--http-port", "0", "--metrics-port", "0")
NAMES = {"--served-model-name", "--trace"}
"""Flags that take any text: a name that a person chooses."""
ABSURD = ["", " ", "-1", "1e400", "9" * 20, "häß", "nosuch0", "/no/such/place", "\udcff", "a\nb", os.sep]
FINE_HERE = {("--max-logprobs", "-1"), ("--start-timeout", "1e400"), ("--start-timeout", "9" * 20)}
"""All of the vocabulary; never."""
TAKEN = {"--model"}  # the line names the path


@pytest.mark.parametrize("flag", [one for flags in FLAGS.values() for one in flags], ids=lambda flag: flag.opts[0])
def test_no_flag_serves_an_absurd_value(flag: click.Option, tmp_path: Path) -> None:
    """One line names the flag, before any process is started, and no file is left."""
    name = flag.opts[0]
    if flag.is_flag or name in NAMES:
        return
    for value in [*ABSURD, str(tmp_path)]:
        if (name, value) in FINE_HERE:
            continue
        with mock.patch.object(torchrun, "run_ranks", return_value=0):
            done = run("serve", *FREE_PORTS, f"{name}={value}")
        assert done.returncode == 2, value
        assert name in TAKEN or name in done.one_line, value


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--kv-cache-memory", "900T", "900 TiB for each of 2 stages is more than this host has free: "),
        ("--interface", "nosuch0", "'nosuch0' has no address here; there are "),
        ("--speculate", "900", "'900' is neither auto nor off nor a number of draft tokens up to 15"),
        ("--threads", "99999", "'99999' is not a whole number from 1 to 1024"),
        ("--chat-template", os.devnull, "cannot be read as a Jinja template: it is empty"),
        ("--secret-file", os.devnull, "needs at least 16 characters"),
        ("--api-key-file", os.devnull, "holds no key"),
    ],
)
def test_what_cannot_be_is_refused_before_processes_start(flag: str, value: str, says: str) -> None:
    flags = ["--stages", "2", "--force-cpu"]
    with mock.patch.object(torchrun, "run_ranks", return_value=0):
        done = run("serve", *FREE_PORTS, *flags, flag, value)
    assert done.returncode == 2
    assert says in done.one_line
    assert flag in done.one_line


def test_certificates_for_stages_are_read_at_once() -> None:
    parts = [f"--stage-tls-{part}={os.devnull}" for part in ("cert", "key", "ca")]
    with mock.patch.object(torchrun, "run_ranks", return_value=0):
        done = run("serve", *FREE_PORTS, *parts)
    assert (done.returncode, "--stage-tls-" in done.one_line) == (2, True)


def test_a_trace_that_can_be_written_is_not_begun(tmp_path: Path) -> None:
    """The start may still fail. What was there stays."""
    (old := tmp_path / "old.json").write_text("[]")
    for trace in (tmp_path / "new.json", old):
        check(dataclasses.replace(FINE, server=dataclasses.replace(FREE, trace=trace)), 2)
    assert list(tmp_path.iterdir()) == [old]
    assert old.read_text() == "[]"
