# SPDX-License-Identifier: Apache-2.0
"""One of vLLM's statistics loggers, which shows our metrics; and how it gets among vLLM's own."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.metrics import loggers

from vllm_pdmux import activation
from vllm_pdmux.metrics import offline
from vllm_pdmux.metrics.definitions import group_labels, metrics
from vllm_pdmux.metrics.exported import Exported
from vllm_pdmux.metrics.log_line import log_line
from vllm_pdmux.metrics.wire import take

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.reader import Metric
    from vllm.v1.metrics.stats import SchedulerStats

logger = init_logger("vllm.pdmux.metrics")

_OURS = "pdmux_stock"  # on what replaces the stock method


class PDMuxStatLogger(loggers.AggregateStatLoggerBase):
    """Takes our values out of the statistics and shows them. First among the loggers, so that no other sees them.

    `has_log_line`: where vLLM writes its own line.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int], has_log_line: bool = True):
        settings = activation.settings_of(vllm_config)
        is_gpu = vllm_config.device_config.device_type == "cuda"
        is_partitioned = is_gpu and settings.backend not in ("streams", "serial")
        self._label_texts = group_labels(settings.manual_divisions, settings.sharing, is_partitioned)
        shown = metrics(settings.sm_group_num - 2, settings.policy == "slo")
        model_name = vllm_config.model_config.served_model_name
        self._exported = Exported(shown, model_name, engine_indexes, self._label_texts)
        self._has_log_line = has_log_line
        self._latest: dict[int, dict[str, int]] = {}  # by engine
        self._logged: dict[int, dict[str, int]] = {}

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None and (values := take(scheduler_stats)):
            self._exported.set(engine_idx, values)
            self._latest[engine_idx] = values

    def log(self) -> None:
        if not self._has_log_line:
            return
        for engine, values in self._latest.items():
            if line := log_line(self._logged.get(engine, {}), values, self._label_texts):
                logger.info("Engine %03d: PD-multiplexing %s", engine, line)
            self._logged[engine] = values

    def pdmux_metrics(self) -> list[Metric]:
        """What is shown, for ``LLM.get_metrics()``."""
        return offline.read(self._exported.families)

    def log_engine_initialized(self) -> None:
        """Nothing to say: the scheduler does."""


def install() -> None:
    """Let every manager of statistics for an engine of ours have our logger. Safe to call again.

    What: wraps ``StatLoggerManager.__init__``, which both kinds of front end call when they keep statistics.
    Why: vLLM's entry point for loggers, ``vllm.stat_logger_plugins``, turns statistics on in every engine of an
    environment in which such a plugin is merely installed.
    To be deleted when an entry point leaves ``--disable-log-stats`` alone.
    """
    manager = loggers.StatLoggerManager
    stock = manager.__init__
    if hasattr(stock, _OURS):
        return

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        given = inspect.signature(stock).bind(self, *args, **kwargs)
        given.apply_defaults()
        vllm_config = given.arguments["vllm_config"]
        if activation.is_active(vllm_config):
            # As vLLM has it: several API servers would each log a part.
            has_log_line = given.arguments["enable_default_loggers"] and given.arguments["client_count"] == 1
            offline.install()
            self.stat_loggers.insert(0, PDMuxStatLogger(vllm_config, self.engine_indexes, has_log_line))

    setattr(init, _OURS, stock)
    manager.__init__ = init
