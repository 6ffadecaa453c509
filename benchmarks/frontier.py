# SPDX-License-Identifier: Apache-2.0
"""ITL of running requests against prefill throughput: stock vLLM over chunk sizes, the plugin over its groups.

A cell is B:C:P, B requests decoding at context C while prompts of P new tokens are prefilled one after another. Random
weights in the shape of Llama-3.1-8B, so no model is needed. Each round starts a stock engine and then one with the
plugin, each in a process of its own, and measures every cell and setting once; the table has the median over rounds.

    python benchmarks/frontier.py --cells 32:2048:8192,16:16384:8192 --chunks 96,192,320,512,1024 \\
        --prefill-sms 116,100,84,68 --rounds 3 --out benchmarks/results/frontier-h200.json

Prints, for each setting: ITL alone (nothing to prefill), ITL p50, p99 and max beside prefill in ms, prefill tokens per
second beside decode, and the TTFT in ms and the tokens per second of a prompt with nothing decoding.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("PDMUX_EXPERIMENTAL_CUDA", "1")

from machine import command_line, description, spread

SHAPES = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
    },
    "toy": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "vocab_size": 512,
    },
}
PROMPTS_PER_RUN = 4
ALONE_STEPS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", default="32:2048:8192,16:16384:8192")
    parser.add_argument("--chunks", default="96,192,320,512,1024", help="of stock: max_num_batched_tokens")
    parser.add_argument("--prefill-sms", default="116,100,84,68", help="of the plugin: SMs of the prefill lane")
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--total-sms", type=int, default=132)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arm", choices=("stock", "pdmux"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        print("RESULT " + json.dumps(measure(args)))
        return
    rows: list[dict[str, Any]] = []
    for round_number in range(args.rounds):
        for arm in ("stock", "pdmux"):
            found = run_arm(arm)
            rows += [{**row, "round": round_number} for row in found["rows"]]
            machine = found["description"]
            if args.out:  # what has been measured is kept, should a later round be cut off
                result = {**machine, "command": command_line(), "summary": summary(rows), "rows": rows}
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    for line in summary(rows):
        print(" ".join(f"{key}={show(value)}" for key, value in line.items()))


def run_arm(arm: str) -> dict[str, Any]:
    """One engine in a process of its own."""
    command = [sys.executable, *sys.argv, "--arm", arm]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(next(line for line in output.splitlines() if line.startswith("RESULT "))[len("RESULT ") :])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every cell and setting of one arm, once."""
    sms = [int(value) for value in args.prefill_sms.split(",")]
    engine = Engine(args.shape, sms if args.arm == "pdmux" else None, args.total_sms)
    settings = sms if args.arm == "pdmux" else [int(value) for value in args.chunks.split(",")]
    rows = []
    for cell in args.cells.split(","):
        batch, context, tokens = (int(value) for value in cell.split(":"))
        ttft_ms = engine.prefill_alone_ms(tokens)
        for setting in settings:
            engine.use(setting, full=True)
            row = engine.cell(batch, context, tokens, lambda setting=setting: engine.use(setting, full=False))
            rows.append({"arm": args.arm, "setting": setting, "cell": cell, "prefill_alone_ttft_ms": ttft_ms, **row})
            print(rows[-1], file=sys.stderr, flush=True)
    return {"rows": rows, "description": description()}


