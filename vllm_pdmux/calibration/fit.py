# SPDX-License-Identifier: Apache-2.0
"""From samples to a profile: least squares on relative errors, with no coefficient below 0; and how wrong it is.

The forms are MuxWise's. A decode step alone: fixed, for each request, for each token of context. A prompt alone: fixed,
for each new token, for each pair of a new token and one that it attends to. Beside each other: for each division, what
the three parts of a decode step are multiplied by, and prefill's pace over its pace alone, which falls with the length
of the decode step. A fused step: what these three parts and the prompt tokens are multiplied by.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TypeVar

import numpy

from vllm_pdmux.calibration import CalibrationError
from vllm_pdmux.calibration.samples import BesideSample, DecodeSample, FusedSample, PrefillSample, Samples
from vllm_pdmux.policy import Mix
from vllm_pdmux.quantile import quantile
from vllm_pdmux.simulator import DeviceProfile, GroupProfile

# Of relative errors: how much a division's single numbers are kept near their mean where few loads were measured.
SHRINKAGE = 0.02
# Without measured fused steps: the sum of both lanes.
FUSED_PARTS, FUSED_PROMPT = (1.0, 1.0, 1.0), 1.0
# On points held out: what is further off is not to be used.
MEDIAN_LIMIT, P95_LIMIT = 0.10, 0.25
SMALLEST_MS = 1e-9  # instead of 0 where a profile has none

FUSED_KIND = "fused step"
DECODE_KIND = "decode alone"
KINDS = (DECODE_KIND, "prefill alone", "decode beside prefill", "prefill beside decode", FUSED_KIND)


@dataclass(frozen=True)
class Errors:
    """Sizes of relative errors of one kind."""

    median: float
    p95: float
    max: float
    points: int


def fit(samples: Samples, name: str, pair_ms: float | None = None) -> DeviceProfile:
    """The profile that fits `samples` best. Raises CalibrationError when they cannot make one.

    `pair_ms`: what a pair of tokens takes, where prompts of one length alone were measured, which cannot tell.
    """
    _check(samples)
    columns = [(1.0, float(one.batch), float(one.context_tokens)) for one in samples.decode]
    fixed, per_request, per_token = nonnegative(columns, [one.ms for one in samples.decode])
    prefill_fixed, per_new_token, per_pair = _prefill(samples.prefill, pair_ms)
    profile = DeviceProfile(
        name=name,
        decode_fixed_ms=max(fixed, SMALLEST_MS),
        decode_ms_per_request=per_request,
        decode_ms_per_context_token=per_token,
        prefill_fixed_ms=prefill_fixed,
        prefill_ms_per_token=max(per_new_token, SMALLEST_MS),
        prefill_ms_per_token_pair=per_pair,
        fused_parts=FUSED_PARTS,
        fused_prompt=FUSED_PROMPT,
        kv_tokens=samples.kv_tokens,
        groups=(),
    )
    if samples.fused:
        profile = profile.model_copy(update=_fused(profile, samples.fused))
    groups = tuple(_group(profile, samples, number) for number in range(1, len(samples.divisions) + 1))
    return profile.model_copy(update={"groups": groups})


def errors(profile: DeviceProfile, samples: Samples) -> dict[str, Errors]:
    """How far the profile is off the samples, for each kind of which there are any."""
    groups = profile.groups
    found = {
        KINDS[0]: [_off(profile.decode_ms(one.batch, one.context_tokens), one.ms) for one in samples.decode],
        KINDS[1]: [_off(_prompt_ms(profile, one.new_tokens, one.reused_tokens), one.ms) for one in samples.prefill],
        KINDS[2]: [_off(_beside_ms(profile, groups[one.group - 1], one), one.itl_p50_ms) for one in samples.beside],
        KINDS[3]: [
            _off(
                _alone_tokens_per_s(profile, one) * profile.pace(groups[one.group - 1], one.batch, one.context_tokens),
                one.prefill_tokens_per_s,
            )
            for one in samples.beside
        ],
        KINDS[4]: _fused_errors(profile, samples.fused),
    }
    return {kind: _summary(values) for kind, values in found.items() if values}


def held_out_errors(samples: Samples) -> dict[str, Errors]:
    """Errors on points that a fit to the others has not seen; of a kind with too few for that, on all of them."""
    seen, unseen = split(samples)
    return {**errors(fit(samples, "all"), samples), **errors(fit(seen, "held out"), unseen)}


def too_large(found: Mapping[str, Errors]) -> list[str]:
    """The errors for which a calibration is not to be used, each with value, limit and remedy."""
    problems = []
    for kind, error in found.items():
        for what, value, limit in (("median", error.median, MEDIAN_LIMIT), ("p95", error.p95, P95_LIMIT)):
            if value > limit:
                problems.append(
                    f"the {what} error of {kind} is {value:.1%} but must be at most {limit:.0%}: "
                    "calibrate again when nothing else uses the device, with --max-model-len 4096 or more"
                )
    return problems


def usable(samples: Samples) -> tuple[Samples, dict[str, Errors], list[str]]:
    """(samples, their errors, what was left out and why): fused steps are left out where they are predicted badly.

    A policy can do without them: it then believes the cautious sum of both lanes and learns the rest while serving.
    """
    found = held_out_errors(samples)
    fused = {kind: error for kind, error in found.items() if kind == FUSED_KIND}
    problems = too_large(fused)
    if not problems:
        return samples, found, []
    return replace(samples, fused=()), {kind: found[kind] for kind in found if kind not in fused}, problems


def split(samples: Samples) -> tuple[Samples, Samples]:
    """(points to fit, points held out): of each kind, by time, every third one between the first and the last."""
    decode, decode_out = _every_third(samples.decode, lambda one: one.ms)
    prefill, prefill_out = _every_third(samples.prefill, lambda one: one.ms)
    beside, beside_out = _unseen_loads(samples.beside)
    fused, fused_out = _every_third(samples.fused, lambda one: one.ms)
    return (
        replace(samples, decode=decode, prefill=prefill, beside=beside, fused=fused),
        replace(samples, decode=decode_out, prefill=prefill_out, beside=beside_out, fused=fused_out),
    )


def nonnegative(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients >= 0 with the least squares of *relative* errors. Exact: tries which of the few are 0."""
    wanted = numpy.array(values, dtype=float)
    matrix = numpy.array(columns, dtype=float) / wanted[:, None]
    ones = numpy.ones(len(wanted))
    return _nonnegative(matrix, ones)


