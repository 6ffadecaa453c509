# SPDX-License-Identifier: Apache-2.0
"""When a batch enters the prefill lane."""

from vllm_pdmux.admission import Admission

LAYERS = 32


def admission(layers=0):
    """After a step in which so many layers were launched."""
    found = Admission(LAYERS, 2, None)
    found.launched(layers)
    return found


def test_the_next_batch_waits_until_half_of_the_layers_are_launched():
    assert [admission(layers=2).is_time(layers) for layers in (0, 15, 16, 32)] == [False, False, True, True]


def test_where_a_batch_lasts_for_few_steps_the_next_one_comes_earlier():
    assert admission(layers=7).is_time(11) and not admission(layers=7).is_time(10)
    assert admission(layers=16).is_time(0)


def test_a_fast_step_is_forgotten_in_time_but_not_for_steps_without_the_lane():
    found = admission(layers=16)
    for _ in range(20):
        found.launched(0)
    assert found.is_time(0)
    for _ in range(20):
        found.launched(1)
    assert not found.is_time(15) and found.is_time(16)
