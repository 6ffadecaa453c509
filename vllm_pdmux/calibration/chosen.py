# SPDX-License-Identifier: Apache-2.0
"""Which calibration an engine begins with, by the setting `calibration`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_pdmux.calibration import cache
from vllm_pdmux.calibration.identity import describe, divisions, key_of
from vllm_pdmux.calibration.samples import Division
from vllm_pdmux.config import ConfigError, PDMuxConfig
from vllm_pdmux.policy import Prior
from vllm_pdmux.simulator import DeviceProfile, GroupProfile, ProfileError
from vllm_pdmux.simulator.profile import read_profile

if TYPE_CHECKING:
    from vllm.config import VllmConfig

AUTO, OFF = "auto", "off"
TYPICAL_CHUNK_TOKENS = 2048  # over which what is fixed in a prefill is spread


def chosen_profile(
    vllm_config: VllmConfig, settings: PDMuxConfig, say: Callable[[str], None], warn: Callable[[str], None]
) -> DeviceProfile | None:
    """The profile, with the engine's groups in their order; None: none is used. One line says which.

    Raises ConfigError where the setting names a file that cannot be used.
    """
    if settings.calibration == OFF:
        say("calibration: off: learning from serving")
        return None
    if settings.calibration != AUTO:
        profile = named_profile(settings)
        found = with_groups(profile, divisions(settings), settings.calibration)
        say(f"calibration: {profile.name}, from {settings.calibration}")
        return found
    key = key_of(vllm_config, settings)
    cached = cache.load(key, warn)
    if cached is None:
        say(
            f"policy slo has no calibration for {describe(key)}: learning from serving; "
            "`vllm-pdmux calibrate` would make one, once, in some seconds beside the engine's start"
        )
        return None
    say(f"calibration: {cached.name}, from {cache.path_of(key)}")
    return cached


def named_profile(settings: PDMuxConfig) -> DeviceProfile:
    """The file that the setting names. Raises ConfigError."""
    try:
        return read_profile(settings.calibration)
    except ProfileError as error:
        raise ConfigError(f"calibration is {settings.calibration!r} but cannot be used: {error}") from None


def with_groups(profile: DeviceProfile, wanted: Sequence[Division], path: str) -> DeviceProfile:
    """`profile` with these groups, in this order. Raises ConfigError for those that it does not know."""
    known = {(one.sharing, one.prefill_sms, one.decode_sms): one for one in profile.groups}
    found: list[GroupProfile] = []
    missing = []
    for one in wanted:
        group = known.get((one.sharing, one.prefill_sms, one.decode_sms))
        if group is None:
            missing.append(f"{one.sharing} {one.prefill_sms}:{one.decode_sms}")
        else:
            found.append(group)
    if missing:
        has = ", ".join(group.label for group in profile.groups) or "none"
        raise ConfigError(
            f"calibration is {path!r} but its profile has no division {', '.join(missing)} (it has {has}): "
            "give manual_divisions and sharing that it has, or calibrate these (vllm-pdmux calibrate), or set auto"
        )
    return profile.model_copy(update={"groups": tuple(found)})


def prior_of(profile: DeviceProfile, splits: int) -> Prior:
    """What a policy over `splits` mixed groups uses of it, with work as in the profile's `prompt_work`.

    A device with fewer groups than were asked for runs the higher numbers in its last one.
    """
    full_rate = rate_alone(profile)
    groups = [group.prior(1 / profile.prefill_ms_per_token) for group in profile.groups]
    groups += groups[-1:] * (splits - len(groups))
    return Prior(
        decode_ms=(profile.decode_fixed_ms, profile.decode_ms_per_request, profile.decode_ms_per_context_token),
        full_rate=full_rate,
        groups=tuple(groups[:splits]),
        # Of the prompt alone as a policy counts it, with what is fixed spread over its tokens.
        fused=replace(profile.fused, prompt=profile.fused_prompt * full_rate * profile.prefill_ms_per_token),
    )


def rate_alone(profile: DeviceProfile) -> float:
    """Work per ms of a prompt that has the device to itself."""
    work = profile.prompt_work.of(TYPICAL_CHUNK_TOKENS)
    return work / (profile.prefill_fixed_ms + profile.prefill_ms(TYPICAL_CHUNK_TOKENS, 0))
