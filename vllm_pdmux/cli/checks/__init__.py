# SPDX-License-Identifier: Apache-2.0
"""What `vllm-pdmux doctor` looks at: the installation, the plugins that vLLM sees, the GPU, and a model."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, ERROR, NOT_CHECKED = "ok", "warning", "error", "not checked"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    status: str  # OK, WARNING, ERROR or NOT_CHECKED
    detail: str
