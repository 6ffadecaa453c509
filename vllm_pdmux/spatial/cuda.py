# SPDX-License-Identifier: Apache-2.0
"""SM partitions of an NVIDIA GPU through the driver: green contexts and their streams, with cuda-bindings.

One split call makes one partition: two separate calls would give overlapping SM sets. Everything is created once and
kept, since a stream that is destroyed with work in flight takes the work with it. The primary context stays current.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class PartitionError(RuntimeError):
    """A partition that this GPU or driver cannot make; the message names the value, the limit and the nearest one."""


@dataclass(frozen=True)
class SMLimits:
    """What the driver says of the device's SMs."""

    total_sms: int
    min_sms: int  # smallest set
    step_sms: int  # sizes are multiples of this

    def nearest(self, sms: int) -> int:
        """The possible size nearest to `sms` that leaves a set for the other lane."""
        steps = max(1, round(sms / self.step_sms))
        largest = (self.total_sms - self.min_sms) // self.step_sms * self.step_sms
        return min(max(steps * self.step_sms, self.min_sms), largest)


@dataclass(frozen=True)
class Partition:
    """Two disjoint sets of SMs, with the number of SMs that the driver granted each and a stream on each.

    The streams are raw handles (``CUstream``) of green contexts, which live as long as the process.
    """

    decode_sms: int
    prefill_sms: int
    decode_stream: int
    prefill_stream: int


class CudaPartitions:
    """Makes partitions of one device. Needs cuda-bindings, a driver with green contexts and a context on the device."""

    def __init__(self, device: int):
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise PartitionError(
                "cuda-bindings is not installed, which SM partitions need: pip install cuda-bindings"
            ) from error
        self._cu = driver
        self._device = self._check("cuDeviceGet", driver.cuDeviceGet(device))
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        self._all = self._check("cuDeviceGetDevResource", driver.cuDeviceGetDevResource(self._device, kind))
        self._kept: list[Any] = []  # resources and contexts that the streams live in
        self.limits = SMLimits(self._all.sm.smCount, *self._granularity())

    def partition(self, decode_sms: int) -> Partition:
        """Split the device: at least `decode_sms` for decode, the rest for prefill. Raises PartitionError."""
        limits = self.limits
        if not limits.min_sms <= decode_sms <= limits.total_sms - limits.min_sms:
            raise PartitionError(
                f"a partition with {decode_sms} SMs for decode is not possible: the device has {limits.total_sms} SMs, "
                f"each lane needs {limits.min_sms}, in steps of {limits.step_sms}; the nearest is "
                f"{limits.nearest(decode_sms)}"
            )
        first, rest = self._split(decode_sms)
        return Partition(first.sm.smCount, rest.sm.smCount, self._stream(first), self._stream(rest))

    def _split(self, sms: int) -> tuple[Any, Any]:
        groups, count, rest = self._check(
            "cuDevSmResourceSplitByCount", self._cu.cuDevSmResourceSplitByCount(1, self._all, 0, sms)
        )
        if count != 1 or rest.sm.smCount == 0:
            raise PartitionError(
                f"the driver cannot split {self.limits.total_sms} SMs into {sms} and the rest: "
                f"sizes go from {self.limits.min_sms} in steps of {self.limits.step_sms}"
            )
        return groups[0], rest

    def _granularity(self) -> tuple[int, int]:
        # What the driver grants for one SM is the smallest set. Newer drivers also say the step.
        groups, _, _ = self._check(
            "cuDevSmResourceSplitByCount", self._cu.cuDevSmResourceSplitByCount(1, self._all, 0, 1)
        )
        smallest = groups[0].sm.smCount
        step = getattr(self._all.sm, "smCoscheduledAlignment", 0) or smallest
        return smallest, step

    def _stream(self, resource: Any) -> int:
        cu = self._cu
        description = self._check("cuDevResourceGenerateDesc", cu.cuDevResourceGenerateDesc([resource], 1))
        flags = cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = self._check("cuGreenCtxCreate", cu.cuGreenCtxCreate(description, self._device, flags))
        non_blocking = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = self._check("cuGreenCtxStreamCreate", cu.cuGreenCtxStreamCreate(context, non_blocking, 0))
        self._kept.append((resource, description, context, stream))
        return int(stream)

    def _check(self, call: str, result: tuple) -> Any:
        if result[0] != self._cu.CUresult.CUDA_SUCCESS:
            raise PartitionError(
                f"{call} failed with {result[0].name}: SM partitions need a GPU of compute capability 8.0 or later and "
                "a driver with green contexts (CUDA 12.4 or later)"
            )
        return result[1] if len(result) == 2 else result[1:]
