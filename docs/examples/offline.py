# SPDX-License-Identifier: Apache-2.0
"""Offline: one engine in this program, answers for a list of prompts.

python docs/examples/offline.py MODEL
"""

import sys
from typing import Any

from vllm import LLM, SamplingParams

PROMPTS = ["Name three primary colours.", "Why is the sky blue?"]


def engine(model: str, **arguments: Any) -> LLM:
    """An engine with the plugin; `arguments` are vLLM's own."""
    return LLM(
        model,
        scheduler_cls="vllm_pdmux.Scheduler",
        additional_config={"pdmux": {"itl_slo_ms": 11}},
        **arguments,
    )


def answers(llm: LLM, max_tokens: int = 64) -> list[str]:
    """The text for each of PROMPTS."""
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=max_tokens))
    return [output.outputs[0].text for output in outputs]


if __name__ == "__main__":  # vLLM may start processes
    for prompt, answer in zip(PROMPTS, answers(engine(sys.argv[1])), strict=True):
        print(f"{prompt}\n  {answer.strip()}\n")
