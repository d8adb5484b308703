"""Llama 3's calls: `{"name": ..., "parameters": ...}`, which `<|python_tag|>` may precede."""

from __future__ import annotations

from ppserve.head.api.answer_parts.bare_json import BareJson


class Llama3(BareJson):
    """A JSON object as the whole answer. Several calls stand behind semicolons."""

    name = "llama3"
    key = "parameters"
    prefix = "<|python_tag|>"
    special = (prefix,)

    def is_shown_by(self, template: str) -> bool:
        return "ipython" in template and '"parameters": ' in template
