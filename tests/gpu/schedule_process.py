# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own serves a schedule of requests and writes tokens and logprobs to a file.

python schedule_process.py stock|stock-later|pdmux MODEL_FOLDER OUT.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("PDMUX_EXPERIMENTAL_CUDA", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

import tiny_model
from driver import Arrival, Driver, prompt


def main(arm: str, model: str, out: str) -> None:
    from vllm import LLM

    arguments = {"additional_config": {"pdmux": {"trace_steps": 100_000}}} if arm == "pdmux" else {}
    llm = LLM(
        model=wide_model(Path(model)),
        max_model_len=2048,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        gpu_memory_utilization=0.2,
        disable_log_stats=False,
        **arguments,
    )
    driver = Driver(llm)
    assert driver.core.batch_queue_size == 2, "scheduling is not asynchronous"
    delay = 2 if arm == "stock-later" else 1  # other arrivals, so other batches
    found = {name: serve(driver, params, delay) for name, params in cases().items()}
    found["aborts"] = serve_with_aborts(driver, delay)
    driver.settle()
    pool = driver.scheduler.kv_cache_manager.block_pool
    found["left"] = {
        "requests": len(driver.scheduler.requests),
        "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "runner": len(driver.worker.model_runner.req_states.req_id_to_index),
    }
    if arm == "pdmux":
        lane, steps = driver.worker._prefill_lane, driver.scheduler.pdmux_trace.steps
        found["left"]["lane"] = len(lane._runner.req_states.req_id_to_index) + len(lane._finished_req_ids)
        found["batches"] = sum(step.batch_ended for step in steps)
    Path(out).write_text(json.dumps(found))


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


def cases():
    return {
        "greedy": params(),
        "prompt logprobs": params(max_tokens=20, prompt_logprobs=2),
        "penalties": params(presence_penalty=1.2, repetition_penalty=1.3),
        "one token": params(max_tokens=1),
    }


def chats(tokens: int):
    return [Arrival(f"chat{i}", prompt(30 + 17 * i, i), params(max_tokens=tokens)) for i in range(4)]


def serve(driver, sampling, delay: int):
    """Four requests decode; long prompts come one after another, and short ones that share a prefix."""
    long = [Arrival(f"long{i}", prompt(900 + 150 * i, 50 + i), sampling, 6 + 9 * i * delay) for i in range(4)]
    shared = [Arrival(f"shared{i}", [*prompt(512, 99), *prompt(40, i)], sampling, 30 + 3 * i * delay) for i in range(3)]
    fresh(driver)
    return plain(driver.run([*chats(150), *long, *shared]))


def serve_with_aborts(driver, delay: int):
    """Prompts are aborted in the lane; later the same prompts come again and must not hit what was not computed."""
    aborts = {7: "long0", 13: "long1", 22: "long2", 29: "long4"}
    long = [Arrival(f"long{i}", prompt(900 + 150 * i, 50 + i), params(), 6 + 5 * i) for i in range(6)]
    again = [Arrival(f"again{i}", prompt(900 + 150 * i, 50 + i), params(), 60 + 5 * i * delay) for i in range(3)]
    fresh(driver)

    def abort(driver):
        if driver.step_number in aborts:
            driver.abort(aborts[driver.step_number])

    results = driver.run([*chats(200), *long, *again], abort)
    return plain({name: result for name, result in results.items() if name not in aborts.values()})


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


if __name__ == "__main__":
    main(*sys.argv[1:])
