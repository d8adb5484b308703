"""The flags of `ppserve serve` become the frozen configuration."""

from __future__ import annotations

import io
import sys
from dataclasses import asdict
from pathlib import Path

import click
import pytest

from ppserve.cli.main import cli
from ppserve.cli.serve import build_config, serve
from ppserve.cli.types import SIZE
from ppserve.process import torchrun
from tests.commands import run

NAMES = {param.name for param in serve.params if param.expose_value} - {"stages"}
GIVEN = {"host": "::1", "advertise": "127.0.0.9"}
FLAGS = {name: GIVEN.get(name, f"value of {name}") for name in NAMES}


def test_every_flag_reaches_the_configuration() -> None:
    fields = {name: value for part in asdict(build_config(FLAGS)).values() for name, value in part.items()}
    assert fields.pop("devices") is None, "only a `Pipeline` is told its devices"
    assert sorted(fields.values()) == sorted(FLAGS.values())


@pytest.mark.parametrize(("log_format", "shown"), [("text", "\r\x1b[Kstarting, 0 s: importing\r"), ("json", "")])
def test_a_terminal_is_told_of_the_start_before_torchrun_is_imported(
    log_format: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def run_ranks(num_ranks: int, _arguments: object, _timeout_s: float) -> int:
        started.append((num_ranks, terminal.getvalue()))
        return 0

    started: list[tuple[int, str]] = []
    monkeypatch.setattr(torchrun, "run_ranks", run_ranks)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    ports = ["--port=0", "--http-port=0", "--metrics-port=0"]
    with pytest.raises(SystemExit) as ended:
        serve.main(
            ["--stages=2", f"--log-format={log_format}", *ports], standalone_mode=False, **cli.context_settings
        )
    assert ended.value.code == 0
    assert started == [(2, shown)]


def test_help_has_every_flag_under_a_heading() -> None:
    assert len(serve.params) <= 54
    shown = serve.get_help(click.Context(serve, click.Context(cli, **cli.context_settings)))
    for heading in ("Model:", "Pipeline:", "Memory:", "gRPC and HTTP:", "Several hosts:", "Logs:"):
        assert f"\n{heading}\n" in shown
    hidden = {param.opts[0] for param in serve.params if param.opts[0] not in shown}
    assert hidden == {"--parallel", "--expect"}, "they were removed"


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("parallel", "auto", "--stages, --tensor-parallel and --replicas say the shape; `ppserve plan`"),
        ("expect", "128,128,16", "--layers auto balances for prompts and answers of 128 tokens"),
    ],
)
def test_a_removed_flag_is_refused_wherever_it_is_given(
    tmp_path: Path, name: str, value: str, instead: str
) -> None:
    said = f"'--{name}': it was removed: {instead}"
    file = tmp_path / "serve.toml"
    file.write_text(f'{name} = "{value}"')
    assert said in run("serve", f"--{name}", value).one_line
    by_environment = run("serve", **{f"PPSERVE_{name.upper()}": value}).one_line
    assert said in by_environment
    assert by_environment.endswith(f" (from PPSERVE_{name.upper()})\n")
    by_file = run("serve", "--config", str(file)).one_line
    assert said in by_file
    assert by_file.endswith(f" (from {file})\n")


