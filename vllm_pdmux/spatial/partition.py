# SPDX-License-Identifier: Apache-2.0
"""What a partition is, and what every backend that makes them offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class PartitionError(RuntimeError):
    """A partition that this GPU or driver cannot make; the message names the value, the limit and the nearest one."""


@dataclass(frozen=True)
class SMLimits:
    """What the driver says of the device's SMs."""

    total_sms: int
    min_sms: int  # smallest set
    step_sms: int  # sizes of the set that is split off are multiples of this

    def nearest(self, sms: int) -> int:
        """The possible size nearest to `sms` that leaves a set for the other lane."""
        steps = max(1, round(sms / self.step_sms))
        largest = (self.total_sms - self.min_sms) // self.step_sms * self.step_sms
        return min(max(steps * self.step_sms, self.min_sms), largest)

    def check(self, decode_sms: int) -> None:
        """Raise PartitionError when a set of `decode_sms`, rounded up to a step, leaves none for the other lane."""
        granted = -(-decode_sms // self.step_sms) * self.step_sms
        if decode_sms < self.min_sms or granted > self.total_sms - self.min_sms:
            raise PartitionError(
                f"a partition with {decode_sms} SMs for decode is not possible: the device has {self.total_sms} SMs, "
                f"each lane needs {self.min_sms}, in steps of {self.step_sms}; the nearest is "
                f"{self.nearest(decode_sms)}"
            )


@dataclass(frozen=True)
class Partition:
    """A set of SMs for each lane, with the number of SMs that the driver granted and a stream on each.

    The sets are disjoint, but for the backend `streams`, where each is the whole device. The streams are raw handles
    (``CUstream``), which live as long as the process.
    """

    decode_sms: int
    prefill_sms: int
    decode_stream: int
    prefill_stream: int


class Partitions(Protocol):
    """Makes partitions of one device."""

    limits: SMLimits

    def partition(self, decode_sms: int) -> Partition:
        """At least `decode_sms` for decode, the rest for prefill. Raises PartitionError."""
