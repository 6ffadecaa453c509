# SPDX-License-Identifier: Apache-2.0
"""What happens to requests while their batch is in the lane: aborts, preemption, pauses, faults."""

import re

import pytest
import tiny_model
from driver import Arrival, prompt
from tokens import assert_same
from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def chats(n=3, params=GREEDY):
    return [Arrival(f"chat{i}", prompt(20 + 7 * i, i), params) for i in range(n)]


def late(name="long", length=200, step=5, seed=100, params=GREEDY, priority=0):
    return Arrival(name, prompt(length, seed), params, step, priority)


def without(results, *names):
    return {name: result for name, result in results.items() if name not in names}


class AbortOnce:
    """A hook that aborts `names` the first time `when` holds."""

    def __init__(self, when, *names):
        self.when, self.names, self.done = when, names, False

    def __call__(self, driver):
        if not self.done and self.when(driver):
            self.done = True
            for name in self.names:
                driver.abort(name)


STAGES = {
    "queued": lambda driver: driver.step_number == 5 and not driver.in_lane("long"),
    "in the first group": lambda driver: driver.in_lane("long") and driver.layer() == 1,
    "in a middle group": lambda driver: driver.in_lane("long") and driver.layer() == 4,
    "in the last group": lambda driver: driver.in_lane("long") and driver.layer() == tiny_model.LAYERS - 1,
    "just joined": lambda driver: driver.step_number > 5 and not driver.in_lane("long"),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("alone", [True, False], ids=["alone in its batch", "with another in its batch"])
def test_abort_at_any_moment(stock, pdmux, stage, alone):
    """The others' tokens are stock's; nothing is left over (checked by the fixture)."""
    pdmux.set_layers_per_group(1)
    # Queued means that another prompt has the lane.
    first = [late("first", 60, 4, 55)] if stage == "queued" else []
    arrivals = [*chats(), *first, late()] + ([] if alone else [late("beside", 40, 5, 77)])
    abort = AbortOnce(STAGES[stage], "long")
    got = pdmux.run(arrivals, abort)
    assert abort.done, "the stage was never reached"
    assert_same(without(got, "long"), without(stock.run(arrivals), "long"))


@pytest.mark.parametrize("layer", [1, 4])
def test_a_dropped_batch_takes_its_hashes_with_it(stock, pdmux, layer):
    """After an abort in mid-prefill the same prompt must not hit blocks that were never computed."""
    pdmux.set_layers_per_group(1)
    abort = AbortOnce(lambda driver: driver.in_lane("long") and driver.layer() == layer, "long")
    arrivals = [*chats(), late(), late("again", step=14)]
    got = pdmux.run(arrivals, abort)
    assert abort.done
    assert_same(without(got, "long"), without(stock.run(arrivals), "long"))


def test_an_aborted_requests_blocks_wait_for_its_batch(pdmux):
    """Its blocks are not free while the layers of the batch, which another request needs, still write to them."""
    pdmux.set_layers_per_group(1)
    pool = pdmux.scheduler.kv_cache_manager.block_pool
    seen = []

    def hook(driver):
        if driver.in_lane("long") and driver.layer() == 2 and not seen:
            blocks = {
                i for r in driver.internal_ids("long") for i in driver.scheduler.kv_cache_manager.get_block_ids(r)[0]
            }
            driver.abort("long")
            seen.append(blocks)
        if seen and driver.in_lane("beside"):
            assert all(pool.blocks[i].ref_cnt == 1 for i in seen[0])

    pdmux.run([*chats(), late(), late("beside", 40, 5, 77)], hook)
    assert seen


def test_an_id_that_is_aborted_and_sent_again_is_two_requests(pdmux, stock):
    """The second one gets its own tokens, though the first one's batch is still in the lane."""
    pdmux.set_layers_per_group(1)
    scheduler, again = pdmux.scheduler, []

    def hook(driver):
        if driver.in_lane("long") and driver.layer() == 3 and not again:
            (req_id,) = driver.internal_ids("long")
            old = scheduler.requests[req_id]
            driver.abort("long")
            driver.add(late("twin", 90, 0, 31))
            (new_id,) = driver.internal_ids("twin")
            twin = scheduler.requests.pop(new_id)
            twin.request_id = req_id  # what a client may do that sets internal ids itself
            scheduler.requests[req_id] = twin
            again.append((old, twin))

    arrivals = [*chats(), late(), late("beside", 40, 5, 77)]
    for arrival in arrivals:
        pdmux.add(arrival) if arrival.step == 0 else None
    for step in range(200):
        if step == 5:
            pdmux.add(arrivals[3]), pdmux.add(arrivals[4])
        pdmux.core.step()
        hook(pdmux)
        if step > 5 and not scheduler.has_requests():
            break
    old, twin = again[0]
    assert old.num_output_tokens == 0
    expected = stock.run([late("twin", 90, 0, 31)])["twin"].tokens[0]
    assert list(twin.output_token_ids) == expected
    pdmux.engine.output_processor.abort_requests(list(pdmux.engine.output_processor.request_states), internal=True)


@pytest.fixture(scope="module")
def small_kv(start_engine, tiny_model_path):
    """Both engines with 20 blocks of 32 tokens: eight requests of 100 tokens do not fit."""
    return [start_engine(tiny_model_path, pdmux=p, num_gpu_blocks_override=20) for p in (None, {})]


@pytest.mark.parametrize("layers", [1, 3, 1000])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 9}], ids=["greedy", "seeded"])
def test_preemption_when_the_kv_cache_is_small(small_kv, layers, sampling):
    stock, pdmux = (driver.fresh() for driver in small_kv)
    pdmux.set_layers_per_group(layers)
    params = SamplingParams(max_tokens=110, ignore_eos=True, **sampling)
    arrivals = [Arrival(f"r{i}", prompt(20 + 9 * i % 60, i), params, step=i) for i in range(8)]
    preempted = []
    expected = stock.run(arrivals)
    original = pdmux.scheduler._preempt_request

    def count(request, *args, **kwargs):
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    pdmux.scheduler._preempt_request = count
    try:
        got = pdmux.run(arrivals)
    finally:
        del pdmux.scheduler._preempt_request
    assert preempted, "the cache was not small enough"
    assert_same(got, expected)
    pdmux.assert_nothing_left()


