# SPDX-License-Identifier: Apache-2.0
"""What a consumer of KV events may believe: that a block is cached and computed; in the end the same as of stock."""

from collections import Counter
from types import SimpleNamespace

import async_engine
import pytest
from driver import Arrival, prompt
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
BLOCK = 32


class Consumer:
    """In the place of vLLM's publisher: counts what has been announced of each block of tokens."""

    def __init__(self):
        self.events, self.believed = [], Counter()

    def publish(self, batch):
        for event in batch.events:
            if isinstance(event, BlockStored):
                for i, block_hash in enumerate(event.block_hashes):
                    tokens = tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size])
                    parent = event.block_hashes[i - 1] if i else event.parent_block_hash
                    assert parent is None or self.believed[parent], "its prefix has not been announced"
                    self._note(1, block_hash)
                    self.events.append(("stored", block_hash, tokens))
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    assert self.believed[block_hash], "removed, though never announced"
                    self._note(-1, block_hash)
                    self.events.append(("removed", block_hash))
            else:
                assert isinstance(event, AllBlocksCleared)
                self.believed.clear()
                self.events.append(("cleared",))

    def _note(self, change, block_hash):
        self.believed[block_hash] += change
        self.believed += Counter()  # without those that are not positive

    def shutdown(self):
        pass


def external(block):
    return maybe_convert_block_hash(get_block_hash(block.block_hash))


def cached(driver):
    """How many blocks of each hash the prefix cache has."""
    pool = driver.scheduler.kv_cache_manager.block_pool
    return Counter(external(block) for block in pool.blocks if block.block_hash is not None)


def being_computed(driver):
    """Hashes of the blocks to which the batch in the lane writes, found by its tokens."""
    scheduler, hashes = driver.scheduler, Counter()
    for batch in getattr(scheduler, "_batches", ()):
        for req_id, request in batch.requests.items():
            held = scheduler.kv_cache_manager.get_block_ids(req_id)[0]
            first = (request.num_computed_tokens - batch.output.num_scheduled_tokens[req_id]) // BLOCK
            blocks = [scheduler.kv_cache_manager.block_pool.blocks[i] for i in held[first:]]
            hashes.update(external(block) for block in blocks if block.block_hash is not None)
    return hashes


def start(start_engine, path, **arguments):
    # The publisher is vLLM's own; the consumer takes its place.
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return start_engine(path, kv_events_config=events, **arguments)


@pytest.fixture(scope="module")
def engines(start_engine, tiny_model_path):
    return [start(start_engine, tiny_model_path, pdmux=p, num_gpu_blocks_override=60) for p in (None, {})]


@pytest.fixture
def consumers(engines):
    """Both engines, each with a consumer that has been told of all there is."""
    for driver in engines:
        driver.fresh()
        driver.scheduler.kv_cache_manager.take_events()
        driver.scheduler.kv_event_publisher = Consumer()
    engines[1].set_layers_per_group(1)
    yield engines
    engines[1].assert_nothing_left()


def run(driver, arrivals, hook=None):
    """Serve; after each step what is believed must be cached and computed. What was announced, in order."""
    consumer = driver.scheduler.kv_event_publisher
    seen = []

    def check(driver):
        computing = being_computed(driver)
        seen.append(bool(computing))
        pending = driver.scheduler.kv_cache_manager.block_pool.kv_event_queue
        if not any(isinstance(event, (BlockRemoved, AllBlocksCleared)) for event in pending):
            assert not consumer.believed - (cached(driver) - computing)
        if hook is not None:
            hook(driver)

    driver.run(arrivals, check)
    driver.settle()
    if left := driver.scheduler.kv_cache_manager.take_events():  # they wait for the next step
        consumer.publish(SimpleNamespace(events=left))
    assert consumer.believed == cached(driver)
    return consumer.events, any(seen)


def chats(n=3):
    return [Arrival(f"chat{i}", prompt(20 + 37 * i, i), GREEDY) for i in range(n)]


