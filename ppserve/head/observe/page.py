"""The page that the HTTP port and the metrics port show: one document, made of the files in `web/`.

A browser runs and shows nothing but these: the document's policy names the digests of its script and its style.
The script may ask its own origin alone.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from ppserve.head.observe.pages import Page

SCRIPTS = ("markdown.js", "pipeline.js", "ask.js")
"""They are one script, in this order."""


def page_of(asks: str, wants_key: bool, knows: Sequence[str] = ()) -> Page:
    """Make the page.

    asks: what the page may ask the server that shows it: "chat" (and completions), "text" (completions), or "" on
    the metrics port and for models without a tokenizer. wants_key: whether asking needs an API key. knows:
    "thinking" and "tools", where the model's format of them is known.
    """
    style, script = _read("page.css"), "\n".join(map(_read, SCRIPTS))
    html = _read("index.html").replace("/* style */", style).replace("/* script */", script)
    more = f'data-wants-key="{str(wants_key).lower()}" data-knows="{" ".join(knows)}"'
    root = f'<html lang="en" data-asks="{asks}" {more}>'
    html = html.replace('<html lang="en">', root)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page("text/html; charset=utf-8", html.encode(), {"Content-Security-Policy": policy})


def _read(name: str) -> str:
    return resources.files("ppserve").joinpath("head/observe/web", name).read_text("utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
