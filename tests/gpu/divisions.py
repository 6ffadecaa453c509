# SPDX-License-Identifier: Apache-2.0
"""Divisions of a device's SMs that the GPU tests use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

DECODE_SMS = (32, 48, 64)
BOTH_KINDS = ("capped", "disjoint", "disjoint", "disjoint", "capped", "capped")


def split(total_sms: int, sharing: Sequence[str], backend: str = "auto") -> dict[str, Any]:
    """Settings of the plugin with one division for each of `sharing`: three splits, over and over."""
    rows = [[total_sms - sms, sms, 0] for sms in DECODE_SMS] * (len(sharing) // len(DECODE_SMS))
    return {"sm_group_num": len(rows) + 2, "manual_divisions": rows, "sharing": list(sharing), "backend": backend}
