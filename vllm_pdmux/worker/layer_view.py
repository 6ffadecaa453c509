# SPDX-License-Identifier: Apache-2.0
"""Where a forward pass can stop: the attention layers it looks up in its forward context.

Attention is an opaque op, eager and compiled, and every such op finds its layer by name in
``forward_context.no_compile_layers``. A lane whose context holds this view of that mapping is told when a new layer
begins, for every model and with nothing patched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any


class LayerView(dict[str, Any]):
    """A copy of the mapping of layers that calls `at_layer` when a lookup names another boundary than the one before.

    `boundaries`: the names of the attention layers.

    A layer looks itself up more than once in a forward pass (KV update, attention), one after the other; only the first
    of them is a boundary.
    """

    def __init__(self, layers: Mapping[str, Any], boundaries: Collection[str], at_layer: Callable[[], None]):
        super().__init__(layers)
        self._boundaries = boundaries
        self._at_layer = at_layer
        self._current: str | None = None

    def __getitem__(self, name: str) -> Any:
        if name != self._current and name in self._boundaries:
            self._current = name
            self._at_layer()
        return super().__getitem__(name)

    def begin(self) -> None:
        """Forget the last layer, so that the first one of the next forward pass is a boundary too."""
        self._current = None
