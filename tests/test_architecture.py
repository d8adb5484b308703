"""The house and its arrows: who may import whom, checked from the imports themselves."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = ROOT / "ppserve"
PAGE = (ROOT / "docs/architecture.md").read_text()

# Who may import whom. A module is ruled by the entry with its own name and by every folder that it lies in
# (whole names: "ppserve.cli" does not rule "ppserve.client"). Entries add up, so a package that has one home
# stands in the entry of that home alone.
MAY_IMPORT: dict[str, set[str]] = {
    "ppserve": {
        *("ppserve.answers", "ppserve.client", "ppserve.errors", "ppserve.library"),
        "ppserve.grammar.structured_output",
    },
    "ppserve.__main__": {
        "ppserve.cli",
        "ppserve.process.interrupts",
        "ppserve.process.lifetime",
        "ppserve.supported",
    },
    "ppserve.supported": set(),
    "ppserve.errors": set(),
    "ppserve.answers": {"ppserve.errors", "ppserve.grammar.structured_output", "msgspec"},
    "ppserve.config": {"ppserve.core", "ppserve.errors"},
    "ppserve.wire": {"ppserve.config", "ppserve.core", "ppserve.errors", "msgspec"},
    "ppserve.core": {"ppserve.core", "ppserve.errors", "msgspec"},
    "ppserve.files": {"ppserve.errors", "msgspec"},
    "ppserve.gguf_file": {"ppserve.errors", "ppserve.files"},
    "ppserve.tokenizer": {
        *("ppserve.tokenizer", "ppserve.errors", "ppserve.files", "ppserve.gguf_file"),
        *("tiktoken", "tokenizers", "msgspec"),
    },
    "ppserve.v1": {"ppserve.v1", "google.protobuf", "grpc"},
    "ppserve.vllm": {"ppserve.vllm", "google.protobuf", "grpc"},
    "ppserve.process": {"ppserve.process", "ppserve.wire", "ppserve.config", "ppserve.errors", "psutil"},
    "ppserve.process.torchrun": {"torch"},
    "ppserve.grammar": {
        *("ppserve.grammar", "ppserve.errors", "ppserve.process.limited", "ppserve.process.memory", "llguidance")
    },
    "ppserve.planning": {"ppserve.planning", "ppserve.core", "ppserve.errors"},
    "ppserve.model": {"ppserve.model", "ppserve.core", "ppserve.errors", "torch", "numpy"},
    "ppserve.model.compiled": {"numba", "llvmlite"},
    "ppserve.model.cpu": {"numba", "llvmlite"},
    "ppserve.model.cuda.triton_operators": {"triton"},
    "ppserve.model.checkpoint": {"ppserve.files", "ppserve.gguf_file", "msgspec"},
    "ppserve.model.checkpoint.gguf": {"gguf"},
    "ppserve.model.checkpoint.hf": {"safetensors"},
    "ppserve.model.checkpoint.hub": {"huggingface_hub"},
    "ppserve.stage": {
        *("ppserve.stage", "ppserve.model", "ppserve.core", "ppserve.wire", "ppserve.config", "ppserve.errors"),
        *("ppserve.process", "torch"),
    },
    "ppserve.stage.probe": {"msgspec"},
    "ppserve.head": {
        *("ppserve.head", "ppserve.core", "ppserve.tokenizer", "ppserve.config", "ppserve.errors"),
        *("ppserve.answers", "ppserve.__version__", "ppserve.grammar.structured_output"),
    },
    "ppserve.head.app": {"ppserve.process"},
    "ppserve.head.engine": {"msgspec", "ppserve.wire", "ppserve.process.identity", "ppserve.process.lifetime"},
    "ppserve.head.engine.placement": {"ppserve.process.network"},
    "ppserve.head.servers": {"ppserve.process.network"},
    "ppserve.head.engine.control_sockets": {"ppserve.process.network", "ppserve.process.tls"},
    "ppserve.head.engine.handshake": {"ppserve.process.handshake"},
    "ppserve.head.api.grpc": {"ppserve.v1", "grpc", "google", "grpc_health", "grpc_reflection"},
    "ppserve.head.api.vllm_grpc": {"ppserve.vllm", "google"},
    "ppserve.head.api.http": {"msgspec", "starlette"},
    "ppserve.head.api": {"msgspec", "ppserve.process.limited"},
    "ppserve.head.api.forms": {"ppserve.grammar"},
    "ppserve.head.api.template_process": {"jinja2"},
    "ppserve.head.listener": {"starlette", "uvicorn"},
    "ppserve.head.observe.pages": {"starlette"},
    "ppserve.head.observe.metrics": {"prometheus_client"},
    "ppserve.library": {
        *("ppserve.library", "ppserve.head", "ppserve.stage", "ppserve.core", "ppserve.model", "ppserve.bench"),
        *("ppserve.answers", "ppserve.wire", "ppserve.config", "ppserve.errors", "ppserve.process.environment"),
        *("ppserve.tokenizer", "ppserve.supported", "msgspec", "torch"),
    },
    "ppserve.client": {
        *("ppserve.client", "ppserve.answers", "ppserve.v1", "ppserve.errors"),
        "ppserve.grammar.structured_output",
        *("grpc", "google", "grpc_health"),
    },
    "ppserve.bench": {
        *("ppserve.bench", "ppserve.client", "ppserve.core", "ppserve.v1", "ppserve.errors"),
        "grpc",
    },
    "ppserve.cli": {
        *("ppserve.cli", "ppserve.bench", "ppserve.client", "ppserve.config", "ppserve.core"),
        *("ppserve.errors", "ppserve.head", "ppserve.model.checkpoint", "ppserve.planning", "ppserve.process"),
        *("ppserve.model.cache", "ppserve.__version__", "ppserve.grammar.structured_output", "click"),
    },
    "ppserve.cli.chat_terminal": {"prompt_toolkit", "rich"},
    "ppserve.cli.top": {"prompt_toolkit"},
    "parallel_state": {"ppserve.stage.parallel_state"},
}

GENERATED = {"ppserve.v1", "ppserve.vllm"}

# packages that must not be loaded, even indirectly, by these rooms
NEVER_LOADS = {
    "ppserve.core.scheduling.scheduler": {"torch", "grpc", "numpy", "time"},
    "ppserve.head.api.request_handler": {"grpc", "google", "torch"},
    "ppserve.head.app": {"torch", "numba", "llguidance"},
    "ppserve.cli.check": {"torch", "grpc"},
    "ppserve.stage.loop": {"grpc", "prometheus_client", "tiktoken", "tokenizers"},
    "ppserve.client": {"torch", "prometheus_client"},
}


def modules() -> Iterator[tuple[str, Path]]:
    yield "parallel_state", ROOT / "parallel_state.py"
    for path in sorted((ROOT / "ppserve").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def tour_modules() -> Iterator[tuple[str, Path]]:
    """The tour obeys no row, but some of the rules."""
    yield "demo", ROOT / "demo.py"
    for path in sorted((ROOT / "tour").glob("*.py")):
        yield f"tour.{path.stem}" if path.stem != "__init__" else "tour", path


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Full names of what a file imports, wherever in the file."""
    found: list[str] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def is_within(name: str, packages: set[str]) -> bool:
    """Return whether a name lies in one of these packages: `a.b` lies within `a`, `a_b` and `ab` do not."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def allowed(module: str) -> set[str]:
    """What a module may import: what its own entry allows, and those of the folders that it lies in (the whole
    package is no folder: its entry is for the public names alone)."""
    rooms = [room for room in MAY_IMPORT if room == module or (room != "ppserve" and is_within(module, {room}))]
    return {name for room in rooms for name in MAY_IMPORT[room]}


@pytest.mark.parametrize(("module", "path"), [pytest.param(*entry, id=entry[0]) for entry in modules()])
def test_imports_follow_the_arrows(module: str, path: Path) -> None:
    own = {*allowed(module), "__future__"}
    wrong = [
        name
        for name in imports(path)
        if name.split(".")[0] not in sys.stdlib_module_names and not is_within(name, own)
    ]
    assert not wrong, f"{module} must not import {wrong}"


def test_what_a_room_of_the_model_never_imports() -> None:
    """The table's rows for folders in a folder allow what the outer one may import."""
    backends = {"ppserve.model.cpu", "ppserve.model.cuda"}
    for module, path in modules():
        found = set(imports(path))
        if is_within(module, {"ppserve.model"}) and not is_within(module, backends):
            assert not any(is_within(name, backends) for name in found), module
        if is_within(module, {"ppserve.model.cpu.kernels", "ppserve.model.compiled"}):
            assert not any(is_within(name, {"torch"}) for name in found), module


