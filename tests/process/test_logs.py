"""A log that cannot be written must not end a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SPEAKS = "print('said', file=sys.stderr, flush=True); print('said', flush=True); logging.warning('said')"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(("survives", "code"), [(True, 3), (False, 1)])
def test_a_full_disk_ends_nothing(survives: bool, code: int) -> None:
    """The same without it fails, as a control."""
    first = "from ppserve.process import logs; logs.survive_full_disks()" if survives else "pass"
    program = f"import logging, sys\n{first}\n{SPEAKS}\nsys.exit(3)"
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=full, timeout=60)
    assert ended.returncode == code


def test_what_can_be_written_is() -> None:
    program = f"import logging, sys\nfrom ppserve.process import logs; logs.survive_full_disks()\n{SPEAKS}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("said\n", "said\nWARNING:root:said\n")


def test_debug_is_ours_and_not_the_compilers() -> None:
    program = """if True:
        import logging
        from ppserve.config import LogSettings
        from ppserve.process.logs import set_up_logging
        set_up_logging(LogSettings(level="debug"), "stage 0")
        logging.getLogger("numba.core").debug("an instruction")
        logging.getLogger("ppserve.stage").debug("a step")
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "a step" in ended.stderr
    assert "an instruction" not in ended.stderr
