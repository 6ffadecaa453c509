# SPDX-License-Identifier: Apache-2.0
"""How a wrong setting is reported: one line that gives the value got, what is allowed, and the remedy."""

import reprlib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

_LONGEST = 8000  # characters of a message: a file may be wrong thousands of times
_KINDS = {str: "a string", bool: "a boolean", float: "a float"}


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python does not write more than 4,300 digits, and YAML reads more, in hexadecimal.
        return super().repr_int(x, level) if x.bit_length() < 1024 else f"an integer of {x.bit_length()} bits"


_short = _Short()
_short.maxstring = _short.maxother = 60
_short.maxlist = _short.maxtuple = 8
_short.maxdict = 4


class ConfigError(ValueError):
    """A configuration that cannot be used.

    The message is one printable line: the source (file, environment variable or inline key), then for each problem the
    field, the value got, what is allowed, and what to do; problems are separated by "; ".
    """

    def __init__(self, message: str) -> None:
        text = one_line(message)
        left_out = len(text) - _LONGEST
        super().__init__(text if left_out <= 0 else f"{text[:_LONGEST]}... ({left_out} characters more)")


def one_line(text: str) -> str:
    """`text` with every line break and other unprintable character as a space: file names and values may hold any."""
    return "".join(character if character.isprintable() else " " for character in text)


def show(value: Any) -> str:
    """A short form of a user's value, with its kind where the value alone does not tell (the string "8", the 8.0)."""
    if value is None:
        return "null"
    text = _plain(value) if isinstance(value, bool) else _short.repr(value)
    kind = _KINDS.get(type(value))
    return f"{text} ({kind})" if kind else text


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def wrong_value(field: str, value: Any, allowed: str, default: Any) -> str:
    """The problem of a value outside of what is allowed, with the remedy that fits this kind of value."""
    if allowed.startswith("an integer") and isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
        remedy = "write the number without quotes"
    else:
        remedy = "change or remove it" if default is None else f"change it (the default is {_plain(default)})"
    return f"{field} is {show(value)} but must be {allowed}: {remedy}"


def unknown_key(key: Any, known: Iterable[str]) -> str:
    """The problem of a key that is no setting, with the nearest setting, or all of them when none is near."""
    known = list(known)
    near = get_close_matches(key, known, n=1) if isinstance(key, str) else []
    remedy = f"did you mean {near[0]}? Else remove it" if near else f"remove it, or use one of {', '.join(known)}"
    return f"{_short.repr(key)} is not a setting: {remedy}"
