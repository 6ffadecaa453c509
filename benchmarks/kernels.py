# SPDX-License-Identifier: Apache-2.0
"""Both lanes' kernels beside each other, without an engine: what the engine could reach, and what sharing itself costs.

The layers of the shape are made of the kernels that vLLM uses (its norms, cuBLAS, FlashAttention 3 on a paged cache).
Decode is a CUDA graph of all layers at batch B and context C, replayed without a pause; prefill is layers of
`--batch-tokens` of a prompt of P tokens, one batch after the other, of which `--queued` are always ahead of the GPU.
No sampling, no logits, no weights of the vocabulary. Needs an NVIDIA GPU.

    python benchmarks/kernels.py --cells 128:2048:8192,64:8192:8192 --groups capped:100,disjoint:100 --out kernels.json

For each group: decode alone on what it may use, decode beside prefill (p50 and max of its steps), prefill alone in its
SMs and beside decode, in tokens per second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import shapes
import torch
from arrivals import quantile
from machine import description, spread

from vllm_pdmux.spatial import DISJOINT, open_backend

BLOCK = 16  # tokens of a KV block
HIGH_PRIORITY = -1
ALONE_STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", default="32:2048:8192,128:2048:8192,16:16384:8192,64:8192:8192")
    parser.add_argument("--groups", default="capped:100,capped:84,capped:68,disjoint:100,disjoint:84,disjoint:68")
    parser.add_argument("--batch-tokens", default="8192", help="of prefill batches, with commas; they divide P")
    parser.add_argument("--queued", type=int, default=8, help="layers that are launched ahead of the GPU")
    parser.add_argument("--prompts", type=int, default=2, help="that are prefilled in each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="cuda", choices=("cuda", "sgl_kernel", "streams"))
    parser.add_argument("--shape", default="llama-8b", choices=("llama-8b",))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU, and PyTorch sees none")
    rows = list(measure(args))
    keys = list(dict.fromkeys((row["cell"], row["group"], row["batch_tokens"]) for row in rows))
    summary = []
    for key in keys:
        same = [row for row in rows if (row["cell"], row["group"], row["batch_tokens"]) == key]
        numbers = {name: spread([row[name] for row in same]) for name, value in same[0].items() if name.endswith("_ms")}
        numbers |= {name: spread([row[name] for row in same]) for name in same[0] if name.endswith("_per_s")}
        summary.append(dict(zip(("cell", "group", "batch_tokens"), key, strict=True)) | numbers)
    text = json.dumps({**description(), "summary": summary, "rows": rows}, indent=1)
    if args.out:
        args.out.write_text(text + "\n")


class Lanes(NamedTuple):
    """Of a group: where decode's graph is captured, where it is replayed, and where prefill is."""

    capture: torch.cuda.Stream
    replay: torch.cuda.Stream
    prefill: torch.cuda.Stream


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = Model(shapes.CONFIGS[args.shape])
    backend = open_backend(args.backend, torch.cuda.current_device())
    decode_stream = torch.cuda.Stream(priority=HIGH_PRIORITY)
    splits: dict[int, Any] = {}
    groups = {}
    for name in args.groups.split(","):
        sharing, _, sms = name.partition(":")
        decode_sms = backend.limits.total_sms - int(sms)
        split = splits.setdefault(decode_sms, backend.partition(decode_sms))
        confined = torch.cuda.ExternalStream(split.decode_stream) if sharing == DISJOINT else decode_stream
        groups[name] = Lanes(confined, decode_stream, torch.cuda.ExternalStream(split.prefill_stream))
    for cell in args.cells.split(","):
        batch, context, prompt = map(int, cell.split(":"))
        step = model.decode(batch, context)
        graphs = {stream: captured(step, stream) for stream in {lanes.capture for lanes in groups.values()}}
        for number in range(args.rounds):
            for name, lanes in groups.items():
                for tokens in map(int, args.batch_tokens.split(",")):
                    layers = model.prefill(prompt, tokens)
                    found = beside(lanes, graphs[lanes.capture], layers, args.prompts, args.queued)
                    alone_s, rate = found["prefill_alone_s"], found.pop("beside_prompts_per_s") * prompt
                    row = {"cell": cell, "group": name, "batch_tokens": tokens, "round": number, **found}
                    row |= {"prefill_tokens_per_s": rate, "prefill_alone_tokens_per_s": prompt / alone_s}
                    print(row, file=sys.stderr, flush=True)
                    yield row
        del step, graphs
        torch.cuda.empty_cache()


