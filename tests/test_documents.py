"""README and docs are true: commands run or at least parse, links lead somewhere, names exist.

A ```console block is run, line by line, against a real server, and so are the Python examples of the pages on
client and library. A block that cannot be run says why in a comment before it (`<!-- not run: ... -->`), and is
parsed like every other command on these pages.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ppserve.cli.main import cli
from ppserve.cli.serve import serve
from ppserve.head.observe.metrics import Metrics
from ppserve.library.settings import Settings
from tests.core.artificial import account_of
from tests.e2e.serving import Server
from tests.fake_engine import READING
from tools import make_command_line, make_dashboard

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PRODUCT = ROOT / "ppserve"
DASHBOARD = ROOT / "deploy/grafana/ppserve.json"
RULES = ROOT / "deploy/prometheus/rules.yml"
PROGRAMS = ("ppserve", "torchrun", "python", "make", "curl")


@dataclass(frozen=True)
class Block:
    """A fenced block: where, its language, its text, and why it is not run, if so."""

    place: str
    language: str
    text: str
    reason: str | None


def blocks(page: Path) -> Iterator[Block]:
    pattern = r"(?:<!-- not run: ([^\n]*?) -->\n)?^```(\w*)\n(.*?)^```"
    text = page.read_text()
    for found in re.finditer(pattern, text, re.DOTALL | re.MULTILINE):
        line = text[: found.start()].count("\n") + 1
        yield Block(f"{page.relative_to(ROOT)}:{line}", found[2], found[3], found[1])


ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]


def commands(block: Block) -> list[str]:
    """Lines that somebody would type: those after a prompt, or, without any, those that begin with a program."""
    if block.language not in ("", "console"):
        return []
    if typed := re.findall(r"^\S*\$ (.+)$", block.text, re.MULTILINE):
        return typed
    return [line for line in block.text.splitlines() if line.split(" ")[0] in PROGRAMS]


ALL_COMMANDS = [pytest.param(line, id=f"{b.place} {line[:40]}") for b in ALL_BLOCKS for line in commands(b)]
OWN_TESTS = "docs/first-hour.md"
"""Its commands hurt their server; tests/e2e/test_first_hour.py runs them."""
TO_RUN = [
    block
    for block in ALL_BLOCKS
    if block.language == "console" and block.reason is None and not block.place.startswith(OWN_TESTS)
]


# ---- commands -----------------------------------------------------------------------------------------


def check_command(line: str) -> None:
    """Every program on the line is asked for something that it has. Raises click.UsageError or AssertionError."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words = list(lexer)
    part: list[str] = []
    for word in [*words, "|"]:
        if set(word) <= set("|&;"):
            check_program(part)
            part = []
        else:
            part.append(word)


def check_program(words: list[str]) -> None:
    if ">" in words:
        words = words[: words.index(">")]
    if not words:
        return
    program, arguments = Path(words[0]).name, words[1:]
    if program == "ppserve":
        check_ours(arguments)
    elif program == "torchrun" and "ppserve" in arguments:
        check_ours(["serve", *arguments[arguments.index("ppserve") + 1 :]])
    elif "demo.py" in words:
        tour = (ROOT / "demo.py").read_text() + (ROOT / "tour/line.py").read_text()
        for option in words[words.index("demo.py") :]:
            assert not option.startswith("--") or f'"{option}"' in tour, option
    elif program == "make":
        targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {name for name in arguments if "=" not in name} <= targets  # the others are variables
    elif program == "python" and arguments[0].endswith(".py"):
        assert (ROOT / arguments[0]).is_file()


def check_ours(arguments: list[str]) -> None:
    """Check them as the command line would take them; files that only the reader has may be missing."""
    name = arguments[0] if arguments and not arguments[0].startswith("-") else "serve"
    parent = click.Context(cli, **cli.context_settings)  # without it, click notes that this command knows no -h
    command = cli.get_command(parent, name)
    assert command is not None, f"no command {name}"
    try:
        command.make_context(name, arguments[1:] if arguments[:1] == [name] else arguments, parent)
    except click.BadParameter as error:
        if "does not exist" not in error.format_message():
            raise


@pytest.mark.parametrize("line", ALL_COMMANDS)
def test_a_command_means_something(line: str) -> None:
    check_command(line)


@pytest.mark.parametrize("line", ["ppserve serve --stagez 2", "echo x | ppserve generat -", "make sereve"])
def test_a_wrong_command_would_be_noticed(line: str) -> None:
    with pytest.raises((click.UsageError, AssertionError, KeyError)):
        check_command(line)


@pytest.mark.parametrize("block", [pytest.param(block, id=block.place) for block in TO_RUN])
def test_a_block_runs_as_it_stands(block: Block, shared_server: Server, tmp_path: Path) -> None:
    environment = {**os.environ, "PPSERVE_TARGET": shared_server.grpc}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    for line in commands(block):
        line = line.replace("localhost:9400", shared_server.metrics).replace(".venv/bin/", "")
        line = line.replace("localhost:8000", shared_server.http)
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        assert done.stdout, f"{line}: no output"


# ---- other blocks -------------------------------------------------------------------------------------

WITH_EXAMPLES = ("docs/client.md", "docs/library.md")
PYTHON = [block for block in ALL_BLOCKS if block.language == "python"]
EXAMPLES = [block for block in PYTHON if block.place.startswith(WITH_EXAMPLES) and not block.reason]


