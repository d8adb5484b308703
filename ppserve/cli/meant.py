"""What a word that a command does not take was probably meant to be: mistyped, or another program's."""

from __future__ import annotations

from collections.abc import Iterable

from ppserve.errors import likely_name

COMMANDS = {
    **dict.fromkeys(("run", "repl", "talk", "ask"), "chat"),
    **dict.fromkeys(("start", "up", "launch", "server", "api"), "serve"),
    **dict.fromkeys(("pull", "download", "get", "install"), "fetch"),
    **dict.fromkeys(("complete", "completion", "prompt", "infer"), "generate"),
    **dict.fromkeys(("ps", "status", "stats", "monitor", "watch"), "top"),
    **dict.fromkeys(("ping", "check"), "health"),
    **dict.fromkeys(("benchmark", "perf", "load"), "bench"),
}
"""What other programs call our commands."""

FLAGS = {
    **dict.fromkeys(("--pipeline-parallel-size", "--pp", "--pp-size", "--num-stages"), "--stages"),
    **dict.fromkeys(("--tensor-parallel-size", "--tp", "--tp-size"), "--tensor-parallel"),
    **dict.fromkeys(("--data-parallel-size", "--dp", "--dp-size"), "--replicas"),
    **dict.fromkeys(("--gpu-memory-utilization", "--mem-fraction-static"), "--kv-cache-memory"),
    **dict.fromkeys(("--ctx-size", "--context-length", "--n-ctx", "-c", "--max-length"), "--max-model-len"),
    **dict.fromkeys(("--model-path", "--model-id", "-m"), "--model"),
    **dict.fromkeys(("--max-num-batched-tokens", "--chunked-prefill-size"), "--prefill-chunk"),
    **dict.fromkeys(("--max-new-tokens", "--n-predict", "--length"), "--max-tokens"),
    **dict.fromkeys(("--temp", "-t"), "--temperature"),
    **dict.fromkeys(("--device", "--cpu", "--no-gpu"), "--force-cpu"),
    **dict.fromkeys(("--api-port", "--web-port"), "--http-port"),
    **dict.fromkeys(("--verbose", "-v", "--debug"), "--log-level debug"),
    **dict.fromkeys(("--host", "--port", "--server", "--address", "--endpoint"), "--target HOST:PORT"),
}
"""What other programs, or other commands of this one, call the flags of a command."""
_OF_CHAT = {"--target HOST:PORT": "--url http://HOST:PORT"}


def likely_flag(given: str, flags: Iterable[str]) -> str | None:
    """Return the flag of a command that was probably meant; None if none was. flags: all that the command has."""
    known = set(flags)
    for meant in (FLAGS.get(given), _OF_CHAT.get(FLAGS.get(given, ""))):
        if meant is not None and meant.split()[0] in known:
            return meant
    return likely_name(given, sorted(known))