class Engine:
    """An engine in this process, and what is measured with it."""

    def __init__(self, shape: str, prefill_sms: list[int] | None, total_sms: int):
        from vllm import LLM

        arguments: dict[str, Any] = {}
        self._is_pdmux = prefill_sms is not None
        if prefill_sms is not None:
            rows = [[sms, total_sms - sms, 0] for sms in prefill_sms]
            pdmux = {"sm_group_num": len(rows) + 2, "manual_divisions": rows, "policy": "fixed", "fixed_group": 1}
            arguments["additional_config"] = {"pdmux": pdmux}
        self._groups = prefill_sms or []
        length = 40960 if shape != "toy" else 1024
        self._llm = LLM(
            model=write_model(shape),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=length,
            max_num_batched_tokens=8192 if shape != "toy" else 256,
            max_num_seqs=256 if shape != "toy" else 16,
            gpu_memory_utilization=0.85,
            enable_prefix_caching=False,
            **arguments,
        )
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._full_budget = self._scheduler.max_num_scheduled_tokens
        self._vocabulary = SHAPES[shape]["vocab_size"]
        self._random = random.Random(0)
        self._count = 0

    def use(self, setting: int, full: bool) -> None:
        """Stock: the chunk size, or the full budget while decoding requests are being set up. Plugin: the group."""
        if self._is_pdmux:
            from vllm_pdmux.policy import ALL_LAYERS, FixedPolicy, LayerRule

            group = self._groups.index(setting) + 1
            self._scheduler._pdmux_policy = FixedPolicy(group, len(self._groups), LayerRule(ALL_LAYERS))
        else:
            self._scheduler.max_num_scheduled_tokens = self._full_budget if full else setting

    def add(self, tokens: int, answer: int) -> str:
        from vllm import SamplingParams

        self._count += 1
        prompt = [self._random.randrange(10, self._vocabulary) for _ in range(tokens)]
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)
        return str(self._count)

    def prefill_alone_ms(self, tokens: int) -> float:
        """TTFT of one prompt with nothing else running."""
        self._scheduler.max_num_scheduled_tokens = self._full_budget
        times = []
        for _ in range(4):
            start = time.perf_counter()
            self.add(tokens, 1)
            while self._engine.has_unfinished_requests():
                self._engine.step()
            times.append((time.perf_counter() - start) * 1e3)
        return sorted(times[1:])[1]

    def cell(self, batch: int, context: int, tokens: int, begin: Any) -> dict[str, float]:
        """ITL alone, then ITL and throughput while prompts are prefilled."""
        decoding = {self.add(context, 100_000 if context > 1000 else 400) for _ in range(batch)}
        lengths: dict[str, int] = {}
        while len(lengths) < batch or min(lengths.values()) < 5:
            for output in self._engine.step():
                lengths[output.request_id] = len(output.outputs[0].token_ids)
        alone = self._gaps(decoding, until=lambda gaps, ended: len(gaps) >= ALONE_STEPS)[0]
        begin()
        for _ in range(PROMPTS_PER_RUN):
            self.add(tokens, 1)
        gaps, seconds = self._gaps(decoding, until=lambda gaps, ended: len(ended) >= PROMPTS_PER_RUN)
        self._engine.abort_request(list(decoding))
        for _ in range(6):
            self._engine.step()
        return {
            "itl_alone_ms": quantile(alone, 0.5),
            "itl_p50_ms": quantile(gaps, 0.5),
            "itl_p99_ms": quantile(gaps, 0.99),
            "itl_max_ms": max(gaps),
            "prefill_tokens_per_s": PROMPTS_PER_RUN * tokens / seconds,
        }

    def _gaps(self, decoding: set[str], until: Any) -> tuple[list[float], float]:
        gaps: list[float] = []
        ended: set[str] = set()
        start, last = time.perf_counter(), None
        while not until(gaps, ended):
            outputs = self._engine.step()
            now = time.perf_counter()
            ended |= {output.request_id for output in outputs if output.request_id not in decoding}
            if any(output.request_id in decoding for output in outputs):
                if last is not None:
                    gaps.append((now - last) * 1e3)
                last = now
        return gaps, time.perf_counter() - start


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median and spread over the rounds, by cell, arm and setting."""
    keys = sorted({(row["cell"], row["arm"], row["setting"]) for row in rows}, key=str)
    lines = []
    for cell, arm, setting in keys:
        same = [row for row in rows if (row["cell"], row["arm"], row["setting"]) == (cell, arm, setting)]
        values = {k: spread([row[k] for row in same]) for k in same[0] if isinstance(same[0][k], float)}
        lines.append({"cell": cell, "arm": arm, "setting": setting, **values})
    return lines


def show(value: Any) -> str:
    return f"{value['median']:.1f}" if isinstance(value, dict) else str(value)


def write_model(shape: str) -> str:
    """A folder with the config of a Llama of that shape; its weights are made up by vLLM."""
    folder = Path(tempfile.gettempdir()) / f"pdmux-{shape}"
    folder.mkdir(exist_ok=True)
    fixed = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    (folder / "config.json").write_text(json.dumps({**fixed, **SHAPES[shape]}))
    return str(folder)


if __name__ == "__main__":
    main()
