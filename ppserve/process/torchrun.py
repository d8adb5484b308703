"""`ppserve serve --stages N` from a plain shell: torchrun's own agent, without its command line.

What torchrun would print about a rank that failed is left out: the rank has said what is wrong in one
line, and its exit code becomes ours.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Sequence

from ppserve.process.environment import LAUNCHER_GRACE

# Stages that hang at the end are killed by their keepers before this.
_ENDING_S = 15


def run_ranks(num_ranks: int, arguments: Sequence[str], shutdown_timeout_s: float) -> int:
    """Starts this same command once per rank on this host, waits, and returns an exit code.

    shutdown_timeout_s: what streams are given after a SIGTERM, and so the ranks.
    """
    os.environ.setdefault(LAUNCHER_GRACE, str(math.ceil(shutdown_timeout_s) + _ENDING_S))
    # torchrun would announce, loudly, that it sets this; stages set their number of threads themselves.
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
        # The ranks were told and have ended: streams were finished or timed out, as asked.
        return 0
    finally:
        sys.stderr.flush()
    return 0