def test_a_long_prompt_in_chunks_while_decodes_take_the_last_blocks(small_kv):
    """A chunked prompt that cannot get its next blocks gives way, and both sides end."""
    stock, pdmux = (driver.fresh() for driver in small_kv)
    for driver in (stock, pdmux):
        driver.set_chunk(64)
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    arrivals = [*chats(4, params), late(length=300, params=GREEDY)]
    assert_same(pdmux.run(arrivals), stock.run(arrivals))
    pdmux.assert_nothing_left()


def test_priorities(start_engine, tiny_model_path, small_kv):
    """Under the priority policy a request that matters more is prefilled first, beside the decodes."""
    pdmux = start_engine(tiny_model_path, pdmux={}, scheduling_policy="priority").fresh()
    pdmux.set_layers_per_group(1)
    order = []

    def hook(driver):
        for name in ("low", "high"):
            if driver.in_lane(name) and name not in order:
                order.append(name)

    arrivals = [*chats(), late("first", 200, 5, 1), late("low", 200, 6, 2, priority=5), late("high", 200, 7, 3)]
    pdmux.set_chunk(200)
    got = pdmux.run(arrivals, hook)
    assert order == ["high", "low"]
    assert_same(got, small_kv[0].fresh().run([Arrival(a.name, a.prompt, a.params, a.step) for a in arrivals]))
    pdmux.assert_nothing_left()


def in_mid_prefill(driver):
    return driver.in_lane("long") and driver.layer() == 4


