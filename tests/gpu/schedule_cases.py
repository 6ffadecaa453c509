# SPDX-License-Identifier: Apache-2.0
"""Schedules of requests that engines serve, of made-up tokens: when each arrives, and what is done meanwhile."""

from __future__ import annotations

from dataclasses import replace

from driver import Arrival, prompt

from vllm_pdmux.policy import OffPolicy

CHOICES = ("the first of the answers", "the second, a longer one of them", "none of the others")  # of `choice`


likeliest = 20  # so many tokens' logprobs are kept at each place; set for models whose tokens are nearly equally likely


def params(**changes):
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, "max_tokens": 60, "ignore_eos": True, "logprobs": likeliest, **changes})


def chats(tokens: int):
    return [Arrival(f"chat{i}", prompt(30 + 17 * i, i), params(max_tokens=tokens)) for i in range(4)]


def longs(count: int, apart: int, sampling, first: int = 6):
    return [Arrival(f"long{i}", prompt(900 + 150 * (i % 6), 50 + i), sampling, first + apart * i) for i in range(count)]


def serve(driver, sampling, delay: int):
    """Four requests decode; long prompts come one after another, and short ones that share a prefix."""
    shared = [Arrival(f"shared{i}", [*prompt(512, 99), *prompt(40, i)], sampling, 30 + 3 * i * delay) for i in range(3)]
    fresh(driver)
    return plain(driver.run([*chats(150), *longs(4, 9 * delay, sampling), *shared]))


def aborts(driver, delay: int):
    """Prompts are aborted in the lane; later the same prompts come again and must not hit what was not computed."""
    aborted = {7: "long0", 13: "long1", 22: "long2", 29: "long4"}
    again = [Arrival(f"again{i}", prompt(900 + 150 * i, 50 + i), params(), 60 + 5 * i * delay) for i in range(3)]
    fresh(driver)

    def abort(driver):
        if driver.step_number in aborted:
            driver.abort(aborted[driver.step_number])

    results = driver.run([*chats(200), *longs(6, 5, params()), *again], abort)
    return plain({name: result for name, result in results.items() if name not in aborted.values()})


def joins(driver, delay: int):
    """500 short prompts join four requests that decode."""
    short = params(max_tokens=3)
    arrivals = [Arrival(f"join{i}", prompt(40 + i % 90, 1000 + i), short, 10 + 2 * i * delay) for i in range(500)]
    fresh(driver)
    return plain(driver.run([*chats(1500), *arrivals], limit=20_000))


def switches(driver, delay: int):
    """Prompts all the time, beside requests that decode for 1,900 steps, twice; what is kept must not grow."""
    import torch

    resources = []
    results = {}
    for _ in range(2):
        fresh(driver)
        results = driver.run([*chats(1900), *longs(420, 4 * delay, params(max_tokens=2))], limit=20_000)
        if hasattr(driver.worker, "_backend"):
            streams = {stream.cuda_stream for stream in driver.worker._prefill_streams.values()}
            kept = {"reserved_bytes": torch.cuda.memory_reserved(), "streams": len(streams)}
            resources.append({**kept, "contexts": len(driver.worker._backend._kept)})
    driver.resources = resources
    return plain({name: result for name, result in results.items() if name.startswith("chat")})


def preemption(driver, delay: int):
    """More requests than the KV cache holds."""
    fresh(driver)
    growing = [Arrival(f"chat{i}", prompt(100 + 7 * i, i), params(max_tokens=300), 2 * i) for i in range(8)]
    return plain(driver.run([*growing, *longs(6, 15 * delay, params(max_tokens=40))], limit=20_000))


def sleeps(driver, delay: int):
    """The same schedule four times: as it is, after a sleep, with a sleep in it, and after one that aborted it.

    A sleep of level 1 unmaps weights and KV cache. The two in a schedule come when a prompt is half-way through the
    lane: what runs is kept and computed again, or it is aborted.
    """
    arrivals = [*chats(150), *longs(4, 9 * delay, params())]
    fresh(driver)
    rounds = {"before": driver.run(arrivals)}
    driver.settle()
    sleep(driver, "abort")
    rounds["after"] = driver.run(arrivals)
    fresh(driver)
    during = HalfWay("long2", lambda driver: sleep(driver, "keep"))
    rounds["during"] = driver.run(arrivals, during)
    fresh(driver)
    aborted = HalfWay("long2", sleep_and_abort)
    driver.run([arrival for arrival in arrivals if arrival.name != "long3"], aborted)
    fresh(driver)
    rounds["after an abort"] = driver.run(arrivals)
    assert during.done and aborted.done, "no prompt was half-way through the lane"
    return {name: plain(results) for name, results in rounds.items()}


def sleep(driver, mode: str):
    driver.llm.sleep(level=1, mode=mode)
    assert driver.engine.is_sleeping() and driver.core.model_executor.is_sleeping
    assert driver.llm.wake_up() and not driver.engine.is_sleeping()


def sleep_and_abort(driver):
    sleep(driver, "abort")
    # vLLM tells a client in another process what was aborted; in this one nobody tells the front.
    front = driver.engine.output_processor
    front.abort_requests(list(front.request_states), internal=True)


