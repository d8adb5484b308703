"""Who imports whom among tests and benchmarks, which the table of rooms does not rule."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.test_architecture import ROOT, imports, is_within, parsed


def private_names(path: Path, of: str) -> list[str]:
    """Names with an underscore in front that a file takes from a package `of`, by an import or as an attribute."""
    modules_here = set()
    found = [name for name in imports(path) if is_within(name, {of}) and "._" in name]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and is_within(node.module or "", {of}):
            modules_here |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and isinstance(node.value, ast.Name):
            found.append(f"{node.value.id}.{node.attr}")
    return [name for name in found if is_within(name, {of}) or name.split(".")[0] in modules_here]


def test_benchmarks_take_the_helpers_of_tests_and_one_folder_of_tests_tries_them() -> None:
    """Imports go one way between folders: `tests/benchmarks` imports benchmarks, and these import helpers of other
    tests. None takes private names."""
    for path in sorted(ROOT.glob("benchmarks/**/*.py")):
        taken = [name for name in imports(path) if is_within(name, {"tests"})]
        assert not any(is_within(name, {"tests.benchmarks"}) for name in taken), path
        assert not any(part.startswith(("test_", "conftest")) for name in taken for part in name.split(".")), path
        assert private_names(path, "tests") == [], path
    tries = {path.parent for path in ROOT.glob("tests/**/*.py") if imports_benchmarks(path)}
    assert tries == {ROOT / "tests/benchmarks"}
    for path in sorted(ROOT.glob("tests/benchmarks/*.py")):
        assert private_names(path, "benchmarks") == [], path


def imports_benchmarks(path: Path) -> bool:
    return any(is_within(name, {"benchmarks"}) for name in imports(path))


def test_benchmarks_use_no_deprecated_name_of_the_client() -> None:
    """Nothing runs most of them, so no warning would be seen."""
    for path in sorted(ROOT.glob("benchmarks/**/*.py")):
        if any(is_within(name, {"ppserve.client"}) for name in imports(path)):
            called = [node.func for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
            assert "generate" not in [each.attr for each in called if isinstance(each, ast.Attribute)], path
