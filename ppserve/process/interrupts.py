"""What Ctrl-C does to a command. It imports nothing that takes time, because it is asked before anything else.

Python raises KeyboardInterrupt wherever it is at the moment. Within an import or at the interpreter's end nobody
catches it, and a traceback is printed. Until a command can end in order it therefore ends at once, in silence.
"""

import os
import signal

EXIT_INTERRUPTED = 128 + signal.SIGINT
"""The exit code after Ctrl-C."""
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def end_at_interrupt() -> None:
    """Let Ctrl-C end this process at once, also one that the parent has blocked until now. A process that was
    started with Ctrl-C ignored, such as one in a shell's background, goes on ignoring it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end_at_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def raise_at_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, as Python does by itself, where `end_at_interrupt` has changed that."""
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_at_once(_number: int, _frame: object) -> None:
    os._exit(EXIT_INTERRUPTED)


def exit_at_signals() -> None:
    """Let the first SIGHUP, SIGINT or SIGTERM raise SystemExit with 128 and its number, so that what was begun is
    ended in order. Further ones are ignored."""

    def leave(number: int, _frame: object) -> None:
        for ending in _ENDING:
            signal.signal(ending, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for ending in _ENDING:
        signal.signal(ending, leave)
