# SPDX-License-Identifier: Apache-2.0
"""From the user's settings to the policy. Apart, so that policies know nothing of configuration."""

from collections.abc import Callable

from vllm_pdmux.config import ConfigError, PDMuxConfig
from vllm_pdmux.policy import (
    ALL_LAYERS,
    PREFILL_WAIT_LIMIT_MS,
    DecodeAlone,
    FixedPolicy,
    LayerRule,
    OffPolicy,
    Policy,
    Prior,
    PromptWork,
    Share,
    SloPolicy,
    TablePolicy,
    Target,
)

# 4,096 tokens of an 8B model take 0.6 GiB of activations: with so many in all, the KV cache keeps 0.97 of what it has
# without the plugin on a GPU of 141 GB.
ACTIVATION_TOKENS = 12288
TOKEN_STEP = 512
LARGEST_SHARE = 0.85  # of prefill in an automatic split: 112 of 132 SMs


def build_policy(
    config: PDMuxConfig,
    splits: int,
    paced_by_device: bool = False,
    alone: DecodeAlone | None = None,
    work: PromptWork = PromptWork(),
    log: Callable[[str], None] = print,
    prior: Prior | None = None,
    graph_tokens: int = 0,
) -> Policy:
    """The policy over `splits` mixed groups: those that the device has, which for an automatic split may be fewer than
    `sm_group_num - 2`.

    `paced_by_device`: the worker launches no more layers than keep the device busy, so that without a setting no other
    limit is needed. For policy slo, see there: `prior`, a calibration, and `graph_tokens`. Raises ConfigError when
    `fixed_group` is not among the groups.
    """
    if config.policy == "off":
        return OffPolicy(splits)
    if config.policy == "slo":
        return SloPolicy(
            shares(config, splits),
            target(config),
            alone or DecodeAlone(1.0, 0.0),
            paced_by_device,
            log,
            work,
            prior,
            graph_tokens,
        )
    rule = _layer_rule(config, paced_by_device)
    if config.policy == "table":
        thresholds = tuple(min_decode_batch for _, _, min_decode_batch in config.manual_divisions)
        return TablePolicy(thresholds, splits, config.decode_bs_divisor, rule)
    assert config.fixed_group is not None  # policy fixed needs it
    if config.fixed_group > splits:
        raise ConfigError(
            f"fixed_group is {config.fixed_group} but must be 1 to {splits}, as this device has no more automatic "
            f"splits: lower it or give manual_divisions"
        )
    return FixedPolicy(config.fixed_group, splits, rule)


def target(config: PDMuxConfig) -> Target:
    """What the user asks of policy slo."""
    limit_ms = config.prefill_wait_limit_ms
    limit_ms = PREFILL_WAIT_LIMIT_MS if limit_ms is None else limit_ms
    return Target(config.itl_slo_ms, config.ttft_slo_ms, limit_ms, config.itl_limit_ms)


def shares(config: PDMuxConfig, splits: int) -> tuple[Share, ...]:
    """What each mixed group gives the lanes, as far as the configuration says it."""
    sharing = [config.sharing] * splits if isinstance(config.sharing, str) else config.sharing[:splits]
    if config.manual_divisions:
        parts = [prefill_sms / (prefill_sms + decode_sms) for prefill_sms, decode_sms, _ in config.manual_divisions]
    else:
        # An automatic split of a device whose SMs are not known here: it goes evenly from most of them to half.
        parts = [LARGEST_SHARE - (LARGEST_SHARE - 0.5) * group / splits for group in range(splits)]
    return tuple(Share(kind == "disjoint", part) for kind, part in zip(sharing, parts, strict=True))


def max_prefill_tokens(config: PDMuxConfig, has_streams: bool) -> int | None:
    """New tokens of one prefill batch at most; None: as many as a step of vLLM may have.

    `has_streams`: each split of the device has a stream of its own, for which PyTorch's allocator keeps the activations
    of a batch. Without a setting all streams together have those of ACTIVATION_TOKENS tokens.
    """
    if config.max_prefill_tokens is not None or not has_streams:
        return config.max_prefill_tokens
    if config.policy in ("fixed", "off"):
        streams = 1
    else:
        splits = {decode_sms for _, decode_sms, _ in config.manual_divisions}
        streams = len(splits) or config.sm_group_num - 2
    return max(ACTIVATION_TOKENS // streams // TOKEN_STEP * TOKEN_STEP, TOKEN_STEP)


def _layer_rule(config: PDMuxConfig, paced_by_device: bool) -> LayerRule:
    if config.lane == "serial":  # a lane without a thread cannot stop between layers
        return LayerRule(layers_per_group=ALL_LAYERS)
    if paced_by_device and config.layers_per_group is None and config.split_forward_token_budget is None:
        return LayerRule(layers_per_group=ALL_LAYERS)
    return LayerRule(config.layers_per_group, config.split_forward_token_budget)
