# SPDX-License-Identifier: Apache-2.0
"""Whether the plugin's source has a text that a page quotes; … stands for what is filled in."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import vllm_pdmux

OURS = Path(vllm_pdmux.__file__).parent
WILD = "…"


@functools.cache
def _templates():
    """Every text in the source, with … for what is filled in."""
    found = []
    for path in OURS.rglob("*.py"):
        tree = ast.parse(path.read_text())
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(_piece(part, constants) for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[-.\d]*[sdfr]", WILD, node.value))
    return found


def _piece(part, constants):
    if isinstance(part, ast.Constant):
        return part.value
    if isinstance(part.value, ast.Name) and part.value.id in constants:
        value = constants[part.value.id]
        return repr(value) if part.conversion == ord("r") else str(value)
    return WILD


def _pattern(text):
    return ".*".join(map(re.escape, text.split(WILD)))


def is_said(message):
    """A part of a text of the source, or a whole one with what is filled in."""
    for template in _templates():
        literal = len(template.replace(WILD, ""))
        if re.search(_pattern(message), template) or (literal > 20 and re.fullmatch(_pattern(template), message)):
            return True
    return False