def late(name="long", length=200, step=5, seed=100):
    return Arrival(name, prompt(length, seed), GREEDY, step)


SHARED = prompt(128, 7)
CASES = {
    "a prompt beside decode": [*chats(), late()],
    "its blocks are full": [*chats(), late(length=192), late("again", 192, 30)],
    "a prefix that is in the lane": [
        *chats(),
        Arrival("first", [*SHARED, *prompt(40, 8)], GREEDY, 5),
        Arrival("second", [*SHARED, *prompt(60, 9)], GREEDY, 7),
    ],
    "two of one prefix in a batch": [
        *chats(),
        Arrival("first", [*SHARED, *prompt(40, 8)], GREEDY, 5),
        Arrival("second", [*SHARED, *prompt(60, 9)], GREEDY, 5),
    ],
}


@pytest.mark.parametrize("arrivals", CASES.values(), ids=CASES)
def test_the_same_is_announced_as_by_stock(consumers, arrivals):
    (expected, _), (got, was_in_lane) = (run(driver, arrivals) for driver in consumers)
    assert was_in_lane and Counter(got) == Counter(expected)
    stored = [event for event in expected if event[0] == "stored"]
    assert len(stored) > 6


def test_chunks_are_announced_as_they_end(consumers):
    for driver in consumers:
        driver.set_chunk(70)
    arrivals = [*chats(), late()]
    (expected, _), (got, was_in_lane) = (run(driver, arrivals) for driver in consumers)
    assert was_in_lane and Counter(got) == Counter(expected)


def test_what_is_evicted_to_make_room(consumers):
    """More prompts than the KV cache keeps: what is gone is announced, in whichever order the two have evicted it."""
    arrivals = [*chats(), *[late(f"r{i}", 160, 5 + 6 * i, 50 + i) for i in range(14)]]
    counted = []
    for driver in consumers:
        events, _ = run(driver, arrivals)
        counted.append(Counter(event[0] for event in events))
    assert counted[1]["removed"] > 10
    assert counted[1]["stored"] == counted[0]["stored"]


@pytest.mark.parametrize("layer", [1, 5])
def test_a_prompt_that_is_aborted_in_the_lane_was_never_announced(consumers, layer):
    _, pdmux = consumers
    done = []

    def hook(driver):
        if driver.in_lane("long") and driver.layer() == layer and not done:
            done.append(True)
            driver.abort("long")

    events, _ = run(pdmux, [*chats(), late()], hook)
    tokens = prompt(200, 100)
    assert done and ("stored", tuple(tokens[:BLOCK])) not in {(event[0], event[-1]) for event in events}


def test_one_of_two_is_aborted_in_the_lane(consumers):
    """The batch goes on: what it has computed of the aborted one is cached, and announced."""
    _, pdmux = consumers
    done = []

    def hook(driver):
        if driver.in_lane("long") and driver.layer() == 3 and not done:
            done.append(True)
            driver.abort("long")

    events, _ = run(pdmux, [*chats(), late(), late("beside", 80, 5, 7)], hook)
    tokens = prompt(200, 100)
    assert done and ("stored", tuple(tokens[:BLOCK])) in {(event[0], event[-1]) for event in events}


def test_a_later_chunk_that_is_aborted(consumers):
    """The chunk before it was announced and stays in the prefix cache, as with stock vLLM; of it nothing is heard."""
    _, pdmux = consumers
    pdmux.set_chunk(96)
    done = []

    def hook(driver):
        if driver.in_lane("long") and driver.layer() == 3 and not done:
            (request,) = (driver.scheduler.requests[i] for i in driver.internal_ids("long"))
            if request.num_computed_tokens > 100:
                done.append(True)
                driver.abort("long")

    events, _ = run(pdmux, [*chats(), late()], hook)
    tokens = prompt(200, 100)
    assert done
    stored = [event for event in events if event[0] == "stored" and event[2] == tuple(tokens[:BLOCK])]
    assert len(stored) == 1 and ("removed", stored[0][1]) not in events
    assert ("stored", tuple(tokens[96 : 96 + BLOCK])) not in {(event[0], event[-1]) for event in events}


