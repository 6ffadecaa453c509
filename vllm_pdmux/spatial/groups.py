# SPDX-License-Identifier: Apache-2.0
"""Stream groups: the numbered divisions of a device's SMs between prefill and decode.

The numbering and the automatic split are those of SGLang's PD-multiplexing, so that one file means the same split on
the same GPU in both. They are what is *asked for*: the driver may grant other counts, and those are what is reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# How the lanes of a group share the device: prefill confined and decode on all SMs, or each lane on its own.
CAPPED, DISJOINT = "capped", "disjoint"
# Below this decode is starved whatever the model, so the automatic split never offers it (SGLang's rule).
MIN_AUTOMATIC_DECODE_SMS = 16
# Smallest part and step, in SMs, by major compute capability. Majors above the last use the last: a device newer than
# this table must start, and 8 is the coarsest alignment that any of them asks for.
ALIGNMENT_SMS = {6: (1, 1), 7: (2, 2), 8: (4, 2), 9: (8, 8)}


class SplitError(ValueError):
    """The asked division does not fit the device. One line: the setting, its value, the limit and the remedy."""


@dataclass(frozen=True)
class Group:
    """One division. `min_decode_batch` is the threshold of a manual row, None where the user gave none."""

    index: int
    prefill_sms: int
    decode_sms: int
    min_decode_batch: int | None
    sharing: str = CAPPED


class SplitSettings(Protocol):
    """What `stream_groups` reads of a configuration; rows are (prefill_sms, decode_sms, min_decode_batch)."""

    @property
    def sm_group_num(self) -> int: ...

    @property
    def manual_divisions(self) -> Sequence[tuple[int, int, int]]: ...

    @property
    def sharing(self) -> str | Sequence[str]:
        """CAPPED or DISJOINT, for all mixed groups or one for each."""


def automatic_split(total_sms: int, compute_capability: tuple[int, int], splits: int) -> tuple[tuple[int, int], ...]:
    """At most `splits` pairs (prefill_sms, decode_sms), each summing to `total_sms`, largest prefill share first.

    Prefill has at least half of the device and decode at least 16 SMs. A small device has fewer such pairs than were
    asked for: count what comes back. Raises SplitError when there is none, or below compute capability 6.0.
    """
    smallest_sms, step_sms = _alignment_sms(compute_capability)
    candidates = [
        prefill_sms
        for prefill_sms in range(smallest_sms, total_sms - smallest_sms + 1, step_sms)
        if prefill_sms >= total_sms - prefill_sms >= MIN_AUTOMATIC_DECODE_SMS
    ]
    if not candidates:
        raise SplitError(
            f"sm_group_num asks for {splits} automatic splits, but {total_sms} SMs have none: prefill needs at least "
            f"half in steps of {step_sms} and decode at least {MIN_AUTOMATIC_DECODE_SMS}: give manual_divisions"
        )
    # As SGLang does: an even stride from the smallest share upwards, which may leave the largest shares out.
    stride = max(1, len(candidates) // splits)
    return tuple((sms, total_sms - sms) for sms in reversed(candidates[::stride][:splits]))


def stream_groups(
    config: SplitSettings, total_sms: int, compute_capability: tuple[int, int], *, source: str = "config"
) -> tuple[Group, ...]:
    """Every stream group of this device: 0 is prefill alone, 1..n the mixed rows in order, n+1 decode alone.

    n is the number of manual rows, else of automatic splits, which a small device may have fewer of than
    `sm_group_num - 2`. `source` names where the rows come from ("file x.yml") in the SplitError for rows that do not
    sum to `total_sms`; all of them are in one message.
    """
    rows: tuple[tuple[int, int, int | None], ...]
    if manual := tuple(config.manual_divisions):
        _check_sums(manual, total_sms, source)
        rows = manual
    else:
        pairs = automatic_split(total_sms, compute_capability, config.sm_group_num - 2)
        rows = tuple((prefill_sms, decode_sms, None) for prefill_sms, decode_sms in pairs)
    sharing = [config.sharing] * len(rows) if isinstance(config.sharing, str) else config.sharing
    mixed = (Group(index, *row, sharing[index - 1]) for index, row in enumerate(rows, start=1))
    return (Group(0, total_sms, 0, None), *mixed, Group(len(rows) + 1, 0, total_sms, None))


def _alignment_sms(compute_capability: tuple[int, int]) -> tuple[int, int]:
    major, minor = compute_capability
    if major < min(ALIGNMENT_SMS):
        raise SplitError(
            f"compute capability {major}.{minor} is below {min(ALIGNMENT_SMS)}.0, where SMs cannot be split: "
            f"use a newer GPU or disable vllm_pdmux"
        )
    return ALIGNMENT_SMS[min(major, max(ALIGNMENT_SMS))]


def _check_sums(rows: Sequence[tuple[int, int, int]], total_sms: int, source: str) -> None:
    problems = []
    for number, (prefill_sms, decode_sms, threshold) in enumerate(rows, start=1):
        excess_sms = prefill_sms + decode_sms - total_sms
        if not excess_sms:
            continue
        wrong = f"{excess_sms} do not exist" if excess_sms > 0 else f"{-excess_sms} would be left idle"
        problems.append(
            f"manual_divisions row {number} is [{prefill_sms}, {decode_sms}, {threshold}], {prefill_sms + decode_sms} "
            f"SMs, but the device has {total_sms}, so {wrong}: make prefill and decode sum to {total_sms}"
        )
    if problems:
        raise SplitError(f"{source}: {'; '.join(problems)}")
