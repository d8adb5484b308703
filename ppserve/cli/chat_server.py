"""The server that `ppserve chat` talks to: OpenAI's chat completions over HTTP, one request at a time."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from ppserve.cli.client import trusting
from ppserve.client.messages import SERVES_ONE_THAT_ANSWERS, no_server
from ppserve.errors import PpserveError

_READS_WITHIN_S = 120.0
_FIRST_ANSWER_WITHIN_S = 10.0
_TRY_AGAIN = (429, 502, 503)
_NOT_ALLOWED = (401, 403)
_THOUGHT_FIELDS = ("reasoning_content", "reasoning")
"""Servers have one of these names for what the model thinks. A message is sent back with its server's."""


class Lost(Exception):
    """The server cannot be reached, or ended the stream before the answer's end."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server says about the model that it serves."""

    name: str
    context: int | None
    """Most tokens of a conversation; None where the server does not say."""
    is_ppserve: bool


@dataclass(frozen=True, slots=True)
class NewText:
    """What one event adds to an answer: what the model thinks, then what it says."""

    thought: str
    said: str


class ReceivedAnswer:
    """One answer as far as it was received. Its seed and token ids continue it after a server's restart."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = {**body, "stream": True, "return_token_ids": True}
        self.ids: list[int] = []
        self.text = ""
        self.thought = ""
        self.calls: list[dict[str, Any]] = []
        """The calls of tools, as OpenAI's messages have them."""
        self._thought_field = _THOUGHT_FIELDS[0]
        self.finish_reason: str | None = None
        self.num_tokens = 0

    @property
    def is_complete(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.thought or self.calls)

    def message(self) -> dict[str, Any]:
        """Return the answer as a message of the next request. Templates may show what the model thought and
        called."""
        thought = {self._thought_field: self.thought} if self.thought else {}
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"role": "assistant", "content": self.text, **thought, **calls}

    def body(self) -> dict[str, Any]:
        """Return the JSON of the next request, which continues the answer where it has tokens."""
        return {**self._body, "resume": {"token_ids": self.ids}} if self.ids else self._body

    def add(self, event: dict[str, Any]) -> NewText:
        """Record an event and return its new text. Raises Lost for one that says that the stream failed."""
        if "error" in event:
            raise Lost(event["error"].get("message", "the stream failed"))
        if "seed" in event:
            self._body["seed"] = event["seed"]
        said = thought = ""
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            pieces = delta.get("tool_calls") or []
            field = next((name for name in _THOUGHT_FIELDS if delta.get(name)), self._thought_field)
            self._thought_field = field
            new_said, new_thought = delta.get("content") or "", delta.get(field) or ""
            said += new_said
            thought += new_thought
            for piece in pieces:
                self._add_call(piece)
            ids = choice.get("token_ids") or []
            self.ids += ids
            # Servers that send no ids send about one token an event.
            has_some = bool(new_said or new_thought or pieces)
            self.num_tokens += len(ids) if ids or not has_some else 1
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.text += said
        self.thought += thought
        return NewText(thought, said)

    def _add_call(self, piece: dict[str, Any]) -> None:
        """Record a call's beginning, which has its name, or further text of its arguments."""
        place, function = piece.get("index", len(self.calls)), piece["function"]
        if place == len(self.calls):
            begun = {"name": function["name"], "arguments": ""}
            self.calls.append({"id": piece.get("id") or str(place), "type": "function", "function": begun})
        self.calls[place]["function"]["arguments"] += function.get("arguments") or ""


