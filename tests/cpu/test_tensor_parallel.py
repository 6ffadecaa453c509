# SPDX-License-Identifier: Apache-2.0
"""Two ranks in two processes (gloo, and vLLM's shared memory between CPUs): tokens, communicators, order, no hang.

PDMUX_PREFILLS sets how many prefills the search for hangs does.
"""

from __future__ import annotations

import os
import random
import time

import psutil
import pytest
import tiny_model
import vllm.envs
from driver import ENGINE, Arrival, Driver, prompt
from rank_extension import Collective, RankExtension
from tokens import assert_same
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from watch import fuse_now_and_then

PREFILLS = int(os.environ.get("PDMUX_PREFILLS", "60"))
RANKS, SLOW_S = 2, 0.05
PER_ROUND = 20
LAYER_GROUPS = [1, 3]
SMALL_KV = 20  # blocks: three of the longest requests do not fit
HANGS_S = "120"  # after which a step is an error
TWO_RANKS = {
    "tensor_parallel_size": RANKS,
    "distributed_executor_backend": "mp",
    "worker_extension_cls": f"{RankExtension.__module__}.{RankExtension.__qualname__}",
}
ASKED = {"experimental_tensor_parallel": True, "trace_steps": 4096, "calibration": "off"}


class Ranks(Driver):
    """An engine whose workers are processes of their own."""

    def __init__(self, llm):
        self.llm, self.engine = llm, llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.step_number = 0

    def on_all(self, method, *args):
        return self.core.model_executor.collective_rpc(method, args=args)

    def processes(self):
        return [worker.proc for worker in self.core.model_executor.workers]

    def assert_nothing_left(self):
        self.settle()
        scheduler, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
        assert not scheduler.requests and not scheduler.running and not scheduler.waiting
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are still in use"
        assert not scheduler._batches and self.on_all("leftovers") == [[], []]

    def close(self):
        self.engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def environment():
    vllm.envs.disable_envs_cache()  # an engine that was started before has made vLLM remember them
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # this machine may have one core, or one NUMA node
        patch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", HANGS_S)
        yield


def start(model, pdmux=None, **arguments):
    additional = {} if pdmux is None else {"pdmux": {**ASKED, **pdmux}}
    return Ranks(LLM(model=model, **{**ENGINE, **TWO_RANKS, "additional_config": additional, **arguments}))


# --- what is served -----------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=3, max_tokens=25, ignore_eos=True)
DIGITS = SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex=r"[0-9]{12}"))


def chats(n=3, params=GREEDY):
    """Requests that decode while something else arrives."""
    return [Arrival(f"chat{i}", prompt(20 + 7 * i, i), params) for i in range(n)]


def late(length=200, step=5, seed=100, params=GREEDY, name="long"):
    return Arrival(name, prompt(length, seed), params, step)


SHARED = prompt(128, 7)
CHUNK = 70
SCENES = {
    "a prompt beside decode": [*chats(), late()],
    "a burst, seeded and structured": [
        *chats(2),
        late(110, params=SEEDED, name="seeded"),
        late(120, params=DIGITS, name="digits"),
        late(35, step=6, seed=9, name="other"),
    ],
    "a shared prefix": [
        *chats(2),
        Arrival("first", [*SHARED, *prompt(40, 8)], GREEDY, 5),
        Arrival("second", [*SHARED, *prompt(50, 9)], GREEDY, 7),
    ],
    "one after the other": [*chats(1), *(late(20 + 37 * i % 180, 3 + 2 * i, 60 + i, name=f"r{i}") for i in range(8))],
    "logprobs": [
        *chats(2),
        late(150, params=SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=2, ignore_eos=True)),
    ],
}
IN_CHUNKS = [
    *chats(params=SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)),
    late(),
    late(140, 8, 5, name="b"),
]
TOO_MUCH = [
    Arrival(f"r{i}", prompt(150 + 20 * i, i), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), i)
    for i in range(4)
]


@pytest.fixture(scope="module")
def model(tiny_model_path, environment):
    return tiny_model_path


