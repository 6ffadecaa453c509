# SPDX-License-Identifier: Apache-2.0
"""How much of the CPUs other processes used: on busy CPUs two runs cannot be compared, and the demo says so."""

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal: not idle, not waiting for a disk


class OtherProcesses:
    """Watches from its creation on the CPUs that this process may use."""

    def __init__(self) -> None:
        self._start = self._read()

    def share(self) -> float | None:
        """The share of the CPUs' time that others used since then, 0 to 1. None where the system does not tell."""
        end = self._read()
        if self._start is None or end is None:
            return None
        wall_s, others_s = end[0] - self._start[0], end[1] - self._start[1]
        return min(1.0, max(0.0, others_s / (wall_s * usable_cpus())))

    @staticmethod
    def _read() -> tuple[float, float] | None:
        """(wall clock, CPU time of others) in seconds, each from some start of its own."""
        try:
            busy_s = busy_seconds(_STAT.read_text(), os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK"))
        except (OSError, AttributeError, ValueError, IndexError):
            return None
        own = os.times()
        return time.perf_counter(), busy_s - own.user - own.system


def busy_seconds(stat: str, cpus: set[int], ticks_per_s: int) -> float:
    """Busy time of `cpus` in the text of ``/proc/stat``."""
    names = {f"cpu{number}" for number in cpus}
    rows = [line.split() for line in stat.splitlines() if line.split(maxsplit=1)[0] in names]
    return sum(int(row[1 + index]) for row in rows for index in _BUSY_FIELDS) / ticks_per_s


def usable_cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
