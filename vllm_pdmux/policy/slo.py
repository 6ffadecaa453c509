# SPDX-License-Identifier: Apache-2.0
"""The slo policy: as much prefill as the target for ITL allows.

It begins with what was calibrated (`Prior`), if anything was, and every step that has run corrects what it believes
(`estimates`). A step's ITL in a group is expected to be what
it takes alone, times the group's slowdown, times a tail factor: the target is for the slow steps, not for the median.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_pdmux.policy.deadline import needed_rate
from vllm_pdmux.policy.estimates import Belief, Beside, DecodeAlone, Rate, Share
from vllm_pdmux.policy.fused import FusedSteps
from vllm_pdmux.policy.prior import ALL_FIXED, Mix, Prior
from vllm_pdmux.policy.tail import Tail
from vllm_pdmux.policy.target import DEFAULT_TARGET, Target
from vllm_pdmux.policy.types import ALL_LAYERS, Decision, Kind, Load, Observation, Prompt, decide_alone, why_fused
from vllm_pdmux.policy.work import PromptWork

# While it is not known how fast the groups prefill, a first token is at risk from this share of its target on.
TTFT_AT_RISK = 0.5
# A group is left for a better one only when that is expected to prefill so much faster, and for one with shorter steps
# only when that is fast enough with so much to spare.
WORTH_A_SWITCH, TO_SPARE = 1.05, 1.15
# A new group stays for so many decisions, and the first of its steps, which may have had layers of the old one beside
# them, say nothing of it.
STAY, UNSETTLED = 6, 2
SMALLEST_FUSED_TOKENS = 128
# What it costs to begin with the lane, or to leave it, in steps beside prefill: a batch that is admitted is launched a
# step or two later, and its end is seen half a step after it.
CHANGE_STEPS = 1.5
SHORTEST_STEP_MS = 0.01


class _Choice(NamedTuple):
    group: int
    beliefs: list[Belief]  # of all groups
    is_within: bool  # whether it is expected to meet the target

    @property
    def belief(self) -> Belief:
        return self.beliefs[self.group - 1]


class SloPolicy:
    """Chooses among mixed groups 1..n, one for each of `shares`, and between them and a fused step.

    `paced_by_device`: the worker launches no more layers than keep the device busy (a GPU). Else the policy gives so
    many layers that the step ends in time. `log` is told, once, of a target that no group can meet. With a `prior`
    it need not be given `alone`'s scale, and knows the groups and prefill's rate from the beginning. `graph_tokens`: of
    the largest step of both kinds of tokens that has a CUDA graph; 0: none has.
    """

    observes = fuses = True

    def __init__(
        self,
        shares: Sequence[Share],
        target: Target,
        alone: DecodeAlone,
        paced_by_device: bool,
        log: Callable[[str], None],
        work: PromptWork = PromptWork(),
        prior: Prior | None = None,
        graph_tokens: int = 0,
    ):
        self._shares, self._target = tuple(shares), target
        self._alone = alone if prior is None else DecodeAlone.calibrated(prior.decode_ms)
        self._paced_by_device = paced_by_device
        self._log = log
        self._work = work
        self._beside = Beside(self._shares, prior.groups if prior is not None else ())
        self._full_rate = Rate() if prior is None else Rate.calibrated(prior.full_rate)  # on the whole device
        self._fused = FusedSteps(prior.fused if prior is not None else None, graph_tokens)
        self._tail = Tail()
        self._group: int | None = None  # of the last step with both lanes busy
        self._slowdown = 1.0  # that was expected in this group when it was asked last
        self._mix = ALL_FIXED  # of the decode step that was asked about last
        self._stay = 0  # decisions for which the group stays
        self._unsettled = 0  # steps of a new group that are still to come in which the old one may have run
        self.fused_reason = ""
        self.missed_steps = 0  # steps with prefill, beside or fused, that took longer than the target
        self.infeasible_decisions = 0  # decisions for which nothing was expected to meet the target

    # --- deciding --------------------------------------------------------------------------------------------------

    def decide(self, load: Load) -> Decision:
        """The group with the most prefill whose slow steps too are expected to meet the target.

        Where that is too slow for first tokens to be in time, the least faster one, whose usual steps still meet it: a
        request whose mean time per token keeps its target is served as asked, one whose first token is late is not.
        """
        if alone := decide_alone(load, len(self._shares)):
            return alone
        alone_ms = self._alone.ms(load.decode_batch, load.context_tokens)
        self._mix = self._mix_of(load)
        target_ms = self._target.of(alone_ms, load.oldest_wait_ms)
        choice = self._choose(load, alone_ms, target_ms, self._mix)
        is_asked = target_ms == self._target.of(alone_ms)  # no prompt has waited too long
        if is_asked and (best_ms := self._best_missing(load, alone_ms, target_ms, choice)) is not None:
            self._count_infeasible(best_ms, target_ms)
        group = self._switch_to(choice.group)
        self._slowdown = choice.beliefs[group - 1].slowdown
        return Decision(group, self._layers(load, alone_ms, target_ms))

    def fused_tokens(self, load: Load) -> int:
        """Prompt tokens of a fused step that meets the target, where that prefills faster than the best group."""
        alone_ms = self._alone.ms(load.decode_batch, load.context_tokens)
        full_rate = self._full_rate.value or self._beside.full_rate
        if (
            not self._paced_by_device
            or full_rate is None
            or not alone_ms
            or not load.decode_batch
            or not load.waiting_work
        ):
            return 0
        target_ms, mix = self._target.of(alone_ms, load.oldest_wait_ms), self._mix_of(load)
        step_ms = target_ms / self._fused.tail.factor
        work = self._fused.work(step_ms, alone_ms, mix, full_rate)
        if work < self._needed_rate(load) * step_ms:
            work = self._fused.work(target_ms, alone_ms, mix, full_rate)
        tokens = self._work.tokens(work, load.computed_tokens)
        tokens = self._fused.with_a_graph(tokens, load.decode_batch)
        if tokens < SMALLEST_FUSED_TOKENS:
            return 0
        work = self._work.of(tokens, load.computed_tokens)
        fused_rate = work / self._fused.ms(work, alone_ms, mix, full_rate)
        best = self._choose(load, alone_ms, target_ms, mix).belief
        return tokens if self._is_sooner_fused(load, fused_rate, full_rate, best, alone_ms) else 0

    def _is_sooner_fused(self, load: Load, fused_rate: float, full_rate: float, best: Belief, alone_ms: float) -> bool:
        """Whether fused steps finish the waiting prompts sooner than the best group: faster, or without a change."""
        lane_rate = best.rate if self._beside.knows_a_rate else full_rate
        change_ms = CHANGE_STEPS * best.slowdown * alone_ms
        lane_ms, fused_ms = load.waiting_work / lane_rate, load.waiting_work / fused_rate
        self.fused_reason = why_fused(fused_ms, lane_ms)
        return fused_ms * WORTH_A_SWITCH + change_ms < lane_ms if load.is_lane_busy else fused_ms < lane_ms + change_ms

    def overtakes(self, waiting: Prompt, begun: Prompt) -> bool:
        """By slack, the time that is left until the target for TTFT cannot be kept: the prompt with less goes first.

        But a prompt that will be late anyway goes behind one that need not be.
        """
        rate = self._prefill_rate()
        if self._target.ttft_ms is None or rate is None:
            return False
        slack_of_waiting, slack_of_begun = (
            self._target.ttft_ms - prompt.age_ms - prompt.work / rate for prompt in (waiting, begun)
        )
        if slack_of_waiting < 0 or slack_of_begun < 0:
            return slack_of_begun < 0 <= slack_of_waiting
        return slack_of_waiting < slack_of_begun

    def _prefill_rate(self) -> float | None:
        """Work per ms that a prompt can count on: that of the group in use, if it is known."""
        if self._group is not None and self._beside.knows_a_rate:
            return self._beside.beliefs(self._mix)[self._group - 1].rate
        return self._full_rate.value

    def _needed_rate(self, load: Load) -> float:
        """Work per ms that first tokens need to be in time."""
        if self._beside.knows_a_rate or self._full_rate.value is not None:
            return needed_rate(load, self._target.ttft_ms)
        is_at_risk = self._target.ttft_ms is not None and load.oldest_wait_ms > self._target.ttft_ms * TTFT_AT_RISK
        return math.inf if is_at_risk else 0.0

    def _choose(self, load: Load, alone_ms: float, target_ms: float, mix: Mix) -> _Choice:
        """See `decide`. Where no group meets the target it is the one with the shortest steps."""
        beliefs = self._beside.beliefs(mix)
        safest = min(range(len(beliefs)), key=lambda place: beliefs[place].slowdown)
        if not self._alone.is_known:
            return _Choice(safest + 1, beliefs, True)
        steps_ms = [alone_ms * one.slowdown * one.hope for one in beliefs]
        # Before any group's rate is known, beliefs are relative to the whole device's.
        whole = 1.0 if self._beside.knows_a_rate else self._full_rate.value or 1.0
        rates = [one.rate * whole / one.hope for one in beliefs]
        safe = [place for place, ms in enumerate(steps_ms) if ms * self._tail.factor <= target_ms]
        best = self._fastest(safe, rates, beliefs)
        needed = self._needed_rate(load)
        is_safe = self._place_in_use is None or self._place_in_use in safe
        if needed and (best is None or rates[best] < needed * (1.0 if is_safe else TO_SPARE)):
            usual = [place for place, ms in enumerate(steps_ms) if ms <= target_ms]
            best = self._fast_enough(usual, rates, steps_ms, needed)
        if best is None:
            return _Choice(safest + 1, beliefs, False)
        return _Choice(best + 1, beliefs, True)

    def _fastest(self, places: list[int], rates: list[float], beliefs: list[Belief]) -> int | None:
        """Of these groups the one with the most prefill; the one in use where it is hardly slower."""
        if not places:
            return None
        best = max(places, key=lambda place: (rates[place], -beliefs[place].slowdown))
        in_use = self._place_in_use
        return in_use if in_use in places and rates[best] < WORTH_A_SWITCH * rates[in_use] else best

    def _fast_enough(self, places: list[int], rates: list[float], steps_ms: list[float], needed: float) -> int | None:
        """Of these groups the one with the shortest steps that prefills at `needed`; else the one with the most."""
        enough = [place for place in places if rates[place] >= needed]
        if not enough:
            return max(places, key=lambda place: rates[place], default=None)
        best = min(enough, key=lambda place: steps_ms[place])
        in_use = self._place_in_use
        return in_use if in_use in enough and rates[best] < TO_SPARE * needed else best

    @property
    def _place_in_use(self) -> int | None:
        return None if self._group is None else self._group - 1

    def _mix_of(self, load: Load) -> Mix:
        return self._alone.mix(load.decode_batch, load.context_tokens)

    def _switch_to(self, group: int) -> int:
        """The group of this step: `group`, unless another one was begun a moment ago."""
        if self._stay > 0:
            self._stay -= 1
        elif group != self._group:
            self._group, self._stay, self._unsettled = group, STAY, UNSETTLED
        return self._group or group

    def _layers(self, load: Load, alone_ms: float, target_ms: float) -> int:
        """On a GPU all; else those whose time fits between a decode step alone and a usual one, one at least."""
        if self._paced_by_device:
            return ALL_LAYERS
        rate = self._full_rate.value
        if rate is None or not load.prefill_work or not self._alone.is_known:
            return max(1, load.model_layers // 8)
        # Of a step all but decode is prefill: this is the shortest one with which first tokens are in time.
        needed = self._needed_rate(load)
        needed_ms = alone_ms / (1 - needed / rate) if needed < rate else math.inf
        usual_ms = min(max(target_ms / self._tail.factor, needed_ms), target_ms)
        spare_ms = usual_ms - alone_ms
        return min(max(1, int(spare_ms / _layer_ms(load, rate))), ALL_LAYERS)

    def _best_missing(self, load: Load, alone_ms: float, target_ms: float, choice: _Choice) -> float | None:
        """What slow steps take with the least that can be beside decode, where that is above the target; else None."""
        if self._paced_by_device:
            missing_ms = alone_ms * choice.belief.slowdown * choice.belief.hope * self._tail.factor
            return None if choice.is_within else missing_ms
        rate = self._full_rate.value
        if rate is None or not self._alone.is_known:
            return None
        shortest_ms = (alone_ms + _layer_ms(load, rate)) * self._tail.factor
        return shortest_ms if shortest_ms > target_ms else None

    # --- what it expects, for metrics -------------------------------------------------------------------------------

    def expected_ms(self, step: Observation) -> float | None:
        """What a step beside prefill usually takes, as decided with. None as well where layers of the group before may
        be queued."""
        if step.kind is not Kind.BESIDE or not self._alone.is_known:
            return None
        alone_ms = self._alone.ms(step.decode_batch, step.context_tokens)
        if not self._paced_by_device:
            rate = self._full_rate.value
            return None if rate is None else alone_ms + step.prefill_work / rate
        if step.group != self._group or self._unsettled > 0:
            return None
        return alone_ms * self._slowdown

    def target_ms(self, step: Observation) -> float | None:
        """For ITL, however long prompts have waited. None: it follows from decode alone, of which nothing is known."""
        return self._target.of(self._alone.ms(step.decode_batch, step.context_tokens)) or None

    # --- learning --------------------------------------------------------------------------------------------------

    def observe(self, step: Observation) -> None:
        """Correct what is believed of steps of this kind."""
        if step.step_ms < SHORTEST_STEP_MS:
            return  # a clock that went backwards
        if step.kind is Kind.DECODE:
            self._alone.add(step.decode_batch, step.context_tokens, step.step_ms)
        elif step.kind is Kind.PREFILL:
            self._full_rate.add(step.prefill_work, step.step_ms)
        elif step.kind is Kind.FUSED:
            self._learn_fused(step)
        else:
            self._learn_beside(step)

    def _learn_beside(self, step: Observation) -> None:
        if self._paced_by_device:
            self._learn_group(step)
        elif self._alone.is_known:
            self._learn_in_turns(step)

    def _learn_group(self, step: Observation) -> None:
        mix = self._alone.mix(step.decode_batch, step.context_tokens)
        slowdown = self._beside.slowdown(step.group, mix)
        self._alone.bound(step.decode_batch, step.context_tokens, step.step_ms, slowdown)
        alone_ms = self._count_missed(step)
        if step.group != self._group or self._unsettled > 0:
            self._unsettled -= step.group == self._group
            return  # layers of the group before are still queued
        self._beside.add_decode(step.group, step.step_ms / alone_ms, mix)
        self._beside.add_prefill(step.group, step.prefill_work, step.step_ms, mix)
        self._tail.see(step.step_ms, alone_ms * slowdown)

    def _learn_in_turns(self, step: Observation) -> None:
        """One after the other: what is not decode is prefill."""
        alone_ms = self._count_missed(step)
        if not step.prefill_work or step.step_ms <= alone_ms:
            return
        rate = self._full_rate.value
        expected_ms = alone_ms if rate is None else alone_ms + step.prefill_work / rate
        self._full_rate.add(step.prefill_work, step.step_ms - alone_ms)
        self._tail.see(step.step_ms, expected_ms)

    def _learn_fused(self, step: Observation) -> None:
        rate = self._full_rate.value or self._beside.full_rate
        if rate is None or not self._alone.is_known:
            return
        alone_ms = self._count_missed(step)
        mix = self._alone.mix(step.decode_batch, step.context_tokens)
        self._fused.learn(step.step_ms, step.prefill_work, alone_ms, mix, rate)

    def _count_missed(self, step: Observation) -> float:
        """Count a step that took longer than its target. What its decode takes alone."""
        alone_ms = self._alone.ms(step.decode_batch, step.context_tokens)
        self.missed_steps += step.step_ms > self._target.of(alone_ms)
        return alone_ms

    def _count_infeasible(self, best_ms: float, target_ms: float) -> None:
        if self.infeasible_decisions == 0:
            self._log(self._out_of_reach(math.ceil(best_ms * 10) / 10, target_ms))  # never the target itself
        self.infeasible_decisions += 1

    def _out_of_reach(self, best_ms: float, target_ms: float) -> str:
        serving = f"the best that is expected beside prefill is {best_ms:.1f} ms: serving as near to it as possible"
        least = "a division with fewer SMs for prefill" if self._paced_by_device else "a smaller max_prefill_tokens"
        if self._target.itl_ms is not None:
            return f"itl_slo_ms is {target_ms:.4g} but {serving}; raise it, or give {least}"
        default = f"{DEFAULT_TARGET} x decode alone, {target_ms:.4g} ms"
        return f"itl_slo_ms is not set, so that the target is {default}, but {serving}; set it, or give {least}"


def _layer_ms(load: Load, rate: float) -> float:
    """Of the prefill batch with nothing beside it, where prefill does `rate` work per ms."""
    return max(load.prefill_work / rate / load.model_layers, SHORTEST_STEP_MS)
