# SPDX-License-Identifier: Apache-2.0
"""A calibration from beginning to end, on an engine that is there already."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm_pdmux.activation import settings_of
from vllm_pdmux.calibration.fit import DECODE_KIND, Errors, fit, too_large, usable
from vllm_pdmux.calibration.identity import describe, key_of
from vllm_pdmux.calibration.measure import Progress, measure, measure_decode_again
from vllm_pdmux.calibration.samples import Samples
from vllm_pdmux.simulator import DeviceProfile


@dataclass(frozen=True)
class Calibration:
    """What was found."""

    key: Mapping[str, Any]
    profile: DeviceProfile  # fitted to all points
    errors: Mapping[str, Errors]  # of a fit to some of them, on the others
    samples: Samples
    measured_s: float
    left_out: tuple[str, ...] = ()  # kinds of steps that are not in the profile, with the reasons

    def details(self) -> dict[str, Any]:
        """For readers of a stored calibration."""
        return {
            "errors": {kind: asdict(error) for kind, error in self.errors.items()},
            "left_out": list(self.left_out),
            "measured_s": round(self.measured_s, 2),
            "samples": asdict(self.samples),
        }


def calibrate(llm: Any, progress: Progress = lambda done, total, what: None) -> Calibration:
    """Measure and fit. `llm`: a ``vllm.LLM`` with the plugin, in this process, serving nothing. Stores nothing.

    Where decode alone would have it refused, some of that is measured once more, which takes a second or two.
    Raises CalibrationError for an engine that cannot be measured.
    """
    config = llm.llm_engine.vllm_config
    key = key_of(config, settings_of(config))
    start = time.perf_counter()
    samples = measure(llm, progress)
    used, errors, left_out = usable(samples)
    if too_large({DECODE_KIND: errors[DECODE_KIND]}):
        samples = measure_decode_again(llm, samples)
        used, errors, left_out = usable(samples)
    measured_s = time.perf_counter() - start
    return Calibration(key, fit(used, describe(key)), errors, samples, measured_s, tuple(left_out))
