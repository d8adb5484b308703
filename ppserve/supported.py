"""Where ppserve runs. This is asked before anything else is imported, so it is written for Python 3.8 too.

    python -m ppserve.supported         says why ppserve cannot run here, with exit code 2, or nothing

Never imports anything of ours.
"""

from __future__ import annotations

import os
import sys
import time

FIRST, LAST = (3, 11), (3, 13)
"""The oldest and the newest Python, as in pyproject.toml."""

_NAMES = {"darwin": "macOS", "win32": "Windows", "cygwin": "Windows"}
_RANK_0_SPEAKS_WITHIN_S = 2.0


def refusal() -> str | None:
    """Return why this system or this Python cannot run ppserve, or None if they can."""
    if sys.platform != "linux":
        system = _NAMES.get(sys.platform, sys.platform)
        return f"{system} is not supported: ppserve runs on Linux (x86-64 or ARM64)"
    if not FIRST <= sys.version_info[:2] <= LAST:
        found, first, last = (".".join(map(str, version)) for version in (sys.version_info[:2], FIRST, LAST))
        return f"Python {found} is not supported: ppserve needs Python {first} to {last}"
    if sys.maxsize < 2**32 or sys.byteorder != "little":
        return "a 32-bit or big-endian Python is not supported: ppserve runs on x86-64 or ARM64"
    return None


def require() -> None:
    """Raise ImportError where ppserve cannot run."""
    if (reason := refusal()) is not None:
        raise ImportError(reason)


def end_unless_supported() -> None:
    """End a command with one line and exit code 2 where ppserve cannot run. Of several ranks, rank 0 speaks."""
    if (reason := refusal()) is None:
        return
    if os.environ.get("RANK", "0") == "0":
        print(f"ppserve: error: {reason}", file=sys.stderr, flush=True)
    else:
        time.sleep(_RANK_0_SPEAKS_WITHIN_S)  # torchrun ends all ranks when one has ended
    sys.exit(2)


if __name__ == "__main__":
    end_unless_supported()
