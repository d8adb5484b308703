"""`ppserve serve`: turns flags into a frozen configuration, and runs this rank's part of the server."""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from typing import Any, NoReturn

import click

from ppserve.cli.flags import FLAGS, ServeCommand, removed
from ppserve.cli.machine import check_machine
from ppserve.config import ServeConfig
from ppserve.errors import ConfigError, likely_name
from ppserve.model.cache import precompiled_mark
from ppserve.process.environment import LAUNCHER_GRACE, RankEnvironment
from ppserve.process.keeper import run_rank
from ppserve.process.lifetime import HEAD_SIGNALS, ignore_signals, signals_blocked
from ppserve.process.limits import open_many_files
from ppserve.process.log import never_wait_for_readers
from ppserve.process.progress import ProgressLine
from ppserve.process.stage_process import ForkServer

_PREFIX = "PPSERVE_"
_OTHER_VARIABLES = ("API_KEY", "TARGET", "URL", "CPU_KERNELS", "GPU_REFERENCE")
_OF_KUBERNETES = re.compile("SERVICE_(HOST|PORT)")

# A slip of the finger must not fill the host with processes.
_RANKS_PER_CORE = 64


@click.command(
    cls=ServeCommand,
    short_help="Serve a model in stages, by gRPC and HTTP.",
    too_many=lambda words: f"did you mean --model {words[0]}?",
    params=[*(flag for flags in FLAGS.values() for flag in flags), *removed("--parallel", "--expect")],
    context_settings={"auto_envvar_prefix": "PPSERVE"},
)
def serve(stages: int | None, **flags: Any) -> None:
    """Serve a model: one pipeline stage per torchrun rank, gRPC and HTTP on rank 0.

    The number of ranks is --tensor-parallel x --replicas x --stages.
    """
    config = build_config(flags)
    _warn_of_variables(filter(None, (param.name for param in click.get_current_context().command.params)))
    sizes = {"--stages": stages or 1}
    sizes |= {f"--{name}": flags[name.replace("-", "_")] for name in ("tensor-parallel", "replicas")}
    asked = math.prod(sizes.values())
    if (environment := RankEnvironment.from_environ()) is None:
        _launch(config, sizes)
    if stages is not None and asked != environment.world_size:
        problem = f"{stages} stages need {asked} ranks, but torchrun started {environment.world_size}"
        raise ConfigError("--stages", problem)
    _run(config, environment)


def _warn_of_variables(flags: Iterable[str]) -> None:
    """Name the environment variables that look like a flag's and are none. They are not refused: Kubernetes sets
    variables that begin with a service's name. flags: the names of all flags."""
    if LAUNCHER_GRACE in os.environ or os.environ.get("RANK", "0") != "0":
        return  # the process that started this one has named them
    known = sorted(flag.upper() for flag in flags)
    given = {name.removeprefix(_PREFIX): value for name, value in os.environ.items() if name.startswith(_PREFIX)}
    for name in sorted(given.keys() - {*known, *_OTHER_VARIABLES}):
        is_of_kubernetes = _OF_KUBERNETES.search(name) or "://" in given[name]
        if not is_of_kubernetes and (near := likely_name(name, known)):
            problem = f"{_PREFIX}{name} is no flag's variable; did you mean {_PREFIX}{near}?"
            click.echo(f"ppserve: warning: {problem}", err=True)


def _launch(config: ServeConfig, sizes: dict[str, int]) -> NoReturn:
    """Start all ranks on this host, from a plain shell."""
    asked, room = math.prod(sizes.values()), _RANKS_PER_CORE * (os.cpu_count() or 1)
    if asked > room:
        problem = f"{asked} ranks; on this host at most {room} are started, {_RANKS_PER_CORE} for each core"
        raise ConfigError(max(sizes, key=sizes.__getitem__), problem)
    check_machine(asked, starts_them=True)
    from ppserve.cli.check import check
    from ppserve.process.torchrun import run_ranks

    check(config, asked)
    start_precompiling(config)
    if config.server.log_format == "text":
        # Imports take seconds. The head goes on with this line.
        ProgressLine(sys.stderr, "starting", 0.0).show("importing", 0.0)
    sys.exit(run_ranks(asked, sys.argv[1:], config.server.shutdown_timeout_s))


def _run(config: ServeConfig, environment: RankEnvironment) -> NoReturn:
    """Run as the rank that torchrun started."""
    ignore_signals(HEAD_SIGNALS)
    open_many_files()
    never_wait_for_readers()
    if environment.local_rank == 0 and LAUNCHER_GRACE not in os.environ:  # else the launcher has begun it
        start_precompiling(config)
    if environment.rank > 0:
        sys.exit(run_rank(config, environment))
    check_machine(environment.local_world_size, starts_them=False)
    from ppserve.cli.check import check

    check(config, environment.world_size, environment.local_world_size)
    # It imports torch while this process imports the head.
    fork_server = ForkServer()
    fork_server.prepare()
    from ppserve.head.app import run_head

    run_head(config, environment, fork_server)


def start_precompiling(config: ServeConfig) -> None:
    """Begin to compile what a first start needs on CPUs, while this process and its children import."""
    from ppserve.cli.check import may_have_gpu

    if may_have_gpu(config) or precompiled_mark(os.environ).exists():
        return

    def run() -> None:
        # Without this process the stages compile all.
        with contextlib.suppress(OSError), signals_blocked():
            command = [sys.executable, "-m", "ppserve.stage.precompile", str(os.getpid())]
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, check=False)

    # It waits for the process, which the kernel ends with this thread.
    threading.Thread(target=run, name="precompile", daemon=True).start()


def build_config(flags: dict[str, Any]) -> ServeConfig:
    """Return the frozen configuration of these flags. Raises ConfigError for flags that do not go together."""
    if len({bool(flags[f"stage_tls_{part}"]) for part in ("cert", "key", "ca")}) > 1:
        raise ConfigError("--stage-tls-cert", "needs --stage-tls-key and --stage-tls-ca, and the other way round")
    return ServeConfig.from_flags({**flags, "path": flags["model"]})
