# SPDX-License-Identifier: Apache-2.0
"""What suspension costs on a CPU: one hand-over between the lanes' threads, and a prefill alone.

The prefill of one prompt is run as a stock step, through the lane with all layers at once, through the lane layer by
layer, and through the serial lane, in turn, on the same engine with nothing else running.

    python benchmarks/handover.py [--model DIR] [--tokens 1024] [--repeats 7] [--out benchmarks/results/handover.json]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from machine import description, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder of a model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--tokens", type=int, default=1024, help="length of the prompt")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {**description(), "tokens": args.tokens, "handover_us": handover_us(20_000)}
    results["prefill_alone_ms"] = prefill_alone_ms(args.model, args.tokens, args.repeats)
    stock = results["prefill_alone_ms"]["stock"]["median"]
    results["slower_than_stock"] = {k: v["median"] / stock - 1 for k, v in results["prefill_alone_ms"].items()}
    text = json.dumps(results, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def handover_us(count: int) -> dict[str, float]:
    """Time from one thread's release to the other's start, in µs: half of a round trip to a job of empty layers."""
    from vllm_pdmux.worker.lane import ThreadedLane

    lane = ThreadedLane(switch_in=lambda: None, switch_out=lambda: None, keep_thread=True)
    lane.start(lambda: [lane.at_layer() for _ in range(count)])
    times = []
    ended = False
    while not ended:
        start = time.perf_counter()
        ended = lane.advance(1)
        times.append((time.perf_counter() - start) / 2 * 1e6)
    lane.take()
    lane.close()
    times.sort()
    return {"median": times[len(times) // 2], "p99": times[int(len(times) * 0.99)], "count": len(times)}


def prefill_alone_ms(model: str | None, tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """Wall time of one prompt's prefill with nothing else running, in ms, by the way it is run."""
    from vllm import LLM

    from vllm_pdmux.demo_model import ensure_model
    from vllm_pdmux.worker.lane import SerialLane

    llm = LLM(
        model=model or str(ensure_model()),
        max_model_len=max(2048, tokens + 64),
        max_num_batched_tokens=max(2048, tokens),
        enforce_eager=True,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        additional_config={"pdmux": {}},
    )
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    lane = worker._prefill_lane
    threaded, serial = lane._lane, SerialLane()

    def through(kind: Any, layers: int) -> None:
        lane._lane = kind
        run_in_lane(llm, lane, tokens, layers)

    arms = {
        "stock": lambda: run_stock(llm, worker, tokens),
        "lane, all layers at once": lambda: through(threaded, 1 << 30),
        "lane, one layer at a time": lambda: through(threaded, 1),
        "lane, serial": lambda: through(serial, 1 << 30),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm()
            if repeat:  # the first round warms up
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: spread(values) for name, values in times.items()}


def admit(llm: Any, tokens: int) -> tuple[Any, Any]:
    """Let the engine's scheduler admit one prompt; the scheduler and its step."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request("p", {"prompt_token_ids": [i % 1000 + 10 for i in range(tokens)]}, params)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return scheduler, scheduler.schedule()


def run_stock(llm: Any, worker: Any, tokens: int) -> None:
    scheduler, step = admit(llm, tokens)
    assert worker.execute_model(step) is None
    finish(llm, scheduler, step, worker.sample_tokens(None))


def run_in_lane(llm: Any, lane: Any, tokens: int, layers: int) -> None:
    from vllm_pdmux.messages import PrefillOrder

    scheduler, step = admit(llm, tokens)
    lane.before_decode(step, PrefillOrder())
    report = lane.advance(PrefillOrder(0, layers, start=step), wait=False).whole()
    while not report.ended:
        report = lane.advance(PrefillOrder(0, layers), wait=False).whole()
    finish(llm, scheduler, step, report.output)


def finish(llm: Any, scheduler: Any, step: Any, output: Any) -> None:
    outputs = scheduler.update_from_output(step, output)
    assert outputs[0].outputs[0].finish_reason is not None
    llm.llm_engine.output_processor.process_outputs(outputs[0].outputs)


if __name__ == "__main__":
    main()
