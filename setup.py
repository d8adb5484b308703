"""What pyproject.toml cannot say: the protos, which lie beside the package here, lie inside of it in a wheel."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithProtos(build_py):
    """Also copies protos/ to ppserve/protos/, for clients in other languages."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for proto in (ROOT / "protos").rglob("*.proto"):
                target = Path(self.build_lib, "ppserve", proto.relative_to(ROOT))
                self.mkpath(str(target.parent))
                self.copy_file(str(proto), str(target))


setup(cmdclass={"build_py": BuildWithProtos})
