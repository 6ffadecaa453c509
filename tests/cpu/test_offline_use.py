# SPDX-License-Identifier: Apache-2.0
"""`LLM.generate`, `LLM.chat` and `LLM.beam_search` say what they say without the plugin."""

import pytest
from driver import prompt
from tokens import LOGPROB_TOLERANCE
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams

pytestmark = pytest.mark.engine

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
LONG = "".join(f"Ship {number} carries {number * 7 % 50} boxes. " for number in range(14))  # 380 bytes, each a token


@pytest.fixture
def lane_steps(pdmux):
    """Steps in which layers ran beside decoding requests."""
    return lambda: [step for step in pdmux.scheduler.pdmux_trace.steps if step.end_layer > step.first_layer]


def said(outputs):
    """Texts, tokens and reasons of every answer, in order."""
    return [
        (output.prompt_token_ids, one.text, list(one.token_ids), one.finish_reason, one.stop_reason)
        for output in outputs
        for one in output.outputs
    ]


def test_generate_with_texts_and_tokens(stock, pdmux, lane_steps):
    """More prompt tokens than one step takes: what did not fit in the first one is prefilled in the lane."""
    prompts = ["Hello", LONG, {"prompt_token_ids": prompt(200, 1)}, "A tree", {"prompt_token_ids": prompt(90, 2)}]
    expected, got = (said(driver.llm.generate(prompts, GREEDY, use_tqdm=False)) for driver in (stock, pdmux))
    assert got == expected and len(got) == len(prompts)
    assert lane_steps()


def test_generate_with_parameters_for_each_prompt(stock, pdmux, lane_steps):
    prompts = [{"prompt_token_ids": prompt(120, seed)} for seed in range(4)]
    params = [
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, n=2, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, stop_token_ids=list(range(0, 256, 9)), ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.5, min_tokens=4),
    ]
    for driver in (stock, pdmux):
        driver.set_chunk(240)  # two prompts: no seeded one is chunked, with which stock vLLM cannot deal on a CPU
    expected, got = (said(driver.llm.generate(prompts, params, use_tqdm=False)) for driver in (stock, pdmux))
    assert got == expected and len(got) == len(prompts) + 1
    assert lane_steps()


def test_chats_of_several_turns(stock, pdmux, lane_steps):
    chats = [
        [{"role": "user", "content": "Hello"}],
        [{"role": "system", "content": LONG[:200]}, {"role": "user", "content": "Which ship is full?"}],
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": LONG},
        ],
    ]
    options = {"chat_template": TEMPLATE, "use_tqdm": False}
    expected, got = (said(driver.llm.chat(chats, GREEDY, **options)) for driver in (stock, pdmux))
    assert got == expected and len(got) == len(chats)
    assert lane_steps()


def test_beam_search(stock, pdmux):
    """Its requests end with their first token, so nothing decodes beside them: the steps are stock's."""
    prompts = [{"prompt_token_ids": prompt(300, 5)}, {"prompt_token_ids": prompt(40, 6)}]
    params = BeamSearchParams(beam_width=3, max_tokens=4)
    expected, got = (driver.llm.beam_search(prompts, params) for driver in (stock, pdmux))
    for mine, theirs in zip(got, expected, strict=True):
        assert len(mine.sequences) == 3
        for beam, same in zip(mine.sequences, theirs.sequences, strict=True):
            assert (beam.tokens, beam.text) == (same.tokens, same.text)
            assert beam.cum_logprob == pytest.approx(same.cum_logprob, abs=LOGPROB_TOLERANCE)
