# SPDX-License-Identifier: Apache-2.0
"""Standard output for a command that runs an engine in its own process."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def own_stdout() -> Iterator[TextIO]:
    """Standard output for the command alone: what libraries print there, in Python or in C, goes to standard error."""
    sys.stdout.flush()
    with open(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace") as stdout:
        os.dup2(2, 1)
        try:
            yield stdout
        finally:
            sys.stdout.flush()
            os.dup2(stdout.fileno(), 1)
