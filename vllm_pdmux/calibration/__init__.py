# SPDX-License-Identifier: Apache-2.0
"""Calibration: how long steps take on this device with this model, measured, fitted, checked and kept.

`samples` is what was measured, `measure` measures it on a real engine, `fit` makes a profile of it and says how wrong
that is, `identity` says for which engines it holds, `cache` keeps it, and `chosen` finds the one that an engine uses.
"""


class CalibrationError(ValueError):
    """Calibration cannot be done or used; the message names what is wrong, the limit and the remedy."""