def test_the_table_allows_no_more_than_is_imported() -> None:
    names = {name for name, _ in modules()}
    assert set(MAY_IMPORT) <= names, "rooms that are gone"
    imported = {module: set(imports(path)) for module, path in modules()}
    unused = {
        (room, name)
        for room, allowances in MAY_IMPORT.items()
        for name in allowances - {room}
        if not any(is_within(found, {name}) for m in imported if is_within(m, {room}) for found in imported[m])
    }
    assert not unused


@pytest.mark.slow
@pytest.mark.parametrize("module", NEVER_LOADS)
def test_loading_a_room_does_not_load(module: str) -> None:
    import subprocess

    code = f"import sys, {module}; print(*sorted(m for m in sys.modules if '.' not in m))"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    # `time` is a built-in that the interpreter loads by itself: for core, its imports above are the proof.
    assert not NEVER_LOADS[module] - {"time"} & set(loaded.split())


def test_core_reads_no_clock() -> None:
    for module, path in modules():
        if module.startswith("ppserve.core"):
            forbidden = {"time", "random", "socket", "threading", "os", "asyncio", "datetime"}
            assert not forbidden & {name.split(".")[0] for name in imports(path)}, module


@dataclass(frozen=True)
class Room:
    """A row of the table of rooms in docs/architecture.md."""

    name: str
    does: str
    imports: frozenset[str]
    never: str


