# SPDX-License-Identifier: Apache-2.0
"""How long things take on one device with one model: what `vllm-pdmux calibrate` or `benchmarks/device_profile.py`
makes of what was measured."""

from __future__ import annotations

import json
import math
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_pdmux.config_errors import one_line
from vllm_pdmux.policy import FusedPrior, GroupPrior, Mix, PromptWork
from vllm_pdmux.small_file import TooLarge, read_small_file

MAKE_IT = "make it with vllm-pdmux calibrate --out"
MOST_BYTES = 1 << 20  # of a file; one with six divisions and its errors has 10 KB


class ProfileError(ValueError):
    """A file that is no profile; the message, one printable line, names the file, what is wrong (`problem`) and the way
    out."""

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        self.problem = one_line(problem)
        super().__init__(one_line(f"profile {path}: {problem}: {remedy}"))


Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]


class GroupProfile(BaseModel):
    """A division: how much slower decode is beside prefill than alone, and prefill's pace over its pace alone.

    `slowdown` and `pace` are means over loads; `slowdowns` and `pace_line`, where they are known, say what they are for
    a given load, see `GroupPrior`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    sharing: str
    prefill_sms: int = Field(ge=1)
    decode_sms: int = Field(ge=1)
    slowdown: float = Field(ge=1)
    pace: float = Field(gt=0, le=1)
    slowdowns: tuple[Above0, Above0, Above0] | None = None  # of a decode step's fixed part, requests and context
    pace_line: tuple[Above0, AtLeast0] | None = None  # beside steps of a fixed part alone; less for each one more

    @property
    def label(self) -> str:
        """ "capped 84:48": how the lanes share, SMs of prefill and of decode."""
        return f"{self.sharing} {self.prefill_sms}:{self.decode_sms}"

    def prior(self, full_rate: float = 1.0) -> GroupPrior:
        """For any load; rates are paces where `full_rate`, prefill's work per ms alone, is not given."""
        first, less = self.pace_line or (self.pace, 0.0)
        slowdowns = self.slowdowns or (self.slowdown, self.slowdown, self.slowdown)
        return GroupPrior(slowdowns, (first * full_rate, less * full_rate))


class DeviceProfile(BaseModel):
    """Times in ms. The forms of decode and prefill are those of MuxWise, linear and quadratic."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    name: str
    decode_fixed_ms: float = Field(gt=0)
    decode_ms_per_request: float = Field(ge=0)
    decode_ms_per_context_token: float = Field(ge=0)
    prefill_fixed_ms: float = Field(ge=0)
    prefill_ms_per_token: float = Field(gt=0)
    prefill_ms_per_token_pair: float = Field(ge=0)  # a new token and one that it attends to
    # What a fused step takes for a decode step's three parts and for its prompt tokens, over what they take alone.
    fused_parts: tuple[AtLeast0, AtLeast0, AtLeast0]
    fused_prompt: float = Field(gt=0)
    kv_tokens: int = Field(ge=1)
    groups: tuple[GroupProfile, ...]

    def decode_ms(self, batch: int, context_tokens: int) -> float:
        """A decode step with nothing beside it."""
        context_ms = self.decode_ms_per_context_token * context_tokens
        return self.decode_fixed_ms + self.decode_ms_per_request * batch + context_ms

    def mix(self, batch: int, context_tokens: int) -> Mix:
        """What a decode step with nothing beside it consists of."""
        whole_ms = self.decode_ms(batch, context_tokens)
        requests_ms, context_ms = self.decode_ms_per_request * batch, self.decode_ms_per_context_token * context_tokens
        return Mix(self.decode_fixed_ms / whole_ms, requests_ms / whole_ms, context_ms / whole_ms)

    def slowdown(self, group: GroupProfile, batch: int, context_tokens: int) -> float:
        """Of a decode step beside prefill in `group`, over what it takes alone."""
        return max(1.0, group.prior().slowdown(self.mix(batch, context_tokens)))

    def pace(self, group: GroupProfile, batch: int, context_tokens: int) -> float:
        """Of prefill beside decode in `group`, over its pace alone."""
        return min(1.0, group.prior().rate(self.mix(batch, context_tokens)))

    def prefill_ms(self, tokens: int, computed_tokens: int) -> float:
        """`tokens` new tokens of a prompt of which `computed_tokens` are computed, with nothing beside them."""
        pairs = tokens * (computed_tokens + tokens / 2)
        return self.prefill_ms_per_token * tokens + self.prefill_ms_per_token_pair * pairs

    @property
    def prompt_work(self) -> PromptWork:
        """How the time of a prompt's tokens grows on this device."""
        pair_ms = self.prefill_ms_per_token_pair
        return PromptWork(self.prefill_ms_per_token / pair_ms if pair_ms else math.inf)

    @property
    def fused(self) -> FusedPrior:
        """Of steps that decode and prefill in one batch."""
        return FusedPrior(self.fused_parts, self.fused_prompt)

    def fused_ms(self, decode_ms: float, mix: Mix, prefill_ms: float) -> float:
        """A step that decodes and prefills in one batch, from what the two take alone."""
        return max(decode_ms, self.fused.ms(decode_ms, mix, prefill_ms))


def read_profile(path: str) -> DeviceProfile:
    """The profile in a JSON file. Raises ProfileError."""
    try:
        content = read_small_file(path, MOST_BYTES)
    except TooLarge as error:
        raise ProfileError(path, f"{error}, more than a profile takes", MAKE_IT) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ProfileError(path, f"cannot be read ({reason})", "correct path or rights") from None
    try:
        return DeviceProfile.model_validate(json.loads(content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ProfileError(path, f"{where}: {first['msg']}", MAKE_IT) from None
    except (ValueError, RecursionError) as error:
        raise ProfileError(path, f"is not JSON ({error})", MAKE_IT) from None
