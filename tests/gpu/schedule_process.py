# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own serves schedules of requests and writes tokens and logprobs to a file.

python schedule_process.py SPEC OUT.json, where SPEC is JSON: "model" (tiny, a shape of benchmarks/shapes.py, or any
name with "path", the model's folder), "cases", "pdmux" (settings of the plugin, null for stock), and what is done to
the engine: "later" (arrivals come later, so that batches differ), "switch" (another group at each step), "delay_cycles"
(the prefill lane's stream sleeps before each sampling), "engine" (arguments of vllm.LLM), "layers" (of a shape, instead
of its own number), "v1" (Model Runner V1), "likeliest" (of how many tokens logprobs are kept).
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import schedule_cases
import text_cases
from driver import Driver
from engine_models import arguments

GIB = 1 << 30
CASES = schedule_cases.CASES | text_cases.CASES


def main(spec: dict, out: str) -> None:
    count_preemptions()
    schedule_cases.likeliest = spec.get("likeliest", schedule_cases.likeliest)
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
    from vllm import LLM

    settings = {}
    if spec["pdmux"] is not None:
        settings["additional_config"] = {"pdmux": {"trace_steps": 100_000, **spec["pdmux"]}}
    common = {"max_model_len": 2048, "max_num_seqs": 16, "max_num_batched_tokens": 1024, "disable_log_stats": False}
    # The size of the KV cache is given, since several engines start beside each other.
    memory = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2 * GIB}
    if "likeliest" in spec:
        common["max_logprobs"] = spec["likeliest"]
    return LLM(**{**common, **memory, **arguments(spec), **settings, **spec.get("engine", {})})


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

    def __getattr__(self, name):
        return getattr(self._policy, name)

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