def rooms_of_the_page() -> dict[str, Room]:
    pattern = r"^\| `([\w/]+)` \| ([^|]+?) \| ([^|]*?) ?\| ([^|]+?) \|$"
    rows = re.findall(pattern, PAGE.partition("## Rooms")[2].partition("\n## ")[0], re.MULTILINE)
    return {row[0]: Room(row[0], row[1], frozenset(re.findall(r"`(\w+)`", row[2])), row[3]) for row in rows}


def test_the_page_has_every_room_and_says_what_the_room_says() -> None:
    folders = {path.parent.relative_to(PRODUCT).as_posix() for path in PRODUCT.rglob("__init__.py")}
    rooms = rooms_of_the_page()
    assert set(rooms) == folders - {".", "v1", "vllm"}
    for name, room in rooms.items():
        said = " ".join((ast.get_docstring(parsed(PRODUCT / name / "__init__.py")) or "").split())
        assert said.startswith(room.does), name
        assert f"Never {room.never}" in said, name


def imported_by(room: str) -> set[str]:
    """The other rooms and single modules of the product that a room imports."""
    own = {f"ppserve.{room}"}
    names = [name for module, path in modules() if is_within(module, own) for name in imports(path)]
    return {name.split(".")[1] for name in names if name.startswith("ppserve.")} - {room, "__version__"}


def test_the_page_lists_the_imports_that_there_are() -> None:
    for name, room in rooms_of_the_page().items():
        if "/" not in name:
            assert imported_by(name) == room.imports, name


