# SPDX-License-Identifier: Apache-2.0
"""Quantiles of what was measured."""

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values, in any order, that at least this share (0 to 1) do not exceed. At least one value."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
