# SPDX-License-Identifier: Apache-2.0
"""Which decode graphs each disjoint group has and which of them a step replays; runner and graphs are stand-ins."""

import importlib
import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state

OURS = "vllm_pdmux.worker.decode_graphs"
STOCKS = "vllm.v1.worker.gpu.cudagraph_utils"

ascending = st.sets(st.integers(1, 512), min_size=1, max_size=40).map(sorted)


@pytest.fixture(scope="module")
def module():
    """The module under test; where vLLM's graph managers cannot be imported, over a stub of theirs."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            importlib.import_module(STOCKS)
        except ImportError:
            stub = ModuleType(STOCKS)
            stub.ModelCudaGraphManager = object
            patch.setitem(sys.modules, STOCKS, stub)
        yield importlib.import_module(OURS)


# --- how many sizes ---------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(ascending, st.integers(1, 60))
def test_some_of_the_sizes_are_kept_evenly_and_the_largest_always(module, sizes, count):
    kept = module.thinned(sizes, count)
    assert len(kept) == min(count, len(sizes))
    assert kept == sorted(set(kept) & set(sizes))
    assert kept[-1] == sizes[-1]
    places = [-1, *map(sizes.index, kept)]
    gaps = {after - before for before, after in pairwise(places)}
    assert max(gaps) - min(gaps) <= 1


@settings(deadline=None)
@given(ascending, st.integers(0, 40))
def test_nothing_is_lost_when_all_may_be_kept(module, sizes, more):
    assert module.thinned(sizes, len(sizes) + more) == sizes


@settings(deadline=None)
@given(ascending, st.integers(1, 8), st.integers(1, 100), st.integers(0, 4 << 30))
def test_as_many_sizes_as_fit_the_budget_and_no_fewer(module, sizes, partitions, layers, budget_bytes):
    graph_bytes = module.GRAPH_BYTES_PER_LAYER * layers

    def needed(graphs):
        return (module.SET_BYTES + graph_bytes * graphs) * partitions

    try:
        kept, expected_bytes = module.affordable(sizes, partitions, layers, budget_bytes)
    except module.DecodeGraphError:
        assert needed(1) > budget_bytes
        return
    assert expected_bytes == needed(len(kept)) <= budget_bytes
    assert kept == module.thinned(sizes, len(kept))
    assert len(kept) == len(sizes) or needed(len(kept) + 1) > budget_bytes


def test_a_budget_without_room_for_one_graph_each_is_an_error_with_the_way_out(module):
    with pytest.raises(module.DecodeGraphError) as raised:
        module.affordable([1, 2, 4], 2, 32, 100 << 20)
    assert str(raised.value) == (
        "graph_memory_share allows 100 MiB for the decode graphs of 2 disjoint divisions, but one graph each takes "
        "140 MiB: raise it, use fewer disjoint divisions, or sharing capped"
    )


def test_the_sizes_are_those_of_stock_that_a_decode_batch_may_have(module):
    def config(sizes):
        return SimpleNamespace(
            compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes),
            scheduler_config=SimpleNamespace(max_num_seqs=16),
        )

    assert module.capture_sizes(config([32, 16, 4, 1])) == [1, 4, 16]
    assert module.capture_sizes(config(None)) == []


# --- capturing and choosing -------------------------------------------------------------------------------------------


class Manager:
    """vLLM's graph manager: what it was made for."""

    def __init__(self, config, device, mode, decode_query_len):
        self.device, self.mode, self.decode_query_len = device, mode, decode_query_len
        self.sizes = config.compilation_config.cudagraph_capture_sizes
        self.largest = config.compilation_config.max_cudagraph_capture_size


class Runner:
    """A V2 runner that captures one graph a second, on a clock of its own."""

    device, decode_query_len = "cuda:0", 1

    def __init__(self):
        self.cudagraph_manager = self.stock = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
        compilation = SimpleNamespace(cudagraph_capture_sizes=[1, 2, 64], max_cudagraph_capture_size=64)
        self.vllm_config = SimpleNamespace(compilation_config=compilation)
        self.is_unlocked = False  # vLLM's workspace
        self.captured = []  # (stream, manager)
        self.now = 1000.0

    def capture_model(self):
        assert self.is_unlocked, "scratch cannot grow"
        self.is_unlocked = False
        stream = parallel_state.GraphCaptureContext("a stream of vLLM's own").stream
        if stream == "broken":
            raise RuntimeError("out of memory")
        self.captured.append((stream, self.cudagraph_manager))
        self.now += len(self.cudagraph_manager.sizes)
        return len(self.cudagraph_manager.sizes) << 21

    def unlock(self):
        self.is_unlocked = True


@pytest.fixture
def runner(module, monkeypatch):
    runner = Runner()
    monkeypatch.setattr(module, "ModelCudaGraphManager", Manager)
    monkeypatch.setattr(module, "unlock_workspace", runner.unlock)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: runner.now))
    return runner


@pytest.fixture
def graphs(module, runner):
    return module.DecodeGraphs(runner)


STREAMS = {1: "decode 1", 3: "decode 3", 4: "decode 4"}  # groups that are disjoint
SIZES = [1, 2, 3, 4, 5, 6, 7, 8]
LONG_S = 1e9


