"""The regular expressions that are enforced. ECMAScript and llguidance read them alike, or they are translated so.

llguidance reads expressions as Rust's `regex` does, where some characters mean another thing than to a JSON
Schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ppserve.grammar.structured_output import FormRefused

ANY = r"[^\n\r\u{2028}\u{2029}]"
"""What `.` matches in ECMAScript."""
SPACES = r" \t\n\r\x0b\x0c\u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
"""What `\\s` matches in ECMAScript, within a class."""
SETS = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": SPACES,
}
CONTROLS = {"t": r"\t", "n": r"\n", "r": r"\r", "f": r"\x0c", "v": r"\x0b"}
MAX_REPEAT = 10_000

_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d+)(?:(,)(\d*))?\})\??")
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})")


def translated(pattern: str, refuse: Callable[[str], FormRefused]) -> str:
    """Translate an ECMAScript expression into one that means the same to llguidance.

    refuse: makes, from a problem, the error that is raised for an expression that cannot be translated.
    """
    return _Translation(pattern, refuse).text


def escaped(text: str) -> str:
    """Return an expression that matches this text and no other."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\u{{{ord(char):x}}}" for char in text)


class _Translation:
    """Translates one expression, which is read once, from left to right."""

    def __init__(self, pattern: str, refuse: Callable[[str], FormRefused]) -> None:
        self._pattern = pattern
        self._refuse = refuse
        self._at = 0
        self._depth = 0
        written = []
        while self._at < len(pattern):
            written.append(self._next())
        if self._depth:
            raise refuse("a group is not closed")
        self.text = "".join(written)

    def _next(self) -> str:
        """Read one atom, quantifier, anchor or bar, and return its translation."""
        char = self._pattern[self._at]
        if quantifier := _QUANTIFIER.match(self._pattern, self._at):
            return self._quantifier(quantifier)
        self._at += 1
        match char:
            case "\\":
                return self._escape(in_class=False)
            case "[":
                return self._class()
            case ".":
                return ANY
            case "(":
                self._depth += 1
                return self._group()
            case ")":
                self._depth -= 1
                if self._depth < 0:
                    raise self._refuse("a group is closed that was not opened")
                return char
            case "{" | "}" | "]":
                raise self._refuse(f"a bare {char!r} is not supported: write \\{char}")
            case "^" | "$" | "|":
                return char
        return escaped(char)

    def _quantifier(self, found: re.Match[str]) -> str:
        counts = [int(count) for count in (found[1], found[3]) if count]
        if any(count > MAX_REPEAT for count in counts):
            raise self._refuse(f"it repeats more than {MAX_REPEAT} times")
        self._at = found.end()
        # The whole text is matched, so it makes no difference whether a quantifier is greedy.
        return found[0][:-1] if len(found[0]) > 1 and found[0].endswith("?") else found[0]

    def _group(self) -> str:
        if not self._pattern.startswith("?", self._at):
            return "(?:"
        if self._pattern.startswith("?:", self._at):
            self._at += 2
            return "(?:"
        if name := re.compile(r"\?<[A-Za-z_]\w*>").match(self._pattern, self._at):
            self._at = name.end()
            return "(?:"
        raise self._refuse(f"({self._pattern[self._at : self._at + 2]} is not supported: no lookaround, no flags")

    def _escape(self, in_class: bool) -> str:
        """Translate what stands behind a backslash."""
        if self._at >= len(self._pattern):
            raise self._refuse("it ends with a backslash")
        char = self._pattern[self._at]
        if code := _CODE.match(self._pattern, self._at):
            self._at = code.end()
            return self._character(int(code[1] or code[2], 16))
        self._at += 1
        if char in CONTROLS:
            return CONTROLS[char]
        if char.lower() in SETS:
            if char.islower():
                return SETS[char] if in_class else f"[{SETS[char]}]"
            if not in_class:
                return f"[^{SETS[char.lower()]}]"
        if char.isalnum() or char == "_":
            raise self._refuse(f"\\{char} is not supported{' in a class' if in_class else ''}")
        return escaped(char)

    def _character(self, code: int) -> str:
        if 0xD800 <= code < 0xE000:
            raise self._refuse("it has half of a surrogate pair: write the character itself")
        return f"\\u{{{code:x}}}"

    def _class(self) -> str:
        is_negated = self._pattern.startswith("^", self._at)
        if is_negated:
            self._at += 1
        members: list[str] = []
        while not self._pattern.startswith("]", self._at):
            if self._at >= len(self._pattern):
                raise self._refuse("a class is not closed")
            members.append(self._member())
        self._at += 1
        if not members:
            raise self._refuse("an empty class is not supported")
        return f"[{'^' if is_negated else ''}{''.join(members)}]"

    def _member(self) -> str:
        """Translate a member of a class: a character, a set or a range."""
        first = self._class_atom()
        is_range = self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at)
        if not is_range:
            return first
        self._at += 1
        if self._at >= len(self._pattern):
            raise self._refuse("a class is not closed")
        last = self._class_atom()
        if first in SETS.values() or last in SETS.values():
            raise self._refuse("a range ends at a set")
        return f"{first}-{last}"

    def _class_atom(self) -> str:
        char = self._pattern[self._at]
        self._at += 1
        if char == "\\" and self._pattern.startswith("b", self._at):
            self._at += 1
            return r"\x08"
        return self._escape(in_class=True) if char == "\\" else escaped(char)