def given(**environment: str) -> dict[str, object]:
    """The flags of a command without any, in this environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return serve.make_context("serve", []).params


def test_what_kubernetes_says_of_a_service_named_like_us_is_no_flag() -> None:
    address = "tcp://10.96.0.7:50051"
    told = {f"PPSERVE_{name}": address for name in ("PORT", "HTTP_PORT", "METRICS_PORT", "CONTROL_PORT")}
    told |= {"PPSERVE_PORT_50051_TCP_ADDR": "10.96.0.7", "PPSERVE_SERVICE_PORT_GRPC": "50051"}
    assert given(**told) == given()
    assert given(PPSERVE_PORT="7")["port"] == 7
    assert run("serve", "--model", "/no/such/place", PPSERVE_PORT="udp").one_line.endswith(
        " (from PPSERVE_PORT)\n"
    )


def test_a_variable_that_is_nearly_a_flag_s_is_named() -> None:
    others = ("API_KEY", "PORT_50051_TCP_PORT", "SERVICE_PORT", "ANYTHING_ELSE", "LAYERS")
    told = {**{f"PPSERVE_{name}": "1" for name in others}, "PPSERVE_STAGES_PORT": "tcp://10.96.0.7:50051"}
    told |= {"PPSERVE_PORT": "0", "PPSERVE_HTTP_PORT": "0", "PPSERVE_METRICS_PORT": "0"}  # a server may run here
    ended = run("serve", "--model", "/no/such/place", PPSERVE_STAGE="2", **told)
    warned, refused = ended.stderr.splitlines()
    assert warned == "ppserve: warning: PPSERVE_STAGE is no flag's variable; did you mean PPSERVE_STAGES?"
    assert refused.startswith("ppserve: error: /no/such/place: ")


def test_an_entry_that_is_nearly_a_flag_is_named(tmp_path: Path) -> None:
    (tmp_path / "it.toml").write_text("max_num_seq = 5")
    line = run("serve", "--config", str(tmp_path / "it.toml")).one_line
    assert line.endswith("it.toml: unknown entry 'max_num_seq'; did you mean max-num-seqs?\n")
    (tmp_path / "it.toml").write_text("model = tiny")
    assert "it.toml cannot be read as TOML: " in run("serve", "--config", str(tmp_path / "it.toml")).one_line


def test_a_model_has_several_names() -> None:
    assert given()["served_model_name"] == ()
    assert given(PPSERVE_SERVED_MODEL_NAME="a, org/b c")["served_model_name"] == ("a", "org/b c")
    flags = ["--served-model-name", "a, org/b", "--served-model-name", "c"]
    parsed = serve.make_context("serve", flags).params["served_model_name"]
    assert parsed == ("a", "org/b", "c")
    for wrong in ("", "a,,b", " ", "a\nb"):
        assert "is not a name" in run("serve", "--served-model-name", wrong).one_line


def test_origins_of_web_pages() -> None:
    assert given()["cors_origin"] == ()
    several = "https://Ours.example, http://[::1]:3000"
    assert given(PPSERVE_CORS_ORIGIN=several)["cors_origin"] == ("https://ours.example", "http://[::1]:3000")
    flags = ["--cors-origin", "*", "--cors-origin", "null,app://a"]
    assert serve.make_context("serve", flags).params["cors_origin"] == ("*", "null", "app://a")
    for wrong in (
        *(
            "ours.example",
            "https://",
            "https://ours.example/",
            "https://ours.example/chat",
            "https://ours.example?a",
        ),
        *("https://*.ours.example", "", "a b://c"),
    ):
        line = run("serve", "--cors-origin", wrong).one_line
        assert (
            f"{wrong!r} is neither an origin (scheme, host and port of a page, with no slash or path beh" in line
        )


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("1K", 1024), ("1.5kB", 1536), ("512MiB", 512 << 20), ("2 GiB", 2 << 30), ("1t", 1 << 40)],
)
def test_sizes_have_units_of_1024(text: str, size: int) -> None:
    assert SIZE(text) == size


def test_a_name_that_no_message_can_hold_is_refused() -> None:
    assert "'--interface': the value is not UTF-8 text" in run("serve", "--interface", "\udcff").one_line


@pytest.mark.parametrize(
    ("entry", "flags"),
    [
        ("layers = [13, 12.5]", ["--layers", "13,12.5"]),
        ("cuda-graphs = false", ["--cuda-graphs", "off"]),
        ("force-cpu = true", ["--force-cpu"]),
        ("kv-cache-memory = 4096", ["--kv-cache-memory", "4096"]),
        ("shutdown_timeout = 2.5", ["--shutdown-timeout", "2.5"]),
        ('model = "a, b"', ["--model", "a, b"]),
        ('served-model-name = "a, org/b"', ["--served-model-name", "a,org/b"]),
        ('served_model_name = ["a", "org/b"]', ["--served-model-name", "a", "--served-model-name", "org/b"]),
    ],
)
def test_entries_of_a_file_are_flags(tmp_path: Path, entry: str, flags: list[str]) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(entry)
    assert serve.make_context("serve", ["--config", str(file)]).params == serve.make_context("serve", flags).params


@pytest.mark.parametrize(
    "entry",
    [
        "port = 1.5", "stages = 2.5", "layers = true", "layers = [[1]]", 'model = ["a"]', "model = {}",
        "model = 2026-11-23", "force-cpu = 5", "kv-cache-memory = -1", "stage-ports = [1, 2]", "layers = [true]",
        "served-model-name = [{}]", "served-model-name = {}",
        'host = "nowhere"', f"max-queue = 1{20 * '0'}", 'kv-cache-memory = "9999999T"', f"stages = {400 * '9'}",
    ],
)  # fmt: skip
def test_an_entry_that_no_flag_could_be_is_named(tmp_path: Path, entry: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(entry)
    line = run("serve", "--config", str(file), RANK="0", WORLD_SIZE="so that nothing is started").one_line
    assert all(word in line for word in (entry.partition(" =")[0], str(file)))
