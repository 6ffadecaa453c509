# SPDX-License-Identifier: Apache-2.0
"""PD-multiplexing for vLLM: prefill a few layers at a time beside running decodes.

The public names are imported on first use, so that the command line, the policies and the configuration work on a
machine that has neither vLLM nor torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Scheduler": "vllm_pdmux.scheduler",
    "PDMuxConfig": "vllm_pdmux.config",
}
__all__ = ["PDMuxConfig", "Scheduler", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'vllm_pdmux' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
