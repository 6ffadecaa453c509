# SPDX-License-Identifier: Apache-2.0
"""The metrics as prometheus_client has them, in one front end."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge

from vllm_pdmux.metrics.definitions import Metric

_registered: list[Any] = []  # by the last engine of this process


class Exported:
    """Counters and gauges with vLLM's labels, and ours where a metric has one.

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
            else:
                family = Counter(metric.name, metric.help, label_names)
            _registered.append(family)
            self._families[metric.name] = metric, family
            for engine in engines:
                for key in metric.keys():  # so that what has not happened yet is shown as 0
                    self._child(engine, key)

    def set(self, engine: int, values: Mapping[str, int]) -> None:
        """Show `values`, which are cumulative where they count."""
        last = self._last.setdefault(engine, {})
        for key, value in values.items():
            if value == last.get(key):
                continue  # most of them, after every step
            if (found := self._families.get(key.partition("/")[0])) is None:
                continue  # of an engine that knows more metrics than this process
            metric, child = found[0], self._child(engine, key)
            if metric.is_gauge:
                child.set(value)
            else:
                # As prometheus does: a counter that fell has begun again.
                before = last.get(key, 0)
                child.inc((value - before if value >= before else value) * metric.unit)
            last[key] = value

    def _child(self, engine: int, key: str) -> Any:
        child = self._children.get((engine, key))
        if child is None:
            name, _, value = key.partition("/")
            metric, family = self._families[name]
            text = self._label_texts.get(value, value) if metric.label == "group" else value
            own = [text] if metric.label else []
            child = self._children[engine, key] = family.labels(self._model_name, str(engine), *own)
        return child
