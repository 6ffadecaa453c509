# SPDX-License-Identifier: Apache-2.0
"""A compiled model is suspended at the same layers: attention is an opaque op in it too."""

import tiny_model
from driver import Arrival, prompt
from tokens import assert_same
from vllm import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def test_tokens_equal_stocks_with_torch_compile(start_engine, tiny_model_path):
    stock = start_engine(tiny_model_path, enforce_eager=False).fresh()
    pdmux = start_engine(tiny_model_path, pdmux={}, enforce_eager=False).fresh()
    assert pdmux.worker.vllm_config.compilation_config.mode.value > 0, "nothing was compiled"
    arrivals = [Arrival(f"chat{i}", prompt(20 + 7 * i, i), GREEDY) for i in range(3)]
    arrivals.append(Arrival("long", prompt(200, 100), GREEDY, step=5))
    assert_same(pdmux.run(arrivals), stock.run(arrivals))
    steps = [step for step in pdmux.scheduler.pdmux_trace.steps if step.end_layer > step.first_layer]
    assert len(steps) == tiny_model.LAYERS // 2 and all(step.decode_batch == 3 for step in steps)
    pdmux.assert_nothing_left()
