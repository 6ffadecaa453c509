# SPDX-License-Identifier: Apache-2.0
"""Tokens equal stock vLLM's, whatever the layer group, the chunk, the arrivals and the sampling."""

import json

import pytest
import tiny_model
from driver import Arrival, prompt
from tokens import assert_same
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
GROUPS = [1, 2, 7, 1000]  # 1000: all layers at once


def chats(n=3, params=GREEDY):
    """Requests that decode while something else arrives."""
    return [Arrival(f"chat{i}", prompt(20 + 7 * i, i), params) for i in range(n)]


def late(length=200, step=5, seed=100, params=GREEDY, name="long"):
    return Arrival(name, prompt(length, seed), params, step)


def lane_steps(driver):
    """Steps in which layers of a batch ran beside at least one decoding request."""
    return [step for step in driver.scheduler.pdmux_trace.steps if step.end_layer > step.first_layer]


@pytest.mark.parametrize("layers", GROUPS)
def test_any_layer_group(assert_same_as_stock, pdmux, layers):
    pdmux.set_layers_per_group(layers)
    assert_same_as_stock([*chats(), late()])
    steps = lane_steps(pdmux)
    assert len(steps) == -(-tiny_model.LAYERS // min(layers, tiny_model.LAYERS))
    assert all(step.decode_batch == 3 for step in steps), "a layer group ran without a decode step beside it"
    assert [step.first_layer for step in steps[1:]] == [step.end_layer for step in steps[:-1]]
    assert steps[-1].end_layer == tiny_model.LAYERS and steps[-1].batch_ended


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64])
def test_any_prompt_length_around_a_block(assert_same_as_stock, length):
    assert_same_as_stock([*chats(), late(length)])


@pytest.mark.parametrize("chunk", [16, 33, 200, 256])
def test_chunks_smaller_than_equal_to_and_larger_than_the_prompt(assert_same_as_stock, stock, pdmux, chunk):
    for driver in (stock, pdmux):
        driver.set_chunk(chunk)
    patient = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    assert_same_as_stock([*chats(params=patient), late(200)])
    sizes = [step.prefill_tokens for step in lane_steps(pdmux) if step.prefill_tokens]
    assert max(sizes) == min(chunk, 200)
    assert len(sizes) >= -(-200 // chunk)


def test_several_requests_in_one_batch(assert_same_as_stock, pdmux):
    burst = [late(20 + 11 * i, seed=50 + i, name=f"burst{i}") for i in range(5)]
    assert_same_as_stock([*chats(), *burst])
    assert max(step.prefill_tokens for step in lane_steps(pdmux)) == sum(20 + 11 * i for i in range(5))


def test_arrivals_while_others_prefill_and_decode(assert_same_as_stock, pdmux):
    pdmux.set_layers_per_group(1)
    stream = [late(20 + 37 * i % 180, step=3 + 2 * i, seed=60 + i, name=f"r{i}") for i in range(12)]
    assert_same_as_stock([*chats(), *stream])
    assert len({step.batch_id for step in lane_steps(pdmux)}) > 2


@pytest.mark.parametrize("second_step", [6, 7, 9])
def test_a_shared_prefix_that_arrives_between_two_layer_groups(assert_same_as_stock, pdmux, second_step):
    shared = prompt(128, 7)
    pdmux.set_layers_per_group(1)
    first = Arrival("first", [*shared, *prompt(40, 8)], GREEDY, 5)
    second = Arrival("second", [*shared, *prompt(50, 9)], GREEDY, second_step)
    assert_same_as_stock([*chats(), first, second])
    # The second batch computes only what the first has not: the shared blocks were hit after they were computed.
    computed = sorted(step.prefill_tokens for step in lane_steps(pdmux) if step.prefill_tokens)
    assert computed == [50, 168]


def test_the_same_prompt_again_hits_the_cache(assert_same_as_stock, pdmux):
    assert_same_as_stock([*chats(), late(130, name="one"), late(130, step=20, name="two")])
    assert sum(step.prefill_tokens for step in lane_steps(pdmux)) < 2 * 130


def test_seeded_sampling(assert_same_as_stock):
    """Within one chunk: stock vLLM cannot sample a seeded request whose prompt is chunked on a CPU."""
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=i, max_tokens=25, ignore_eos=True) for i in range(4)
    ]
    arrivals = [Arrival(f"s{i}", prompt(25 + i, i), p) for i, p in enumerate(params[:2])]
    arrivals += [late(110, name=f"t{i}", seed=i, params=p) for i, p in enumerate(params[2:])]
    assert_same_as_stock(arrivals)


