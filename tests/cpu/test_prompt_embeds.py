# SPDX-License-Identifier: Apache-2.0
"""Prompts that are embeddings: tokens equal stock vLLM's, in the lane, in chunks, beside prompts of tokens."""

import pytest
import torch
from beside_stock import same_tokens
from driver import Arrival, prompt
from safetensors.torch import load_file
from test_equality import lane_steps
from test_lifecycle import Once, load_the_weights_again, pause_and_resume, reset
from tokens import assert_same
from vllm import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=11, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def engines(start_engine, tiny_model_path):
    return [start_engine(tiny_model_path, pdmux=p, enable_prompt_embeds=True) for p in (None, {})]


@pytest.fixture
def fresh(engines):
    stock, pdmux = (driver.fresh() for driver in engines)
    yield stock, pdmux
    pdmux.assert_nothing_left()


@pytest.fixture(scope="module")
def table(tiny_model_path):
    """The model's embedding of each token."""
    return load_file(f"{tiny_model_path}/model.safetensors")["model.embed_tokens.weight"]


def made_up(length, seed):
    """Embeddings that are those of no token."""
    generator = torch.Generator().manual_seed(seed)
    return {"prompt_embeds": torch.randn(length, 128, generator=generator)}


def mixed(length, seed):
    """Embeddings in the middle of tokens."""
    is_token = torch.ones(length, dtype=torch.bool)
    is_token[length // 4 : length // 2] = False
    embeds = made_up(length, seed)["prompt_embeds"]
    return {"prompt_token_ids": prompt(length, seed), "prompt_embeds": embeds, "prompt_is_token_ids": is_token}


def chats(params=GREEDY):
    """Requests that decode meanwhile: of tokens, and of embeddings."""
    tokens = [Arrival(f"chat{i}", prompt(20 + 7 * i, i), params) for i in range(2)]
    return [*tokens, Arrival("embedded chat", made_up(25, 3), params)]


@pytest.mark.parametrize("kind", [made_up, mixed])
@pytest.mark.parametrize("chunk", [50, 256])
def test_embeddings_beside_decode(fresh, chunk, kind):
    stock, pdmux = fresh
    for driver in fresh:
        driver.set_chunk(chunk)
    arrivals = [
        *chats(),
        Arrival("long", kind(200, 100), GREEDY, 5),
        Arrival("tokens", prompt(90, 7), GREEDY, 5),
        Arrival("other", kind(60, 101), GREEDY, 9),
    ]
    assert_same(pdmux.run(arrivals), stock.run(arrivals))
    assert len(lane_steps(pdmux)) > 4


def test_seeded_sampling(fresh):
    """Of a prompt that stock need not split, since it cannot sample a seeded one in chunks on a CPU."""
    stock, pdmux = fresh
    arrivals = [*chats(SEEDED), Arrival("long", made_up(200, 100), SEEDED, 5)]
    assert_same(pdmux.run(arrivals), stock.run(arrivals))
    assert lane_steps(pdmux)


def test_embeddings_of_tokens_are_those_tokens(fresh, table):
    """So the comparison is not of two engines that ignore them."""
    _, pdmux = fresh
    tokens = prompt(150, 21)
    arrivals = [
        *chats(),
        Arrival("long", {"prompt_embeds": table[tokens]}, GREEDY, 5),
        Arrival("same", tokens, GREEDY, 5),
        Arrival("other", made_up(150, 21), GREEDY, 5),
    ]
    got = pdmux.run(arrivals)
    assert got["long"].tokens == got["same"].tokens != got["other"].tokens
    assert lane_steps(pdmux)


def test_the_prefix_cache_tells_embeddings_apart(fresh):
    """Both kinds of hits, and a miss: embeddings that differ, though all have the same made-up token ids."""
    stock, pdmux = fresh
    first, other = made_up(128, 31), made_up(128, 32)
    longer = {"prompt_embeds": torch.cat([first["prompt_embeds"], made_up(40, 33)["prompt_embeds"]])}
    arrivals = [
        *chats(),
        Arrival("first", first, GREEDY, 5),
        Arrival("longer", longer, GREEDY, 7),
        Arrival("other", other, GREEDY, 7),
        Arrival("again", first, GREEDY, 25),
    ]
    got = pdmux.run(arrivals)
    assert_same(got, stock.run(arrivals))
    assert got["first"].tokens == got["again"].tokens != got["other"].tokens


def test_an_abort_in_the_lane(fresh):
    """The next prompt takes the row of the one that is gone."""
    fresh[-1].set_layers_per_group(1)
    hook = Once(lambda driver: driver.abort("long"))
    arrivals = [*chats(), Arrival("long", made_up(200, 100), GREEDY, 5), Arrival("next", prompt(90, 7), GREEDY, 12)]
    same_tokens(fresh, arrivals, hook, gone=["long"])
    assert hook.done


@pytest.mark.parametrize("action", [reset, pause_and_resume, load_the_weights_again])
def test_in_mid_prefill(fresh, action):
    stock, pdmux = fresh
    pdmux.set_layers_per_group(1)
    hook = Once(action)
    arrivals = [*chats(), Arrival("long", made_up(200, 100), GREEDY, 5)]
    got = pdmux.run(arrivals, hook)
    assert hook.done
    assert_same(got, stock.run(arrivals))


def test_preemption(start_engine, tiny_model_path):
    """What was preempted while it decoded is prefilled again: its embeddings, then the tokens it has said."""
    arguments = {"enable_prompt_embeds": True, "num_gpu_blocks_override": 20}
    stock, pdmux = (start_engine(tiny_model_path, pdmux=p, **arguments).fresh() for p in (None, {}))
    pdmux.set_layers_per_group(1)
    params = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
    kinds = [lambda n, i: prompt(n, i), made_up, mixed]
    arrivals = [Arrival(f"r{i}", kinds[i % 3](20 + 9 * i % 60, i), params, step=i) for i in range(8)]
    preempted = []
    original = pdmux.scheduler._preempt_request
    pdmux.scheduler._preempt_request = lambda request, *a, **k: (
        preempted.append(request.prompt_embeds is not None),
        original(request, *a, **k),
    )
    try:
        got = pdmux.run(arrivals)
    finally:
        del pdmux.scheduler._preempt_request
    assert any(preempted)
    assert_same(got, stock.run(arrivals))
    pdmux.assert_nothing_left()