@pytest.fixture(scope="module")
def stock_said(model):
    """What stock vLLM says with two ranks. Its processes are gone before others start."""
    stock = start(model)
    try:
        said = {name: stock.fresh().run(arrivals) for name, arrivals in SCENES.items()}
        stock.fresh().set_chunk(CHUNK)
        said["in chunks"] = stock.run(IN_CHUNKS)
        said["too much"] = stock.fresh().run(TOO_MUCH)
        return said
    finally:
        stock.close()


@pytest.fixture(scope="module")
def two_ranks(model, stock_said):
    two = start(model, {})
    two.on_all("watch_collectives")
    yield two
    two.close()


@pytest.fixture
def two(two_ranks):
    two_ranks.fresh()
    two_ranks.on_all("collectives")
    yield two_ranks
    two_ranks.on_all("slow_down", None, 0.0)
    two_ranks.assert_nothing_left()
    assert_each_lane_has_its_communicator(two_ranks.on_all("collectives"))


def assert_each_lane_has_its_communicator(by_rank):
    """And the ranks agree on the order, on what it was and on how much of it."""
    first, *others = ([Collective(*one) for one in seen] for seen in by_rank)
    assert first, "nothing was watched"
    assert all(one.lane == one.own for one in first), "a lane has used the other's communicator"
    for other in others:
        assert other == first, "the ranks ran different collectives, or in another order"


def lane_steps(two):
    return [step for step in two.scheduler.pdmux_trace.steps if step.end_layer > step.first_layer]


@pytest.mark.parametrize("layers", LAYER_GROUPS)
@pytest.mark.parametrize("scene", SCENES)
def test_tokens_are_those_of_stock_vllm_with_two_ranks(two, stock_said, scene, layers):
    two.set_layers_per_group(layers)
    assert_same(two.run(SCENES[scene]), stock_said[scene])
    assert lane_steps(two) and all(step.decode_batch for step in lane_steps(two))


def test_both_lanes_have_collectives_in_one_step(two):
    """Else nothing is shown by the check that follows every test here."""
    two.set_layers_per_group(2)
    two.run(SCENES["a prompt beside decode"])
    first, second = two.on_all("collectives")
    assert first == second
    seen = [Collective(*one) for one in first]
    assert_each_lane_has_its_communicator([first, second])
    # Of the lane: one after the embedding, two in each layer, and the logits of the first token.
    own = [one for one in seen if one.own]
    assert len(own) == 1 + 2 * tiny_model.LAYERS + 1
    changes = [i for i in range(1, len(seen)) if seen[i].own != seen[i - 1].own]
    assert len(changes) == 2 * (tiny_model.LAYERS // 2), "the lane was not stopped between layers"
    two.run(chats(1))  # for the check after the test


def test_chunks_in_the_lane(two, stock_said):
    two.set_layers_per_group(3)
    two.set_chunk(CHUNK)
    assert_same(two.run(IN_CHUNKS), stock_said["in chunks"])
    assert len({step.batch_id for step in lane_steps(two)}) > 3


@pytest.mark.parametrize("rank", range(RANKS))
def test_one_rank_that_is_slow(two, stock_said, rank):
    two.on_all("slow_down", rank, SLOW_S)
    two.set_layers_per_group(3)
    assert_same(two.run(SCENES["a shared prefix"]), stock_said["a shared prefix"])


@pytest.mark.parametrize("layer", [1, 4, 8])
def test_an_abort_in_the_lane(two, stock_said, layer):
    """Of the one request of its batch: the batch is dropped on both ranks at the same layer."""
    two.set_layers_per_group(1)
    aborted = []

    def abort(driver):
        if (
            not aborted
            and driver.in_lane("long")
            and lane_steps(driver)[-1:]
            and lane_steps(driver)[-1].end_layer == layer
        ):
            driver.abort("long")
            aborted.append(layer)

    got = two.run(SCENES["a prompt beside decode"], abort)
    expected = dict(stock_said["a prompt beside decode"])
    got.pop("long"), expected.pop("long")
    assert_same(got, expected)
    if layer < tiny_model.LAYERS:
        assert aborted


def test_reset_of_running_requests_in_the_lane(two, stock_said):
    two.set_layers_per_group(1)
    resets = []

    def reset(driver):
        if not resets and driver.in_lane("long"):
            resets.append(driver.scheduler.reset_prefix_cache(reset_running_requests=True))

    assert_same(two.run(SCENES["a prompt beside decode"], reset), stock_said["a prompt beside decode"])
    assert resets == [True]


def test_pause_in_the_lane(two, stock_said):
    """Nothing of the lane is kept, and its requests begin again when the engine goes on."""
    two.set_layers_per_group(1)
    paused_at = []

    def pause(driver):
        if not paused_at and driver.in_lane("long"):
            driver.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            paused_at.append(driver.step_number)
        elif paused_at and driver.step_number == paused_at[0] + 3:
            driver.scheduler.set_pause_state(PauseState.UNPAUSED)

    assert_same(two.run(SCENES["a prompt beside decode"], pause), stock_said["a prompt beside decode"])
    assert paused_at


@pytest.mark.parametrize("fused", [(40, 3), (200, 2)])
def test_fused_steps_in_between(two, stock_said, fused):
    two.set_layers_per_group(3)
    fuse_now_and_then(two.scheduler, fused)
    assert_same(two.run(SCENES["one after the other"]), stock_said["one after the other"])
    two.scheduler._observer = None
    kinds = {step.kind for step in two.scheduler.pdmux_trace.steps}
    assert {"beside", "fused"} <= kinds


def test_preemption(two, stock_said):
    """With blocks taken away, so that not all of the requests fit."""
    pool = two.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - SMALL_KV)
    preempted = []
    stock = two.scheduler._preempt_request

    def preempt(request, *args, **kwargs):
        preempted.append(request.request_id)
        return stock(request, *args, **kwargs)

    two.set_layers_per_group(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two.scheduler, "_preempt_request", preempt)
        got = two.run(TOO_MUCH)
    pool.free_blocks(taken)
    assert_same(got, stock_said["too much"])
    assert preempted and lane_steps(two)


