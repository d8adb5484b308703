"""Generate ppserve/v1 and ppserve/vllm from protos/, with the pinned grpcio-tools.

    python tools/generate_stubs.py            # writes *_pb2.py, .pyi and *_pb2_grpc.py
    python tools/generate_stubs.py --check    # writes nothing; fails when they are out of date

The protos lie in folders of the packages' names, so the imports in the generated files are right as they come:
nothing is patched, and the checked-in files can be compared byte by byte.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib import metadata
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGES = ("v1", "vllm")
# Newer releases emit code that refuses to load beside clients that hold protobuf below 7.
PINNED = "1.81.1"


def generate(output: Path) -> None:
    """Write the stubs of every proto below `output`, which stands for the repository's root."""
    version = metadata.version("grpcio-tools")
    if version != PINNED:
        raise SystemExit(f"grpcio-tools {version} is installed; the stubs are made with {PINNED}")
    well_known = Path(protoc.__file__).parent / "_proto"
    command = [
        "protoc",
        f"--proto_path={PROTOS}",
        f"--proto_path={well_known}",
        f"--python_out={output}",
        f"--pyi_out={output}",
        f"--grpc_python_out={output}",
        *(str(path) for path in sorted(PROTOS.rglob("*.proto"))),
    ]
    if protoc.main(command) != 0:
        raise SystemExit("protoc failed")


def out_of_date() -> list[str]:
    """Names of checked-in stubs that are not what the protos make, or lack."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        made = _contents(Path(folder))
    kept = _contents(ROOT)
    return sorted(name for name in made | kept if made.get(name) != kept.get(name))


def _contents(root: Path) -> dict[str, bytes]:
    paths = [path for package in PACKAGES for path in (root / "ppserve" / package).glob("*_pb2*.py*")]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        generate(ROOT)
    elif stale := out_of_date():
        raise SystemExit(f"out of date: {', '.join(stale)}; run tools/generate_stubs.py")


if __name__ == "__main__":
    main()