def captured(step: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            step()
    stream.synchronize()
    return graph


def beside(
    lanes: Lanes, graph: torch.cuda.CUDAGraph, layers: list[Callable[[], None]], prompts: int, queued: int
) -> dict[str, float]:
    """Each lane alone, then both: all `layers` of so many prompts while the graph is replayed without a pause."""
    decode_alone_ms = statistics.median(step_times_ms(lanes.replay, graph, ALONE_STEPS))
    with torch.cuda.stream(lanes.prefill):
        start = event(lanes.prefill)
        for layer in layers:
            layer()
        end = event(lanes.prefill)
    torch.cuda.synchronize()
    alone_s = start.elapsed_time(end) / 1e3
    todo = deque(layers * prompts)
    marks: deque[torch.cuda.Event] = deque()
    edges = [event(lanes.replay)]
    with torch.cuda.stream(lanes.prefill):
        start = event(lanes.prefill)
    while todo or not marks[-1].query():
        with torch.cuda.stream(lanes.prefill):
            while todo and len(marks) < queued:
                todo.popleft()()
                marks.append(event(lanes.prefill))
        while len(marks) > 1 and marks[0].query():
            marks.popleft()
        if len(edges) < 3 or edges[-2].query():  # one step is always queued behind the one that runs
            with torch.cuda.stream(lanes.replay):
                graph.replay()
                edges.append(event(lanes.replay))
        time.sleep(0)
    torch.cuda.synchronize()
    gaps = [a.elapsed_time(b) for a, b in pairwise(edges)][1:-2]  # those with prefill beside all of it
    return {
        "decode_alone_ms": decode_alone_ms,
        "decode_p50_ms": statistics.median(gaps),
        "decode_p99_ms": quantile(gaps, 0.99),
        "decode_max_ms": max(gaps),
        "prefill_alone_s": alone_s,
        "beside_prompts_per_s": prompts / (start.elapsed_time(marks[-1]) / 1e3),
    }


def step_times_ms(stream: torch.cuda.Stream, graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        edges = [event(stream)]
        for _ in range(count):
            graph.replay()
            edges.append(event(stream))
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(edges)][1:]


def event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    made = torch.cuda.Event(enable_timing=True)
    made.record(stream)
    return made


class Model:
    """The decoder layers of a shape with random weights, in bf16."""

    def __init__(self, config: dict[str, Any]):
        self.hidden, self.width = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads, self.size = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
        )
        self.norm = torch.ones(self.hidden, device="cuda", dtype=torch.bfloat16)
        qkv = (self.heads + 2 * self.kv_heads) * self.size
        sizes = {
            "qkv": (qkv, self.hidden),
            "out": (self.hidden, self.heads * self.size),
            "up": (2 * self.width, self.hidden),
            "down": (self.hidden, self.width),
        }
        self.layers = [
            {name: self._random(*size) * 0.02 for name, size in sizes.items()}
            for _ in range(config["num_hidden_layers"])
        ]

    def decode(self, batch: int, context: int) -> Callable[[], None]:
        """A decode step of all layers. They share one KV cache, which is larger than any cache of the GPU."""
        attention = self._attention([context] * batch, [1] * batch)
        tokens = self._random(batch, self.hidden)

        def step() -> None:
            x = tokens
            for weights in self.layers:
                x = self._layer(weights, x, attention)

        return step

    def prefill(self, prompt: int, batch_tokens: int) -> list[Callable[[], None]]:
        """The layers of a prompt's batches, in order. Each batch attends to itself and to those before it."""
        found: list[Callable[[], None]] = []
        for end in range(batch_tokens, prompt + 1, batch_tokens):
            attention, state = self._attention([end], [batch_tokens]), {"x": self._random(batch_tokens, self.hidden)}
            for weights in self.layers:

                def layer(weights: Any = weights, attention: Any = attention, state: Any = state) -> None:
                    state["x"] = self._layer(weights, state["x"], attention)

                found.append(layer)
        return found

    def _attention(self, lengths: list[int], new: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        blocks = -(-max(lengths) // BLOCK)
        keys = self._random(len(lengths) * blocks, BLOCK, self.kv_heads, self.size)
        values = torch.randn_like(keys)
        table = torch.arange(len(lengths) * blocks, device="cuda", dtype=torch.int32).view(len(lengths), blocks)
        starts = torch.tensor([0, *new], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
        used = torch.tensor(lengths, device="cuda", dtype=torch.int32)

        def attend(queries: torch.Tensor) -> torch.Tensor:
            return flash_attn_varlen_func(
                queries,
                keys,
                values,
                max_seqlen_q=max(new),
                cu_seqlens_q=starts,
                max_seqlen_k=max(lengths),
                seqused_k=used,
                block_table=table,
                causal=True,
                fa_version=3,
            )

        return attend

    def _layer(self, weights: dict[str, torch.Tensor], x: torch.Tensor, attention: Any) -> torch.Tensor:
        from vllm import _custom_ops as ops

        normed = torch.empty_like(x)
        ops.rms_norm(normed, x, self.norm, 1e-5)
        qkv = normed @ weights["qkv"].t()
        queries = qkv[:, : self.heads * self.size].reshape(-1, self.heads, self.size)
        x = x + attention(queries).view(x.shape[0], -1) @ weights["out"].t()
        ops.rms_norm(normed, x, self.norm, 1e-5)
        up = normed @ weights["up"].t()
        gated = torch.empty(x.shape[0], self.width, device="cuda", dtype=x.dtype)
        torch.ops._C.silu_and_mul(gated, up)
        return x + gated @ weights["down"].t()

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
