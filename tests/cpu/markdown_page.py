# SPDX-License-Identifier: Apache-2.0
"""What a Markdown file says: its code, links, headings and tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^|\n\n)((?:    .*\n?)+)")
_COMMENT = re.compile(r"(?<=\s)#.*$")


@dataclass(frozen=True)
class Block:
    """A block of code; `language` is "" where none is said."""

    language: str
    text: str


class Page:
    """One file."""

    def __init__(self, path: Path):
        self.path, self.text = path, path.read_text(encoding="utf-8")
        fenced = [Block(*found.groups()) for found in _FENCED.finditer(self.text)]
        rest = _FENCED.sub("", self.text)
        self.blocks = fenced + [Block("", _without_indent(found[1])) for found in _INDENTED.finditer(rest)]
        self.prose = _INDENTED.sub("\n\n", rest)
        self.code_spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", self.prose)]
        self.links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", self.prose))

    def anchors(self) -> set[str]:
        """Of the headings, as GitHub makes them."""
        headings = re.findall(r"^#+ (.*)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    def section(self, heading: str) -> str:
        """The text below a heading, down to the next one of its level or above."""
        level = len(heading) - len(heading.lstrip("#"))
        _, _, below = self.text.partition(f"\n{heading}\n")
        assert below, f"{self.path.name} has no {heading!r}"
        return re.split(rf"^#{{1,{level}}} ", below, maxsplit=1, flags=re.MULTILINE)[0]

    def command_lines(self) -> list[str]:
        """The lines of blocks of commands, continued ones joined, without comments."""
        blocks = [block.text for block in self.blocks if block.language in ("", "sh")]
        lines = re.sub(r"\\\n\s*", "", "\n".join(blocks)).splitlines()
        return [stripped for line in lines if (stripped := _COMMENT.sub("", line).strip())]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in `text`, without heads and rules."""
    found = []
    for table in re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE):
        found += [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return found


def _without_indent(text: str) -> str:
    return re.sub(r"^    ", "", text, flags=re.MULTILINE)
