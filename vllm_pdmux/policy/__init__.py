# SPDX-License-Identifier: Apache-2.0
"""Policies: which stream group the two lanes use next, and how many layers the prefill lane advances."""

from vllm_pdmux.policy.estimates import DecodeAlone, Share
from vllm_pdmux.policy.fixed import FixedPolicy
from vllm_pdmux.policy.layers import LayerRule
from vllm_pdmux.policy.off import OffPolicy
from vllm_pdmux.policy.prior import FusedPrior, GroupPrior, Mix, Prior
from vllm_pdmux.policy.slo import SloPolicy
from vllm_pdmux.policy.table import TablePolicy
from vllm_pdmux.policy.target import PREFILL_WAIT_LIMIT_MS, Target
from vllm_pdmux.policy.types import (
    ALL_LAYERS,
    LANE_EMPTY,
    MOST_WAITING,
    OFF,
    SOONER,
    Decision,
    Kind,
    Load,
    Observation,
    Policy,
    Prompt,
)
from vllm_pdmux.policy.work import PromptWork

__all__ = [
    "ALL_LAYERS",
    "LANE_EMPTY",
    "MOST_WAITING",
    "OFF",
    "PREFILL_WAIT_LIMIT_MS",
    "SOONER",
    "Decision",
    "DecodeAlone",
    "FixedPolicy",
    "FusedPrior",
    "GroupPrior",
    "Kind",
    "LayerRule",
    "Load",
    "Mix",
    "Observation",
    "OffPolicy",
    "Policy",
    "Prior",
    "Prompt",
    "PromptWork",
    "Share",
    "SloPolicy",
    "TablePolicy",
    "Target",
]
