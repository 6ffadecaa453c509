# SPDX-License-Identifier: Apache-2.0
"""The metrics as prometheus_client has them, in one front end."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from vllm_pdmux.metrics.definitions import SUM, Metric
from vllm_pdmux.metrics.histogram import add

_registered: list[Any] = []  # by the last engine of this process


class Exported:
    """Counters, gauges and histograms with vLLM's labels, and ours where a metric has one.

    An engine's metrics replace those of the engine before it in the same process, as vLLM's own do.
    """

    def __init__(
        self, metrics: Sequence[Metric], model_name: str, engines: Sequence[int], label_texts: Mapping[str, str]
    ):
        while _registered:
            with contextlib.suppress(KeyError):  # someone else has unregistered it
                REGISTRY.unregister(_registered.pop())
        self._children: dict[tuple[int, str], Any] = {}
        self._families: dict[str, tuple[Metric, Any]] = {}
        self._label_texts, self._model_name = label_texts, model_name
        self._last: dict[int, dict[str, int]] = {engine: {} for engine in engines}
        for metric in metrics:
            label_names = ["model_name", "engine", *([metric.label] if metric.label else [])]
            if metric.is_gauge:
                family = Gauge(metric.name, metric.help, label_names, multiprocess_mode="mostrecent")
            elif metric.buckets:
                family = Histogram(metric.name, metric.help, label_names, buckets=metric.buckets)
            else:
                family = Counter(metric.name, metric.help, label_names)
            _registered.append(family)
            self._families[metric.name] = metric, family
            for engine in engines:
                for series in metric.series():  # so that what has not happened yet is shown as 0
                    self._child(engine, metric, series)

    @property
    def families(self) -> list[tuple[Metric, Any]]:
        """Each metric, and prometheus_client's object for it."""
        return list(self._families.values())

    def set(self, engine: int, values: Mapping[str, int]) -> None:
        """Show `values`, which are cumulative where they count. What has not been counted yet may be left out."""
        last = self._last.setdefault(engine, {})
        if not last.keys() <= values.keys():
            last.clear()  # an engine that has begun again
        for key, value in values.items():
            if value == last.get(key):
                continue  # most of them, after every step
            if (found := self._families.get(key.partition("/")[0])) is None:
                continue  # of an engine that knows more metrics than this process
            metric, before = found[0], last.get(key, 0)
            # As prometheus does: a counter that fell has begun again.
            new = value - before if value >= before else value
            if metric.is_gauge:
                self._child(engine, metric, key).set(value)
            elif metric.buckets:
                series, _, part = key.rpartition("/")
                add(self._child(engine, metric, series), part, new * metric.unit if part == SUM else new)
            else:
                self._child(engine, metric, key).inc(new * metric.unit)
            last[key] = value

    def _child(self, engine: int, metric: Metric, series: str) -> Any:
        child = self._children.get((engine, series))
        if child is None:
            value = series.partition("/")[2]
            text = self._label_texts.get(value, value) if metric.label == "group" else value
            own = [text] if metric.label else []
            family = self._families[metric.name][1]
            child = self._children[engine, series] = family.labels(self._model_name, str(engine), *own)
        return child