def test_many_prefills_without_a_hang(two):
    """Random ones beside decode, some of them aborted, and the ranks slow in turn in some of them."""
    chance = random.Random(1)
    two.run([*chats(1)])
    before, done, round_number = two.on_all("threads"), 0, 0
    while done < PREFILLS:
        round_number += 1
        two.set_layers_per_group(chance.choice([1, 2, 3, 5, 1000]))
        two.set_chunk(chance.choice([64, 256]))
        two.on_all("slow_down", [None, 0, 1][round_number % 3], SLOW_S)
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        prompts = [
            late(chance.randint(1, 250), 2 + chance.randint(0, 25), 1000 * round_number + i, short, f"p{i}")
            for i in range(PER_ROUND)
        ]
        aborts = {f"p{i}": chance.randint(2, 30) for i in range(PER_ROUND) if chance.random() < 0.2}

        def abort(driver, aborts=aborts):
            for name, step in aborts.items():
                if step == driver.step_number:
                    driver.abort(name)

        results = two.run([*chats(2, params), *prompts], abort)
        assert all(len(results[f"chat{i}"].tokens[0]) == 40 for i in range(2))
        done += sum(1 for name, result in results.items() if name.startswith("p") and result.tokens)
        two.settle()
        assert_each_lane_has_its_communicator(two.on_all("collectives"))
    assert two.on_all("threads") == before
    print(f"{done} prefills in {round_number} rounds")
    two.run(chats(1))  # for the check after the test


# --- how it ends ----------------------------------------------------------------------------------------------------


def gone(processes, within_s=30.0):
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if not any(psutil.pid_exists(one.pid) and one.is_alive() for one in processes):
            return True
        time.sleep(0.1)
    return False


def test_a_failure_on_one_rank_ends_the_engine_and_leaves_no_process(model, two_ranks):
    """The last test: the others wait in a collective for the rank that has failed, so the batch cannot end alone."""
    processes = two_ranks.processes()
    two_ranks.on_all("fail_once", 1)
    with pytest.raises(Exception, match=r"(?i)died|failed|cancel|closed|shut"):
        two_ranks.run(SCENES["a prompt beside decode"])
    assert gone(processes)
