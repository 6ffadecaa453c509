# SPDX-License-Identifier: Apache-2.0
"""From groups to partitions: one stream for one split, counts from the driver, and errors that say the way out.

The driver and sgl_kernel are stand-ins; that partitions hold on a GPU is tested in tests/gpu.
"""

import enum
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pdmux.spatial import (
    BACKENDS,
    GrantedGroup,
    Group,
    Partition,
    PartitionError,
    SMLimits,
    granted_groups,
    open_backend,
)

ROOT = Path(__file__).parents[2]
TOTAL = 132


def group(index, decode_sms, sharing="capped"):
    return Group(index, TOTAL - decode_sms, decode_sms, None, sharing)


# --- from groups to partitions ----------------------------------------------------------------------------------------


class Backend:
    """Rounds decode's part up to a multiple of 8, as a driver does, on new streams each time."""

    limits = SMLimits(TOTAL, 8, 8)

    def __init__(self):
        self.asked = []

    def partition(self, decode_sms):
        self.limits.check(decode_sms)
        self.asked.append(decode_sms)
        granted_sms, number = -(-decode_sms // 8) * 8, len(self.asked)
        return Partition(granted_sms, TOTAL - granted_sms, 100 + number, 200 + number)


class TestGrantedGroups:
    def test_each_group_has_the_partition_of_its_split_in_order(self):
        granted = granted_groups([group(1, 24), group(2, 16), group(3, 64)], Backend())
        assert [(one.index, one.partition.decode_sms) for one in granted] == [(1, 24), (2, 16), (3, 64)]
        assert len({one.partition.decode_stream for one in granted}) == 3

    @pytest.mark.parametrize("sizes", [(20, 24), (24, 20), (17, 23)])
    def test_groups_that_are_rounded_to_one_split_share_a_partition_and_its_streams(self, sizes):
        first, other, second = granted_groups([group(1, sizes[0]), group(2, 40), group(3, sizes[1])], Backend())
        assert first.partition is second.partition is not other.partition
        assert (first.asked.decode_sms, second.asked.decode_sms) == sizes

    def test_groups_that_share_the_device_in_other_ways_have_one_partition(self):
        backend = Backend()
        capped, disjoint = granted_groups([group(1, 24, "capped"), group(2, 24, "disjoint")], backend)
        assert capped.partition is disjoint.partition and backend.asked == [24]
        assert not capped.is_disjoint and disjoint.is_disjoint

    def test_a_lane_alone_has_no_partition(self):
        backend = Backend()
        alone = [Group(0, TOTAL, 0, None), Group(2, 0, TOTAL, None)]
        (granted,) = granted_groups([alone[0], group(1, 24), alone[1]], backend)
        assert granted.index == 1 and backend.asked == [24]
        assert granted_groups(alone, backend) == ()

    def test_every_group_that_has_no_partition_is_named_in_one_message(self):
        with pytest.raises(PartitionError) as raised:
            granted_groups([group(1, 4), group(2, 24), group(3, 130), group(4, 4)], Backend())
        problems = str(raised.value).split("; group ")
        assert [problem.removeprefix("group ")[:2] for problem in problems] == ["1:", "3:", "4:"]
        assert "4 SMs for decode" in problems[0] and "130 SMs for decode" in problems[1]


class TestDescription:
    @pytest.mark.parametrize(("sharing", "decode_sms"), [("capped", TOTAL), ("disjoint", 24)])
    def test_what_was_granted_is_all_of_it_when_it_was_asked_for(self, sharing, decode_sms):
        granted = GrantedGroup(group(2, 24, sharing), Partition(24, 108, 1, 2))
        assert granted.describe(TOTAL) == f"group 2 ({sharing}): prefill on 108 SMs, decode on {decode_sms}"

    @pytest.mark.parametrize(("sharing", "decode_sms"), [("capped", TOTAL), ("disjoint", 24)])
    def test_what_was_asked_for_is_said_where_it_differs(self, sharing, decode_sms):
        granted = GrantedGroup(group(1, 20, sharing), Partition(24, 108, 1, 2))
        assert granted.describe(TOTAL) == (
            f"group 1 ({sharing}): prefill on 108 SMs, decode on {decode_sms}; asked for: 112 and 20"
        )


# --- what is possible -------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(1, 4), st.integers(0, 200), st.integers(-10, 500))
def test_the_nearest_size_is_possible_and_none_is_nearer(step_sms, steps, more, sms):
    smallest = steps * step_sms
    limits = SMLimits(2 * smallest + more, smallest, step_sms)
    possible = range(smallest, limits.total_sms - smallest + 1, step_sms)
    nearest = limits.nearest(sms)
    assert nearest in possible
    assert abs(nearest - sms) == min(abs(size - sms) for size in possible)
    limits.check(nearest)


@pytest.mark.parametrize(("sms", "nearest"), [(7, 8), (0, 8), (-8, 8), (125, 120), (132, 120), (1000, 120)])
def test_a_size_that_leaves_a_lane_too_little_is_an_error_with_the_limits_and_the_nearest(sms, nearest):
    with pytest.raises(PartitionError) as raised:
        SMLimits(TOTAL, 8, 8).check(sms)
    assert str(raised.value) == (
        f"a partition with {sms} SMs for decode is not possible: the device has 132 SMs, each lane needs 8, in steps "
        f"of 8; the nearest is {nearest}"
    )


@pytest.mark.parametrize("sms", [8, 9, 66, 120])
def test_a_size_within_the_limits_is_accepted(sms):
    SMLimits(TOTAL, 8, 8).check(sms)


# --- backends ---------------------------------------------------------------------------------------------------------


def test_importing_spatial_imports_no_library_of_a_backend():
    code = (
        "import sys, vllm_pdmux.spatial; print(sorted({'torch', 'vllm', 'cuda', 'sgl_kernel', "
        "'vllm_pdmux.spatial.cuda', 'vllm_pdmux.spatial.sgl', 'vllm_pdmux.spatial.plain'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Result(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_SUPPORTED = 801


class Driver:
    """cuda.bindings.driver of a device with 132 SMs in steps of 8. Handles are numbers."""

    CUresult = Result
    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstream = int

    def __init__(self):
        self.broken = None  # the call that fails
        self.says_step = True
        self.sets_found = 1
        self._contexts = {}  # context -> its SMs; its stream is the number 100 above

    def stream(self, sms):
        """A stream of a new green context with so many SMs."""
        context = len(self._contexts) + 1
        self._contexts[context] = sms
        return 100 + context

    def _answer(self, call, *values):
        if call == self.broken:
            return Result.CUDA_ERROR_NOT_SUPPORTED, *(None for _ in values)
        return Result.CUDA_SUCCESS, *values

    def _resource(self, sms):
        return SimpleNamespace(sm=SimpleNamespace(smCount=sms, smCoscheduledAlignment=4 if self.says_step else 0))

    def cuDeviceGet(self, index):
        return self._answer("cuDeviceGet", index)

    def cuDeviceGetDevResource(self, device, kind):
        return self._answer("cuDeviceGetDevResource", self._resource(TOTAL))

    def cuDevSmResourceSplitByCount(self, count, resource, flags, sms):
        granted_sms = -(-sms // 8) * 8
        sets = [self._resource(granted_sms)], self.sets_found, self._resource(resource.sm.smCount - granted_sms)
        return self._answer("cuDevSmResourceSplitByCount", *sets)

    def cuDevResourceGenerateDesc(self, resources, count):
        return self._answer("cuDevResourceGenerateDesc", resources[0].sm.smCount)

    def cuGreenCtxCreate(self, description, device, flags):
        return self._answer("cuGreenCtxCreate", self.stream(description) - 100)

    def cuGreenCtxStreamCreate(self, context, flags, priority):
        return self._answer("cuGreenCtxStreamCreate", 100 + context)

    def cuStreamGetGreenCtx(self, stream):
        return self._answer("cuStreamGetGreenCtx", stream - 100 if stream - 100 in self._contexts else 0)

    def cuGreenCtxGetDevResource(self, context, kind):
        return self._answer("cuGreenCtxGetDevResource", self._resource(self._contexts[context]))


CALLS = [name for name in vars(Driver) if name.startswith("cu")]


@pytest.fixture
def driver(monkeypatch):
    driver, bindings, cuda = Driver(), ModuleType("cuda.bindings"), ModuleType("cuda")
    cuda.bindings, bindings.driver = bindings, driver
    for name, module in {"cuda": cuda, "cuda.bindings": bindings, "cuda.bindings.driver": driver}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return driver


@pytest.fixture
def sgl_kernel(monkeypatch, driver):
    """sgl_kernel; `create` of what it returns is called by its only function."""

    def create(decode_sms, prefill_sms, device):
        return spatial.create(decode_sms, prefill_sms, device)

    spatial = SimpleNamespace(create_greenctx_stream_by_value=create)
    library = ModuleType("sgl_kernel")
    library.spatial = spatial
    monkeypatch.setitem(sys.modules, "sgl_kernel", library)
    monkeypatch.setitem(sys.modules, "sgl_kernel.spatial", spatial)
    return spatial


class TestCuda:
    def test_the_limits_are_what_the_driver_says(self, driver):
        assert open_backend("cuda", 0).limits == SMLimits(TOTAL, min_sms=8, step_sms=4)

    def test_the_step_of_a_driver_that_says_none_is_the_smallest_set(self, driver):
        driver.says_step = False
        assert open_backend("cuda", 0).limits == SMLimits(TOTAL, min_sms=8, step_sms=8)

    def test_the_counts_are_what_the_driver_granted(self, driver):
        partition = open_backend("cuda", 0).partition(20)
        assert (partition.decode_sms, partition.prefill_sms) == (24, 108)
        assert partition.decode_stream != partition.prefill_stream

    def test_each_stream_is_on_its_own_set(self, driver):
        partition = open_backend("cuda", 0).partition(20)
        sms = {stream: driver._contexts[stream - 100] for stream in (partition.decode_stream, partition.prefill_stream)}
        assert sms == {partition.decode_stream: 24, partition.prefill_stream: 108}

    @pytest.mark.parametrize(("sms", "nearest"), [(7, 8), (0, 8), (128, 124)])
    def test_less_than_a_lane_needs_is_refused_with_the_nearest(self, driver, sms, nearest):
        backend = open_backend("cuda", 0)
        with pytest.raises(PartitionError, match=f"with {sms} SMs for decode .*needs 8, .*the nearest is {nearest}$"):
            backend.partition(sms)
        assert not driver._contexts, "nothing was made"

    def test_a_split_that_the_driver_does_not_find_is_an_error_with_the_sizes(self, driver):
        backend = open_backend("cuda", 0)
        driver.sets_found = 0
        with pytest.raises(PartitionError, match=r"cannot split 132 SMs into 24 and the rest: .* from 8 in steps of 4"):
            backend.partition(24)

    @pytest.mark.parametrize("call", CALLS)
    def test_a_call_that_fails_is_named_with_what_partitions_need(self, driver, call):
        driver.broken = call
        with pytest.raises(PartitionError) as raised:
            open_backend("cuda", 0).partition(24)
        assert str(raised.value) == (
            f"{call} failed with CUDA_ERROR_NOT_SUPPORTED: SM partitions need a GPU of compute capability 8.0 or later "
            "and a driver with green contexts (CUDA 12.4 or later)"
        )

    @pytest.mark.parametrize("name", ["cuda", "sgl_kernel"])
    def test_without_cuda_bindings_the_package_is_named(self, monkeypatch, driver, name):
        for module in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
            monkeypatch.setitem(sys.modules, module, None)  # an import of it fails
        with pytest.raises(PartitionError, match=r"cuda-bindings is not installed.*pip install cuda-bindings"):
            open_backend(name, 0)


def unusable(reason):
    import torch

    return (
        f"backend sgl_kernel needs the package sglang-kernel, built for torch {torch.__version__}, but it does not "
        f"load ({reason}): install a version for this torch, or use backend cuda"
    )


class TestSglKernel:
    def test_the_counts_are_what_the_driver_says_of_the_streams(self, driver, sgl_kernel):
        sgl_kernel.create = lambda *_: [SimpleNamespace(cuda_stream=driver.stream(sms)) for sms in (32, 96)]
        partition = open_backend("sgl_kernel", 0).partition(24)
        assert (partition.decode_sms, partition.prefill_sms) == (32, 96)
        assert [driver._contexts[s - 100] for s in (partition.decode_stream, partition.prefill_stream)] == [32, 96]

    def test_both_sets_together_are_the_device(self, driver, sgl_kernel):
        asked = []

        def create(*arguments):
            asked.append(arguments)
            return [SimpleNamespace(cuda_stream=driver.stream(sms)) for sms in arguments[:2]]

        driver.says_step = False
        sgl_kernel.create = create
        backend = open_backend("sgl_kernel", 3)
        backend.partition(20)
        backend.partition(24)
        assert asked == [(24, 108, 3), (24, 108, 3)]

    def test_the_limits_are_checked_before_the_library_is_called(self, driver, sgl_kernel):
        sgl_kernel.create = lambda *_: pytest.fail("it was called")
        with pytest.raises(PartitionError, match="the nearest is 8"):
            open_backend("sgl_kernel", 0).partition(4)

    def test_a_library_that_is_not_there_is_named_with_the_way_out(self, monkeypatch, driver):
        monkeypatch.setitem(sys.modules, "sgl_kernel", None)  # an import of it fails
        with pytest.raises(PartitionError) as raised:
            open_backend("sgl_kernel", 0)
        assert str(raised.value) == unusable("ModuleNotFoundError: import of sgl_kernel halted; None in sys.modules")

    @pytest.mark.parametrize("kind", [ImportError, OSError, RuntimeError])
    def test_a_library_for_another_torch_is_named_with_the_way_out(self, monkeypatch, driver, kind):
        def fail(name):
            raise kind("undefined symbol: at_cuda\nmore of it")

        library = ModuleType("sgl_kernel")
        library.__getattr__ = fail
        monkeypatch.setitem(sys.modules, "sgl_kernel", library)
        with pytest.raises(PartitionError) as raised:
            open_backend("sgl_kernel", 0)
        assert str(raised.value) == unusable(f"{kind.__name__}: undefined symbol: at_cuda")

    def test_a_library_that_loads_at_its_first_call_and_fails_is_the_same(self, driver, sgl_kernel):
        def create(*_):
            raise ImportError("spatial_ops is not compiled\nsee the manual")

        sgl_kernel.create = create
        backend = open_backend("sgl_kernel", 0)
        with pytest.raises(PartitionError) as raised:
            backend.partition(24)
        assert str(raised.value) == unusable("ImportError: spatial_ops is not compiled")

    def test_a_split_that_it_cannot_make_is_said_with_the_way_out(self, driver, sgl_kernel):
        def create(*_):
            raise RuntimeError("CUDA Error: invalid resource\nstack")

        sgl_kernel.create = create
        backend = open_backend("sgl_kernel", 0)
        with pytest.raises(PartitionError) as raised:
            backend.partition(24)
        assert str(raised.value) == (
            "sgl_kernel cannot split the device into 24 and 108 SMs (CUDA Error: invalid resource): choose another "
            "split, or backend cuda"
        )

    def test_streams_in_no_green_context_are_an_error(self, driver, sgl_kernel):
        sgl_kernel.create = lambda *_: [SimpleNamespace(cuda_stream=7)] * 2
        with pytest.raises(PartitionError, match="in no green context: use another backend"):
            open_backend("sgl_kernel", 0).partition(24)


class PlainStream:
    def __init__(self, device, priority):
        self.cuda_stream = 1000 + priority

    @staticmethod
    def priority_range():
        return 0, -5


@pytest.fixture
def plain(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "Stream", PlainStream)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=TOTAL)
    )


@pytest.mark.usefixtures("plain")
def test_plain_streams_give_both_lanes_the_device_and_decode_the_higher_priority():
    first, second = granted_groups([group(1, 24), group(2, 64)], open_backend("streams", 0))
    assert first.partition is second.partition
    assert first.partition == Partition(TOTAL, TOTAL, decode_stream=995, prefill_stream=1000)


@pytest.mark.usefixtures("driver", "sgl_kernel", "plain")
def test_every_backend_has_a_class_of_its_own():
    assert len({type(open_backend(name, 0)) for name in BACKENDS}) == len(BACKENDS)
