# SPDX-License-Identifier: Apache-2.0
"""The worker class of NVIDIA GPUs: prefill confined to a set of SMs, decode on all of them at a higher priority."""

from __future__ import annotations

import torch
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu_worker import Worker

from vllm_pdmux.activation import resolved_of
from vllm_pdmux.spatial.cuda import CudaPartitions
from vllm_pdmux.spatial.groups import stream_groups
from vllm_pdmux.worker.lane_device import CudaDevice, LaneDevice
from vllm_pdmux.worker.worker import PDMuxWorkerMixin

logger = init_logger("vllm.pdmux.worker")

HIGH_PRIORITY = -1
SECOND_RUNNER_BYTES = 384 << 20  # its input buffers and states; measured 150 MiB for an 8B model, 256 requests


class PDMuxGPUWorker(PDMuxWorkerMixin, Worker):
    """vLLM's GPU worker with a prefill lane on green contexts."""

    _decode_stream: torch.cuda.Stream

    def init_device(self) -> None:
        super().init_device()
        # All that the decode lane does, from now on and its CUDA graphs included, is on this stream.
        before = torch.cuda.current_stream()
        self._decode_stream = torch.cuda.Stream(priority=HIGH_PRIORITY)
        self._decode_stream.wait_stream(before)
        torch.cuda.set_stream(self._decode_stream)
        self._prefill_streams = self._make_streams()

    def determine_available_memory(self) -> int:
        """Stock's, less what the lane needs beside a stock step: its runner, and activations on each of its streams."""
        available = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes:
            return available  # the user has said how much
        activations = int(getattr(self, "peak_activation_memory", 0))
        lane = SECOND_RUNNER_BYTES + activations * len(self._prefill_streams)
        logger.info(
            "PD-multiplexing: %.2f of %.2f GiB for KV go to the prefill lane (its runner, and %.2f GiB of activations "
            "on each of %d streams)",
            lane / 2**30,
            available / 2**30,
            activations / 2**30,
            len(self._prefill_streams),
        )
        return available - lane

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        # A graph takes the priority of the stream that it is captured on, and vLLM captures on one of its own.
        self.model_runner.cudagraph_manager._capture_stream = lambda description: self._decode_stream

    def _lane_device(self) -> LaneDevice:
        return CudaDevice(self._decode_stream, self._prefill_streams)

    def _make_streams(self) -> dict[int, torch.cuda.Stream]:
        """A stream for each mixed group, by the group's number."""
        resolved = resolved_of(self.vllm_config)
        properties = torch.cuda.get_device_properties(self.device)
        groups = stream_groups(
            resolved.config,
            properties.multi_processor_count,
            (properties.major, properties.minor),
            source=resolved.origins["manual_divisions"],
        )
        partitions = CudaPartitions(torch.cuda.current_device())
        streams = {}
        for group in groups[1:-1]:
            made = partitions.partition(group.decode_sms)
            if made.prefill_sms != group.prefill_sms:
                logger.warning(
                    "PD-multiplexing: the driver grants prefill %d SMs in group %d instead of %d (steps of %d)",
                    made.prefill_sms,
                    group.index,
                    group.prefill_sms,
                    partitions.limits.step_sms,
                )
            streams[group.index] = torch.cuda.ExternalStream(made.prefill_stream)
            logger.info(
                "PD-multiplexing group %d: prefill on %d of %d SMs, decode on all",
                group.index,
                made.prefill_sms,
                partitions.limits.total_sms,
            )
        self._partitions = partitions  # keeps the green contexts
        return streams