def test_seeded_sampling_of_a_prompt_that_is_chunked_in_the_lane(stock, pdmux):
    """Stock vLLM's engine dies of this on a CPU, so the oracle is stock with the prompt in one chunk."""
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=25, ignore_eos=True)
    arrivals = [*chats(2), late(200, params=params)]
    pdmux.set_chunk(70)
    assert_same(pdmux.run(arrivals), stock.run(arrivals))
    assert len({step.batch_id for step in lane_steps(pdmux)}) == 3


def test_several_samples_of_one_prompt(assert_same_as_stock):
    params = SamplingParams(n=3, temperature=0.8, seed=11, max_tokens=20, ignore_eos=True)
    results = assert_same_as_stock([*chats(), late(120, params=params)])
    assert len({tuple(tokens) for tokens in results["long"].tokens}) == 3


@pytest.mark.parametrize("chunk", [64, 256])
def test_logprobs_and_prompt_logprobs(assert_same_as_stock, stock, pdmux, chunk):
    for driver in (stock, pdmux):
        driver.set_chunk(chunk)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=4, prompt_logprobs=3, ignore_eos=True)
    results = assert_same_as_stock([*chats(params=params), late(150, params=params)])
    assert len(results["long"].prompt_logprobs) == 150
    assert len(results["long"].logprobs[0]) == 12


def test_prompt_logprobs_of_a_prompt_that_changes_lanes_half_way(assert_same_as_stock, stock, pdmux):
    """Its first chunk runs alone as a stock step; then another request decodes and the rest goes through the lane."""
    for driver in (stock, pdmux):
        driver.set_chunk(64)
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=2, ignore_eos=True)
    short, long = Arrival("short", prompt(10, 1), GREEDY), Arrival("long", prompt(200, 2), params)
    assert_same_as_stock([short, long])
    assert lane_steps(pdmux)


def test_stop_strings_and_stop_ids(assert_same_as_stock, stock):
    probe = stock.run([late(100, step=0)])["long"].tokens[0]
    stock.fresh()
    stop_id = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[probe[7]], ignore_eos=True)
    first_id = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[probe[0]], ignore_eos=True)
    text = SamplingParams(temperature=0, max_tokens=30, stop=[stock.llm.get_tokenizer().decode(probe[4:6])])
    for params, reason in ((stop_id, probe[7]), (first_id, probe[0]), (text, None)):
        results = assert_same_as_stock([*chats(), late(100, params=params)])
        assert results["long"].finish_reasons == ["stop"]
        assert reason is None or results["long"].stop_reasons == [reason]
        stock.fresh()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=25, min_tokens=20),
        SamplingParams(temperature=0, max_tokens=25, presence_penalty=1.5, frequency_penalty=0.7),
        SamplingParams(temperature=0, max_tokens=25, repetition_penalty=1.4),
        SamplingParams(temperature=0, max_tokens=25, bad_words=["a", "b", "e"]),
        SamplingParams(temperature=0, max_tokens=25, logit_bias={5: 30.0, 6: 20.0}),
        SamplingParams(temperature=0, max_tokens=25, allowed_token_ids=list(range(40, 90))),
        SamplingParams(temperature=0.7, min_p=0.1, seed=5, max_tokens=25, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=600, ignore_eos=True),  # to the end of the context
    ],
    ids=lambda params: ",".join(
        f"{name}={getattr(params, name)}" for name in ("max_tokens", "min_tokens", "repetition_penalty", "min_p")
    ),
)
def test_sampling_parameters(assert_same_as_stock, pdmux, params):
    assert_same_as_stock([*chats(), late(150, params=params)])
    assert lane_steps(pdmux)


def test_structured_output(assert_same_as_stock, pdmux):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    params = SamplingParams(temperature=0, max_tokens=90, structured_outputs=StructuredOutputsParams(json=schema))
    choice = SamplingParams(
        temperature=0, max_tokens=10, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
    )
    results = assert_same_as_stock(
        [
            *chats(2),
            Arrival("early", prompt(30, 3), params),
            late(150, params=params),
            late(90, params=choice, name="c"),
        ]
    )
    assert set(json.loads(results["long"].texts[0])) == {"n"}
    assert results["c"].texts[0].endswith(("yes", "no"))  # behind the end of a prompt that is not text
    assert lane_steps(pdmux)


def test_end_of_sequence_ends_an_answer(assert_same_as_stock):
    bias = SamplingParams(temperature=0, max_tokens=25, logit_bias={tiny_model.EOS: 12.0})
    assert_same_as_stock([*chats(params=bias), late(90, params=bias)])


def test_nothing_to_prefill_and_nothing_decoding_are_stock_steps(assert_same_as_stock, pdmux):
    assert_same_as_stock([late(200, step=0)])
    assert not lane_steps(pdmux)
