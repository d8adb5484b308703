"""`ppserve chat`: a conversation with any server of OpenAI's chat completions."""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import click

from ppserve.cli.client import API_KEY_FILE, api_key, trusting
from ppserve.cli.main import say
from ppserve.cli.types import COUNT, FILE, TEXT, Number, Parsed
from ppserve.errors import PpserveError

COMMANDS = "/reset forgets the conversation, /system TEXT sets the system's message, /quit ends."
_PAUSE_S = 0.5
_READS_WITHIN_S = 120.0


class _Lost(Exception):
    """The server cannot be reached, or ended the stream before the answer's end."""


class ReceivedAnswer:
    """One answer as far as it was received. Its seed and token ids continue it after a server's restart."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = {**body, "stream": True, "return_token_ids": True}
        self.ids: list[int] = []
        self.text = ""
        self.is_complete = False
        self.num_tokens = 0

    def body(self) -> dict[str, Any]:
        """The JSON of the next request, which continues the answer where it has tokens."""
        return {**self._body, "resume": {"token_ids": self.ids}} if self.ids else self._body

    def add(self, event: dict[str, Any]) -> str:
        """Record an event and return its new text. Raises _Lost for one that says that the stream failed."""
        if "error" in event:
            raise _Lost(event["error"].get("message", "the stream failed"))
        if "seed" in event:
            self._body["seed"] = event["seed"]
        new = ""
        for choice in event.get("choices", ()):
            text = choice["delta"].get("content") or ""
            new += text
            ids = choice.get("token_ids") or []
            self.ids += ids
            # Servers that send no ids send about one token an event.
            self.num_tokens += len(ids) if ids or not text else 1
            self.is_complete |= choice.get("finish_reason") is not None
        self.text += new
        return new


class ChatServer:
    """A server's address, and how requests are sent to it."""

    def __init__(self, url: SplitResult, key: str | None, authority: Path | None) -> None:
        """authority: the PEM file that an https server is checked with. Raises ConfigError for an unusable one."""
        kind: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        if url.scheme == "https":
            kind = partial(http.client.HTTPSConnection, context=trusting(authority))
        self._url = f"{url.scheme}://{url.netloc.rpartition('@')[2]}"
        self._connect = partial(kind, url.hostname, url.port, timeout=_READS_WITHIN_S)
        self._path = url.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    def texts(self, answer: ReceivedAnswer) -> Iterator[str]:
        """Yield the text that each event adds. Raises _Lost where trying again may help, else PpserveError."""
        with closing(self._connect()) as connection:
            try:
                content = json.dumps(answer.body(), ensure_ascii=False).encode()
                connection.request("POST", self._path, content, self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    problem = _problem(response.read())
                    raise _Lost(problem) if response.status in (429, 502, 503) else PpserveError(problem)
                for line in response:
                    if line.startswith(b"data: {"):
                        yield self._read(line[6:], answer)
            except UnicodeEncodeError:
                raise PpserveError("a message is not UTF-8 text") from None
            except OSError as error:
                raise _Lost(f"{self._url}: {error}") from None
            except http.client.HTTPException as error:  # its text may be bytes of another protocol
                raise _Lost(
                    f"{self._url}: no HTTP answer ({type(error).__name__}); give the server's HTTP port"
                ) from None

    def _read(self, event: bytes, answer: ReceivedAnswer) -> str:
        try:
            return answer.add(json.loads(event))
        except (AttributeError, LookupError, TypeError, ValueError):
            sent = event.decode("utf-8", "replace").strip()[:200]
            raise PpserveError(f"{self._url} sent no event of a chat: {sent!r}") from None


def _problem(content: bytes) -> str:
    try:
        return " ".join(str(json.loads(content)["error"]["message"]).split())
    except (ValueError, KeyError, TypeError):
        return content.decode("utf-8", "replace").partition("\n")[0][:200] or "the server gave no reason"


class Dialogue:
    """The messages so far, and the options that are sent with them."""

    def __init__(self, server: ChatServer, options: dict[str, Any], retry_s: float) -> None:
        self._server, self._options, self._retry_s = server, options, retry_s
        self.history: list[dict[str, str]] = []

    def ask(self, text: str, system: str | None, shows_timings: bool) -> bool:
        """Print the answer as it arrives, up to a Ctrl-C. Return whether it ended without an error."""
        instructions = [{"role": "system", "content": system}] if system else []
        question = {"role": "user", "content": text}
        answer = ReceivedAnswer({**self._options, "messages": [*instructions, *self.history, question]})
        begun_s = time.monotonic()
        first_s: float | None = None
        problem: str | None = None
        try:
            for new in self._texts(answer):
                if first_s is None:
                    first_s = time.monotonic() - begun_s
                say(new, end="")
        except KeyboardInterrupt:
            pass
        except PpserveError as error:
            problem = f"ppserve: error: {error}"
        say("")
        if problem is not None:
            click.echo(problem, err=True)
            if not answer.text:
                return False
        self.history += [question, {"role": "assistant", "content": answer.text}]
        if shows_timings:
            _show_timings(answer.num_tokens, first_s or 0.0, time.monotonic() - begun_s)
        return problem is None

    def _texts(self, answer: ReceivedAnswer) -> Iterator[str]:
        """Yield the answer's texts up to its end. While the server cannot be reached, the request is repeated."""
        until_s: float | None = None
        while not answer.is_complete:
            try:
                for new in filter(None, self._server.texts(answer)):
                    until_s = None
                    yield new
                if not answer.is_complete:
                    raise _Lost("the stream ended too early")
            except _Lost as error:
                if answer.is_complete:
                    break
                if answer.text and not answer.ids:
                    raise PpserveError(f"the answer broke off: {error}") from None
                if until_s is None:
                    until_s = time.monotonic() + self._retry_s
                    click.echo(f"\n[the server is away ({error}): trying for {self._retry_s:g} s]", err=True)
                if time.monotonic() >= until_s:
                    raise PpserveError(f"no answer: {error}") from None
                time.sleep(_PAUSE_S)


def _show_timings(num_tokens: int, first_s: float, took_s: float) -> None:
    rate = max(0, num_tokens - 1) / max(took_s - first_s, 1e-9)
    in_all = f"{num_tokens} tokens in {took_s:.2f} s"
    click.echo(f"[{in_all}; the first after {first_s:.2f} s, then {rate:.1f} a second]", err=True)


def _url(text: str) -> SplitResult:
    url = urlsplit(text if "://" in text else f"http://{text}")
    is_plain = text.isascii() and text.isprintable() and " " not in text
    if url.scheme not in ("http", "https") or not url.hostname or url.port == 0 or not is_plain:
        raise ValueError(f"{text!r} is not http://HOST:PORT")
    url.hostname.encode("idna")  # raises UnicodeError for what no lookup takes
    return url


@click.command(short_help="Talk to a model that answers.", epilog=COMMANDS, params=[API_KEY_FILE])
@click.option(
    "--url", type=Parsed("url", _url), default="http://127.0.0.1:8000", envvar="PPSERVE_URL",
    help="Address of the server, which may be any with /v1/chat/completions.",
)  # fmt: skip
@click.option("--tls-ca", type=FILE, help="PEM file of the authority to trust for https.  [default: the system's]")
@click.option("--model", type=TEXT, help="Name of the model, for servers with several.")
@click.option("--system", type=TEXT, help="System message at the beginning of the conversation.")
@click.option("--max-tokens", type=COUNT, help="Most tokens of each answer.  [default: what fits the context]")
@click.option("--temperature", type=Number(0), default=0.0, help="Randomness of the answer; 0 is greedy.")
@click.option(
    "--retry", "retry_s", type=Number(0), default=120.0,
    help="Seconds to keep trying while no server answers.",
)  # fmt: skip
@click.option("--timings", is_flag=True, help="Print the speed of each answer after it.")
def chat(url: SplitResult, api_key_file: Path | None, tls_ca: Path | None, **flags: Any) -> None:
    """Talk with a model: each line is a question, which is sent with the conversation before it.

    Ctrl-C ends an answer. Where standard input is no terminal, each of its lines is a question.
    """
    options = {name: flags[name] for name in ("model", "max_tokens", "temperature") if flags[name] is not None}
    server = ChatServer(url, api_key(api_key_file), tls_ca)
    conversation = Dialogue(server, options, flags["retry_s"])
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        click.echo(COMMANDS, err=True)
        import readline  # noqa: F401 - lines can be edited
    failed, system = False, flags["system"]
    for line in _lines(is_terminal):
        command, _, rest = line.strip().partition(" ")
        if command == "/quit":
            break
        if command == "/reset":
            conversation.history.clear()
        elif command == "/system":
            system = rest.strip()
        elif command.startswith("/"):
            click.echo(COMMANDS, err=True)
        elif command:
            failed = not conversation.ask(line.strip(), system, flags["timings"])
    sys.exit(1 if failed else 0)


def _lines(is_terminal: bool) -> Iterator[str]:
    """Yield the lines of standard input. At a terminal, Ctrl-C begins the line anew."""
    while is_terminal:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            say("")
        except EOFError:
            say("")
            return
    yield from sys.stdin
