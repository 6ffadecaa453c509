# SPDX-License-Identifier: Apache-2.0
"""Files of a user that are read as a whole: never more of one than such a file could reasonably hold."""

from pathlib import Path


class TooLarge(ValueError):
    """The message says how large it may be."""


def read_small_file(path: str | Path, most_bytes: int) -> bytes:
    """What is in the file. Raises TooLarge, OSError, and ValueError for a path that cannot be one."""
    with Path(path).open("rb") as file:
        content = file.read(most_bytes + 1)  # a size that the system says may be that of a device or of a moment ago
    if len(content) > most_bytes:
        raise TooLarge(f"is larger than {most_bytes} bytes")
    return content
