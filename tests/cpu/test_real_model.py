# SPDX-License-Identifier: Apache-2.0
"""A real model answers in real words, the same with and without the plugin: SmolLM2-135M-Instruct.

In float32: in bfloat16 two tokens of these answers tie exactly on CPUs that compute it in matrix units, and which one
wins depends on the rest of the batch, in stock vLLM alone too.
"""

import pytest
from driver import Arrival
from tokens import assert_same
from vllm import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=40)
QUESTIONS = ["Name three primary colors.", "Write one sentence about the sea.", "What is the capital of France?"]
FACTS = " ".join(f"Box number {i} holds {i * 3 % 17} apples and stands on shelf {i % 5}." for i in range(60))
DOCUMENT = f"{FACTS} How many kinds of fruit are in the boxes, and which? Answer in one sentence."


@pytest.fixture(scope="module")
def model_path():
    from vllm_pdmux.demo_model import ensure_model

    return str(ensure_model())


@pytest.fixture(scope="module")
def engines(start_engine, model_path):
    settings = {"dtype": "float32", "max_model_len": 2048, "max_num_batched_tokens": 2048}
    return [start_engine(model_path, pdmux=pdmux, **settings) for pdmux in (None, {})]


def arrivals(driver):
    tokenizer = driver.llm.get_tokenizer()

    def chat(text):
        messages = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    chats = [Arrival(f"chat{i}", chat(question), GREEDY) for i, question in enumerate(QUESTIONS)]
    return [*chats, Arrival("document", chat(DOCUMENT), GREEDY, step=5)]


@pytest.mark.parametrize("layers", [1, 7])
def test_texts_equal_stocks(engines, layers):
    stock, pdmux = (driver.fresh() for driver in engines)
    pdmux.set_chunk(2048), stock.set_chunk(2048)
    pdmux.set_layers_per_group(layers)
    got = pdmux.run(arrivals(pdmux))
    assert_same(got, stock.run(arrivals(stock)))
    assert "Red" in got["chat0"].texts[0] and "Paris" in got["chat2"].texts[0]
    steps = [step for step in pdmux.scheduler.pdmux_trace.steps if step.end_layer > step.first_layer]
    # The chats may all end before the document's last layers, which then run in one step.
    beside = [step for step in steps if step.decode_batch]
    assert len(beside) >= 4
    assert all(step.end_layer - step.first_layer == layers or step.end_layer == 30 for step in beside)
    assert steps[0].first_layer == 0 and steps[-1].end_layer == 30
    pdmux.assert_nothing_left()
