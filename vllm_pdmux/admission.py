# SPDX-License-Identifier: Apache-2.0
"""When the next batch enters the prefill lane and how large it may be, by the pace that the lane has had lately."""

from __future__ import annotations

from collections.abc import Iterable

# The next batch is admitted behind one of which this share of the layers is launched, or earlier if the rest of them
# does not last for the steps that an order takes to get to the device (two may be queued before it).
LAYERS_BEFORE_NEXT, STEPS_BEFORE_NEXT = 0.5, 3
# All prompts of a batch have their first token when it ends. So prompts share one only until it has enough tokens to
# keep the device busy, and lasts for enough steps that the one behind it can be admitted in time.
SHORTEST_BATCH_TOKENS, SHORTEST_BATCH_STEPS = 1024, 4
FORGET = 0.8  # what is kept in a step of the most that was launched in one


class Admission:
    """Of one lane. `max_batches`: in it at a time. `most_tokens`: of a batch; None: as many as stock vLLM's step."""

    def __init__(self, model_layers: int, max_batches: int, most_tokens: int | None):
        self._model_layers = model_layers
        self.max_batches, self.most_tokens = max_batches, most_tokens
        self.shortest_tokens = SHORTEST_BATCH_TOKENS
        self._layers_per_step = self._tokens_per_step = 0.0  # at most, in the last steps

    def launched(self, runs: Iterable[tuple[int, int]]) -> None:
        """In a step beside decode: layers, and tokens of the batch that they belong to."""
        runs = list(runs)
        if layers := sum(layers for layers, _ in runs):
            tokens = sum(layers * tokens for layers, tokens in runs) / self._model_layers
            self._layers_per_step = max(layers, self._layers_per_step * FORGET)
            self._tokens_per_step = max(tokens, self._tokens_per_step * FORGET)

    def is_time(self, layers_launched: int) -> bool:
        """Whether the batch behind one of which so many layers are launched should be admitted: late, so that it takes
        all that has arrived, yet before the lane runs dry."""
        early = self._model_layers - STEPS_BEFORE_NEXT * self._layers_per_step
        return layers_launched >= min(early, self._model_layers * LAYERS_BEFORE_NEXT)

    def tokens(self, first_prompt_tokens: int) -> int | None:
        """Of the next batch at most, the first prompt of which has so many left. None: no limit but stock vLLM's."""
        if self.max_batches == 1:  # the lane is empty between two batches, so they should be few
            return self.most_tokens
        steps_tokens = int(SHORTEST_BATCH_STEPS * self._tokens_per_step)
        enough = max(first_prompt_tokens, self.shortest_tokens, steps_tokens)
        return enough if self.most_tokens is None else min(enough, self.most_tokens)
