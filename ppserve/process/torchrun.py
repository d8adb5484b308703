"""`ppserve serve --stages N` from a plain shell: runs torchrun's agent in this process, without its command line.

torchrun's own report of a failed rank is not printed: the rank has written one line that says what is wrong, and
its exit code becomes the command's.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Sequence

from ppserve.process.environment import LAUNCHER_GRACE

# Longer than keepers wait before they kill a stage that does not end.
_ENDING_S = 15


def run_ranks(num_ranks: int, arguments: Sequence[str], shutdown_timeout_s: float) -> int:
    """Starts this same command once per rank on this host, waits, and returns an exit code.

    shutdown_timeout_s: how long streams may finish after a SIGTERM; ranks get a little more.
    """
    os.environ.setdefault(LAUNCHER_GRACE, str(math.ceil(shutdown_timeout_s) + _ENDING_S))
    # Otherwise torchrun sets it and prints a warning; stages choose their number of threads themselves.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable(logging.CRITICAL)
    command = ["serve", *arguments] if arguments[:1] != ["serve"] else list(arguments)
    launcher = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={num_ranks}", "-m", "ppserve"]
    try:
        run(parse_args([*launcher, *command]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException:
        # A signal to this process: the ranks got it too and have ended, their streams finished or timed out.
        return 0
    finally:
        sys.stderr.flush()
    return 0
