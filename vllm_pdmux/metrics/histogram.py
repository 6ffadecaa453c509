# SPDX-License-Identifier: Apache-2.0
"""A Prometheus histogram of what was counted in another process."""

from __future__ import annotations

from prometheus_client import Histogram

from vllm_pdmux.metrics.definitions import SUM


def add(child: Histogram, part: str, amount: float) -> None:
    """Add to a part, as in the keys of `definitions`, of a histogram with its labels.

    What: adds to ``_buckets`` or ``_sum``, as ``Histogram.observe`` does.
    Why: that takes values, one by one, which do not travel. A collector of our own, for which prometheus_client has a
    public class, would not be seen where several API servers share a page.
    To be deleted when prometheus_client can add a count to a bucket.
    """
    (child._sum if part == SUM else child._buckets[int(part)]).inc(amount)
