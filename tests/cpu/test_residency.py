# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2 is sent a request that changes lanes as a new one, with all its tokens and blocks."""

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.request import Request

from vllm_pdmux.residency import Residency

BLOCKS = {"a": ([1, 2, 3],), "b": ([4],)}


@pytest.fixture
def requests():
    made = {name: Request(name, [5, 6, 7, 8], SamplingParams(max_tokens=4), None) for name in BLOCKS}
    made["a"].append_output_token_ids(9)
    return made


@pytest.fixture
def residency():
    return Residency()


@pytest.fixture
def localise(requests, residency):
    return lambda output, lane: residency.localise(output, lane, requests, BLOCKS.__getitem__)


def step(*cached):
    """A step in which requests go on that the stock scheduler has sent before."""
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(cached),
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[([70 + i],) for i, _ in enumerate(cached)],
        num_computed_tokens=[4 + i for i, _ in enumerate(cached)],
        num_output_tokens=[1 for _ in cached],
    )
    output.num_scheduled_tokens = dict.fromkeys(cached, 1)
    output.total_num_scheduled_tokens = len(cached)
    return output


def test_a_request_that_stays_is_sent_as_stock_sends_it(localise):
    localise(step("a", "b"), "decode")
    output = step("a", "b")
    assert localise(output, "decode") is output


def test_a_request_that_joins_is_new_with_its_first_token(localise):
    localise(step("a"), "prefill")
    output = localise(step("a"), "decode")
    (new,) = output.scheduled_new_reqs
    assert new.prefill_token_ids == [5, 6, 7, 8, 9] and new.prompt_token_ids == [5, 6, 7, 8]
    assert new.num_computed_tokens == 4, "one token is left to compute: it runs as a decode"
    assert new.block_ids == BLOCKS["a"] and output.num_scheduled_tokens == {"a": 1}
    assert not output.scheduled_cached_reqs.req_ids


def test_only_those_that_change_lanes_are_new(localise):
    localise(step("b"), "decode")
    localise(step("a"), "prefill")
    output = localise(step("a", "b"), "decode")
    assert [new.req_id for new in output.scheduled_new_reqs] == ["a"]
    rest = output.scheduled_cached_reqs
    assert (rest.req_ids, rest.num_computed_tokens, rest.new_block_ids) == (["b"], [5], [([71],)])
    again = step("a", "b")
    assert localise(again, "decode") is again


def test_a_request_that_was_gone_is_new_again(localise, residency):
    localise(step("a"), "decode")
    residency.forget({"a", "nobody"})
    assert [new.req_id for new in localise(step("a"), "decode").scheduled_new_reqs] == ["a"]


def test_a_step_that_tells_of_what_is_gone_forgets_nothing_that_was_sent_in_it(localise, residency):
    """What has ended or was preempted may come again in the same step, to the other lane."""
    localise(step("a"), "prefill")
    told = step("b")
    told.finished_req_ids, told.preempted_req_ids = {"a"}, {"a"}
    localise(told, "decode")
    assert residency.lane_of("a") == "prefill"


def test_of_those_that_stay_all_is_sent_as_stock_sends_it(localise):
    """One joins, and the rest of the step is as if it had never been there."""
    localise(step("b"), "decode")
    output = step("a", "b")
    cached = output.scheduled_cached_reqs
    cached.resumed_req_ids, cached.all_token_ids, cached.num_output_tokens = {"b"}, {"b": [5, 6]}, [1, 2]
    left = localise(output, "decode").scheduled_cached_reqs
    assert left == CachedRequestData(
        req_ids=["b"],
        resumed_req_ids={"b"},
        new_token_ids=[],
        all_token_ids={"b": [5, 6]},
        new_block_ids=[([71],)],
        num_computed_tokens=[5],
        num_output_tokens=[2],
    )
