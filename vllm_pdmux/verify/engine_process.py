# SPDX-License-Identifier: Apache-2.0
"""One engine, stock or with the plugin, in a process of its own:
`python -m vllm_pdmux.verify.engine_process SPEC OUT PROGRESS`.

SPEC is a JSON file that `processes` has written, and OUT gets another one. It is written when the engine has started
and again at the end, so that a process which died tells its parent how far it came. PROGRESS is the number of an open
file, which gets a line for people at each stage.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vllm_pdmux.demo import DemoError, document
from vllm_pdmux.demo.contention import usable_cpus
from vllm_pdmux.demo.drive import drive
from vllm_pdmux.demo.engine import layers_of, prepare_environment, running, trace_of
from vllm_pdmux.demo.workload import build, encoder
from vllm_pdmux.verify import machine
from vllm_pdmux.verify.answers import answers
from vllm_pdmux.verify.workload import SCHEDULES, requests

_TRACE_STEPS = 100_000  # more than a schedule has steps
_AT_MOST_OF_CONTEXT = 0.8  # of the model's context that the long prompt takes


def main(spec_path: str, out_path: str, progress: str) -> int:
    """0, or 1 with an error in OUT."""
    start_s = time.monotonic()

    def say(text: str) -> None:
        os.write(int(progress), f"vllm-pdmux verify:   {time.monotonic() - start_s:4.0f} s  {text}\n".encode())

    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    out = Path(out_path)
    prepare_environment()
    found: dict[str, Any] = {"started": False}
    try:
        with running(_arguments(spec), spec["with_pdmux"]) as llm:
            found["started"] = True
            _write(out, found)
            found |= _asked(llm, spec, say)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent says it
        traceback.print_exc()  # the parent shows it with --debug
        found["error"] = str(error) if isinstance(error, DemoError) else f"{type(error).__name__}: {error}"
    _write(out, found)
    return 1 if "error" in found else 0


def _arguments(spec: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``. Both engines have the prefix cache: a shared prefix is part of what is verified.

    float32 on a CPU, as in the demo: there stock vLLM's tokens do not depend on the batch.
    """
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    settings = spec["pdmux"] | {"enabled": True, "trace_steps": _TRACE_STEPS} if spec["with_pdmux"] else {}
    arguments = {"dtype": "float32"} if on_cpu else {}
    arguments |= spec["arguments"] | {
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
        "additional_config": {"pdmux": settings or {"enabled": False}},
    }
    return arguments | ({"distributed_executor_backend": "uni"} if on_cpu else {})


def _asked(llm: Any, spec: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """The answers in both schedules, then the latencies of each round."""
    encode = encoder(llm.get_tokenizer())
    context = llm.llm_engine.model_config.max_model_len
    longest = min(spec["document_tokens"], int(_AT_MOST_OF_CONTEXT * context) - spec["max_tokens"])
    sizes = spec["chats"], longest, spec["max_tokens"]
    shortest = len(encode(document.text(document.shortest())))
    if longest < shortest <= spec["document_tokens"]:
        raise DemoError(
            f"max_model_len is {context}, of which {longest} tokens are left for the long prompt, but the shortest has "
            f"{shortest}: raise --max-model-len, or lower --max-tokens"
        )
    found: dict[str, Any] = {"facts": _facts(llm), "answers": {}, "beside_steps": {}, "rounds": []}
    for schedule in SCHEDULES:
        say(f"tokens: {schedule}")
        if (trace := trace_of(llm)) is not None:
            trace.clear()
        asked = requests(encode, *sizes, schedule)
        found["prompt_tokens"] = {one.name: len(one.token_ids) for one in asked}
        found["kinds"] = {one.name: one.kind for one in asked}
        given = answers(llm, asked, schedule)
        found["answers"][schedule] = {name: answer.plain() for name, answer in given.items()}
        if trace is not None:
            found["beside_steps"][schedule] = sum(step.kind == "beside" for step in trace.steps)
    workload = replace(build(encode, *sizes), ignore_eos=True)
    say("latencies: warm-up")
    drive(llm, replace(workload, cache_salt="warm-up"))
    for number in range(spec["rounds"]):
        say(f"latencies: round {number + 1} of {spec['rounds']}")
        run = asdict(drive(llm, replace(workload, cache_salt=f"round {number}")))
        found["rounds"].append({name: run[name] for name in ("ttft_ms", "itl_ms", "itl_during_prefill_ms")})
    return found


def _facts(llm: Any) -> dict[str, Any]:
    config = llm.llm_engine.vllm_config
    return {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "layers": layers_of(llm),
        "max_model_len": config.model_config.max_model_len,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "enforce_eager": config.model_config.enforce_eager,
        "versions": machine.versions(),
        "device": machine.device(usable_cpus()),
    }


def _write(out: Path, found: dict[str, Any]) -> None:
    """Whole or not at all: the process may be killed at any time."""
    scratch = out.with_suffix(".part")
    scratch.write_text(json.dumps(found), encoding="utf-8")
    scratch.replace(out)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
