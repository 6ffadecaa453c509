# SPDX-License-Identifier: Apache-2.0
"""FULL CUDA graphs of decode steps, one set for each disjoint partition.

A graph runs on the SMs of the stream that it was captured on, wherever it is replayed. So the decode lane keeps one
stream, and choosing the graph confines a step's forward pass; preparing its inputs and sampling stay on all SMs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import parallel_state
from vllm.logger import init_logger
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.workspace import unlock_workspace

logger = init_logger("vllm.pdmux.graphs")

# Device memory of a set of graphs: scratch that libraries keep for its stream, and the kernels of each graph. Measured
# on an H200 with 32 layers: 0.28 GiB for 35 graphs.
SET_BYTES = 64 << 20
GRAPH_BYTES_PER_LAYER = 192 << 10


class DecodeGraphError(ValueError):
    """There can be no decode graphs for disjoint divisions; the message names the setting, its value and the remedy."""


def capture_sizes(config: VllmConfig) -> list[int]:
    """The decode batches that stock captures FULL graphs of, ascending."""
    sizes = config.compilation_config.cudagraph_capture_sizes or []
    return sorted(size for size in sizes if size <= config.scheduler_config.max_num_seqs)


def thinned(sizes: Sequence[int], count: int) -> list[int]:
    """At most `count` of `sizes` (ascending), spread evenly; the largest is always kept."""
    if count >= len(sizes):
        return list(sizes)
    return [sizes[len(sizes) * (number + 1) // count - 1] for number in range(count)]


def affordable(sizes: Sequence[int], partitions: int, layers: int, budget_bytes: int) -> tuple[list[int], int]:
    """The sizes that each of `partitions` sets may have, and the bytes that all sets are expected to take."""
    graph_bytes = GRAPH_BYTES_PER_LAYER * layers
    count = (budget_bytes // partitions - SET_BYTES) // graph_bytes
    if count < 1:
        raise DecodeGraphError(
            f"graph_memory_share allows {budget_bytes >> 20} MiB for the decode graphs of {partitions} disjoint "
            f"divisions, but one graph each takes {(SET_BYTES + graph_bytes) * partitions >> 20} MiB: raise it, use "
            "fewer disjoint divisions, or sharing capped"
        )
    kept = thinned(sizes, count)
    return kept, (SET_BYTES + graph_bytes * len(kept)) * partitions


@contextmanager
def graphs_captured_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Let vLLM capture its graphs on `stream` meanwhile.

    What: replaces the class of the context that `parallel_state.graph_capture` makes with a stream of its own.
    Why: a graph takes the SMs and the priority of the stream that it is captured on, and only one of vLLM's two runners
    lets its stream be chosen.
    To be deleted when both do.
    """
    stock = parallel_state.GraphCaptureContext
    parallel_state.GraphCaptureContext = lambda own_stream: stock(stream)
    try:
        yield
    finally:
        parallel_state.GraphCaptureContext = stock


class DecodeGraphs:
    """Stock's graphs and one set for each disjoint group of a V2 runner; chooses the set of each step."""

    def __init__(self, runner: Any):
        self._runner = runner
        self._stock: ModelCudaGraphManager = runner.cudagraph_manager
        self._sets: dict[int, ModelCudaGraphManager] = {}  # by group
        self._largest = 0
        self.confined_steps = 0  # steps that ran on the graphs of a disjoint group
        self.unconfined_steps = 0  # steps of a disjoint group that found no graph of their size

    def capture(
        self,
        streams: Mapping[int, torch.cuda.Stream],
        sizes: Sequence[int],
        limit_s: float,
        progress: Callable[[str], None] = logger.info,
    ) -> None:
        """A set of graphs of `sizes` for each group of `streams`, on its decode stream.

        All sets together take `limit_s` seconds at most, as far as the first one predicts it: the others have fewer.
        """
        if not sizes:
            raise DecodeGraphError(
                "cudagraph_capture_sizes has no size up to max_num_seqs, so that there are no decode graphs for "
                "sharing disjoint: add such sizes, or set sharing capped"
            )
        mode = self._stock.cudagraph_mode
        if mode.decode_mode() != CUDAGraphMode.FULL:
            raise DecodeGraphError(
                f"sharing disjoint needs FULL decode graphs, but with this attention backend vLLM has cudagraph_mode "
                f"{mode.name}: choose another backend, or set sharing capped"
            )
        started = time.perf_counter()
        left = dict(streams)
        for group, stream in streams.items():
            begun = time.perf_counter()
            self._sets[group], taken_bytes = self._capture_one(stream, sizes)
            now = time.perf_counter()
            del left[group]
            progress(
                f"PD-multiplexing group {group}: {len(sizes)} decode graphs, {now - begun:.1f} s, "
                f"{taken_bytes >> 20} MiB"
            )
            if left:
                seconds_each = (now - begun) / len(sizes)
                affords = int((limit_s - (now - started)) / (seconds_each * len(left)))
                sizes = thinned(sizes, max(1, affords))
        self._largest = max(sizes, default=0)

    def use(self, group: int | None, decode_batch: int) -> None:
        """Let the next step replay the graphs of `group`; None or a group without a set: stock's."""
        graphs = self._sets.get(group) if group is not None else None
        if graphs is not None:
            fits = 0 < decode_batch <= self._largest
            self.confined_steps += fits
            self.unconfined_steps += decode_batch > self._largest
            graphs = graphs if fits else None
        self._runner.cudagraph_manager = graphs or self._stock

    def _capture_one(self, stream: torch.cuda.Stream, sizes: Sequence[int]) -> tuple[ModelCudaGraphManager, int]:
        """The set, and the bytes that it took."""
        runner = self._runner
        config = copy.copy(runner.vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.cudagraph_capture_sizes = list(sizes)
        config.compilation_config.max_cudagraph_capture_size = max(sizes)
        graphs = ModelCudaGraphManager(
            config, runner.device, CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=runner.decode_query_len
        )
        runner.cudagraph_manager = graphs
        unlock_workspace()  # buffers that are kept for each stream; capture_model locks again
        try:
            with graphs_captured_on(stream):
                taken_bytes: int = runner.capture_model()
        finally:
            runner.cudagraph_manager = self._stock
        return graphs, taken_bytes
