# SPDX-License-Identifier: Apache-2.0
"""The worker class of NVIDIA GPUs: prefill confined to a set of SMs, decode beside it.

In a `capped` group decode keeps all SMs at a higher priority; in a `disjoint` one its graphs run on the other SMs.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu_worker import Worker

from vllm_pdmux.activation import resolved_of
from vllm_pdmux.config import Resolved
from vllm_pdmux.messages import PrefillOrder
from vllm_pdmux.policy_from_config import max_prefill_tokens
from vllm_pdmux.spatial import GrantedGroup, environment, granted_groups, open_backend, stream_groups
from vllm_pdmux.support import UnsupportedError
from vllm_pdmux.worker import side_streams
from vllm_pdmux.worker.decode_graphs import DecodeGraphs, affordable, capture_sizes, graphs_captured_on
from vllm_pdmux.worker.lane_device import CudaDevice, HostDevice, LaneDevice, RankDevice
from vllm_pdmux.worker.prefill_runner import dummy_prefill
from vllm_pdmux.worker.worker import PDMuxWorkerMixin

logger = init_logger("vllm.pdmux.worker")

HIGH_PRIORITY = -1
# Others keep scratch for the whole process, or have not been run in two lanes at once.
ATTENTION_BACKENDS = ("FLASH_ATTN",)
SECOND_RUNNER_BYTES = 256 << 20  # its input buffers and states; measured 150 MiB for an 8B model, 256 requests


class PDMuxGPUWorker(PDMuxWorkerMixin, Worker):
    """vLLM's GPU worker with a prefill lane on green contexts."""

    _decode_stream: torch.cuda.Stream
    _groups: tuple[GrantedGroup, ...]
    _prefill_streams: dict[int, torch.cuda.Stream]  # by group; group 0, prefill alone, has the decode stream
    _graph_sizes: list[int]
    _decode_graphs: DecodeGraphs | None = None

    def init_device(self) -> None:
        super().init_device()
        self._give_each_lane_a_workspace()
        # All that the decode lane does, from now on and its CUDA graphs included, is on this stream.
        before = torch.cuda.current_stream()
        self._decode_stream = torch.cuda.Stream(priority=HIGH_PRIORITY)
        self._decode_stream.wait_stream(before)
        torch.cuda.set_stream(self._decode_stream)
        resolved = resolved_of(self.vllm_config)
        self._settings = resolved.config
        self._groups = self._make_groups(resolved)
        made = {one.partition.prefill_stream for one in self._groups}
        streams = {handle: torch.cuda.ExternalStream(handle) for handle in made}
        self._prefill_streams = {one.index: streams[one.partition.prefill_stream] for one in self._groups}
        self._prefill_streams[0] = self._decode_stream

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        if layers := side_streams.turn_off(self.model_runner.get_model()):
            logger.info("PD-multiplexing: shared experts run on the stream of their lane in %d layers", layers)

    def determine_available_memory(self) -> int:
        """Stock's, less what the lanes need beside a stock step: a runner, activations, scratch and graphs."""
        is_given = bool(self.cache_config.kv_cache_memory_bytes)  # by the user; stock's start-up plan may set it too
        available: int = super().determine_available_memory()
        self._graph_sizes = capture_sizes(self.vllm_config)
        if is_given:
            return available
        streams = len(set(self._prefill_streams.values())) - 1
        activations = self._activations_bytes()
        scratch = sum(map(workspace.WorkspaceManager._workspace_size_bytes, self._workspaces()))
        graphs = 0
        if disjoint := [one for one in self._groups if one.is_disjoint]:
            budget = int(available * self._settings.graph_memory_share)
            layers = self.model_config.get_num_layers(self.parallel_config)
            self._graph_sizes, graphs = affordable(self._graph_sizes, len(disjoint), layers, budget)
        lanes: int = SECOND_RUNNER_BYTES + activations * streams + scratch + graphs
        logger.info(
            "PD-multiplexing: %.2f of %.2f GiB for KV go to the lanes: a second runner, %.2f GiB of activations for "
            "%d tokens on each of %d streams, %.2f GiB of scratch, %.2f GiB of decode graphs (%d sizes)",
            lanes / 2**30,
            available / 2**30,
            activations / 2**30,
            self._prefill_tokens(),
            streams,
            scratch / 2**30,
            graphs / 2**30,
            len(self._graph_sizes) if graphs else 0,
        )
        return available - lanes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        check_backends(self.model_runner.attn_groups)

    def shutdown(self) -> None:
        super().shutdown()
        self._decode_graphs = self._prefill_lane = None  # and with them the second runner and its graphs

    def compile_or_warm_up_model(self) -> Any:
        self._warm_up_lane()  # before stock captures its graphs, since scratch may not grow after that
        with graphs_captured_on(self._decode_stream):
            times = super().compile_or_warm_up_model()
        streams = {
            one.index: torch.cuda.ExternalStream(one.partition.decode_stream) for one in self._groups if one.is_disjoint
        }
        if streams:
            self._decode_graphs = DecodeGraphs(self.model_runner)
            self._decode_graphs.capture(streams, self._graph_sizes, self._settings.graph_capture_s)
        self._warm_up_lane()  # capturing has emptied the allocator's pools
        return times

    def _warm_up_lane(self) -> None:
        """Let the lane use each of its streams, so that no request pays for what a first use makes there."""
        assert self._prefill_lane is not None
        for group in {stream: group for group, stream in self._prefill_streams.items()}.values():
            self._prefill_lane.warm_up(group, self._prefill_tokens())

    def _before_decode(self, output: SchedulerOutput, order: PrefillOrder) -> None:
        if self._decode_graphs is not None:
            group = None if order.batch_id is None else self._clamped(order.group)
            self._decode_graphs.use(group, len(output.num_scheduled_tokens))

    def _unconfined_steps(self) -> int:
        return 0 if self._decode_graphs is None else self._decode_graphs.unconfined_steps

    def _lane_device(self) -> LaneDevice:
        if self._settings.lane == "serial":
            return HostDevice()  # one thread, and all of it on the decode stream
        kind = CudaDevice if self.parallel_config.world_size == 1 else RankDevice
        return kind(self._decode_stream, self._prefill_streams)

    def _clamped(self, group: int) -> int:
        return min(group, self._groups[-1].index)

    def _prefill_tokens(self) -> int:
        most: int = self.scheduler_config.max_num_batched_tokens
        return min(most, max_prefill_tokens(self._settings, has_streams=True) or most)

    def _give_each_lane_a_workspace(self) -> None:
        """Scratch of fused MoE and MLA is kept by lane, and vLLM makes one lane where nothing is speculated."""
        stock = workspace.current_workspace_manager()
        workspace._manager = workspace.WorkspaceManager(self.device, num_lanes=2, alloc_context=stock._alloc_context)

    def _workspaces(self) -> list[torch.Tensor | None]:
        workspaces: list[torch.Tensor | None] = workspace.current_workspace_manager()._current_workspaces
        return workspaces

    @torch.inference_mode()
    def _activations_bytes(self) -> int:
        """What one prefill batch of the largest size makes the allocator keep for its stream, measured."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before: int = torch.cuda.memory_reserved()
        for _ in range(2):
            dummy_prefill(self.model_runner, self._prefill_tokens(), with_attention=False)
        torch.cuda.synchronize()
        kept: int = torch.cuda.memory_reserved() - before
        torch.cuda.empty_cache()
        return kept

    def _make_groups(self, resolved: Resolved) -> tuple[GrantedGroup, ...]:
        """The mixed groups that the policy may choose, on partitions of this device."""
        settings = resolved.config
        properties = torch.cuda.get_device_properties(self.device)
        groups = stream_groups(
            settings,
            properties.multi_processor_count,
            (properties.major, properties.minor),
            source=resolved.origins["manual_divisions"],
        )[1:-1]
        if settings.policy == "off":
            groups = ()
        elif settings.policy == "fixed":
            groups = tuple(one for one in groups if one.index == settings.fixed_group) or groups[-1:]
        name = "cuda" if settings.backend == "auto" else settings.backend
        self._backend = open_backend(name, torch.cuda.current_device())  # keeps what the streams live in
        granted = granted_groups(groups, self._backend)
        for problem in environment.problems(os.environ, torch.cuda.current_device(), str(properties.uuid)):
            logger.warning("PD-multiplexing: %s", problem)
        for one in granted:
            logger.info("PD-multiplexing %s (backend %s)", one.describe(properties.multi_processor_count), name)
        return granted


def check_backends(attention_groups: Any) -> None:
    """Raise UnsupportedError for an attention backend that cannot run in two lanes at once."""
    names = {group.backend.get_name() for groups in attention_groups for group in groups}
    if wrong := sorted(names - set(ATTENTION_BACKENDS)):
        raise UnsupportedError(
            [
                f"the attention backend {', '.join(wrong)} is not supported on a GPU: set --attention-backend "
                f"{ATTENTION_BACKENDS[0]}, or serve this model without the plugin"
            ]
        )
