# SPDX-License-Identifier: Apache-2.0
"""Whether the batch in the lane is about to end, so that a decode step is worth waiting for it.

Under asynchronous scheduling a step is scheduled while the one before it runs. A batch that ends during that one would
see its requests decode in the step after the next: their second token would come two steps after the first. So where
the end is near the next step is not scheduled ahead, but when it is known. All that decode wait for the host for once.
"""

from __future__ import annotations

from collections import deque

from vllm_pdmux.messages import LaneReport

PACE_STEPS = 4  # of so many last steps the mean of the layers that the device begins in one
# What is left of a batch when no layer is left to begin, in layers: the half of one that runs, logits and sampling.
REST_LAYERS = 0.75


class EndInSight:
    """What reports say of the device's queue. Of a device without one, or before its pace is known: nothing is near."""

    def __init__(self) -> None:
        self._begun = 0  # layers, by the last report of a step
        self._paces: deque[int] = deque(maxlen=PACE_STEPS)
        self._ending: tuple[int, int] | None = None

    def reported(self, report: LaneReport, is_decode_step: bool) -> None:
        """A step has come back: with something decoding, or one that left decode out."""
        self._ending = report.ending
        if not is_decode_step:
            return
        begun, self._begun = report.begun_layers - self._begun, report.begun_layers
        if report.is_saturated and begun > 0:
            self._paces.append(begun)

    def is_near(self, batch_id: int) -> bool:
        """Whether this batch, the first in the lane, is expected to end during the step that is under way."""
        if self._ending is None or self._ending[0] != batch_id or not self._paces:
            return False
        return self._ending[1] + REST_LAYERS <= sum(self._paces) / len(self._paces)
