# SPDX-License-Identifier: Apache-2.0
"""One engine, stock or with the plugin, and what is measured with it.

Started by other benchmarks as a process that obeys lines of JSON, each of which is answered with one line of JSON:

    {"cell": "B:C:P", "setting": ..., "prompts": ..., "limit_s": ...}
    {"replay": ..., "setting": ..., "limit_s": ...}     arrivals as in a service
    {"alone": TOKENS}                                   a prompt with nothing decoding
    {"decode": "B:C", "setting": ..., "steps": ...}     decode with nothing to prefill, and its time on the CPU
    {"streams": "B:C:P", "setting": ...}                how busy each stream of the GPU is, by torch's profiler
    {"calibrate": true}                                 the policy slo of this process
    {"prior": {...}}                                    it begins with this profile, which a calibration has found

A setting is a chunk size (stock), or ``capped:SMS`` or ``disjoint:SMS`` (the plugin; SMs of the prefill lane), or
``slo:ITL`` or ``slo:ITL:TTFT`` (its policy, with targets in ms).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Container
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import shapes
import torch
from arrivals import Request, quantile, serve
from machine import description

ALONE_STEPS = 40
PROFILED_AFTER, PROFILED_STEPS = 12, 30
ANSWER = "PDMUX-ANSWER "  # before each answer, since libraries print too
NO_END = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arm", choices=("stock", "pdmux"), required=True)
    parser.add_argument("--shape", choices=shapes.CONFIGS, required=True)
    parser.add_argument("--groups", default="", help="of the plugin: settings that it may be asked for")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--total-sms", type=int, default=132)
    parser.add_argument("--kv-gib", type=float, help="KV cache in GiB, where other engines share the GPU")
    parser.add_argument("--max-prefill-tokens", type=int, default=None)
    args = parser.parse_args()
    started = time.perf_counter()
    engine = Engine(args)
    answer({"ready_s": time.perf_counter() - started, "kv_tokens": engine.kv_tokens, **description()})
    for line in sys.stdin:
        try:
            answer(obey(engine, json.loads(line)))
        except Exception as error:  # noqa: BLE001 - the engine may be good for the next order
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})


def obey(engine: Engine, order: dict[str, Any]) -> dict[str, Any]:
    if "alone" in order:
        return {"prefill_alone_ttft_ms": engine.prefill_alone_ms(order["alone"])}
    if "decode" in order:
        return engine.decode(*map(int, order["decode"].split(":")), order["setting"], order["steps"])
    if "streams" in order:
        return engine.streams(*map(int, order["streams"].split(":")), order["setting"])
    if "prior" in order:
        return engine.begin_with(order["prior"])
    if "calibrate" in order:
        return engine.calibrate()
    if "replay" in order:
        return engine.replay(order["replay"], order["setting"], order["limit_s"])
    return engine.cell(*map(int, order["cell"].split(":")), order["setting"], order["prompts"], order["limit_s"])


def answer(values: dict[str, Any]) -> None:
    print(ANSWER + json.dumps(values), flush=True)


class Engine:
    """An engine in this process."""

    def __init__(self, args: argparse.Namespace):
        from vllm import LLM
        from vllm.platforms import current_platform

        self._args = args
        self._groups = [group for group in args.groups.split(",") if group] if args.arm == "pdmux" else []
        is_toy = args.shape == "toy"
        self._is_gpu = not current_platform.is_cpu()
        self._policies: dict[str, tuple[Any, Any, Any]] = {}  # slo, by setting
        self._profile: Any = None  # with which they begin
        arguments: dict[str, Any] = shapes.arguments(args.shape)
        if args.arm == "pdmux":
            arguments["additional_config"] = {"pdmux": self._settings()}
        if not self._is_gpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            arguments.update(enforce_eager=True, distributed_executor_backend="uni")
        elif args.kv_gib:
            arguments.update(gpu_memory_utilization=0.1, kv_cache_memory_bytes=int(args.kv_gib * 2**30))
        else:
            arguments["gpu_memory_utilization"] = 0.85
        self._llm = LLM(
            max_model_len=1024 if is_toy else 40960,
            max_num_batched_tokens=256 if is_toy else 8192,
            max_num_seqs=16 if is_toy else 256,
            enable_prefix_caching=True,  # so that the decoding requests of a cell are set up again at no cost
            **arguments,
        )
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._full_budget = self._scheduler.max_num_scheduled_tokens
        self._random = random.Random(0)
        self._contexts: dict[tuple[int, int], list[list[int]]] = {}
        self._count = 0

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks * self._scheduler.block_size

    def prefill_alone_ms(self, tokens: int) -> float:
        """TTFT of one prompt with nothing else running: the median of 3, after one that warms up."""
        self._use(None)
        times = []
        for _ in range(4):
            start = time.perf_counter()
            self._add(self._prompt(tokens), 1)
            while self._engine.has_unfinished_requests():
                self._engine.step()
            times.append((time.perf_counter() - start) * 1e3)
        return sorted(times[1:])[1]

    def decode(self, batch: int, context: int, setting: Any, steps: int) -> dict[str, float]:
        """ITL of `steps` decode steps with nothing to prefill, and the CPU time of each: of all threads of the process,
        which schedule, launch, and read what was sampled. And the tokens of all contexts before the first of them."""
        self._use(setting)
        decoding = self._decoding(batch, context)
        cpu_s = time.process_time()
        gaps = self._gaps(decoding, lambda gaps, ended: len(gaps) >= steps)[0]
        cpu_s = time.process_time() - cpu_s
        self._end(list(decoding))
        return {
            "context_tokens": float(batch * context + sum(decoding.values())),
            "itl_p50_ms": quantile(gaps, 0.5),
            "itl_p99_ms": quantile(gaps, 0.99),
            "cpu_ms_per_step": cpu_s / (len(gaps) + 1) * 1e3,
        }

    def cell(
        self, batch: int, context: int, tokens: int, setting: Any, prompt_count: int, limit_s: float
    ) -> dict[str, float]:
        """ITL with nothing to prefill, then ITL and prefill throughput while `prompt_count` prompts are prefilled; with
        stock's smallest chunks only what is done in `limit_s`."""
        # A policy that learns sees decode alone too, as it would in a server.
        self._use(setting if str(setting).startswith("slo") else None)
        decoding = self._decoding(batch, context)
        alone = self._gaps(decoding, lambda gaps, ended: len(gaps) >= ALONE_STEPS)[0]
        self._use(setting)
        prompts = [self._add(self._prompt(tokens), 1) for _ in range(prompt_count)]
        limit = time.perf_counter() + (limit_s if self._args.arm == "stock" else 1e9)
        gaps, seconds, ended = self._gaps(
            decoding, lambda gaps, ended: len(ended) >= len(prompts) or time.perf_counter() > limit
        )
        done = tokens * len(ended) + sum(self._computed(one) for one in prompts if one not in ended)
        rate = done / seconds
        self._end([*decoding, *prompts])
        return {
            "itl_alone_ms": quantile(alone, 0.5),
            "itl_p50_ms": quantile(gaps, 0.5),
            "itl_p99_ms": quantile(gaps, 0.99),
            "itl_max_ms": max(gaps),
            "prefill_tokens_per_s": rate,
            "steady_tokens_per_s": steady_rate(list(ended.values()), tokens, rate),
            "steps": float(len(gaps)),
        }

    def streams(self, batch: int, context: int, tokens: int, setting: Any) -> dict[str, Any]:
        """What each stream of the GPU is busy with in a second or so of decode steps beside prefill."""
        from streams import stream_use

        self._use(None)
        decoding = self._decoding(batch, context)
        self._use(setting)
        prompts = [self._add(self._prompt(tokens), 1) for _ in range(4)]
        self._gaps(decoding, lambda gaps, ended: len(gaps) >= PROFILED_AFTER)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            gaps = self._gaps(decoding, lambda gaps, ended: len(gaps) >= PROFILED_STEPS)[0]
            torch.cuda.synchronize()
        self._end([*decoding, *prompts])
        return {"itl_p50_ms": quantile(gaps, 0.5), "streams": stream_use(profiled)}

    def calibrate(self) -> dict[str, Any]:
        """From now on slo begins with what is measured now, once more where that is refused, as the command
        `calibrate` does. The profile, its errors on points that were held out."""
        from vllm_pdmux.calibration.fit import too_large
        from vllm_pdmux.calibration.run import calibrate

        self._use(None)
        assert self._scheduler.reset_prefix_cache()
        found = calibrate(self._llm)
        if too_large(found.errors):
            found = calibrate(self._llm)
        if not (refused := too_large(found.errors)):
            self._profile, self._policies = found.profile, {}
        return {"profile": found.profile.model_dump(), "refused": refused, **found.details()}

    def begin_with(self, profile: dict[str, Any]) -> dict[str, Any]:
        """From now on slo begins with `profile`."""
        from vllm_pdmux.simulator import DeviceProfile

        self._profile, self._policies = DeviceProfile.model_validate(profile), {}
        return {"groups": len(self._profile.groups)}

    def replay(self, arrivals: list[list[Any]], setting: Any, limit_s: float) -> dict[str, Any]:
        """Serve `arrivals` at their times, `limit_s` at most, and what each request saw."""
        self._use(setting)
        assert self._scheduler.reset_prefix_cache()
        requests = [Request(*one) for one in arrivals]
        if not str(setting).startswith("slo"):
            return serve(self._engine, requests, shapes.vocabulary(self._args.shape), limit_s)
        policy, steps = self._scheduler._pdmux_policy, defaultdict(list)
        counts = ("missed_steps", "infeasible_decisions")
        before = {name: getattr(policy, name) for name in counts}
        with mock.patch.object(policy, "observe", listed(policy.observe, self._groups, steps)):
            served = serve(self._engine, requests, shapes.vocabulary(self._args.shape), limit_s)
        kinds = {
            kind: {"steps": len(ms), "p50_ms": quantile(ms, 0.5), "p95_ms": quantile(ms, 0.95)}
            for kind, ms in steps.items()
        }
        return {**served, "steps": kinds, **{name: getattr(policy, name) - before[name] for name in counts}}

    def _settings(self) -> dict[str, Any]:
        splits = [group.split(":") for group in self._groups]
        return {
            "sm_group_num": len(splits) + 2,
            "manual_divisions": [[int(sms), self._args.total_sms - int(sms), 0] for _, sms in splits],
            "sharing": [sharing for sharing, _ in splits],
            "backend": self._args.backend,
            "max_prefill_tokens": self._args.max_prefill_tokens,
        }

    def _use(self, setting: Any) -> None:
        """Stock: the chunk size, all the budget without one. Plugin: the group, or the policy slo with its targets."""
        if self._args.arm == "stock":
            self._scheduler.max_num_scheduled_tokens = setting or self._full_budget
        elif setting is not None and setting.startswith("slo"):
            self._use_slo(setting)
        elif setting is not None:
            from vllm_pdmux.policy import ALL_LAYERS, FixedPolicy, LayerRule, PromptWork

            group = self._groups.index(setting) + 1
            self._scheduler._pdmux_policy = FixedPolicy(group, len(self._groups), LayerRule(ALL_LAYERS))
            self._scheduler._observer, self._scheduler._prompt_work = None, PromptWork()

    def _use_slo(self, setting: str) -> None:
        """A policy keeps what it has learned from one measurement to the next, as it would in a server."""
        from vllm_pdmux.activation import settings_of
        from vllm_pdmux.calibration.chosen import prior_of
        from vllm_pdmux.mixed_graphs import mixed_graph_tokens
        from vllm_pdmux.model_size import decode_alone, prompt_work
        from vllm_pdmux.observer import Observer
        from vllm_pdmux.policy_from_config import build_policy

        scheduler = self._scheduler
        if setting not in self._policies:
            targets = [float(one) for one in setting.split(":")[1:]]
            changes = {"policy": "slo"} | dict(zip(("itl_slo_ms", "ttft_slo_ms"), targets, strict=False))
            config = settings_of(scheduler.vllm_config).model_copy(update=changes)
            alone, work, prior = decode_alone(scheduler.vllm_config), prompt_work(scheduler.vllm_config), None
            if self._profile is not None:
                prior, work = prior_of(self._profile, len(self._groups)), self._profile.prompt_work
            graphs = mixed_graph_tokens(scheduler.vllm_config)
            policy = build_policy(config, len(self._groups), self._is_gpu, alone, work, log, prior, graphs)
            self._policies[setting] = policy, Observer(policy, work), work
        scheduler._pdmux_policy, scheduler._observer, scheduler._prompt_work = self._policies[setting]

    def _decoding(self, batch: int, context: int) -> dict[str, int]:
        """So many requests with this context, all of which decode, with the tokens of their answers so far: as many in
        every arm.

        Their contexts are computed before, so that all of them begin within a few steps: else the first ones would have
        longer contexts by the time the last ones begin, most where decode goes on beside prefill.
        """
        if (batch, context) not in self._contexts:
            self._contexts[batch, context] = [self._prompt(context) for _ in range(batch)]
        prompts = self._contexts[batch, context]
        for prompt in prompts:
            self._add(prompt, 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        for prompt in prompts:
            self._add(prompt, NO_END if context > 1000 else 400)
        lengths: dict[str, int] = {}
        while len(lengths) < batch or min(lengths.values()) < 5:
            for output in self._engine.step():
                lengths[output.request_id] = len(output.outputs[0].token_ids)
        return lengths

    def _end(self, request_ids: list[str]) -> None:
        self._engine.abort_request(request_ids)
        for _ in range(6):
            self._engine.step()

    def _prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(10, shapes.vocabulary(self._args.shape)) for _ in range(tokens)]

    def _add(self, prompt: list[int], answer: int) -> str:
        from vllm import SamplingParams

        self._count += 1
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)
        return str(self._count)

    def _computed(self, request_id: str) -> int:
        found = [one for name, one in self._scheduler.requests.items() if name.split("-")[0] == request_id]
        return found[0].num_computed_tokens if found else 0

    def _gaps(self, decoding: Container[str], until: Any) -> tuple[list[float], float, dict[str, float]]:
        """Between decode steps, in ms; the seconds of it all; and after which of them each prompt has ended."""
        gaps: list[float] = []
        ended: dict[str, float] = {}
        start, last = time.perf_counter(), None
        while not until(gaps, ended):
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                if output.request_id not in decoding:
                    ended.setdefault(output.request_id, now - start)
            if any(output.request_id in decoding for output in outputs):
                if last is not None:
                    gaps.append((now - last) * 1e3)
                last = now
        return gaps, time.perf_counter() - start, ended


def steady_rate(ended_s: list[float], tokens: int, whole: float) -> float:
    """Prefill tokens per second from the end of the first prompt to that of the last, which a run's own beginning and
    end do not touch; that of the `whole` run where fewer than two prompts of `tokens` have ended."""
    if len(ended_s) < 2 or max(ended_s) == min(ended_s):
        return whole
    return tokens * (len(ended_s) - 1) / (max(ended_s) - min(ended_s))


def listed(observe: Callable[[Any], None], groups: list[str], steps: dict[str, list[float]]) -> Callable[[Any], None]:
    """`observe`, putting what each step took in `steps`: "decode", "prefill", "fused", or the group beside prefill."""

    def put(step: Any) -> None:
        steps[groups[step.group - 1] if step.kind.value == "beside" else step.kind.value].append(step.step_ms)
        observe(step)

    return put


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
