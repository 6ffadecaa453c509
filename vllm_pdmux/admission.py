# SPDX-License-Identifier: Apache-2.0
"""When the next batch enters the prefill lane, by the pace that the lane has had lately."""

from __future__ import annotations

# The next batch is admitted behind one of which this share of the layers is launched, or earlier if the rest of them
# does not last for the steps that an order takes to get to the device (two may be queued before it).
LAYERS_BEFORE_NEXT, STEPS_BEFORE_NEXT = 0.5, 3
FORGET = 0.8  # what is kept in a step of the most layers that were launched in one


class Admission:
    """Of one lane. `max_batches`: in it at a time. `most_tokens`: of a batch; None: as many as stock vLLM's step."""

    def __init__(self, model_layers: int, max_batches: int, most_tokens: int | None):
        self._model_layers = model_layers
        self.max_batches, self.most_tokens = max_batches, most_tokens
        self._layers_per_step = 0.0  # at most, in the last steps

    def launched(self, layers: int) -> None:
        """So many in a step beside decode."""
        if layers:
            self._layers_per_step = max(layers, self._layers_per_step * FORGET)

    def is_time(self, layers_launched: int) -> bool:
        """Whether the batch behind one of which so many layers are launched should be admitted: late, so that it takes
        all that has arrived, yet before the lane runs dry."""
        early = self._model_layers - STEPS_BEFORE_NEXT * self._layers_per_step
        return layers_launched >= min(early, self._model_layers * LAYERS_BEFORE_NEXT)
