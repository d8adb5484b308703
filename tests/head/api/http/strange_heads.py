"""Requests as no client writes them: odd names, values, sizes and numbers of headers, and bodies that are not as
long as they say. For fuzzing, here and in benchmarks."""

from __future__ import annotations

import json
import re
import socket

from hypothesis import strategies as st

from tests.head.api.http.strange_bodies import bodies

PATHS = ("/v1/completions", "/tokenize", "/v1/models", "/health", "/nothing", "/%ff/..;", "*")
METHODS = (*["POST"] * 8, "GET", "GET", "HEAD", "PUT", "OPTIONS", "get", "PO ST")
VERSIONS = (*["1.1"] * 8, "1.0", "2")
KNOWN = (
    *("authorization", "x-request-id", "traceparent", "x-request-timeout", "content-type", "accept", "expect"),
    *("upgrade", "accept-encoding", "content-encoding", "range", "te", "trailer", "cookie", "keep-alive"),
)
WORDS = (
    *("", "0", "-1", "+5", "1e9", "nan", "0.5", "1_0", "5, 5", "100-continue", "websocket", "h2c", "gzip", "\xff"),
    *("Bearer ", "Bearer x", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "application/json"),
)
visible = st.characters(min_codepoint=33, max_codepoint=126)
values = st.sampled_from(WORDS) | st.text(visible, max_size=60)
odd_values = st.text(st.characters(max_codepoint=255), max_size=60) | st.integers(1, 40_000).map("v".__mul__)
names = st.sampled_from(KNOWN)
odd_names = st.text(visible, min_size=1, max_size=30) | st.sampled_from(["host", "x y", "", ":", "\xff", "x\0"])
# How a body of so many bytes tells its length, rightly and wrongly; rightly four times out of five.
GOOD_FRAMINGS = (["content-length: {0}"], ["transfer-encoding: chunked"], ["transfer-encoding: CHUNKED"])
ODD_FRAMINGS = (
    *(["content-length: {0}", "content-length: {0}"], ["content-length: {0}", "transfer-encoding: chunked"], []),
    *(["content-length: {0}", "content-length: 1{0}"], ["content-length: 1{0}"], ["content-length: 1"]),
    *(["content-length: -{0}"], ["content-length: +{0}"], ["content-length: {0}, {0}"], ["content-length: 0x{0}"]),
    *(["content-length: 99999999999999999999999"], ["content-length: "], ["content-length : {0}"]),
    *(["transfer-encoding: gzip"], ["transfer-encoding: gzip, chunked"], ["transfer-encoding:\tchunked"]),
    ["transfer-encoding: chunked", "transfer-encoding: chunked"],
)


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """A request, byte for byte."""

    def seldom() -> bool:
        return draw(st.integers(0, 9)) == 0

    path, content = draw(bodies()) if draw(st.booleans()) else (draw(st.sampled_from(PATHS)), b'{"prompt": "a"}')
    lines = [f"{draw(st.sampled_from(METHODS))} {path} HTTP/{draw(st.sampled_from(VERSIONS))}"]
    lines += [] if seldom() else ["host: here"]
    for _ in range(draw(st.integers(0, 4))):
        line = f"{draw(odd_names if seldom() else names)}: {draw(odd_values if seldom() else values)}"
        lines += [line] * (200 if seldom() else 1)
    framing = draw(st.sampled_from(ODD_FRAMINGS if draw(st.integers(0, 4)) == 0 else GOOD_FRAMINGS))
    lines += [line.format(len(content)) for line in framing]
    if any("chunked" in line.lower() for line in framing):
        size = b"%x" if not seldom() else draw(st.sampled_from([b"%x;a=b", b"0%x", b"-%x", b"%xg", b"f%x"]))
        content = size % len(content) + b"\r\n" + content + b"\r\n0\r\n\r\n"
    end = "\n" if seldom() else "\r\n"
    return (end.join([*lines, "connection: close"]) + end * 2).encode("latin-1") + content


def statuses_of_head(port: int, request: bytes, patience_s: float) -> list[int]:
    """The final statuses of all answers that came back. There may be none, where the server waits for more: it is
    left after patience_s. Our errors must have the form of all errors; uvicorn's are plain texts."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        answer = b""
        try:
            connection.sendall(request)
            connection.settimeout(patience_s)
            while piece := connection.recv(1 << 16):
                answer += piece
        except (TimeoutError, ConnectionError):
            pass
    assert b"internal error" not in answer.lower(), (request, answer)
    found = [int(status) for status in re.findall(rb"HTTP/1\.1 ([2-9]\d\d) ", answer)]
    head, _, body = answer.partition(b"\r\n\r\n")
    is_ours = b"text/plain" not in head and not answer.startswith(b"HTTP/1.1 100 ")
    if len(found) == 1 and found[0] >= 400 and body and is_ours:
        assert b"x-request-id: " in head, answer
        assert "message" in json.loads(body)["error"], answer
    return found
