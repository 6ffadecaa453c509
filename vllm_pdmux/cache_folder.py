# SPDX-License-Identifier: Apache-2.0
"""Where this package keeps what it has made: the demo's model, calibrations."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """The folder of the cache: $PDMUX_CACHE, else $XDG_CACHE_HOME/vllm_pdmux, else ~/.cache/vllm_pdmux."""
    # os.path: unlike pathlib it leaves a home that does not exist, as in some containers, as it is.
    if own := os.environ.get("PDMUX_CACHE"):
        return Path(os.path.expanduser(own)).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base).absolute() / "vllm_pdmux"


def make_private(folder: Path) -> None:
    """Make `folder`, and what is missing above it, for this user alone. What is there already keeps its rights.

    What is in it decides what runs and for whom, so nobody else may put something there. Raises OSError.
    """
    if not folder.parent.is_dir():
        make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
