# SPDX-License-Identifier: Apache-2.0
"""A partition is what it says: a census of the SMs that work really runs on."""

import pytest

from vllm_pdmux.spatial.census import Census
from vllm_pdmux.spatial.cuda import CudaPartitions, PartitionError


@pytest.fixture(scope="module")
def census(gpu):
    return Census()


@pytest.fixture(scope="module")
def partitions(census):
    return CudaPartitions(0)


def sizes(partitions):
    limits = partitions.limits
    return range(limits.min_sms, limits.total_sms - limits.min_sms + 1, 2 * limits.step_sms)


def test_the_limits_are_the_devices(partitions, gpu):
    assert partitions.limits.total_sms == gpu.multi_processor_count


def test_the_sets_of_a_partition_are_disjoint_and_of_the_sizes_that_are_reported(partitions, census):
    import torch

    for size in sizes(partitions):
        made = partitions.partition(size)
        decode = census.sms(torch.cuda.ExternalStream(made.decode_stream))
        prefill = census.sms(torch.cuda.ExternalStream(made.prefill_stream))
        assert not decode & prefill
        assert (len(decode), len(prefill)) == (made.decode_sms, made.prefill_sms)


def test_a_graph_stays_on_the_sms_of_the_stream_that_it_was_captured_on(partitions, census):
    import torch

    everywhere = torch.cuda.Stream(priority=-1)
    made = partitions.partition(partitions.limits.nearest(partitions.limits.total_sms // 4))
    stream = torch.cuda.ExternalStream(made.prefill_stream)
    assert len(census.sms(everywhere)) == partitions.limits.total_sms
    assert census.sms_of_graph(stream, everywhere) == census.sms(stream)


@pytest.mark.parametrize("more", [-3, 1, 1000])
def test_a_size_that_is_not_possible_is_an_error_that_names_the_nearest(partitions, more):
    limits = partitions.limits
    sms = limits.total_sms - limits.min_sms + more if more > 0 else limits.min_sms + more
    with pytest.raises(PartitionError, match=f"{limits.total_sms} SMs.*steps of {limits.step_sms}; the nearest is"):
        partitions.partition(sms)
