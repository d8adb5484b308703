"""`make chat`: two stages of a model on free ports, and a conversation with it; both end together."""

from __future__ import annotations

from ppserve.process.interrupts import end_at_interrupt, exit_at_signals

end_at_interrupt()

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ppserve.process.lifetime import ending_with_us
from ppserve.process.progress import write_over

READY = re.compile(r"^ppserve ready .*http=(\S+)$", re.MULTILINE)
SERVED = re.compile(r"^ppserve [\d.]+: (.*)$", re.MULTILINE)
"""The line of the server's banner that says what it serves, in which numbers."""
PROGRESS = re.compile(r"^starting, .*$", re.MULTILINE)
PPSERVE = (sys.executable, "-m", "ppserve")


def show(text: str) -> None:
    """Write over the line of the progress, where there is a terminal."""
    if sys.stderr.isatty():
        write_over(sys.stderr, text)


def show_progress(log: str, said: str) -> str:
    """Show the last line in which the server says how its start goes on, unless it is `said`; return it."""
    told = PROGRESS.findall(log)
    if not told or told[-1] == said:
        return said
    show(told[-1])
    return str(told[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--stages", default="2")
    known, others = parser.parse_known_args()
    ports = ("--port", "0", "--http-port", "0", "--metrics-port", "0")
    command = [*PPSERVE, "serve", "--model", known.model, "--stages", known.stages, *ports]
    exit_at_signals()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "server.log")
        with log.open("wb") as output:
            # A session of its own: Ctrl-C is for the conversation. If this program is killed, the server ends too.
            command = ending_with_us(command, by=signal.SIGTERM)
            server = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            print(f"starting {known.stages} stages of {known.model}", file=sys.stderr)
            said = ""
            while not (ready := READY.search(text := log.read_text(errors="replace"))):
                said = show_progress(text, said)
                if server.poll() is not None:
                    print(log.read_text(errors="replace"), file=sys.stderr)
                    return server.returncode
                time.sleep(0.1)
            show("")
            signal.signal(signal.SIGINT, lambda *_: None)
            if served := SERVED.search(log.read_text(errors="replace")):
                print(served[1], file=sys.stderr)
            return subprocess.run(
                [*PPSERVE, "chat", "--url", f"http://{ready[1]}", *others], check=False
            ).returncode
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    sys.exit(main())
