# SPDX-License-Identifier: Apache-2.0
"""An engine that only counts time: what a policy would make of a trace, from a profile of a device. Needs no GPU."""

from vllm_pdmux.simulator.engine import Result, Stock, simulate
from vllm_pdmux.simulator.profile import DeviceProfile, GroupProfile, ProfileError
from vllm_pdmux.simulator.trace import Arrival, TraceError, read_trace, steady

__all__ = [
    "Arrival",
    "DeviceProfile",
    "GroupProfile",
    "ProfileError",
    "Result",
    "Stock",
    "TraceError",
    "read_trace",
    "simulate",
    "steady",
]
