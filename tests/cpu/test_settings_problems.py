# SPDX-License-Identifier: Apache-2.0
"""Settings of the plugin that a platform or an engine cannot have are refused at start, each with the way out."""

from types import SimpleNamespace

import pytest

from vllm_pdmux.support import settings_problems

SERIAL = "backend serial is for machines without a GPU: set backend auto, or lane serial for one lane"
NO_PARTITION = "backend streams makes no partition that decode could be confined to: set sharing capped"
V2_ONLY = "sharing disjoint needs Model Runner V2: unset VLLM_USE_V2_MODEL_RUNNER, or set sharing capped"


def settings(backend="auto", sharing="capped", watchdog_action="log"):
    return SimpleNamespace(
        backend=backend,
        sharing=sharing,
        calibration="auto",
        experimental_tensor_parallel=False,
        watchdog_action=watchdog_action,
    )


def engine(mode="FULL_AND_PIECEWISE", v2=True):
    """An engine's config with this cudagraph_mode, None: not set."""
    from vllm.config import CUDAGraphMode

    mode = None if mode is None else CUDAGraphMode[mode]
    return SimpleNamespace(
        use_v2_model_runner=v2,
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


class TestOnACPU:
    @pytest.mark.parametrize("backend", ["cuda", "sgl_kernel", "streams"])
    def test_a_backend_of_gpus_is_refused(self, backend):
        assert settings_problems(engine(), settings(backend)) == [
            f"backend {backend} needs an NVIDIA GPU: set backend auto"
        ]

    @pytest.mark.parametrize("backend", ["auto", "serial"])
    def test_others_are_fine(self, backend):
        assert settings_problems(engine(), settings(backend)) == []

    @pytest.mark.parametrize(("action", "count"), [("log", 0), ("exit", 0), ("fail", 1)])
    def test_the_lane_cannot_fail_alone(self, action, count):
        said = [
            "watchdog_action is fail but on a CPU the engine itself hangs where a layer does: set watchdog_action exit"
        ]
        assert settings_problems(engine(), settings(watchdog_action=action)) == said[:count]

    @pytest.mark.parametrize("sharing", ["disjoint", ("capped", "disjoint")])
    def test_sharing_means_nothing(self, sharing):
        assert settings_problems(engine("NONE", v2=False), settings(sharing=sharing)) == []


@pytest.fixture
def on_cuda(monkeypatch):
    from vllm import platforms

    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_cuda=lambda: True))


@pytest.mark.usefixtures("on_cuda")
class TestOnAGPU:
    @pytest.mark.parametrize("backend", ["auto", "cuda", "sgl_kernel", "streams"])
    def test_capped_asks_nothing_of_the_engine(self, backend):
        for sharing in ("capped", ("capped", "capped")):
            assert settings_problems(engine("NONE", v2=False), settings(backend, sharing)) == []

    @pytest.mark.parametrize("action", ["log", "fail", "exit"])
    def test_every_action_of_the_watchdog_can_be_had(self, action):
        assert settings_problems(engine(), settings(watchdog_action=action)) == []

    @pytest.mark.parametrize("backend", ["auto", "cuda", "sgl_kernel"])
    @pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
    def test_disjoint_is_served_by_full_graphs_of_decode(self, backend, mode):
        assert settings_problems(engine(mode), settings(backend, "disjoint")) == []

    def test_serial_is_refused(self):
        assert settings_problems(engine(), settings("serial")) == [SERIAL]

    def test_streams_are_no_partition_for_disjoint(self):
        assert settings_problems(engine(), settings("streams", "disjoint")) == [NO_PARTITION]

    def test_disjoint_needs_the_runner_with_a_graph_manager(self):
        assert settings_problems(engine(v2=False), settings(sharing="disjoint")) == [V2_ONLY]

    @pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", None])
    def test_disjoint_without_full_graphs_of_decode_is_refused(self, mode):
        assert settings_problems(engine(mode), settings(sharing="disjoint")) == [
            f"sharing disjoint confines decode by FULL CUDA graphs, but cudagraph_mode is {mode}: drop --enforce-eager "
            "or set a cudagraph_mode with FULL decode graphs, or set sharing capped"
        ]

    @pytest.mark.parametrize("sharing", [("capped", "disjoint"), ("disjoint", "capped"), ["capped", "disjoint"]])
    def test_one_disjoint_division_is_enough(self, sharing):
        assert settings_problems(engine(), settings("streams", sharing)) == [NO_PARTITION]
        assert settings_problems(engine(), settings("cuda", sharing)) == []

    def test_all_problems_are_reported_at_once(self):
        found = settings_problems(engine("NONE", v2=False), settings("streams", "disjoint"))
        assert found[:2] == [NO_PARTITION, V2_ONLY]
        assert len(found) == 3 and "cudagraph_mode is NONE" in found[2]
