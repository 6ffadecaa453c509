# SPDX-License-Identifier: Apache-2.0
"""Numbers that commands take as options."""

import argparse
from collections.abc import Callable
from typing import Any


def positive(kind: type) -> Callable[[str], Any]:
    """For argparse: a finite number above 0 of this kind, int or float."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"is {text!r} but must be a number above 0")
        return value

    return parse