@pytest.mark.parametrize("block", [pytest.param(block, id=block.place) for block in EXAMPLES])
def test_an_example_runs_as_it_stands(
    block: Block, shared_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    source = block.text.replace("127.0.0.1:50051", shared_server.grpc)
    source = source.replace("127.0.0.1:8000", shared_server.http)
    exec(compile(source, block.place, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out or "print" not in source


_TYPES = """\
[mypy]
strict = true
# The packages below ours are nobody's concern here, and reading them takes a minute.
[mypy-torch.*,numba.*,llvmlite.*,transformers.*]
follow_imports = skip
ignore_missing_imports = true
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_strict_types_accept_every_example(tmp_path: Path) -> None:
    """A user's mypy reads them, beside a mistake that it finds."""
    (tmp_path / "mypy.ini").write_text(_TYPES)
    examples = [block for block in PYTHON if not (block.reason or "").startswith("needs ")]
    assert len(examples) > 10
    for number, block in enumerate(examples):
        (tmp_path / f"example_{number}.py").write_text(f"# {block.place}\n{block.text}")
    (tmp_path / "mistake.py").write_text("from ppserve import Client\n\nClient().complete(5)\n")
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    problems = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line.partition(":")[0] for line in problems] == ["mistake.py"], done.stdout + done.stderr


def test_every_setting_of_a_pipeline_is_in_its_table() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/library.md").read_text(), re.MULTILINE)
    assert {name.strip("`") for row in rows for name in row.split(", ")} == set(Settings.__annotations__)


def test_python_compiles_and_entries_of_a_config_file_are_flags() -> None:
    flags = {option.opts[0].removeprefix("--") for option in serve.params}
    for block in ALL_BLOCKS:
        if block.language == "python":
            compile(block.text, block.place, "exec")
        elif block.language == "toml":
            assert set(tomllib.loads(block.text)) <= flags, block.place


def test_generated_parts_are_up_to_date() -> None:
    stubs = [sys.executable, "tools/generate_stubs.py", "--check"]
    done = subprocess.run(stubs, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    page = make_command_line.PAGE.read_text()
    assert make_command_line.with_commands(page) == page, "run python tools/make_command_line.py"
    assert make_dashboard.dashboard() == json.loads(DASHBOARD.read_text()), "run python tools/make_dashboard.py"


# ---- links --------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """What `#...` may name: headings, as code hosts make anchors of them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    missing += [path for path in paths_in(text) if not (ROOT / path).exists() and not (PRODUCT / path).exists()]
    assert not missing


def paths_in(text: str) -> Iterator[str]:
    """Names of files and folders, from the root of the project or from that of the product."""
    folders = "|".join(path.name for root in (ROOT, PRODUCT) for path in root.iterdir() if path.is_dir())
    yield from re.findall(rf"`((?:{folders})/[\w./-]*)`", text)
    # The annotated tree of the README: names, two spaces or more, what they are.
    for tree in re.findall(r"^```\n(parallel_state\.py .*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in tree.splitlines():
            yield from re.split(r",? ", re.split(r" {2,}", line.strip())[0])


def test_there_is_something_to_check() -> None:
    """The control: patterns that match nothing would find nothing wrong."""
    assert len(TO_RUN) >= 3
    assert len(ALL_COMMANDS) >= 20
    assert len(EXAMPLES) >= 10
    named = set(paths_in((ROOT / "README.md").read_text()))
    assert {"core/scheduling/", "wire.py", "tour/", "stage/loop.py"} <= named


def test_the_page_on_sampling_parameters_names_every_place_of_one() -> None:
    page = (ROOT / "docs/contributing/sampling-parameter.md").read_text()
    generated = {PRODUCT / "v1", PRODUCT / "vllm"}
    files = [path for path in PRODUCT.rglob("*.py") if path.parent not in generated]
    files += (ROOT / "protos").rglob("*.proto")
    mentions = re.compile(r"\b(min_p|repetition_penalty)\b")
    places = {path.relative_to(ROOT).as_posix() for path in files if mentions.search(path.read_text())}
    assert len(places) >= 10
    assert not {place for place in places if f"`{place}`" not in page}


# ---- metrics ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples() -> Iterator[dict[str, list[dict[str, str]]]]:
    """Labels of every series of a server of two stages, by name."""
    metrics = Metrics(2)
    metrics.http_answered("/v1/completions", 200)
    metrics.read_pipelines(lambda: (replace(READING, times=account_of(2).snapshot(1)),))
    # Set where a pipeline has formed.
    found: dict[str, list[dict[str, str]]] = {"ppserve_build_info": [{}]}
    for family in text_string_to_metric_families(metrics.page().body.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """(where, text) of everything that names metrics."""
    for page in PAGES:
        yield str(page.relative_to(ROOT)), page.read_text()
    yield "rules", RULES.read_text()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def test_every_metric_that_is_named_exists(samples: dict[str, list[dict[str, str]]]) -> None:
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in samples}
    unknown = {
        (where, name)
        for where, text in expressions()
        for name in re.findall(r"(?<![:\w/.])ppserve_[a-z0-9_]+\b(?![:.])", text)
        if name not in samples and name not in families
    }
    # As in `grep ppserve_stage_bubble`: the beginning of names is enough there.
    assert {name for _, name in unknown} <= {"ppserve_stage_bubble"}


def test_every_selector_can_match(samples: dict[str, list[dict[str, str]]]) -> None:
    for where, text in expressions():
        for name, selector in re.findall(r"(ppserve_\w+)\{([^}]*=[^}]*)\}", text):
            for label, operator, value in re.findall(r'(\w+)(=~?)"([^"]*)"', selector):
                if label == "instance" or value.startswith("$"):
                    continue
                fits = re.compile(value if operator == "=~" else re.escape(value)).fullmatch
                assert any(fits(labels.get(label, "")) for labels in samples[name]), (where, name, label, value)


def test_alerts_in_the_docs_are_those_of_the_rules() -> None:
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    told = re.findall(r"^\| `(Ppserve\w+)` \|", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    assert alerts
    assert sorted(alerts) == sorted(told)