class ChatServer:
    """A server's address, and how requests are sent to it."""

    def __init__(self, url: SplitResult, key: str | None, authority: Path | None) -> None:
        """authority: the PEM file that an https server is checked with. Raises ConfigError for an unusable one."""
        kind: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        if url.scheme == "https":
            kind = partial(http.client.HTTPSConnection, context=trusting(authority))
        self.url = f"{url.scheme}://{url.netloc.rpartition('@')[2]}"
        self._host = url.hostname
        self._connect = partial(kind, url.hostname, url.port)
        self._root = url.path.rstrip("/").removesuffix("/v1")
        self._path = f"{self._root}/v1"
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    def served(self, wanted: str | None) -> ServedModel | None:
        """Return the model called `wanted`, or the first; None if the server does not say which it serves.

        Raises PpserveError where nobody listens, and where the key is not accepted.
        """
        try:
            status, content = self._get(f"{self._path}/models")
        except OSError as error:
            raise PpserveError(self._not_reached(error)) from None
        except http.client.HTTPException as error:
            raise PpserveError(self._no_http(error)) from None
        if status in _NOT_ALLOWED:
            raise PpserveError(f"{self.url}: {_problem(content)}")
        try:
            models = json.loads(content)["data"]
            model = next((each for each in models if each["id"] == wanted), models[0])
            return ServedModel(str(model["id"]), model.get("max_model_len"), model.get("owned_by") == "ppserve")
        except (AttributeError, LookupError, TypeError, ValueError):
            return None

    def texts(self, answer: ReceivedAnswer) -> Iterator[NewText]:
        """Yield the text that each event adds. Raises Lost where trying again may help, else PpserveError."""
        with closing(self._connect(timeout=_READS_WITHIN_S)) as connection:
            try:
                content = json.dumps(answer.body(), ensure_ascii=False).encode()
                connection.request("POST", f"{self._path}/chat/completions", content, self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    problem = _problem(response.read())
                    raise Lost(problem) if response.status in _TRY_AGAIN else PpserveError(problem)
                for line in response:
                    if line.startswith(b"data: {"):
                        yield self._read(line[6:], answer)
            except UnicodeEncodeError:
                raise PpserveError("a message is not UTF-8 text") from None
            except OSError as error:
                raise Lost(f"{self.url}: {error}") from None
            except http.client.HTTPException as error:
                raise Lost(self._no_http(error)) from None

    def stages(self) -> list[dict[str, Any]]:
        """Return what the server's page shows of each stage. Raises PpserveError where the server shows no
        page."""
        try:
            status, content = self._get(f"{self._root}/state.json")
            if status in _NOT_ALLOWED:
                raise PpserveError(f"{self.url}: {_problem(content)}")
            stages: list[dict[str, Any]] = json.loads(content)["stages"]
            return stages
        except OSError as error:
            raise PpserveError(f"{self.url}: {error}") from None
        except http.client.HTTPException as error:
            raise PpserveError(self._no_http(error)) from None
        except (LookupError, TypeError, ValueError):
            problem = "does not tell what its stages do; ppserve does, unless it was started with --no-page"
            raise PpserveError(f"{self.url} {problem}") from None

    def _get(self, path: str) -> tuple[int, bytes]:
        """Return the status and content of a page."""
        with closing(self._connect(timeout=_FIRST_ANSWER_WITHIN_S)) as connection:
            connection.request("GET", path, headers=self._headers)
            response = connection.getresponse()
            return response.status, response.read()

    def _not_reached(self, error: OSError) -> str:
        """Say why there is no answer, and what to change."""
        if isinstance(error, ssl.SSLCertVerificationError):
            why = f"the certificate of {self.url} is not trusted ({error.verify_message})"
            return f"{why}; name the authority that signed it (--tls-ca)"
        if isinstance(error, ssl.SSLError):
            return f"{self.url}: TLS failed ({error.reason}); a server without --tls-cert is asked with http://"
        if isinstance(error, ConnectionResetError):
            return f"{self.url} hangs up before it answers; a server with --tls-cert is asked with https://"
        if isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME:
            return f"no host is called {self._host}"
        why = "" if isinstance(error, ConnectionRefusedError) else f" ({error.strerror or error})"
        return no_server(self.url, why)

    def _no_http(self, error: http.client.HTTPException) -> str:
        """Say that the answer is no HTTP. The error's own text is not shown: it may be bytes of another
        protocol."""
        return f"{self.url}: no HTTP answer ({type(error).__name__}); give the server's HTTP port"

    def _read(self, event: bytes, answer: ReceivedAnswer) -> NewText:
        try:
            return answer.add(json.loads(event))
        except (AttributeError, LookupError, TypeError, ValueError):
            sent = event.decode("utf-8", "replace").strip()[:200]
            raise PpserveError(f"{self.url} sent no event of a chat: {sent!r}") from None


def parse_url(text: str) -> SplitResult:
    """Read http://HOST:PORT, where http:// may be left out. Raises ValueError for other texts."""
    url = urlsplit(text if "://" in text else f"http://{text}")
    is_plain = text.isascii() and text.isprintable() and " " not in text
    if url.scheme not in ("http", "https") or not url.hostname or url.port == 0 or not is_plain:
        raise ValueError(f"{text!r} is not http://HOST:PORT")
    url.hostname.encode("idna")  # raises UnicodeError for what no lookup takes
    return url


def _problem(content: bytes) -> str:
    try:
        error = json.loads(content)["error"]
        problem = " ".join(str(error["message"]).split())
        if error.get("code") == "no_chat_template":
            problem += f"; a model that answers: {SERVES_ONE_THAT_ANSWERS}"
        return problem
    except (AttributeError, ValueError, KeyError, TypeError):
        return content.decode("utf-8", "replace").partition("\n")[0][:200] or "the server gave no reason"
