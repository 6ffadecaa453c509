# SPDX-License-Identifier: Apache-2.0
"""What one engine answers: greedy tokens, and the logprobs of each of them and of its rivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_pdmux.verify.workload import Asked

RIVALS = 5  # logprobs of so many most likely tokens are kept at each place


@dataclass
class Answer:
    """Of one request."""

    tokens: list[int]
    logprobs: list[dict[int, float]]  # at each place, by token id: the chosen one and the most likely ones
    decoding: int = 0  # other requests that were decoding when it arrived

    def plain(self) -> dict[str, Any]:
        """For JSON, whose keys are strings."""
        return vars(self) | {"logprobs": [list(place.items()) for place in self.logprobs]}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Answer:
        """The inverse of `plain`."""
        return cls(**plain | {"logprobs": [{int(token): value for token, value in one} for one in plain["logprobs"]]})


def answers(llm: Any, asked: Sequence[Asked], cache_salt: str) -> dict[str, Answer]:
    """Serve `asked` to the end; by name. Requests of another salt are not hit in the prefix cache."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    found: dict[str, Answer] = {}
    ended: set[str] = set()
    waiting = list(asked)
    while waiting or engine.has_unfinished_requests():
        for one in [one for one in waiting if _may_arrive(one, found)]:
            waiting.remove(one)
            decoding = sum(bool(answer.tokens) and name not in ended for name, answer in found.items())
            found[one.name] = Answer([], [], decoding)
            params = SamplingParams(temperature=0.0, max_tokens=one.max_tokens, ignore_eos=True, logprobs=RIVALS)
            prompt = {"prompt_token_ids": list(one.token_ids), "cache_salt": cache_salt}
            engine.add_request(one.name, prompt, params)
        for output in engine.step():
            completion = output.outputs[0]
            answer = found[output.request_id]
            answer.tokens = list(completion.token_ids)
            answer.logprobs = [{int(t): value.logprob for t, value in place.items()} for place in completion.logprobs]
            if output.finished:
                ended.add(output.request_id)
        assert not (waiting and len(ended) == len(found)), f"{waiting[0].name} never arrives"
    return found


def _may_arrive(one: Asked, found: dict[str, Answer]) -> bool:
    return all(name in found and len(found[name].tokens) >= tokens for name, tokens in one.after.items())
