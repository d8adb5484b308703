"""Finds out whether this machine can run a server, before any process is started. What it lacks is one line."""

from __future__ import annotations

import mmap
import os

from ppserve.errors import UsageError
from ppserve.model.cache import kernel_directory
from ppserve.process.limits import available_tasks
from ppserve.process.network import local_address

# Processes and threads of a started server without load. The numbers are a little below those that were counted.
_TASKS_OF_LAUNCHER, _TASKS_OF_HEAD, _TASKS_OF_RANK = 6, 8, 17


def check_machine(num_ranks: int, *, starts_them: bool) -> None:
    """Raise UsageError if this host cannot run `num_ranks` ranks.

    `starts_them` is whether they are still to be started; if not, they need no further processes and threads.
    """
    try:
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
    except OSError as error:
        which = "SELinux's execmem, systemd's MemoryDenyWriteExecute, PR_SET_MDWE"
        problem = f"kernels need executable memory, which this system does not give: {error.strerror} ({which})"
        raise UsageError(problem) from None
    kernel_directory(os.environ)
    if num_ranks > 1:
        local_address()
    needed = _TASKS_OF_LAUNCHER + _TASKS_OF_HEAD + _TASKS_OF_RANK * num_ranks if starts_them else 0
    if (left := available_tasks()) < needed:
        limits = "pids.max of the cgroup, ulimit -u"
        problem = f"{num_ranks} ranks need {needed} processes and threads; {left:g} may be started ({limits})"
        raise UsageError(problem)
