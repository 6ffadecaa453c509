# SPDX-License-Identifier: Apache-2.0
"""SM partitions of an NVIDIA GPU through the driver: green contexts and their streams, with cuda-bindings.

One split call makes one partition: two separate calls would give overlapping SM sets. Everything is created once and
kept, since a stream that is destroyed with work in flight takes the work with it. The primary context stays current.
"""

from __future__ import annotations

from typing import Any

from vllm_pdmux.spatial.partition import Partition, PartitionError, SMLimits


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
        self._kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        self._all = self._check("cuDeviceGetDevResource", driver.cuDeviceGetDevResource(self._device, self._kind))
        self._kept: list[Any] = []  # resources and contexts that the streams live in
        self.limits = SMLimits(self._all.sm.smCount, *self._granularity())

    def partition(self, decode_sms: int) -> Partition:
        """Split the device: at least `decode_sms` for decode, the rest for prefill. Raises PartitionError."""
        self.limits.check(decode_sms)
        return self._granted(*self._streams(decode_sms))

    def _streams(self, decode_sms: int) -> tuple[int, int]:
        """A stream for decode on at least `decode_sms` SMs, and one for prefill on the rest."""
        groups, count, rest = self._check(
            "cuDevSmResourceSplitByCount", self._cu.cuDevSmResourceSplitByCount(1, self._all, 0, decode_sms)
        )
        if count != 1 or rest.sm.smCount == 0:
            raise PartitionError(
                f"the driver cannot split {self.limits.total_sms} SMs into {decode_sms} and the rest: "
                f"sizes go from {self.limits.min_sms} in steps of {self.limits.step_sms}"
            )
        return self._stream(groups[0]), self._stream(rest)

    def _granted(self, decode_stream: int, prefill_stream: int) -> Partition:
        """The partition with these streams: its counts are what the driver says of them, not what was asked for."""
        return Partition(self._sms(decode_stream), self._sms(prefill_stream), decode_stream, prefill_stream)

    def _sms(self, stream: int) -> int:
        cu = self._cu
        context = self._check("cuStreamGetGreenCtx", cu.cuStreamGetGreenCtx(cu.CUstream(stream)))
        if not int(context):
            raise PartitionError("the driver made a stream that is in no green context: use another backend")
        resource = self._check("cuGreenCtxGetDevResource", cu.cuGreenCtxGetDevResource(context, self._kind))
        return int(resource.sm.smCount)

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

    def _check(self, call: str, result: tuple[Any, ...]) -> Any:
        if result[0] != self._cu.CUresult.CUDA_SUCCESS:
            raise PartitionError(
                f"{call} failed with {result[0].name}: SM partitions need a GPU of compute capability 8.0 or later and "
                "a driver with green contexts (CUDA 12.4 or later)"
            )
        return result[1] if len(result) == 2 else result[1:]
