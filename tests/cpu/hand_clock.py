# SPDX-License-Identifier: Apache-2.0
"""A clock that is moved by hand."""


class HandClock:
    """Seconds, which pass only when a test says so."""

    now_s = 0.0

    def __call__(self):
        return self.now_s
