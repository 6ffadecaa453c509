# SPDX-License-Identifier: Apache-2.0
"""Measures a real engine in this process: steps of either lane alone, and of both in each division.

Times are those that a policy is told (`StepTimes`), so a calibration and what is learned while serving mean the same.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm import SamplingParams
from vllm.v1.request import Request

from vllm_pdmux.activation import settings_of
from vllm_pdmux.calibration import CalibrationError
from vllm_pdmux.calibration.identity import divisions
from vllm_pdmux.calibration.plan import (
    DecodeLoad,
    Limits,
    beside_loads,
    decode_loads,
    fused_chunks,
    lane_prompt,
    prompts,
)
from vllm_pdmux.calibration.recorder import Recorder, RecordingObserver
from vllm_pdmux.calibration.samples import BesideSample, DecodeSample, FusedSample, PrefillSample, Samples
from vllm_pdmux.policy import Kind, Observation, PromptWork
from vllm_pdmux.scheduler import PDMuxSchedulerMixin

# A point of decode alone: so many steps, fewer where they take long.
ALONE_STEPS, FEWEST_STEPS, ALONE_MS = 16, 5, 400.0
SETTLE_STEPS = 3  # at the beginning of a point, which count for nothing
PREFILL_REPEATS = 3  # after one that warms up
# What is shorter waits for the host, whose speed changes from second to second: it is measured at the end once more.
SHORT_PREFILL_MS = 60.0
# Beside each other: all points together take about this long, each at least and at most so long.
BESIDE_MS, BESIDE_MS_LIMITS = 7_500.0, (200.0, 600.0)
BESIDE_STEPS, MOST_BESIDE_STEPS = 8, 200
PROMPTS_AHEAD = 3  # that wait or are prefilled at any time, so that the lane never runs dry
FUSED_STEPS, FUSED_SETTLE_STEPS = 8, 2  # of which the first ones count for nothing
STUCK_STEPS = 2000
STEPS_IN_FLIGHT = 3  # under asynchronous scheduling, at most
FIRST_TOKEN = 10  # token ids below may be special
CUT_OFF = 1e-6

Progress = Callable[[int, int, str], None]  # points done, points in all, what comes next


def measure(llm: Any, progress: Progress = lambda done, total, what: None) -> Samples:
    """All points, on an engine that serves nothing else meanwhile. Its prefix cache is empty afterwards.

    Raises CalibrationError for an engine that cannot be measured.
    """
    return Meter(llm).measure(progress)


def measure_decode_again(llm: Any, samples: Samples) -> Samples:
    """`samples` of this engine, of decode alone the shorter of two times: now the loads that nothing else was measured
    with are measured once more. The largest batch waits for the host, whose speed changes from second to second."""
    return Meter(llm).measure_decode_again(samples)


class Meter:
    """One engine, driven step by step."""

    def __init__(self, llm: Any):
        self._engine = llm.llm_engine
        self._core: Any = getattr(self._engine.engine_core, "engine_core", None)
        if self._core is None:
            raise CalibrationError("the engine runs in another process: set VLLM_ENABLE_V1_MULTIPROCESSING=0")
        self._scheduler = self._core.scheduler
        if not isinstance(self._scheduler, PDMuxSchedulerMixin):
            raise CalibrationError('the engine is stock vLLM: give it additional_config={"pdmux": {"policy": "slo"}}')
        if self._core.request_block_hasher is None:
            raise CalibrationError("the engine has no prefix cache: set enable_prefix_caching")
        config = self._engine.vllm_config
        settings = settings_of(config)
        if settings.policy in ("fixed", "off"):
            raise CalibrationError(f"policy is {settings.policy}, which does not make all divisions: set policy slo")
        self._divisions = divisions(settings)
        self._limits = Limits(
            config.model_config.max_model_len,
            config.scheduler_config.max_num_seqs,
            self._scheduler.max_num_scheduled_tokens,
            self._scheduler._admission.most_tokens or self._scheduler.max_num_scheduled_tokens,
            self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks * self._scheduler.block_size,
            self._scheduler.block_size,
        )
        self._vocabulary = config.model_config.get_vocab_size()
        self._random = random.Random(0)
        self._recorder = Recorder(max(1, len(self._divisions)))
        self._unfinished: set[str] = set()
        self._count = 0

    def measure(self, progress: Progress) -> Samples:
        """All points, then the engine as it was."""
        with self._recording():
            return self._measure(progress)

    def measure_decode_again(self, samples: Samples) -> Samples:
        """See the function."""
        decode_samples = list(samples.decode)
        loads = decode_loads(self._limits)
        with self._recording():
            for place in range(len(beside_loads(self._limits)) if self._divisions else 0, len(loads)):
                again = self._start(loads[place])
                self._stop()
                decode_samples[place] = min(decode_samples[place], again, key=lambda one: one.ms)
        return replace(samples, decode=tuple(decode_samples))

    def _measure(self, progress: Progress) -> Samples:
        loads, beside = decode_loads(self._limits), beside_loads(self._limits) if self._divisions else []
        points = prompts(self._limits)
        total, done = len(points) + len(loads) + len(beside) * len(self._divisions), 0

        def report(what: str, points: int = 1) -> None:
            nonlocal done
            done += points
            progress(done, total, what)

        report("prefill alone", 0)
        prefill_samples = []
        for new_tokens, reused_tokens in points:
            prefill_samples.append(self._prefill_alone(new_tokens, reused_tokens))
            report("prefill alone")
        decode_samples, beside_samples, fused_samples = [], [], []
        for number, load in enumerate(loads):
            decode_samples.append(self._start(load))
            report("decode alone")
            if number < len(beside):
                alone_ms = decode_samples[-1].ms
                if number == 0:  # the first ones make what later ones use again
                    for chunk in fused_chunks(self._limits):
                        self._fused(load, chunk, alone_ms)
                fused_samples += [self._fused(load, chunk, alone_ms) for chunk in fused_chunks(self._limits)]
                for group in range(1, len(self._divisions) + 1):
                    beside_samples.append(self._beside(number, load, group, alone_ms, len(beside)))
                    report("both lanes")
            self._stop()
        for place, (new_tokens, reused_tokens) in enumerate(points):
            if prefill_samples[place].ms < SHORT_PREFILL_MS:
                again = self._prefill_alone(new_tokens, reused_tokens)
                prefill_samples[place] = min(prefill_samples[place], again, key=lambda one: one.ms)
        return Samples(
            tuple(decode_samples),
            tuple(prefill_samples),
            tuple(beside_samples),
            tuple(one for one in fused_samples if one is not None),
            self._divisions,
            self._limits.kv_tokens,
        )

    # --- points ----------------------------------------------------------------------------------------------------

    def _prefill_alone(self, new_tokens: int, reused_tokens: int) -> PrefillSample:
        before = self._tokens(reused_tokens)
        self._make_reusable(before)
        times, computed = [], []
        for _ in range(1 + PREFILL_REPEATS):
            self._recorder.clear()
            self._add(before + self._tokens(new_tokens), 1)
            self._step_until(lambda: not self._unfinished, "a prompt")
            steps = [step for step in self._recorder.steps if step.kind is Kind.PREFILL]
            times.append(sum(step.step_ms for step in steps))
            computed.append(sum(step.prefill_work for step in steps))
        tokens = round(computed[-1])  # more where the KV cache has lost what was to be reused
        return PrefillSample(tokens, new_tokens + reused_tokens - tokens, statistics.median(times[1:]))

    def _start(self, load: DecodeLoad) -> DecodeSample:
        """Let requests decode; what their steps take alone."""
        for _ in range(load.batch):
            prompt = self._tokens(load.context_tokens + 1)  # one token to compute
            self._make_reusable(prompt)
            self._add(prompt, self._limits.max_model_len - len(prompt))
        self._decoding = set(self._unfinished)
        self._recorder.clear()
        self._step_until(lambda: self._is_enough(self._alone_steps(load)), "decode alone")
        steps = self._alone_steps(load)[SETTLE_STEPS:]
        return DecodeSample(*_middle(steps))

    def _alone_steps(self, load: DecodeLoad) -> list[Observation]:
        steps = self._recorder.steps
        return [step for step in steps if step.kind is Kind.DECODE and step.decode_batch == load.batch]

    @staticmethod
    def _is_enough(steps: list[Observation]) -> bool:
        steps = steps[SETTLE_STEPS:]
        takes_long = len(steps) >= FEWEST_STEPS and sum(step.step_ms for step in steps) >= ALONE_MS
        return takes_long or len(steps) >= ALONE_STEPS

    def _fused(self, load: DecodeLoad, chunk: int, alone_ms: float) -> FusedSample | None:
        """Chunks of one prompt, in stock steps; None where the engine is too short for them."""
        tokens = chunk * FUSED_STEPS
        if tokens >= self._limits.max_model_len:
            return None
        self._renew(load, FUSED_STEPS * 3)
        self._recorder.clear()
        self._recorder.fused = chunk
        name = self._add(self._tokens(tokens), 1)
        self._step_until(lambda: name not in self._unfinished, "a fused step")
        self._recorder.fused = 0
        steps = [one for one in self._recorder.steps if one.kind is Kind.FUSED and abs(one.prefill_work - chunk) < 1]
        steps = [one for one in steps if one.decode_batch == load.batch][FUSED_SETTLE_STEPS:]
        if not steps:
            return None
        batch, context_tokens, ms = _middle(steps)
        return FusedSample(batch, context_tokens, chunk, chunk * FUSED_STEPS // 2, ms, alone_ms)

    def _beside(self, number: int, load: DecodeLoad, group: int, alone_ms: float, loads: int) -> BesideSample:
        """Prompts go through the lane in `group` while the load decodes."""
        low, high = BESIDE_MS_LIMITS
        window_ms = min(max(BESIDE_MS / (loads * len(self._divisions)), low), high)
        self._renew(load, MOST_BESIDE_STEPS)
        self._recorder.use(group)
        tokens = lane_prompt(self._limits)

        def is_done() -> bool:
            while len(self._unfinished - self._decoding) < PROMPTS_AHEAD:
                self._add(self._tokens(tokens), 1)
            steps = self._beside_steps(group)
            saturated = [step.step_ms for step, is_saturated in steps if is_saturated]
            is_long = len(saturated) >= BESIDE_STEPS and sum(saturated) >= window_ms
            return is_long or len(steps) >= MOST_BESIDE_STEPS

        self._step_until(is_done, f"group {group} beside prefill")
        steps = self._beside_steps(group)
        places = [place for place, (_, is_saturated) in enumerate(steps) if is_saturated]
        if len(places) >= BESIDE_STEPS:  # else the lane is too fast to be saturated: as it is
            steps = steps[places[0] : places[-1] + 1]
            beside = [step for step, is_saturated in steps if is_saturated]
        else:
            beside = [step for step, _ in steps if step.kind is Kind.BESIDE]
        batch, context_tokens, itl_ms = _middle(beside)
        work, ms = sum(step.prefill_work for step, _ in steps), sum(step.step_ms for step, _ in steps)
        rate = max(work / ms * 1e3, CUT_OFF)
        return BesideSample(group, number, batch, context_tokens, tokens, itl_ms, rate, alone_ms)

    def _beside_steps(self, group: int) -> list[tuple[Observation, bool]]:
        """Steps since the group is in use, but the first ones, in which layers of another may have run.

        A step with nothing in the lane counts: a lane that runs dry is slower for it.
        """
        noted = zip(self._recorder.steps, self._recorder.saturated, strict=True)
        found = [
            (step, is_saturated and step.kind is Kind.BESIDE)
            for step, is_saturated in noted
            if step.kind is Kind.DECODE or (step.kind is Kind.BESIDE and step.group == group)
        ]
        first = next((place for place, (step, _) in enumerate(found) if step.kind is Kind.BESIDE), len(found))
        return found[first + SETTLE_STEPS :]

    # --- the engine ------------------------------------------------------------------------------------------------

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Our policy in the place of the engine's; afterwards no request and nothing in the prefix cache is left."""
        scheduler = self._scheduler
        if scheduler.requests:
            raise CalibrationError(f"the engine serves {len(scheduler.requests)} requests: calibrate when it is idle")
        before = scheduler._pdmux_policy, scheduler._observer, scheduler._prompt_work
        scheduler._pdmux_policy, scheduler._observer = self._recorder, RecordingObserver(self._recorder)
        scheduler._prompt_work = PromptWork()
        try:
            yield
        finally:
            try:
                self._stop()
            finally:
                scheduler._pdmux_policy, scheduler._observer, scheduler._prompt_work = before
                # Blocks that were made reusable hold KV of nothing.
                if not scheduler.reset_prefix_cache():
                    raise CalibrationError("the prefix cache could not be emptied: start the engine again")

    def _make_reusable(self, tokens: list[int]) -> None:
        """Put whole blocks of these tokens in the prefix cache without computing them: what is in a block does not
        change how long it takes to read, and half a million tokens of context would take 15 s to prefill."""
        if len(tokens) < self._limits.block_tokens:
            return
        request = Request(
            request_id=self._name(),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self._core.request_block_hasher,
        )
        manager = self._scheduler.kv_cache_manager
        if manager.allocate_slots(request, len(tokens)) is None:
            raise CalibrationError(
                f"the KV cache of {self._limits.kv_tokens} tokens has no room for {len(tokens)} more: "
                "raise gpu_memory_utilization"
            )
        manager.free(request)

    def _add(self, prompt: list[int], answer_tokens: int) -> str:
        name = self._name()
        params = SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        self._unfinished.add(name)
        return name

    def _name(self) -> str:
        self._count += 1
        return f"calibrate{self._count}"

    def _tokens(self, count: int) -> list[int]:
        first = min(FIRST_TOKEN, self._vocabulary - 1)
        return self._random.choices(range(first, self._vocabulary), k=count)

    def _renew(self, load: DecodeLoad, steps: int) -> None:
        """Start the load again where its requests would reach the longest context within so many steps."""
        used = max((step.context_tokens // load.batch for step in self._recorder.steps[-SETTLE_STEPS:]), default=0)
        if self._decoding <= self._unfinished and used + steps + SETTLE_STEPS < self._limits.max_model_len:
            return
        self._stop()
        self._start(load)

    def _step_until(self, is_done: Callable[[], bool], what: str) -> None:
        for _ in range(STUCK_STEPS):
            if is_done():
                return
            for output in self._engine.step():
                if output.finished:
                    self._unfinished.discard(output.request_id)
        raise CalibrationError(f"{what} was not done after {STUCK_STEPS} steps: report this as a bug")

    def _stop(self) -> None:
        """End what is unfinished, and let the workers know."""
        self._engine.abort_request(list(self._unfinished))
        self._unfinished.clear()
        for _ in range(STUCK_STEPS):
            if not self._scheduler.has_requests():
                break
            self._engine.step()
        for _ in range(STEPS_IN_FLIGHT):
            self._engine.step()


def _middle(steps: list[Observation]) -> tuple[int, int, float]:
    """(requests decoding, context tokens, ms), the medians."""
    if not steps:
        raise CalibrationError("no step could be measured: raise max_model_len")
    batch = round(statistics.median(step.decode_batch for step in steps))
    context_tokens = round(statistics.median(step.context_tokens for step in steps))
    return batch, context_tokens, statistics.median(step.step_ms for step in steps)
