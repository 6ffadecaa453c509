# SPDX-License-Identifier: Apache-2.0
"""What crosses between the scheduler and the worker: one order down and one report up per engine step.

Both ride on vLLM's own messages as one extra attribute, so they need no channel of their own and reach every worker in
the order of the steps.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

_ORDER = "pdmux_order"
_REPORT = "pdmux_report"


@dataclass(frozen=True)
class PrefillOrder:
    """What the prefill lane has to do in one engine step.

    The fields apply in this order: abandon `drop` and `lose`, take `start` into the lane, advance the lane by `layers`.
    With several ranks every one of them does so, and nothing that it launches depends on anything else.
    """

    batch_id: int | None = None  # the last batch in the lane, which `start` belongs to; None: the lane is empty
    layers: int = 0  # at most this many attention layers; with nothing decoding all of them
    start: SchedulerOutput | None = None  # a batch's own step, sent once
    grammar: GrammarOutput | None = None  # bitmask for the first tokens of `start`
    group: int = 0  # stream group of both lanes from this step on; with nothing decoding prefill may have all SMs
    drop: int | None = None  # no batch up to this one may run again: their KV blocks may be reused from this step on
    # As `drop`, but what is queued of them is not waited for: their KV blocks are kept until the lane is back.
    lose: int | None = None
    # The last batch that the scheduler has been told has left the lane, by the one rank whose outputs it gets.
    ended: int = -1

    @property
    def abandoned(self) -> int | None:
        """The last batch of `drop` and `lose`."""
        return max((one for one in (self.drop, self.lose) if one is not None), default=None)


class Run(NamedTuple):
    """Layers [first_layer, end_layer) of a batch that were run in one engine step."""

    batch_id: int
    first_layer: int
    end_layer: int


@dataclass(frozen=True)
class LaneReport:
    """What the prefill lane did in one engine step."""

    batch_id: int  # the first batch that has ended, else one whose layers were run
    runs: tuple[Run, ...] = ()  # one for each batch, in order
    is_saturated: bool = True  # whether there were layers for the device to run during all of the step
    # An asynchronous output is a handle to wait on; it is resolved before the report reaches the scheduler.
    output: ModelRunnerOutput | None = None  # set when the batch has run all its layers and was sampled
    error: str | None = None  # set when the batch raised; its KV is not valid
    lead_layers: int = 0  # that the lane keeps queued ahead of the device; 0: it has no queue
    unconfined_steps: int = 0  # so far: steps of disjoint groups that found no CUDA graph of their size
    stalled_s: float = 0.0  # the lane is given up after so many seconds without progress, with all that is in it
    back: int | None = None  # nothing runs any more of the lost batches up to this one

    @property
    def layers(self) -> tuple[int, int]:
        """Of the report's batch: the first layer and the end of those that were run in this step."""
        return next(((run.first_layer, run.end_layer) for run in self.runs if run.batch_id == self.batch_id), (0, 0))

    @property
    def launched_layers(self) -> int:
        """Of all batches, in this step."""
        return sum(run.end_layer - run.first_layer for run in self.runs)

    @property
    def ended(self) -> bool:
        """Whether the batch has left the lane."""
        return self.output is not None or self.error is not None

    @property
    def is_of_layers(self) -> bool:
        """Whether there were layers in this step; else it is about the lane alone."""
        return self.ended or not (self.stalled_s or self.back is not None)


def attach_order(output: SchedulerOutput, order: PrefillOrder) -> SchedulerOutput:
    """Put `order` on the step `output` and return it."""
    setattr(output, _ORDER, order)
    return output


def order_of(output: SchedulerOutput) -> PrefillOrder | None:
    """The order on a step; None when it comes from a scheduler that is not ours."""
    return getattr(output, _ORDER, None)


def attach_report(output: ModelRunnerOutput, report: LaneReport) -> ModelRunnerOutput:
    """A copy of `output` with `report` on it. A copy, since vLLM shares one object for all empty outputs."""
    output = copy.copy(output)
    setattr(output, _REPORT, report)
    return output


def report_of(output: ModelRunnerOutput) -> LaneReport | None:
    """The report on a step's output; None when the lane had nothing to do in it."""
    return getattr(output, _REPORT, None)
