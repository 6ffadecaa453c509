# SPDX-License-Identifier: Apache-2.0
"""Our metrics in ``LLM.get_metrics()``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

from vllm.v1.metrics import reader

from vllm_pdmux.metrics.definitions import Metric

_OURS = "pdmux_stock"  # on what replaces the stock method


def read(families: Iterable[tuple[Metric, Any]]) -> list[reader.Metric]:
    """What prometheus_client's `families` show, as vLLM says it of its own: counters without ``_total``."""
    found: list[reader.Metric] = []
    for metric, family in families:
        name = metric.name.removesuffix("_total")
        samples = [sample for collected in family.collect() for sample in collected.samples]
        if metric.buckets:
            found += _histograms(name, samples)
            continue
        for sample in samples:
            if sample.name == metric.name:  # and not the time at which it was created
                is_whole = metric.unit == 1.0
                kind = reader.Gauge if metric.is_gauge else reader.Counter
                found.append(kind(name, sample.labels, int(sample.value) if is_whole else sample.value))
    return found


def _histograms(name: str, samples: list[Any]) -> list[reader.Histogram]:
    by_labels: dict[tuple[str, ...], reader.Histogram] = {}
    for sample in samples:
        labels = {label: text for label, text in sample.labels.items() if label != "le"}
        one = by_labels.setdefault(tuple(labels.values()), reader.Histogram(name, labels, 0, 0.0, {}))
        if sample.name == f"{name}_bucket":
            one.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name == f"{name}_count":
            one.count = int(sample.value)
        elif sample.name == f"{name}_sum":
            one.sum = sample.value
    return list(by_labels.values())


def install() -> None:
    """Let ``LLM.get_metrics()`` of an engine of ours say our metrics too. Safe to call again.

    What: wraps ``LLMEngine.get_metrics``, where that is used.
    Why: it leaves out all whose names do not begin with ``vllm:``.
    To be deleted when it does not.
    """
    module = sys.modules.get("vllm.v1.engine.llm_engine")
    if module is None:  # a server, which has another engine class
        return
    stock = module.LLMEngine.get_metrics
    if hasattr(stock, _OURS):
        return

    @functools.wraps(stock)
    def get_metrics(self: Any) -> list[reader.Metric]:
        found: list[reader.Metric] = stock(self)
        for one in self.logger_manager.stat_loggers:
            if hasattr(one, "pdmux_metrics"):
                found += one.pdmux_metrics()
        return found

    setattr(get_metrics, _OURS, stock)
    module.LLMEngine.get_metrics = get_metrics
