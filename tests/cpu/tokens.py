# SPDX-License-Identifier: Apache-2.0
"""Comparing what two engines said."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from driver import Result

LOGPROB_TOLERANCE = 1e-3  # float32 sums in another batch composition


def assert_same(got: Mapping[str, Result], expected: Mapping[str, Result]) -> None:
    """Equal tokens, texts and reasons; logprobs of the same tokens, equal up to rounding."""
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        have = got[name]
        assert have.tokens == want.tokens, f"tokens of {name}"
        assert have.texts == want.texts, f"text of {name}"
        assert have.finish_reasons == want.finish_reasons, f"finish reason of {name}"
        assert have.stop_reasons == want.stop_reasons, f"stop reason of {name}"
        for mine, theirs in zip(have.logprobs, want.logprobs, strict=True):
            _assert_same_logprobs(mine, theirs, f"logprobs of {name}")
        _assert_same_logprobs(have.prompt_logprobs, want.prompt_logprobs, f"prompt logprobs of {name}")


def _assert_same_logprobs(mine: Any, theirs: Any, what: str) -> None:
    if theirs is None:
        assert mine is None, what
        return
    assert len(mine) == len(theirs), what
    for here, there in zip(mine, theirs, strict=True):
        if there is None:
            assert here is None, what
            continue
        assert here.keys() == there.keys(), what
        for token, value in there.items():
            assert math.isclose(here[token].logprob, value.logprob, abs_tol=LOGPROB_TOLERANCE), what