class TestCapture:
    def test_each_group_has_a_set_of_its_own_on_its_own_stream(self, graphs, runner):
        graphs.capture(STREAMS, SIZES, LONG_S)
        assert [stream for stream, _ in runner.captured] == list(STREAMS.values())
        made = [manager for _, manager in runner.captured]
        assert len(set(made)) == 3 and runner.stock not in made
        for manager in made:
            assert (manager.sizes, manager.largest) == (SIZES, 8)
            assert (manager.device, manager.decode_query_len) == ("cuda:0", 1)
            assert manager.mode == CUDAGraphMode.FULL_DECODE_ONLY

    def test_what_is_stocks_is_as_before(self, graphs, runner):
        stock = parallel_state.GraphCaptureContext
        graphs.capture(STREAMS, SIZES, LONG_S)
        assert runner.cudagraph_manager is runner.stock
        assert parallel_state.GraphCaptureContext is stock
        compilation = runner.vllm_config.compilation_config
        assert (compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size) == ([1, 2, 64], 64)

    def test_what_is_stocks_is_as_before_when_capturing_fails(self, graphs, runner):
        stock = parallel_state.GraphCaptureContext
        with pytest.raises(RuntimeError, match="out of memory"):
            graphs.capture({1: "decode 1", 2: "broken"}, SIZES, LONG_S)
        assert runner.cudagraph_manager is runner.stock
        assert parallel_state.GraphCaptureContext is stock

    def test_each_set_is_told_with_its_number_of_graphs_and_what_it_took(self, graphs):
        told = []
        graphs.capture({2: "decode 2", 3: "decode 3"}, SIZES, 12, told.append)
        assert told == [
            "PD-multiplexing group 2: 8 decode graphs, 8.0 s, 16 MiB",
            "PD-multiplexing group 3: 4 decode graphs, 4.0 s, 8 MiB",
        ]

    @pytest.mark.parametrize(
        ("limit_s", "numbers"), [(24, [8, 8, 8]), (20, [8, 6, 6]), (16, [8, 4, 4]), (8, [8, 1, 1]), (0, [8, 1, 1])]
    )
    def test_later_sets_have_fewer_sizes_when_the_first_shows_that_time_is_short(
        self, graphs, runner, limit_s, numbers
    ):
        graphs.capture(STREAMS, SIZES, limit_s)
        sizes = [manager.sizes for _, manager in runner.captured]
        assert list(map(len, sizes)) == numbers
        assert all(set(some) <= set(SIZES) and some[-1] == 8 for some in sizes)

    def test_one_set_has_all_its_sizes_whatever_it_takes(self, graphs, runner):
        graphs.capture({5: "decode 5"}, SIZES, 0)
        assert [manager.sizes for _, manager in runner.captured] == [SIZES]

    @pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE])
    def test_a_backend_that_has_no_full_graphs_is_an_error_with_the_way_out(self, module, graphs, runner, mode):
        runner.stock.cudagraph_mode = mode  # vLLM lowers it when it knows the attention backend
        with pytest.raises(module.DecodeGraphError, match=f"cudagraph_mode {mode.name}: .* sharing capped"):
            graphs.capture(STREAMS, SIZES, LONG_S)

    def test_no_sizes_are_an_error_with_the_way_out(self, module, graphs):
        with pytest.raises(module.DecodeGraphError, match=r"cudagraph_capture_sizes .* max_num_seqs.* sharing capped"):
            graphs.capture(STREAMS, [], LONG_S)


class TestUse:
    @pytest.fixture(autouse=True)
    def captured(self, graphs, runner):
        graphs.capture(STREAMS, SIZES, LONG_S)
        self.sets = {group: manager for group, (_, manager) in zip(STREAMS, runner.captured, strict=True)}

    @pytest.mark.parametrize("group", STREAMS)
    @pytest.mark.parametrize("decode_batch", [1, 5, 8])
    def test_a_batch_up_to_the_largest_size_has_the_set_of_its_group(self, graphs, runner, group, decode_batch):
        graphs.use(group, decode_batch)
        assert runner.cudagraph_manager is self.sets[group]
        assert (graphs.confined_steps, graphs.unconfined_steps) == (1, 0)

    def test_a_larger_batch_has_stocks_and_is_counted(self, graphs, runner):
        graphs.use(1, 8)
        graphs.use(1, 9)
        assert runner.cudagraph_manager is runner.stock
        assert (graphs.confined_steps, graphs.unconfined_steps) == (1, 1)

    @pytest.mark.parametrize("group", [None, 0, 2, 5])
    def test_no_group_or_one_without_a_set_has_stocks(self, graphs, runner, group):
        graphs.use(1, 4)
        for decode_batch in (4, 9):
            graphs.use(group, decode_batch)
            assert runner.cudagraph_manager is runner.stock
        assert (graphs.confined_steps, graphs.unconfined_steps) == (1, 0)

    def test_a_step_that_decodes_nothing_has_stocks_and_is_not_counted(self, graphs, runner):
        graphs.use(1, 4)
        graphs.use(1, 0)
        assert runner.cudagraph_manager is runner.stock
        assert (graphs.confined_steps, graphs.unconfined_steps) == (1, 0)

    def test_the_group_may_change_with_every_step(self, graphs, runner):
        chosen = []
        for group in (1, 3, None, 4, 1):
            graphs.use(group, 2)
            chosen.append(runner.cudagraph_manager)
        assert chosen == [self.sets[1], self.sets[3], runner.stock, self.sets[4], self.sets[1]]
