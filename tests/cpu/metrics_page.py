# SPDX-License-Identifier: Apache-2.0
"""Reads the plugin's metrics from a page of ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

PREFIX = "vllm_pdmux:"
VLLM_LABELS = ("engine", "model_name")


@dataclass
class Shown:
    """A histogram; `buckets` by their upper bound as it is written, each with those below it."""

    buckets: dict[str, float] = field(default_factory=dict)
    count: float | None = None
    sum: float | None = None


class Page:
    """What a page says of the plugin, by name without prefix and by the value of the metric's own label ("": none).

    `engine`: the one of several whose values these are.
    """

    def __init__(self, text: str, engine: int | None = None):
        self.values: dict[str, dict[str, float]] = {}
        self.histograms: dict[str, dict[str, Shown]] = {}
        self.types: dict[str, str] = {}
        for family in self._families(text):
            for sample in family.samples:
                if sample.name.endswith("_created") or engine not in (None, int(sample.labels["engine"])):
                    continue
                name = sample.name.removeprefix(PREFIX)
                assert set(VLLM_LABELS) <= set(sample.labels), sample
                own = [value for label, value in sample.labels.items() if label not in (*VLLM_LABELS, "le")]
                assert len(own) <= 1, sample
                if family.type == "histogram":
                    name = family.name.removeprefix(PREFIX)
                    self._add_part(name, "".join(own), sample)
                else:
                    self.values.setdefault(name, {})["".join(own)] = sample.value
                self.types[name] = family.type

    def _add_part(self, name: str, label_value: str, sample: Sample) -> None:
        one = self.histograms.setdefault(name, {}).setdefault(label_value, Shown())
        part = sample.name.removeprefix(f"{PREFIX}{name}_")
        if part == "bucket":
            one.buckets[sample.labels["le"]] = sample.value
        else:
            assert part in ("count", "sum"), sample
            setattr(one, part, sample.value)

    @staticmethod
    def _families(text: str) -> Iterable[Metric]:
        families = text_string_to_metric_families(text)
        return (one for one in families if one.name.startswith(PREFIX) and not one.name.endswith("_created"))

    def of(self, name: str, label_value: str = "") -> float:
        return self.values[name][label_value]

    def assert_whole(self, layers: int) -> None:
        """The relations that hold when the lane is empty and no batch was dropped or failed."""
        ended = self.of("prefill_batches_total", "ended")
        assert ended >= 1 and self.of("prefill_batches_total", "failed") == 0
        assert self.of("prefill_batches_total", "dropped") == 0 and self.of("batches_in_lane") == 0
        assert self.of("prefill_layers_total") == ended * layers
        assert self.of("steps_total", "beside") == sum(self.values["beside_steps_total"].values()) > 0
        assert self.of("steps_total", "decode") > 0 and self.of("steps_total", "prefill") > 0
        seconds = self.values["beside_seconds_total"]
        assert all((seconds[group] > 0) == (steps > 0) for group, steps in self.values["beside_steps_total"].items())
        assert self.of("prefill_tokens_total") >= ended
        assert ended <= self.of("prefill_layer_groups_total") <= self.of("prefill_layers_total")
        assert self.of("dry_seconds_total") <= sum(seconds.values())
        assert sum(self.values["fused_steps_total"].values()) == self.of("steps_total", "fused")
        times = self.histograms["step_seconds"]
        for kind in ("decode", "fused", "beside"):
            counts = list(times[kind].buckets.values())
            assert counts == sorted(counts) and counts[-1] == times[kind].count == self.of("steps_total", kind)
        assert abs(times["beside"].sum - sum(seconds.values())) < 1e-9 + 1e-6 * times["beside"].count
