# SPDX-License-Identifier: Apache-2.0
"""The tests' model is one whose tokens depend on every layer's KV: otherwise equal tokens would prove nothing."""

import pytest
import tiny_model
from driver import Arrival, prompt
from vllm import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def corrupt(driver, layer, block):
    """Overwrite one layer's KV of one block of the running request."""
    attention = driver.worker.vllm_config.compilation_config.static_forward_context
    caches = [module.kv_cache for name, module in attention.items() if f"layers.{layer}." in name]
    assert len(caches) == 1
    request = driver.scheduler.running[0]
    block_id = driver.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0][block]
    cache = caches[0]
    blocks = cache if cache.shape[0] == driver.scheduler.kv_cache_manager.block_pool.num_gpu_blocks else cache[0]
    blocks[block_id].neg_()


@pytest.mark.parametrize("layer", range(tiny_model.LAYERS))
def test_one_corrupt_block_of_any_layer_changes_the_tokens(stock, layer):
    arrivals = [Arrival("a", prompt(100, 1), PARAMS)]
    sound = stock.run(arrivals)["a"].tokens[0]
    stock.fresh()

    def damage(driver):
        if driver.step_number == 2:
            corrupt(driver, layer, block=1)

    damaged = stock.run(arrivals, damage)["a"].tokens[0]
    assert damaged[:3] == sound[:3], "the damage came before its time"
    assert damaged != sound


def test_tokens_vary_along_an_answer_and_between_prompts(stock):
    results = stock.run([Arrival(str(i), prompt(40 + i, i), PARAMS) for i in range(8)])
    answers = [tuple(result.tokens[0]) for result in results.values()]
    assert len(set(answers)) == len(answers)
    assert all(len(set(answer)) > 12 for answer in answers), "an answer repeats itself"
