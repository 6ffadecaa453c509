# SPDX-License-Identifier: Apache-2.0
"""Files of a user that are read as a whole: never more of one than such a file could reasonably hold."""

import errno
import os
import stat
from pathlib import Path


class TooLarge(ValueError):
    """The message says how large it may be."""


def read_small_file(path: str | Path, most_bytes: int) -> bytes:
    """What is in the file. Raises TooLarge, OSError, and ValueError for a path that cannot be one.

    OSError too for a pipe, a socket or a device: to read one may take for ever, and cannot be repeated by the process
    that the same path is handed to.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # of a directory the system itself says what is wrong
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with Path(path).open("rb") as file:
        content = file.read(most_bytes + 1)  # a size that the system says may be that of a device or of a moment ago
    if len(content) > most_bytes:
        raise TooLarge(f"is larger than {most_bytes} bytes")
    return content