# The most lines that a room may have, as `wc -l` counts them, without generated files: its size in November 2026
# and a tenth more. A limit asks which idea a change adds and which it ends; it never shortens a sentence. Whoever
# needs more raises it in the commit that needs it, with a sentence that says why.
BUDGET = {
    "ppserve/*.py": 1_370,  # supported.py asks before anything is imported, so it stands beside __main__.py
    "ppserve/core/*.py": 1_320,
    "ppserve/core/scheduling/*.py": 2_450,
    "ppserve/core/ledger/*.py": 936,
    "ppserve/planning/*.py": 605,
    "ppserve/process/*.py": 1_720,  # what Ctrl-C does before a command can end in order
    "ppserve/stage/*.py": 1_725,  # what a first start compiles ahead
    "ppserve/stage/transport/*.py": 1_019,
    "ppserve/head/*.py ppserve/head/engine/*.py": 3_900,
    "ppserve/head/api/**/*.py": 7_480,  # the newer doors say which fields of chats they refuse
    "ppserve/head/observe/*.py": 985,
    "ppserve/model/*.py": 2_120,
    "ppserve/model/compiled/*.py": 760,
    "ppserve/model/cpu/**/*.py": 4_100,
    "ppserve/model/cuda/*.py": 1_435,
    "ppserve/model/checkpoint/*.py": 2_000,
    "ppserve/tokenizer/*.py": 960,
    "ppserve/grammar/*.py": 1_210,  # keywords may demand nothing
    "ppserve/library/*.py": 880,
    "ppserve/client/*.py": 725,  # it says in words where caller and server disagree about TLS
    "ppserve/bench/*.py": 850,
    "ppserve/cli/*.py": 2930,  # flags are named for fields, and what cannot be is refused
    "tests/**/*.py": 43_100,  # what doors must agree in took 300; signals at every moment and absurd flags 500
    "benchmarks/**/*.py": 4_400,
    "README.md": 200,
}


def lines_of(patterns: str) -> int:
    found = {path for pattern in patterns.split() for path in ROOT.glob(pattern) if "_pb2" not in path.name}
    return sum(len(path.read_text().splitlines()) for path in found)


@pytest.mark.parametrize("patterns", BUDGET)
def test_a_room_keeps_its_budget(patterns: str) -> None:
    assert 0 < lines_of(patterns) <= BUDGET[patterns]


def test_every_module_is_in_a_room_with_a_budget() -> None:
    in_rooms = {path for patterns in BUDGET for pattern in patterns.split() for path in ROOT.glob(pattern)}
    missing = {path for path in PRODUCT.rglob("*.py") if path not in in_rooms}
    assert {path.parent.name for path in missing} == {"v1", "vllm"}