def stalls(driver, delay: int):
    """The same schedule twice: as it is, and with a prompt behind the first of whose layers a kernel runs for seconds.

    The watchdog gives the lane up, so that this prompt and one behind it end with an error while others decode; a
    prompt that comes meanwhile is served without the lane, one that comes afterwards in it.
    """
    import torch

    lane, scheduler = driver.worker._prefill_lane, driver.scheduler
    common = [*chats(1900), *longs(1, 0, params(), first=20)]
    fresh(driver)
    meanwhile, afterwards = prompt(700, 71), prompt(800, 72)
    again = [Arrival("meanwhile", meanwhile, params(), 60), Arrival("afterwards", afterwards, params(), 90)]
    rounds = {"before": driver.run([*common, *again], limit=20_000)}
    names = ["stuck", "behind"]
    doomed = [Arrival(name, prompt(900, 80 + i), params(), 60 + i) for i, name in enumerate(names)]
    # The first launch of a cuBLAS kernel waits for all that runs, and cuBLAS chooses kernels by the number of tokens:
    # every batch of the second round is run before, in the lane and, as while that is given up, out of it.
    fresh(driver)
    driver.run([*common, *doomed], limit=20_000)
    fresh(driver)
    policy, scheduler._pdmux_policy = scheduler._pdmux_policy, OffPolicy(1)
    driver.run([*common, *(replace(arrival, step=150 + 90 * i) for i, arrival in enumerate(again))], limit=20_000)
    scheduler._pdmux_policy = policy
    fresh(driver)
    kernel, mark = torch.cuda.Event(), lane._device.mark
    seen = dict.fromkeys(("marks", "decode_steps", "steps_beside_the_kernel", "batches", "lost_blocks"), 0)

    def stands_still():
        mark()
        stuck = lane._current is not None and any("stuck" in req_id for req_id in lane._current.req_ids)
        seen["marks"] += stuck
        if stuck and seen["marks"] == STUCK_AT_MARK:
            torch.cuda._sleep(STALL_CYCLES)
            kernel.record(lane._device._stream)

    def comes(driver):
        if scheduler._lost:
            seen["steps_beside_the_kernel"] += not kernel.query()
            if not seen["decode_steps"]:
                driver.add(again[0])
                seen["was_given_up_after_the_kernel"] = kernel.query()
                seen["lost_blocks"] = sum(len(blocks) for batch in scheduler._lost for blocks in batch.held_blocks)
                seen["batches"] = scheduler._next_batch_id
            seen["decode_steps"] += 1
        elif seen["decode_steps"] and "afterwards" not in came:
            came.append("afterwards")
            seen["is_back_after_the_kernel"] = kernel.query()
            seen["batches_meanwhile"] = scheduler._next_batch_id - seen["batches"]
            driver.add(again[1])

    came: list[str] = []
    lane._device.mark = stands_still
    results = driver.run([*common, *doomed], comes, limit=20_000, later=again)
    lane._device.mark = mark
    seen["ends"] = {name: results.pop(name).finish_reasons for name in names}
    seen["batches_afterwards"] = scheduler._next_batch_id - seen["batches"]
    return {"before": plain(rounds["before"]), "during": plain(results), "seen": seen}


STALL_CYCLES = 4_000_000_000  # about two seconds
STUCK_AT_MARK = 3  # of the ends of what the lane queues in a step


class HalfWay:
    """A hook that does `action` once, when layers of a request have run in the lane and others have not."""

    def __init__(self, name: str, action):
        self._name, self._action, self.done = name, action, False

    def __call__(self, driver):
        layers = driver.scheduler._model_layers
        if not self.done and driver.in_lane(self._name) and 0 < driver.layer() < layers:
            self.done = True
            self._action(driver)


def choice(driver, delay: int):
    """Prompts whose answer is one of a few texts, beside requests that say anything."""
    from vllm.sampling_params import StructuredOutputsParams

    sampling = params(ignore_eos=False, structured_outputs=StructuredOutputsParams(choice=list(CHOICES)))
    answers = serve(driver, sampling, delay)
    for answer in answers.values():
        # vLLM's text begins with bytes of the prompt where a made-up prompt ends within a character.
        answer["text"] = driver.llm.get_tokenizer().decode(answer["tokens"], skip_special_tokens=True)
    return answers


def fresh(driver):
    driver.settle()
    assert driver.scheduler.reset_prefix_cache()


def plain(results):
    def values(logprobs):
        return {str(token): value.logprob for token, value in logprobs.items()}

    return {
        name: {
            "tokens": result.tokens[0],
            "text": result.texts[0],
            "finish": result.finish_reasons[0],
            "logprobs": [values(one) for one in result.logprobs[0]],
            "prompt": [values(one) for one in (result.prompt_logprobs or []) if one is not None],
        }
        for name, result in results.items()
    }


CASES = {
    "greedy": lambda driver, delay: serve(driver, params(), delay),
    "prompt logprobs": lambda driver, delay: serve(driver, params(max_tokens=20, prompt_logprobs=2), delay),
    "penalties": lambda driver, delay: serve(driver, params(presence_penalty=1.2, repetition_penalty=1.3), delay),
    # Its kernels keep scratch for the whole process, and some rows are greedy.
    "top k and top p": lambda driver, delay: serve(driver, params(temperature=0.8, top_k=20, top_p=0.9, seed=7), delay),
    "one token": lambda driver, delay: serve(driver, params(max_tokens=1), delay),
    "aborts": aborts,
    "joins": joins,
    "switches": switches,
    "preemption": preemption,
    "sleeps": sleeps,
    "stalls": stalls,
    "choice": choice,
}
