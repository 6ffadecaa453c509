# SPDX-License-Identifier: Apache-2.0
"""A pair of engines, stock and the plugin's, that serve the same requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from driver import Arrival, Driver, Result
from tokens import assert_same


def prepared(engines: Iterable[Driver]) -> Iterator[tuple[Driver, Driver]]:
    """For a fixture: both as new, the plugin's with one layer in a group; nothing is left in it afterwards."""
    stock, pdmux = (driver.fresh() for driver in engines)
    pdmux.set_layers_per_group(1)
    yield stock, pdmux
    pdmux.assert_nothing_left()


def same_tokens(
    both: tuple[Driver, Driver],
    arrivals: list[Arrival],
    hook: Callable[[Driver], None] | None = None,
    gone: Collection[str] = (),
) -> dict[str, Result]:
    """What the plugin answers, which must be what stock does, but for requests that are `gone`. `hook`: between the
    plugin's steps alone."""
    stock, pdmux = both
    got, expected = pdmux.run(arrivals, hook), stock.run(arrivals)
    for name in gone:
        del got[name], expected[name]
    assert_same(got, expected)
    return got
