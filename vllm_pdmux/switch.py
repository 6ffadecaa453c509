# SPDX-License-Identifier: Apache-2.0
"""The variable that asks for the plugin."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_pdmux.config_errors import ConfigError


def is_on(environ: Mapping[str, str]) -> bool:
    """Whether PDMUX asks for the plugin. Raises ConfigError for a value that says neither yes nor no."""
    value = environ.get("PDMUX", "").strip().lower()
    if value in ("1", "true", "on", "yes"):
        return True
    if value in ("", "0", "false", "off", "no"):
        return False
    raise ConfigError(f"PDMUX={environ['PDMUX']!r}: it must be 1 (use the plugin) or 0 (do not)")
