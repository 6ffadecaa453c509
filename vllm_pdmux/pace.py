# SPDX-License-Identifier: Apache-2.0
"""How many layers several GPUs launch in a step, decided once.

One GPU launches what keeps it busy, by looking at its own queue. Several would look at different moments and launch
different layers, and then wait in collectives for each other in another order. So the scheduler counts for all of them,
from what the rank whose outputs it gets has said of its queue, a step or two later.
"""

from __future__ import annotations

from vllm_pdmux.messages import LaneReport

# An order and its report are under way for three steps, and the device begins layers during the next one too: so many
# steps' layers must be ordered already.
STEPS_UNDER_WAY = 4
FIRST_WINDOW, MARGIN, LONGEST_WINDOW = 4, 2, 48  # layers


class Pace:
    """A window: so many layers may be ordered that the device is not known to have begun."""

    def __init__(self) -> None:
        self._window = FIRST_WINDOW
        self._ordered = 0  # in steps that have not been reported
        self._queued = 0  # when the last report was made
        self._is_short = False  # whether more layers were wanted than the window had room for

    def layers(self, wanted: int, is_first: bool) -> int:
        """How many of `wanted` layers to order now; one at least where they are the first of a batch."""
        room = max(self._window - self._ordered - self._queued, int(is_first))
        layers = min(wanted, room)
        self._is_short = layers < wanted
        self._ordered += layers
        return layers

    def reported(self, ordered: int, report: LaneReport | None) -> None:
        """The step that ordered so many layers has come back; None: there was nothing to launch."""
        self._ordered -= ordered
        if report is None:
            self._queued = 0
            return
        begun = max(0, self._queued + report.launched_layers - report.lead_layers)
        self._queued = report.lead_layers
        if self._is_short and not report.is_saturated:
            self._window += self._window // 2  # how many more it would have begun is not known
        else:
            needed = begun * STEPS_UNDER_WAY + MARGIN
            self._window = needed if needed > self._window else self._window - (self._window > FIRST_WINDOW)
        self._window = min(self._window, LONGEST_WINDOW)