# --- parts of a profile -----------------------------------------------------------------------------------------------


def _nonnegative(matrix: Any, values: Any) -> list[float]:
    width = matrix.shape[1]
    scale = numpy.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    best, least = [0.0] * width, float(values @ values)
    for count in range(1, width + 1):
        for chosen in map(list, combinations(range(width), count)):
            part = matrix[:, chosen] / scale[chosen]
            found = numpy.linalg.lstsq(part, values, rcond=None)[0]
            rest = values - part @ found
            if (found >= 0).all() and float(rest @ rest) < least - 1e-15:
                least = float(rest @ rest)
                best = [0.0] * width
                for place, value in zip(chosen, found / scale[chosen], strict=True):
                    best[place] = float(value)
    return best


def _prefill(samples: Sequence[PrefillSample], pair_ms: float | None) -> tuple[float, float, float]:
    """Fixed, per new token, per pair."""
    pairs = [_pairs(one.new_tokens, one.reused_tokens) for one in samples]
    if pair_ms is not None:
        rest = [(one.ms - pair_ms * pair) / one.new_tokens for one, pair in zip(samples, pairs, strict=True)]
        return 0.0, statistics.median(rest), pair_ms
    columns = [(1.0, float(one.new_tokens), pair) for one, pair in zip(samples, pairs, strict=True)]
    fixed, per_token, per_pair = nonnegative(columns, [one.ms for one in samples])
    return fixed, per_token, per_pair


def _pairs(new_tokens: int, reused_tokens: int) -> float:
    return new_tokens * (reused_tokens + new_tokens / 2)


def _prompt_ms(profile: DeviceProfile, new_tokens: int, reused_tokens: int) -> float:
    return profile.prefill_fixed_ms + profile.prefill_ms(new_tokens, reused_tokens)


def _alone_tokens_per_s(profile: DeviceProfile, one: BesideSample) -> float:
    """Without what is fixed, as the simulator and the policy count a lane's work."""
    return one.prompt_tokens / profile.prefill_ms(one.prompt_tokens, 0) * 1e3


def _alone_ms(profile: DeviceProfile, one: BesideSample | FusedSample) -> float:
    return one.alone_ms or profile.decode_ms(one.batch, one.context_tokens)


def _beside_ms(profile: DeviceProfile, group: GroupProfile, one: BesideSample) -> float:
    alone_ms = profile.decode_ms(one.batch, one.context_tokens)
    return alone_ms * profile.slowdown(group, one.batch, one.context_tokens)