class Once:
    """A hook that does `action` the first time the long prompt is half-way through its layers."""

    def __init__(self, action):
        self.action, self.done = action, False

    def __call__(self, driver):
        if not self.done and in_mid_prefill(driver):
            self.done = True
            self.action(driver)


def reset(driver):
    assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)


def pause_and_resume(driver):
    driver.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not driver.scheduler.has_unfinished_requests()
    driver.core.step()
    assert not driver.in_lane("long")
    driver.scheduler.set_pause_state(PauseState.UNPAUSED)


def refuse_new_ones(driver):
    driver.scheduler.set_pause_state(PauseState.PAUSED_NEW)


def ask_every_worker(driver):
    assert driver.core.collective_rpc("check_health") == [None]


def load_the_weights_again(driver):
    driver.core.collective_rpc("reload_weights")


@pytest.mark.parametrize("action", [reset, pause_and_resume, ask_every_worker, load_the_weights_again])
def test_in_mid_prefill(stock, pdmux, action):
    pdmux.set_layers_per_group(1)
    hook = Once(action)
    arrivals = [*chats(), late()]
    got = pdmux.run(arrivals, hook)
    assert hook.done
    assert_same(got, stock.run(arrivals))


def test_a_pause_for_new_requests_lets_the_batch_in_the_lane_end(stock, pdmux):
    pdmux.set_layers_per_group(1)
    hook = Once(refuse_new_ones)
    arrivals = [*chats(), late(), late("queued", 50, 6, 9)]
    expected = stock.run(arrivals)

    def drain(driver):
        hook(driver)
        unfinished = driver.scheduler.get_num_unfinished_requests()
        if hook.done and not unfinished and driver.scheduler.pause_state == PauseState.PAUSED_NEW:
            assert driver.internal_ids("queued") and not driver.internal_ids("long")
            driver.scheduler.set_pause_state(PauseState.UNPAUSED)

    assert_same(pdmux.run(arrivals, drain), expected)


@pytest.mark.parametrize("layer", [0, 3, tiny_model.LAYERS - 1])
def test_an_exception_in_the_lane_ends_its_batch_alone(stock, pdmux, layer, caplog_vllm):
    pdmux.set_layers_per_group(1)
    lane = pdmux.worker._prefill_lane
    original, broken = lane._view._at_layer, []

    def fail():
        if lane._lane.layer == layer and not broken:
            broken.append(lane._current.id)
            raise RuntimeError("injected")
        original()

    lane._view._at_layer = fail
    try:
        arrivals = [*chats(), late(), late("beside", 40, 5, 77), late("after", step=20)]
        got = pdmux.run(arrivals)
    finally:
        lane._view._at_layer = original
    assert broken
    assert got["long"].finish_reasons == ["error"] and got["beside"].finish_reasons == ["error"]
    # "after" is the same prompt as "long": it must not hit the failed batch's blocks.
    assert_same(without(got, "long", "beside"), without(stock.run(arrivals), "long", "beside"))
    # The lane tells of it with the stack, the scheduler with those that it has ended.
    log = caplog_vllm.text
    assert "RuntimeError: injected" in log and "long" in log and "beside" in log
    (said,) = {record.getMessage() for record in caplog_vllm.records if "prefill failed" in record.getMessage()}
    assert re.fullmatch(r"prefill failed \(RuntimeError: injected\); ended with an error: long\S*, beside\S*", said), (
        said
    )


def test_the_serial_lane_is_the_oracle(start_engine, tiny_model_path, stock):
    """No second thread, all layers at once; the same tokens."""
    serial = start_engine(tiny_model_path, pdmux={"lane": "serial"})
    arrivals = [*chats(), late(), late("two", 90, 8, 4)]
    got = serial.run(arrivals)
    assert_same(got, stock.run(arrivals))
    steps = [step for step in serial.scheduler.pdmux_trace.steps if step.end_layer > step.first_layer]
    assert steps and all(step.end_layer == tiny_model.LAYERS and step.batch_ended for step in steps)
    serial.assert_nothing_left()
