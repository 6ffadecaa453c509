# SPDX-License-Identifier: Apache-2.0
"""Tests that need an NVIDIA GPU: `python -m pytest tests/gpu`. They are not part of CI; results are committed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))  # the tiny model and the driver


@pytest.fixture(scope="session", autouse=True)
def gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: torch.cuda.is_available() is False")
    return torch.cuda.get_device_properties(0)