def _group(profile: DeviceProfile, samples: Samples, number: int) -> GroupProfile:
    mine = [one for one in samples.beside if one.group == number]
    slowdowns = [one.itl_p50_ms / _alone_ms(profile, one) for one in mine]
    paces = [one.prefill_tokens_per_s / _alone_tokens_per_s(profile, one) for one in mine]
    slowdown, pace = max(1.0, statistics.mean(slowdowns)), min(1.0, statistics.mean(paces))
    mixes = [profile.mix(one.batch, one.context_tokens) for one in mine]
    # Relative to the means, so that one number for both kinds says how near to them the parts are kept.
    parts = _near(mixes, [value / slowdown for value in slowdowns], (1.0, 1.0, 1.0))
    fixed_part, requests_part, context_part = (max(part * slowdown, SMALLEST_MS) for part in parts)
    line = _near([(1.0, -mix.added) for mix in mixes], [value / pace for value in paces], (1.0, 0.0))
    division = samples.divisions[number - 1]
    return GroupProfile(
        sharing=division.sharing,
        prefill_sms=division.prefill_sms,
        decode_sms=division.decode_sms,
        slowdown=slowdown,
        pace=pace,
        slowdowns=(fixed_part, requests_part, context_part),
        pace_line=(min(max(line[0] * pace, SMALLEST_MS), 1.0), line[1] * pace),
    )


def _near(rows: Sequence[Sequence[float]], values: Sequence[float], usual: Sequence[float]) -> list[float]:
    """Coefficients >= 0 for `values`, relative errors, each pulled a little towards its usual one."""
    wanted = numpy.array(values, dtype=float)
    matrix = numpy.array([list(row) for row in rows], dtype=float) / wanted[:, None]
    width = matrix.shape[1]
    weight = math.sqrt(SHRINKAGE / width)
    whole = numpy.vstack([matrix, weight * numpy.eye(width)])
    return _nonnegative(whole, numpy.concatenate([numpy.ones(len(wanted)), weight * numpy.array(usual)]))


def _fused(profile: DeviceProfile, samples: Sequence[FusedSample]) -> dict[str, Any]:
    """The profile's values for fused steps."""
    rows = [
        (*(share * alone_ms for share in mix), prompt_ms)
        for alone_ms, mix, prompt_ms in (_fused_load(profile, one) for one in samples)
    ]
    *parts, prompt = _near(rows, [one.ms for one in samples], (*FUSED_PARTS, FUSED_PROMPT))
    return {"fused_parts": tuple(parts), "fused_prompt": max(prompt, SMALLEST_MS)}


def _fused_load(profile: DeviceProfile, one: FusedSample) -> tuple[float, Mix, float]:
    """What decode takes alone, its mix, and what the prompt tokens take alone."""
    mix = profile.mix(one.batch, one.context_tokens)
    return _alone_ms(profile, one), mix, profile.prefill_ms(one.chunk_tokens, one.computed_tokens)


def _fused_errors(profile: DeviceProfile, samples: Iterable[FusedSample]) -> list[float]:
    return [_off(profile.fused_ms(*_fused_load(profile, one)), one.ms) for one in samples]


# --- checks and counts ------------------------------------------------------------------------------------------------


def _check(samples: Samples) -> None:
    times = [one.ms for one in samples.decode]
    times += [one.ms for one in samples.prefill]
    times += [one.ms for one in samples.fused]
    times += [value for one in samples.beside for value in (one.itl_p50_ms, one.prefill_tokens_per_s)]
    if not all(math.isfinite(value) and value > 0 for value in times):
        raise CalibrationError("a measured time or rate is not above 0: measure again (calibrate with --force)")
    for what, found in (("decode alone", samples.decode), ("prefill alone", samples.prefill)):
        if not found:
            raise CalibrationError(f"no point of {what} was measured, at least 1 is needed: raise max_model_len")
    missing = {*range(1, len(samples.divisions) + 1)} - {one.group for one in samples.beside}
    if missing:
        groups = ", ".join(map(str, sorted(missing)))
        raise CalibrationError(f"no point was measured beside prefill in group {groups}: raise max_model_len")


def _off(expected: float, measured: float) -> float:
    return abs(expected / measured - 1)


def _summary(values: Sequence[float]) -> Errors:
    return Errors(statistics.median(values), quantile(values, 0.95), max(values), len(values))


_T = TypeVar("_T", DecodeSample, PrefillSample, BesideSample, FusedSample)


def _every_third(points: Sequence[_T], size: Callable[[_T], float]) -> tuple[tuple[_T, ...], tuple[_T, ...]]:
    ordered = sorted(points, key=size)
    out = list(range(1, len(ordered) - 1, 3))
    rest = tuple(one for place, one in enumerate(ordered) if place not in out)
    return rest, tuple(ordered[place] for place in out)


def _unseen_loads(points: Sequence[BesideSample]) -> tuple[tuple[BesideSample, ...], tuple[BesideSample, ...]]:
    """Whole loads are held out, the same for all groups."""
    sizes = {one.load: one.alone_ms or one.itl_p50_ms for one in points}
    ordered = sorted(sizes, key=sizes.__getitem__)
    out = {ordered[place] for place in range(1, len(ordered) - 1, 3)}
    seen = tuple(one for one in points if one.load not in out)
    return seen, tuple(one for one in points if one.load in out)
