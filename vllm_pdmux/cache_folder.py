# SPDX-License-Identifier: Apache-2.0
"""Where this package keeps what it has made: the demo's model, calibrations."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """The folder of the cache: $PDMUX_CACHE, else $XDG_CACHE_HOME/vllm_pdmux, else ~/.cache/vllm_pdmux."""
    if own := os.environ.get("PDMUX_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "vllm_pdmux"