def test_a_reset_in_the_lane(consumers):
    _, pdmux = consumers
    done = []

    def hook(driver):
        if driver.in_lane("long") and driver.layer() == 4 and not done:
            done.append(True)
            assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)

    events, _ = run(pdmux, [*chats(), late()], hook)
    assert done and ("cleared",) in events


def test_a_batch_that_fails_was_never_announced(consumers):
    _, pdmux = consumers
    lane = pdmux.worker._prefill_lane
    original, broken = lane._view._at_layer, []

    def fail():
        if lane._lane.layer == 3 and not broken:
            broken.append(True)
            raise RuntimeError("injected")
        original()

    lane._view._at_layer = fail
    try:
        events, _ = run(pdmux, [*chats(), late()])
    finally:
        lane._view._at_layer = original
    tokens = prompt(200, 100)
    assert broken and ("stored", tuple(tokens[:BLOCK])) not in {(event[0], event[-1]) for event in events}


# --- asynchronous scheduling, and a batch behind one in the lane ------------------------------------------------------


@pytest.fixture(scope="module")
def asynchronous(tiny_model_path):
    engine = async_engine.Engine(tiny_model_path, {}, use_v2=True)
    manager = engine.scheduler.kv_cache_manager
    manager.enable_kv_cache_events = manager.block_pool.enable_kv_cache_events = True
    return engine


@pytest.mark.parametrize("aborted", [(), ("first",), ("first", "second")], ids=lambda names: f"{len(names)} aborted")
def test_a_batch_that_hits_blocks_of_the_one_before_it_in_the_lane(asynchronous, aborted):
    engine = asynchronous.fresh(layers=1, batches=2)
    engine.scheduler.kv_cache_manager.take_events()
    engine.scheduler.kv_event_publisher = Consumer()
    arrivals = [
        *[async_engine.Arrival(f"chat{i}", prompt(20 + 37 * i, i), 40) for i in range(3)],
        async_engine.Arrival("first", [*SHARED, *prompt(40, 8)], 5, 5),
        async_engine.Arrival("second", [*SHARED, *prompt(60, 9)], 5, 7),
    ]
    both = []

    def hook(engine):
        if engine.in_lane("first") and engine.in_lane("second") and not both:
            both.append(True)
            for name in aborted:
                engine.abort(name)

    events, _ = run(engine, arrivals, hook)
    assert both
    shared = [event for event in events if event[0] == "stored" and event[2] == tuple(SHARED[:BLOCK])]
    assert len(shared) == (len(aborted) < 2)
    engine.assert_nothing_left()


def test_a_batch_fails_of_which_the_one_behind_it_has_hit_blocks(asynchronous):
    """Its blocks were never announced, so they are not removed, whichever of the two batches leaves first."""
    engine = asynchronous.fresh(layers=1, batches=2)
    engine.scheduler.kv_cache_manager.take_events()
    engine.scheduler.kv_event_publisher = Consumer()
    lane = engine.worker._prefill_lane
    original, broken = lane._view._at_layer, []

    def fail():
        if engine.in_lane("second") and not broken:
            broken.append(True)
            raise RuntimeError("injected")
        original()

    lane._view._at_layer = fail
    arrivals = [
        *[async_engine.Arrival(f"chat{i}", prompt(20 + 37 * i, i), 40) for i in range(3)],
        async_engine.Arrival("first", [*SHARED, *prompt(40, 8)], 5, 5),
        async_engine.Arrival("second", [*SHARED, *prompt(60, 9)], 5, 7),
    ]
    try:
        run(engine, arrivals)
    finally:
        lane._view._at_layer = original
    assert broken and engine.reasons["first"] == "error" and engine.tokens["second"] == arrivals[-1].answer
    engine.assert_nothing_left()
