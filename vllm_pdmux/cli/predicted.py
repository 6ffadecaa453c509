# SPDX-License-Identifier: Apache-2.0
"""What a profile says of one load in each group, as it goes on: arrivals and queues are for `simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_pdmux.simulator import DeviceProfile
from vllm_pdmux.spatial import Group


@dataclass(frozen=True)
class Beside:
    """Of one group. None: a lane that does not run there, or a division that the profile does not know."""

    group: int
    itl_ms: float | None  # of a decode step, beside prefill where the group has both
    prefill_ms: float | None  # of the prompt, beside decode where the group has both
    is_known: bool = True


def predictions(
    profile: DeviceProfile, groups: Sequence[Group], decode_batch: int, context_tokens: int, prompt_tokens: int
) -> list[Beside]:
    """For `decode_batch` requests with `context_tokens` each, and a prompt of `prompt_tokens` new tokens."""
    known = {(one.sharing, one.prefill_sms, one.decode_sms): one for one in profile.groups}
    context = decode_batch * context_tokens
    decode_ms = profile.decode_ms(decode_batch, context) if decode_batch else None
    prefill_ms = profile.prefill_fixed_ms + profile.prefill_ms(prompt_tokens, 0) if prompt_tokens else None
    found = []
    for group in groups:
        if not group.decode_sms:
            found.append(Beside(group.index, None, prefill_ms))
        elif not group.prefill_sms:
            found.append(Beside(group.index, decode_ms, None))
        elif (division := known.get((group.sharing, group.prefill_sms, group.decode_sms))) is None:
            found.append(Beside(group.index, None, None, is_known=False))
        elif decode_ms is None:  # nothing decodes: prefill has the whole device
            found.append(Beside(group.index, None, None))
        else:
            slowdown = profile.slowdown(division, decode_batch, context)
            pace = profile.pace(division, decode_batch, context)
            beside_ms = None if prefill_ms is None else prefill_ms / pace
            found.append(Beside(group.index, decode_ms * slowdown if beside_ms else decode_ms, beside_ms))
    return found
