# SPDX-License-Identifier: Apache-2.0
"""Policies slo of a device that is as it was calibrated, so that what they choose can be worked out.

A decode step of 10 requests with 30,000 tokens of context takes 10 ms alone, a half of it fixed, and prompts go at 40
tokens per ms. Beside prefill at 30, 20 and 10 tokens per ms it takes 20, 16 and 12 ms; slow steps take 1.15 times as
long at first: 23, 18.4 and 13.8 ms.
"""

from types import SimpleNamespace

from vllm_pdmux.policy import (
    DecodeAlone,
    GroupPrior,
    Kind,
    Load,
    Observation,
    Prior,
    PromptWork,
    Share,
    SloPolicy,
    Target,
)

DECODE_MS = (5.0, 0.2, 0.0001)  # 5 + 2 + 3 ms
STEP = {"decode_batch": 10, "context_tokens": 30_000}
# By the parts of the decode step; in one that is twice as long as its fixed part.
GROUPS = (
    GroupPrior((1.0, 3.0, 3.0), (33.0, 3.0)),
    GroupPrior((1.0, 1.9, 2.4), (21.0, 1.0)),
    GroupPrior((1.0, 1.7, 1.2), (10.0, 0.0)),
)
SHARES = [Share(False, 0.8), Share(False, 0.6), Share(False, 0.4)]
ALONE_MS, FULL_RATE = 10.0, 40.0


def constant(slowdown, rate):
    """A group whatever the mix."""
    return GroupPrior((slowdown, slowdown, slowdown), (rate, 0.0))


def calibrated(itl_ms=None, ttft_ms=None, groups=GROUPS, paced=True, said=None, work=None, fused=None, graph_tokens=0):
    """Given a wrong size of the model, which a calibration makes needless."""
    return SloPolicy(
        SHARES[: len(groups)],
        Target(itl_ms, ttft_ms),
        DecodeAlone(1.0, 0.0),
        paced,
        (said if said is not None else []).append,
        work or PromptWork(),
        Prior(DECODE_MS, FULL_RATE, groups, fused),
        graph_tokens,
    )


def learning(itl_ms=None, ttft_ms=None, shares=SHARES, paced=True, said=None):
    """Without a calibration: it has seen nothing."""
    return SloPolicy(
        shares, Target(itl_ms, ttft_ms), DecodeAlone(1.0, 0.0), paced, (said if said is not None else []).append
    )


def load(**others):
    return Load(**{**STEP, "prefill_tokens": 4096, "model_layers": 32, "prefill_work": 4096.0, **others})


def needing(rate, **others):
    """One first token is to come, and 750 ms are left for it of a target of 1 s."""
    return load(first_tokens=((rate * 750.0, 0.0),), **others)


def beside(step_ms, work=0.0, group=1):
    return Observation(Kind.BESIDE, step_ms, **STEP, prefill_work=work, group=group)


def decode(step_ms=ALONE_MS):
    return Observation(Kind.DECODE, step_ms, **STEP)


def prefill(rate=FULL_RATE):
    return Observation(Kind.PREFILL, 100.0, prefill_work=rate * 100.0)


def fused(step_ms, work=1200.0):
    return Observation(Kind.FUSED, step_ms, **STEP, prefill_work=work)


def chosen(slo, *loads):
    return [slo.decide(one).group for one in loads]


def watched(slo, factor=1.15):
    """What its tail is told of steps, as pairs of what was measured and what was expected; its factor stays."""
    seen = []
    slo._tail = SimpleNamespace(factor=factor, see=lambda *step: seen.append(step))
    return seen
