"""The house and its arrows: who may import whom, checked from the imports themselves."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# room: the rooms of ours and the third-party packages that it may import. A room is the longest entry
# that a module's name begins with. Type stubs, tests and tools are not part of the house.
MAY_IMPORT: dict[str, set[str]] = {
    "ppserve": set(),
    "ppserve.errors": set(),
    "ppserve.config": {"ppserve.core"},
    "ppserve.logs": {"ppserve.config"},
    "ppserve.core": {"ppserve.core", "ppserve.errors"},
    "ppserve.wire": {"ppserve.config", "ppserve.core", "ppserve.errors", "msgspec"},
    "ppserve.tokenizer": {"ppserve.tokenizer", "ppserve.errors", "tiktoken", "tiktoken_ext"},
    "ppserve.v1": {"ppserve.v1", "google.protobuf", "grpc"},
    "ppserve.launch": {"ppserve.wire", "ppserve.config"},
    "ppserve.torchrun": {"ppserve.launch", "torch"},
    "ppserve.model": {"ppserve.model", "ppserve.core", "ppserve.errors", "torch", "numpy", "numba", "llvmlite"},
    "ppserve.model.checkpoint": {"ppserve.model.checkpoint", "ppserve.core", "ppserve.errors", "torch", "numpy"},
    "ppserve.model.checkpoint.hf": {"safetensors"},
    "ppserve.model.checkpoint.hub": {"huggingface_hub"},
    "ppserve.stage": {
        *("ppserve.stage", "ppserve.model", "ppserve.core", "ppserve.wire", "ppserve.config", "ppserve.errors"),
        *("ppserve.launch", "ppserve.logs", "parallel_state", "torch", "numpy"),
    },
    "ppserve.head": {
        *("ppserve.head", "ppserve.core", "ppserve.wire", "ppserve.tokenizer", "ppserve.v1", "ppserve.config"),
        *("ppserve.errors", "ppserve.launch", "ppserve.logs", "ppserve", "grpc", "grpc_status", "google"),
    },
    "ppserve.head.metrics": {"prometheus_client"},
    "ppserve.head.server": {"grpc_health", "grpc_reflection"},
    "ppserve.client": {"ppserve.client", "ppserve.v1", "ppserve.errors", "grpc", "google", "grpc_status"},
    "ppserve.bench": {"ppserve.bench", "ppserve.client", "ppserve.v1", "ppserve.errors", "grpc", "matplotlib"},
    "parallel_state": {"torch"},
}
# The composition roots: the command line may reach every room.
ROOTS = ("ppserve.cli", "ppserve.__main__", "ppserve.planning", "ppserve.simulation")

# packages that must not be loaded, even indirectly, by these rooms
NEVER_LOADS = {
    "ppserve.core.scheduler": {"torch", "grpc", "numpy", "msgspec", "time"},
    "ppserve.head.app": {"torch", "numba"},
    "ppserve.cli_check": {"torch", "grpc"},
    "ppserve.stage.loop": {"grpc", "prometheus_client", "tiktoken"},
    "ppserve.client": {"torch", "msgspec", "prometheus_client"},
}


def modules() -> Iterator[tuple[str, Path]]:
    yield "parallel_state", ROOT / "parallel_state.py"
    for path in sorted((ROOT / "ppserve").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def allowed(module: str) -> set[str]:
    """What a module may import: what its room may, and what its own entry adds."""
    entries = [room for room in MAY_IMPORT if module == room or module.startswith(room + ".")]
    return set().union(*(MAY_IMPORT[room] for room in entries)) if entries else set()


def is_within(name: str, packages: set[str]) -> bool:
    # "ppserve" itself stands for its version only, not for everything below it.
    return any(name == p or name.startswith(p + ".") for p in packages - {"ppserve"}) or (
        "ppserve" in packages and name == "ppserve.__version__"
    )


@pytest.mark.parametrize(("module", "path"), [pytest.param(*entry, id=entry[0]) for entry in modules()])
def test_imports_follow_the_arrows(module: str, path: Path) -> None:
    if module.startswith(ROOTS):
        return
    own = {*allowed(module), "__future__"}
    wrong = [
        name
        for name in imports(path)
        if name.split(".")[0] not in sys.stdlib_module_names and not is_within(name, own)
    ]
    assert not wrong, f"{module} must not import {wrong}"


def test_the_table_has_no_rooms_that_are_gone() -> None:
    names = {name for name, _ in modules()}
    assert set(MAY_IMPORT) <= names


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


def test_files_stay_small() -> None:
    own = [(module, path) for module, path in modules() if not module.startswith("ppserve.v1.")]
    assert not {module: lines for module, path in own if (lines := len(path.read_text().splitlines())) > 400}
