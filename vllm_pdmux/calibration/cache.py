# SPDX-License-Identifier: Apache-2.0
"""Keeps calibrations: one JSON file for each key, which is a profile with the key and the errors beside it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_pdmux.cache_folder import cache_dir, make_private
from vllm_pdmux.calibration import CalibrationError
from vllm_pdmux.simulator import DeviceProfile, ProfileError
from vllm_pdmux.simulator.profile import MOST_BYTES, read_profile
from vllm_pdmux.small_file import read_small_file

FOLDER = "calibrations"


def path_of(key: Mapping[str, Any]) -> Path:
    """The file of this key."""
    text = json.dumps(key, sort_keys=True)
    return cache_dir() / FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def load(key: Mapping[str, Any], warn: Callable[[str], None]) -> DeviceProfile | None:
    """The profile that was stored for this key. None when there is none, or when its file is of no use, which is said.

    A damaged file never keeps an engine from starting: it serves as if nothing had been calibrated.
    """
    path = path_of(key)
    try:
        if not path.exists():
            return None
        profile = read_profile(str(path))
        stored = json.loads(read_small_file(path, MOST_BYTES)).get("key")
    except (OSError, ValueError) as error:  # ProfileError too
        problem = error.problem if isinstance(error, ProfileError) else str(error)
    else:
        if stored == dict(key):
            return profile
        problem = "it is of another engine than its name says"
    warn(f"calibration {path} is not used: {problem}: make it again with vllm-pdmux calibrate --model MODEL --force")
    return None


def store(key: Mapping[str, Any], profile: DeviceProfile, details: Mapping[str, Any]) -> Path:
    """Keep `profile` for engines of this key; `details` are for readers. Raises CalibrationError."""
    path = path_of(key)
    write(path, key, profile, details, is_private=True)
    return path


def write(
    path: Path,
    key: Mapping[str, Any],
    profile: DeviceProfile,
    details: Mapping[str, Any],
    *,
    is_private: bool = False,
) -> None:
    """Write the file whole or not at all: into a file beside it, which a rename puts in place.

    `is_private`: for this user alone, and so are folders that are made for it. Raises CalibrationError.
    """
    text = json.dumps({**profile.model_dump(mode="json"), "key": dict(key), **details}, indent=1) + "\n"
    scratch = None
    try:
        if is_private:
            make_private(path.parent)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        if not is_private:
            os.chmod(scratch, 0o644)  # mkstemp leaves 0600
        os.replace(scratch, path)
    except OSError as error:
        if scratch is not None:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
        raise CalibrationError(
            f"{path} cannot be written ({error.strerror or error}): name another folder with PDMUX_CACHE=FOLDER, "
            "or another file with --out"
        ) from None