def test_the_pages_keep_their_budget() -> None:
    """The bars of a table are no words: a table must not cost more than the sentence that it replaces."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    words = [word for page in pages for word in page.read_text().split() if re.search(r"\w", word)]
    assert 0 < len(words) <= 34_000


def test_the_spine_can_be_read_in_an_evening() -> None:
    spine = re.findall(r"^\d+\. `([\w/.]+)`: \S.*\.$", PAGE.partition("## The spine")[2], re.MULTILINE)
    assert 30 <= len(spine) <= 40
    assert len(set(spine)) == len(spine)
    assert sum(len((PRODUCT / path).read_text().splitlines()) for path in spine) <= 7_850


def test_the_readme_draws_the_arrows_that_there_are() -> None:
    """Each arrow of its drawing is an import that exists, and none goes the other way."""
    line = " ".join((ROOT / "README.md").read_text().partition("Imports go one way:")[2].split())
    drawn = re.findall(r"`(\w+) → ([\w, ]+)`", line)
    assert len(drawn) >= 8
    for source, targets in drawn:
        for target in targets.split(", "):
            assert target in imported_by(source), f"{source} does not import {target}"
            assert source not in imported_by(target), f"{target} imports {source}"


def arrows_within(folder: str) -> dict[str, set[str]]:
    """Return who imports whom among what lies in a folder, its files and its folders."""
    known = {name for name, _ in modules()}

    def place(name: str) -> str | None:
        """The file or folder that a name lies in."""
        found = name if name in known else name.rpartition(".")[0]
        is_inside = found in known and found.startswith(folder + ".")
        return ".".join(found.split(".")[: folder.count(".") + 2]) if is_inside else None

    arrows: dict[str, set[str]] = {}
    for module, path in modules():
        if (source := place(module)) is not None:
            arrows.setdefault(source, set()).update(target for name in imports(path) if (target := place(name)))
    return {source: targets - {source} for source, targets in arrows.items()}


def circles(arrows: dict[str, set[str]]) -> list[str]:
    """The places that import themselves by way of others, and those that import them."""
    while leaves := {place for place, targets in arrows.items() if not targets & set(arrows)}:
        arrows = {place: targets for place, targets in arrows.items() if place not in leaves}
    return sorted(arrows)


@pytest.mark.parametrize("folder", [name for name, path in modules() if path.name == "__init__.py"])
def test_what_lies_in_a_folder_imports_one_way(folder: str) -> None:
    assert circles(arrows_within(folder)) == []


def test_the_name_of_a_type_has_one_meaning() -> None:
    """A class is defined once, and what a name in capitals stands for is the same in every module."""
    meanings: dict[str, set[str]] = {}
    for module, path in [*modules(), *tour_modules()]:
        if is_within(module, GENERATED):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                meanings.setdefault(node.name.lstrip("_"), set()).add(module)
        for line in parsed(path).body:
            target = line.targets[0] if isinstance(line, ast.Assign) else None
            if isinstance(target, ast.Name) and re.fullmatch("[A-Z]+[a-z]+[A-Za-z]*", target.id):
                meanings.setdefault(target.id, set()).add(ast.unparse(line.value))
    assert [name for name, found in meanings.items() if len(found) > 1] == []


def test_the_scheduler_sets_attributes_only_where_they_are_declared() -> None:
    """So a Sequence is written in one file, and nobody sets another object's attributes."""
    for module, path in modules():
        if not is_within(module, {"ppserve.core.scheduling"}):
            continue
        nodes = list(ast.walk(parsed(path)))
        declared = {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
        written = [n for n in nodes if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load)]
        others = [n for n in written if ast.unparse(n.value) != "self" and n.attr not in declared]
        assert [ast.unparse(node) for node in others] == [], module


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for line in body if isinstance(body, list) else []:
            value = line.value if isinstance(line, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value.strip()


FRAGMENT = re.compile(
    r"(Of|By|As|With|In|From|Those|Likewise|The same|For|Until|Without|Also|And|Or|Per|Through|To|Up|Out|On|At"
    r"|Before|After|Between|Like|Once|Now|When|While)\b"
)
"""Words that begin a fragment where a sentence should stand. Help texts are checked by tests/cli/test_help.py."""


def test_a_docstring_begins_with_a_subject_or_a_verb() -> None:
    assert FRAGMENT.match("Of keys and values."), "the test can fail"
    own = [path for module, path in modules() if not is_within(module, GENERATED)]
    others = [
        path for folder in ("tests", "benchmarks", "tools", "tour") for path in (ROOT / folder).rglob("*.py")
    ]
    found = [(str(path), text) for path in own + others for text in docstrings(parsed(path))]
    assert [each for each in found if FRAGMENT.match(each[1])] == []


def test_files_stay_small() -> None:
    own = [(module, path) for module, path in modules() if not is_within(module, GENERATED)]
    assert not {module: lines for module, path in own if (lines := len(path.read_text().splitlines())) > 400}


@pytest.mark.parametrize("path", [ROOT / "demo.py", *sorted((ROOT / "tour").glob("*.py"))], ids=str)
def test_the_tour_uses_public_names_only(path: Path) -> None:
    import ppserve
    import ppserve.library
    from ppserve.process import interrupts, lifetime

    public = {f"{home.__name__}.{name}" for home in (ppserve, ppserve.library) for name in home.__all__}
    public.add("ppserve.supported.end_unless_supported")  # what it asks before it imports them
    public |= {f"{home.__name__}.{name}" for home in (interrupts, lifetime) for name in vars(home)}  # how it ends
    assert {name for name in imports(path) if name.startswith("ppserve")} <= public
