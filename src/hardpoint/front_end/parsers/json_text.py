"""JSON that comes in pieces: one value is checked character by character and given back as strict JSON.

Models write almost JSON: control characters inside strings, Python's True and None. Both are mended here.
"""

from __future__ import annotations

import re

MAX_DEPTH = 256
WHITESPACE = " \t\r\n"

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[-+.\w]+")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_ESCAPES = frozenset('"\\/bfnrt')
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonReader:
    """Reads one JSON value.

    text  what was read of it so far, as strict JSON
    done  the value is complete
    bad   what comes is no JSON; `text` ends before it
    """

    def __init__(self) -> None:
        self.text = ""
        self.done = False
        self.bad = False
        self._closers: list[str] = []
        self._expects = "value"
        self._scalar = ""
        self._hex = ""
        self._in_key = False

    def feed(self, piece: str, at: int = 0) -> int:
        """Read from `piece[at:]`; returns the place of the first character that is not the value's."""
        while at < len(piece) and not self.done and not self.bad:
            step = getattr(self, f"_{self._expects}")
            at = step(piece, at)
        return at

    def end(self) -> None:
        """Nothing more comes: a number or word at the top is complete now."""
        if self._expects == "word" and not self._closers:
            self._end_word()

    # -- one step each: read something at `at`, return where to go on ------------------------------

    def _value(self, piece: str, at: int) -> int:
        char = piece[at]
        if char in WHITESPACE:
            return self._add(char, at)
        if char == '"':
            self._expects, self._in_key = "string", False
            return self._add(char, at)
        if char in "{[":
            return self._open(char, at)
        if _SCALAR.match(char):
            self._expects = "word"
            return at
        return self._fail(at)

    def _open(self, char: str, at: int) -> int:
        if len(self._closers) >= MAX_DEPTH:
            return self._fail(at)
        self._closers.append("}" if char == "{" else "]")
        self._expects = "first_key" if char == "{" else "first_item"
        return self._add(char, at)

    def _first_item(self, piece: str, at: int) -> int:
        return self._close(at) if piece[at] == "]" else self._value(piece, at)

    def _first_key(self, piece: str, at: int) -> int:
        return self._close(at) if piece[at] == "}" else self._key(piece, at)

    def _key(self, piece: str, at: int) -> int:
        if piece[at] in WHITESPACE:
            return self._add(piece[at], at)
        if piece[at] != '"':
            return self._fail(at)
        self._expects, self._in_key = "string", True
        return self._add('"', at)

    def _colon(self, piece: str, at: int) -> int:
        if piece[at] in WHITESPACE:
            return self._add(piece[at], at)
        if piece[at] != ":":
            return self._fail(at)
        self._expects = "value"
        return self._add(":", at)

    def _next(self, piece: str, at: int) -> int:
        char = piece[at]
        if char in WHITESPACE:
            return self._add(char, at)
        if char == ",":
            self._expects = "key" if self._closers[-1] == "}" else "value"
            return self._add(char, at)
        return self._close(at) if char == self._closers[-1] else self._fail(at)

    def _string(self, piece: str, at: int) -> int:
        plain = _PLAIN.match(piece, at)
        if plain is not None:
            self.text += plain[0]
            return plain.end()
        char = piece[at]
        if char == "\\":
            self._expects = "escape"
            return at + 1
        if char != '"':
            return self._add(_CONTROL.get(char) or f"\\u{ord(char):04x}", at)
        self.text += char
        if self._in_key:
            self._expects = "colon"
        else:
            self._ended()
        return at + 1

    def _escape(self, piece: str, at: int) -> int:
        char = piece[at]
        self._expects = "string"
        if char == "u":
            self._expects, self._hex = "hex_digit", ""
            return at + 1
        if char in _ESCAPES:
            return self._add(f"\\{char}", at)
        # An escape JSON does not know: `\'` means the quote, the rest means itself.
        if char == "'":
            return self._add(char, at)
        self.text += "\\\\"
        return at

    def _hex_digit(self, piece: str, at: int) -> int:
        if piece[at] not in _HEX:
            return self._fail(at)
        self._hex += piece[at]
        if len(self._hex) == 4:
            self.text += f"\\u{self._hex}"
            self._expects = "string"
        return at + 1

    def _word(self, piece: str, at: int) -> int:
        more = _SCALAR.match(piece, at)
        if more is not None:
            self._scalar += more[0]
            return more.end() if len(self._scalar) <= 4096 else self._fail(at)
        self._end_word()
        return at

    def _end_word(self) -> None:
        word = _WORDS.get(self._scalar) or (self._scalar if _NUMBER.fullmatch(self._scalar) else None)
        self._scalar = ""
        if word is None:
            self.bad = True
            return
        self.text += word
        self._ended()

    # -- what steps share -----------------------------------------------------------------------

    def _add(self, text: str, at: int) -> int:
        self.text += text
        return at + 1

    def _close(self, at: int) -> int:
        self.text += self._closers.pop()
        self._ended()
        return at + 1

    def _ended(self) -> None:
        self._expects = "next"
        self.done = not self._closers

    def _fail(self, at: int) -> int:
        self.bad = True
        return at
