# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own serves schedules of requests and writes tokens and logprobs to a file.

python schedule_process.py SPEC OUT.json, where SPEC is JSON: "model" (tiny or a shape of benchmarks/shapes.py),
"cases", "pdmux" (settings of the plugin, null for stock), and what is done to the engine: "later" (arrivals come later,
so that batches differ), "switch" (another group at each step), "delay_cycles" (the prefill lane's stream sleeps before
each sampling), "engine" (arguments of vllm.LLM), "layers" (of a shape, instead of its own number),
"v1" (Model Runner V1).
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("PDMUX_EXPERIMENTAL_CUDA", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import tiny_model
from driver import Arrival, Driver, prompt

GIB = 1 << 30


def main(spec: dict, out: str) -> None:
    count_preemptions()
    driver = Driver(engine(spec))
    assert driver.core.batch_queue_size == 2, "scheduling is not asynchronous"
    switches = prepare(driver, spec) if spec["pdmux"] is not None else None
    delay = 2 if spec.get("later") else 1
    found = {name: CASES[name](driver, delay) for name in spec["cases"]}
    driver.settle()
    found["left"] = left(driver)
    found["preemptions"] = driver.preemptions
    if spec["pdmux"] is not None:
        found["lane"] = lane(driver, switches)
    Path(out).write_text(json.dumps(found))


def engine(spec: dict):
    import shapes
    import wide_weights
    from vllm import LLM

    if spec["model"] == "tiny":
        model = {"model": wide_model(Path(tempfile.mkdtemp()))}
    else:
        wide_weights.install()
        changes = {"num_hidden_layers": spec["layers"]} if "layers" in spec else {}
        model = shapes.arguments(spec["model"], **changes)
    settings = {}
    if spec["pdmux"] is not None:
        settings["additional_config"] = {"pdmux": {"trace_steps": 100_000, **spec["pdmux"]}}
    common = {"max_model_len": 2048, "max_num_seqs": 16, "max_num_batched_tokens": 1024, "disable_log_stats": False}
    # The size of the KV cache is given, since several engines start beside each other.
    memory = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2 * GIB}
    return LLM(**{**common, **memory, **model, **settings, **spec.get("engine", {})})


def prepare(driver, spec):
    """Count preemptions; switch groups and delay the lane where the spec says so. The counter of switches."""
    switches = itertools.count()
    if spec.get("switch"):
        driver.scheduler._pdmux_policy = Switching(driver.scheduler._pdmux_policy, switches, len(driver.worker._groups))
    if cycles := spec.get("delay_cycles"):
        import torch

        runner = driver.worker._prefill_lane._runner
        stock = runner.sample_tokens

        def sample_tokens(grammar):
            torch.cuda._sleep(cycles)
            return stock(grammar)

        runner.sample_tokens = sample_tokens
    return switches


class Switching:
    """Another group at each step; all else is the policy's."""

    def __init__(self, policy, switches, groups: int):
        self._policy, self._switches, self._groups = policy, switches, groups

    def decide(self, load):
        from dataclasses import replace

        decision = self._policy.decide(load)
        if not load.decode_batch:
            return decision
        return replace(decision, group=next(self._switches) % self._groups + 1)


def lane(driver, switches):
    """What the lane did, and what it keeps."""
    worker = driver.worker
    prefill, graphs = worker._prefill_lane, worker._decode_graphs
    return {
        "batches": sum(step.batch_ended for step in driver.scheduler.pdmux_trace.steps),
        "left": states(prefill._runner) + len(prefill._finished_req_ids),
        "confined_steps": graphs.confined_steps if graphs is not None else 0,
        "unconfined_steps": graphs.unconfined_steps if graphs is not None else 0,
        "switches": next(switches),
        "resources": getattr(driver, "resources", None),
    }


def left(driver):
    pool = driver.scheduler.kv_cache_manager.block_pool
    return {
        "requests": len(driver.scheduler.requests),
        "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "runner": states(driver.worker.model_runner),
    }


def states(runner) -> int:
    """Requests that a runner, V2 or V1, knows."""
    return len(runner.req_states.req_id_to_index if hasattr(runner, "req_states") else runner.requests)


def wide_model(folder: Path) -> str:
    """The tiny model, wider: FlashAttention wants heads of 64 and 16-bit weights."""
    sizes = {"HIDDEN": 512, "HEADS": 8, "KV_HEADS": 2, "INTERMEDIATE": 1024, "HEAD": 64}
    for name, value in sizes.items():
        setattr(tiny_model, name, value)
    tiny_model.build(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    return str(folder)


def params(**changes):
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, "max_tokens": 60, "ignore_eos": True, "logprobs": 3, **changes})


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
    for round_number in range(2):
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
}


def fresh(driver):
    driver.settle()
    assert driver.scheduler.reset_prefix_cache()


def plain(results):
    def values(logprobs):
        return {str(token): value.logprob for token, value in logprobs.items()}

    return {
        name: {
            "tokens": result.tokens[0],
            "logprobs": [values(one) for one in result.logprobs[0]],
            "prompt": [values(one) for one in (result.prompt_logprobs or []) if one is not None],
        }
        for name, result in results.items()
    }


def count_preemptions():
    from vllm.v1.core.sched.scheduler import Scheduler

    stock = Scheduler._preempt_request

    def preempt(self, *args, **kwargs):
        Driver.preemptions += 1
        return stock(self, *args, **kwargs)

    Driver.preemptions, Scheduler._preempt_request = 0, preempt


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    if wanted.get("v1"):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    main(wanted, sys.argv[2])
