# SPDX-License-Identifier: Apache-2.0
"""Adapters of LoRA: one prefills while others decode, there are more than slots, and each has its own tokens.

On a CPU stock vLLM gives a request without an adapter the weights of the last slot when one with an adapter is in its
step (github.com/vllm-project/vllm/pull/48421). So such requests are compared where the last slot is empty.
"""

import functools
import json

import pytest
import tiny_model
import torch
from beside_stock import prepared, same_tokens
from driver import Arrival, prompt
from safetensors.torch import save_file
from test_equality import lane_steps
from test_lifecycle import Once, load_the_weights_again, pause_and_resume, reset
from tokens import assert_same
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from vllm_pdmux.adapters import fitting_adapters

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
RANK, SLOTS, ADAPTERS = 8, 2, 4
LINEAR = {  # rows and columns
    "self_attn.q_proj": (tiny_model.HEADS * tiny_model.HEAD, tiny_model.HIDDEN),
    "self_attn.v_proj": (tiny_model.KV_HEADS * tiny_model.HEAD, tiny_model.HIDDEN),
    "self_attn.o_proj": (tiny_model.HIDDEN, tiny_model.HEADS * tiny_model.HEAD),
    "mlp.down_proj": (tiny_model.HIDDEN, tiny_model.INTERMEDIATE),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Adapters with random weights, from 1 on; at 0 none."""
    folders = tmp_path_factory.mktemp("adapters")
    return [None, *(LoRARequest(f"adapter{i}", i, write(folders / str(i), i)) for i in range(1, ADAPTERS + 1))]


def write(folder, seed):
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    config["target_modules"] = [name.split(".")[-1] for name in LINEAR]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for layer in range(tiny_model.LAYERS):
        for name, (rows, columns) in LINEAR.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            a, b = torch.randn(RANK, columns, generator=generator), torch.randn(rows, RANK, generator=generator)
            weights[f"{prefix}.lora_A.weight"], weights[f"{prefix}.lora_B.weight"] = a / columns**0.5, b / RANK**0.5
    save_file(weights, folder / "adapter_model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def with_slots(start_engine, tiny_model_path):
    """Both engines, with so many slots."""

    @functools.cache
    def start(slots):
        arguments = {"enable_lora": True, "max_loras": slots, "max_lora_rank": RANK, "max_cpu_loras": ADAPTERS}
        return [start_engine(tiny_model_path, pdmux=p, **arguments) for p in (None, {})]

    return start


@pytest.fixture
def fresh(with_slots):
    yield from prepared(with_slots(SLOTS))


@pytest.fixture
def an_empty_slot(with_slots):
    yield from prepared(with_slots(SLOTS + 1))


@pytest.mark.parametrize("layers, chunk", [(1, 256), (3, 50), (1000, 256)])
@pytest.mark.parametrize("decoding, prefilling", [(2, 1), (1, 1), (0, 1), (1, 0)])
def test_one_adapter_prefills_beside_another_that_decodes(an_empty_slot, adapters, layers, chunk, decoding, prefilling):
    _, pdmux = an_empty_slot
    pdmux.set_layers_per_group(layers)
    for driver in an_empty_slot:
        driver.set_chunk(chunk)
    chats = [Arrival(f"chat{i}", prompt(20 + 7 * i, i), GREEDY, lora=adapters[decoding]) for i in range(3)]
    same_tokens(an_empty_slot, [*chats, Arrival("long", prompt(200, 100), GREEDY, 5, lora=adapters[prefilling])])
    assert max(step.decode_batch for step in lane_steps(pdmux)) == 3


def test_every_adapter_has_tokens_of_its_own(fresh, adapters):
    """So the comparison is not of two engines that ignore them."""
    _, pdmux = fresh
    said = set()
    for adapter in adapters:
        chats = [Arrival("chat", prompt(20, 1), GREEDY, lora=adapters[1])]
        got = pdmux.run([*chats, Arrival("long", prompt(150, 2), GREEDY, 3, lora=adapter)])
        said.add(tuple(got["long"].tokens[0]))
    assert len(said) == len(adapters)


def test_both_lanes_have_the_same_table(fresh, adapters):
    """vLLM writes none where a step has that of the one before; the one before was the other lane's."""
    _, pdmux = fresh
    # A prompt of one token has the table of a decode step of one request.
    arrivals = [
        Arrival("chat", prompt(20, 1), GREEDY, lora=adapters[1]),
        Arrival("short", prompt(1, 2), GREEDY, 4, lora=adapters[1]),
        Arrival("other", prompt(1, 3), GREEDY, 19, lora=adapters[2]),
    ]
    same_tokens(fresh, arrivals)
    assert lane_steps(pdmux)


def in_use(driver):
    return {request.lora_request.lora_int_id for request in driver.scheduler.running if request.lora_request}


def test_more_adapters_than_slots(fresh, adapters):
    """Those that decode and those in the lane together never need more slots than there are."""
    _, pdmux = fresh
    most = []
    arrivals = [
        Arrival(f"r{i}", prompt(20 + 37 * i % 180, i), GREEDY, 2 * i, lora=adapters[(1, 2, 3, 1, 4, 2)[i % 6]])
        for i in range(16)
    ]
    got = pdmux.run(arrivals, lambda driver: most.append(len(in_use(driver))))
    assert max(most) == SLOTS
    assert len(lane_steps(pdmux)) > 20
    assert_same(got, fresh[0].run(arrivals))


def test_what_waits_for_a_slot_keeps_its_place(fresh, adapters):
    """One whose adapter has a slot overtakes it, as in stock; those that wait stay in order."""
    began = []

    def hook(driver):
        waiting = [request.request_id[:2] for request in driver.scheduler.waiting]
        assert waiting == sorted(waiting)
        began.extend(name for name in ("a3", "b3", "c3", "d1") if driver.in_lane(name) and name not in began)

    arrivals = [
        Arrival("chat1", prompt(20, 1), GREEDY, lora=adapters[1]),
        Arrival("chat2", prompt(20, 2), GREEDY, lora=adapters[2]),
        *(Arrival(f"{name}3", prompt(100, 40 + i), GREEDY, 5, lora=adapters[3]) for i, name in enumerate("abc")),
        Arrival("d1", prompt(90, 50), GREEDY, 5, lora=adapters[1]),
    ]
    same_tokens(fresh, arrivals, hook)
    assert began[0] == "d1"


def test_metrics_name_adapters_alone(fresh, adapters):
    """Ours travel in a field of vLLM's for adapters, and are taken out of it."""
    _, pdmux = fresh
    seen = set()

    def hook(driver):
        for metric in driver.llm.get_metrics():
            if metric.name == "vllm:lora_requests_info":
                seen.add(metric.labels["running_lora_adapters"])

    chats = [Arrival("chat", prompt(20, 1), GREEDY, lora=adapters[1])]
    pdmux.run([*chats, Arrival("long", prompt(150, 2), GREEDY, 3, lora=adapters[2])], hook)
    names = {name for label in seen for name in label.split(",")}
    assert {"adapter1", "adapter2"} <= names <= {"", *(one.lora_name for one in adapters[1:])}


def add(adapter):
    def action(driver):
        driver.engine.add_lora(adapter)

    return action


@pytest.mark.parametrize("other", [3, 4])
def test_an_adapter_that_is_added_in_mid_prefill(fresh, adapters, other):
    """It gets a slot of those that are in use; the prompt in the lane is done before."""
    hook = Once(add(adapters[other]))
    chats = [Arrival(f"chat{i}", prompt(20 + 7 * i, i), GREEDY, lora=adapters[2]) for i in range(3)]
    arrivals = [*chats, Arrival("long", prompt(200, 100), GREEDY, 5, lora=adapters[1])]
    same_tokens(fresh, arrivals, hook)
    assert hook.done


@pytest.mark.parametrize("call", ["remove_lora", "pin_lora"])
def test_an_adapter_that_is_removed_or_pinned_in_mid_prefill(fresh, adapters, call):
    _, pdmux = fresh
    hook = Once(lambda driver: getattr(driver.engine, call)(1))
    chats = [Arrival(f"chat{i}", prompt(20 + 7 * i, i), GREEDY, lora=adapters[2]) for i in range(3)]
    arrivals = [*chats, Arrival("long", prompt(200, 100), GREEDY, 5, lora=adapters[1])]
    try:
        same_tokens(fresh, arrivals, hook)
    finally:
        pdmux.engine.remove_lora(1)  # and its pin
    assert hook.done


@pytest.mark.parametrize("action", [reset, pause_and_resume, load_the_weights_again])
def test_in_mid_prefill(fresh, adapters, action):
    hook = Once(action)
    chats = [Arrival(f"chat{i}", prompt(20 + 7 * i, i), GREEDY, lora=adapters[2]) for i in range(3)]
    same_tokens(fresh, [*chats, Arrival("long", prompt(200, 100), GREEDY, 5, lora=adapters[1])], hook)
    assert hook.done


def test_a_slot_that_is_lost_all_the_same_ends_the_batch(fresh, adapters):
    """Nothing of vLLM's does that to a suspended prompt; were it done, its tokens would be another adapter's."""
    _, pdmux = fresh

    def steal(driver):
        manager = driver.worker.model_runner.lora_manager
        manager._adapter_manager.deactivate_adapter(1)

    hook = Once(steal)
    chats = [Arrival("chat", prompt(20, 1), GREEDY, lora=adapters[2])]
    got = pdmux.run([*chats, Arrival("long", prompt(200, 100), GREEDY, 5, lora=adapters[1])], hook)
    assert hook.done and got["long"].finish_reasons == ["error"] and got["chat"].finish_reasons == ["length"]


@pytest.mark.parametrize(
    "held, waiting, expected",
    [
        ([], [1, 2, 3, 1], {0, 1, 2}),
        ([3], [1, 2, 3], {0, 3, 1}),
        ([3, 4, 0], [1, 0, 4], {0, 3, 4}),
    ],
)
def test_which_adapters_find_a_slot(held, waiting, expected):
    requests = [type("Request", (), {"lora_request": LoRARequest(str(i), i, "/x") if i else None}) for i in waiting]
    assert fitting_adapters(held, requests, 2) == expected
