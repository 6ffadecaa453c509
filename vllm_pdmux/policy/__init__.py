# SPDX-License-Identifier: Apache-2.0
"""Policies: which stream group the two lanes use next, and how many layers the prefill lane advances."""

from vllm_pdmux.policy.fixed import FixedPolicy
from vllm_pdmux.policy.layers import LayerRule
from vllm_pdmux.policy.table import TablePolicy
from vllm_pdmux.policy.types import ALL_LAYERS, Decision, Load, Policy

__all__ = ["ALL_LAYERS", "Decision", "FixedPolicy", "LayerRule", "Load", "Policy", "TablePolicy"]
