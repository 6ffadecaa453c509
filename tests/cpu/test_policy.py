# SPDX-License-Identifier: Apache-2.0
"""Policies: which group a load gets, and how many layers a prefill advances."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pdmux.config import ConfigError, PDMuxConfig
from vllm_pdmux.policy import (
    ALL_LAYERS,
    LANE_EMPTY,
    OFF,
    SOONER,
    Decision,
    FixedPolicy,
    Kind,
    LayerRule,
    Load,
    Observation,
    OffPolicy,
    Prompt,
    TablePolicy,
)
from vllm_pdmux.policy.types import ALL_TOKENS, why_fused
from vllm_pdmux.policy_from_config import build_policy

FOUR_LAYERS = LayerRule(layers_per_group=4)
AUTOMATIC = TablePolicy(thresholds=(), splits=6, decode_bs_divisor=36, layers=FOUR_LAYERS)


def busy(decode_batch, prefill_tokens=8192, model_layers=32):
    return Load(decode_batch, prefill_tokens, model_layers)


def table(*thresholds):
    return TablePolicy(thresholds, splits=len(thresholds), decode_bs_divisor=36, layers=FOUR_LAYERS)


@pytest.mark.parametrize("policy", [AUTOMATIC, table(10, 5), FixedPolicy(2, 6, FOUR_LAYERS), OffPolicy(6)])
class TestAlone:
    def test_nothing_decoding_gives_prefill_all_sms_and_all_layers(self, policy):
        assert policy.decide(busy(0)) == Decision(group=0, layers=ALL_LAYERS)

    def test_nothing_to_prefill_gives_decode_all_sms(self, policy):
        assert policy.decide(busy(7, prefill_tokens=0)) == Decision(group=policy.splits + 1, layers=0)


@pytest.mark.parametrize(
    "batches, group",
    [
        (range(1, 12), 1),
        (range(12, 18), 2),
        (range(18, 24), 3),
        (range(24, 30), 4),
        (range(30, 36), 5),
        ([36, 37, 72, 5000], 6),
    ],
)
def test_the_default_table_is_that_of_sglang(batches, group):
    assert {AUTOMATIC.decide(busy(batch)).group for batch in batches} == {group}


@pytest.mark.parametrize(
    "thresholds, batch, group",
    [
        ((1, 5, 10), 4, 1),
        ((1, 5, 10), 5, 2),
        ((1, 5, 10), 9, 2),
        ((1, 5, 10), 99, 3),
        ((10, 5), 12, 1),  # the largest threshold that is met, not the last row that is
        ((10, 5), 7, 2),
        ((10, 5), 3, 1),  # below every threshold
        ((5, 10), 4, 1),
        ((5, 5, 5), 5, 3),  # equal thresholds: the later row
        ((0, 3), 1, 1),
    ],
)
def test_the_largest_threshold_met_wins(thresholds, batch, group):
    assert table(*thresholds).decide(busy(batch)).group == group


@given(st.data(), st.lists(st.integers(0, 64), min_size=1, max_size=8, unique=True))
def test_the_order_of_rows_does_not_matter(data, thresholds):
    """A batch that meets a threshold gets the SMs of the same row, wherever that row stands."""
    batch = data.draw(st.integers(max(1, min(thresholds)), 80), label="batch")
    rows = [(132 - 10 * number, 10 * number, threshold) for number, threshold in enumerate(thresholds, start=1)]
    permuted = data.draw(st.permutations(rows), label="permuted")

    def split(rows):
        return rows[table(*(threshold for _, _, threshold in rows)).decide(busy(batch)).group - 1]

    assert split(permuted) == split(rows)


@given(st.lists(st.integers(0, 64), max_size=8), st.integers(1, 9), st.integers(1, 100), st.integers(1, 200))
def test_both_lanes_busy_always_gets_a_mixed_group_and_a_layer(thresholds, splits, divisor, batch):
    splits = len(thresholds) or splits
    decision = TablePolicy(tuple(thresholds), splits, divisor, LayerRule()).decide(busy(batch))
    assert 1 <= decision.group <= splits
    assert decision.layers >= 1


@given(st.integers(1, 9), st.integers(1, 100), st.integers(1, 200))
def test_the_automatic_table_is_the_manual_one_with_its_first_batches(splits, divisor, batch):
    automatic = TablePolicy((), splits, divisor, FOUR_LAYERS)
    assert automatic.decide(busy(batch)) == table(*automatic.first_batches()).decide(busy(batch))


@pytest.mark.parametrize(
    "splits, divisor, batches",
    [(1, 36, (1,)), (6, 36, (1, 12, 18, 24, 30, 36)), (3, 10, (1, 7, 10)), (4, 2, (1, 1, 2, 2))],
)
def test_the_automatic_table_begins_its_rows_at_even_parts_of_the_divisor(splits, divisor, batches):
    assert TablePolicy((), splits, divisor, FOUR_LAYERS).first_batches() == batches


def test_the_manual_table_begins_its_rows_at_its_thresholds():
    assert table(10, 5).first_batches() == (10, 5)


def test_the_fixed_policy_ignores_the_batch():
    assert {FixedPolicy(3, 6, FOUR_LAYERS).decide(busy(batch)) for batch in (1, 12, 500)} == {Decision(3, 4)}


@pytest.mark.parametrize("group", [1, 6])
def test_the_fixed_group_may_be_the_first_or_the_last(group):
    assert FixedPolicy(group, 6, FOUR_LAYERS).decide(busy(12)).group == group


@pytest.mark.parametrize("group", [0, 7])
def test_the_fixed_group_must_be_a_mixed_one(group):
    with pytest.raises(ValueError, match=f"group {group} is not one of the mixed groups 1..6"):
        FixedPolicy(group, 6, FOUR_LAYERS)


@pytest.mark.parametrize("policy", [AUTOMATIC, table(1, 5), FixedPolicy(2, 6, FOUR_LAYERS)])
def test_tables_and_the_fixed_group_never_fuse_and_learn_nothing(policy):
    step = Observation(Kind.BESIDE, 10.0, 4, 400, 100.0, 1)
    assert not policy.observes and not policy.fuses and policy.fused_reason == ""
    assert policy.fused_tokens(busy(4)) == 0 and not policy.overtakes(Prompt(1, 1000), Prompt(1e6, 0))
    assert policy.expected_ms(step) is policy.target_ms(step) is policy.observe(step) is None


def test_off_fuses_all_that_vllm_allows_and_ends_what_is_in_the_lane():
    policy = OffPolicy(6)
    assert policy.fuses and policy.fused_tokens(busy(4)) == ALL_TOKENS and policy.fused_reason == OFF
    assert policy.decide(busy(4)) == Decision(group=1, layers=ALL_LAYERS)


@pytest.mark.parametrize(
    "fused_ms, lane_ms, reason", [(9.0, 10.0, SOONER), (10.0, 10.0, LANE_EMPTY), (11.0, 10.0, LANE_EMPTY)]
)
def test_a_step_is_fused_as_prompts_end_sooner_or_else_as_the_lane_is_empty(fused_ms, lane_ms, reason):
    assert why_fused(fused_ms, lane_ms) == reason


@pytest.mark.parametrize("splits, divisor", [(0, 36), (6, 0), (0, 0), (-1, 36)])
def test_a_table_has_a_row_and_a_divisor(splits, divisor):
    said = rf"splits \({splits}\) and decode_bs_divisor \({divisor}\) must be >= 1"
    with pytest.raises(ValueError, match=f"^{said}$"):
        TablePolicy((), splits, divisor, FOUR_LAYERS)
    TablePolicy((), 1, 1, FOUR_LAYERS)


def test_a_table_has_one_threshold_for_each_split():
    with pytest.raises(ValueError, match=r"^2 thresholds for 3 splits: give one for each, or none$"):
        TablePolicy((1, 5), 3, 36, FOUR_LAYERS)


@pytest.mark.parametrize(
    "rule, load, layers",
    [
        (LayerRule(), busy(4, model_layers=32), 4),
        (LayerRule(), busy(4, model_layers=33), 5),
        (LayerRule(), busy(4, model_layers=2), 1),
        (LayerRule(split_forward_token_budget=65536), busy(4, prefill_tokens=8192), 8),
        (LayerRule(split_forward_token_budget=65536), busy(4, prefill_tokens=65537), 1),
        (LayerRule(split_forward_token_budget=10), busy(4, prefill_tokens=4), 2),
        (LayerRule(split_forward_token_budget=6), busy(4, prefill_tokens=1), 6),
        (LayerRule(layers_per_group=3, split_forward_token_budget=65536), busy(4), 3),
    ],
)
def test_layers_per_group_then_the_token_budget_then_an_eighth(rule, load, layers):
    assert rule.layers(load) == layers
    assert FixedPolicy(2, 6, rule).decide(load) == Decision(2, layers)
    assert TablePolicy((), 1, 36, rule).decide(load) == Decision(1, layers)


class TestFromConfig:
    def test_without_settings_a_prefill_leaves_room_for_eight_decode_steps(self):
        policy = build_policy(PDMuxConfig(), splits=6)
        assert policy == TablePolicy((), 6, 36, LayerRule(None, None))
        assert policy.decide(busy(12, model_layers=80)) == Decision(2, 10)

    def test_manual_rows_become_thresholds(self):
        config = PDMuxConfig(sm_group_num=4, manual_divisions=[[112, 20, 10], [66, 66, 5]], layers_per_group=2)
        assert build_policy(config, splits=2) == TablePolicy((10, 5), 2, 36, LayerRule(2, None))

    def test_the_divisor_reaches_the_last_split_that_the_device_has(self):
        assert build_policy(PDMuxConfig(), splits=3).decide(busy(36)).group == 3

    def test_policy_fixed(self):
        config = PDMuxConfig(policy="fixed", fixed_group=2, split_forward_token_budget=100)
        assert build_policy(config, splits=6) == FixedPolicy(2, 6, LayerRule(None, 100))

    def test_a_fixed_group_that_this_device_does_not_have_is_an_error_with_the_range(self):
        with pytest.raises(ConfigError, match="fixed_group is 5 but must be 1 to 3"):
            build_policy(PDMuxConfig(policy="fixed", fixed_group=5), splits=3)

    def test_a_serial_lane_takes_all_layers_at_once(self):
        config = PDMuxConfig(lane="serial", layers_per_group=2)
        assert build_policy(config, splits=6).decide(busy(12)) == Decision(2, ALL_LAYERS)
