"""Starts the ranks of a server as torchrun does: `python -m tests.e2e.bare_launcher RANKS FLAGS`.

torchrun imports torch before any rank begins, a fifth of what the start of two stages computes. Tests that are not
about the launcher do without.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid


def main(num_ranks: int, flags: list[str]) -> int:
    """0 when all ranks ended well. When one fails, or a SIGTERM comes, the others are told to end."""
    common = {"TORCHELASTIC_RUN_ID": str(uuid.uuid4()), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    common |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    ranks: list[subprocess.Popen[bytes]] = []

    def end(_signum: int, _frame: object) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.terminate()

    signal.signal(signal.SIGTERM, end)
    for number in range(num_ranks):
        numbers = {"RANK": str(number), "LOCAL_RANK": str(number)}
        command = [sys.executable, "-m", "ppserve", *flags]
        ranks.append(subprocess.Popen(command, env=os.environ | common | numbers))
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            end(signal.SIGTERM, None)
            return max(abs(rank.wait()) for rank in ranks)
        time.sleep(0.05)
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
