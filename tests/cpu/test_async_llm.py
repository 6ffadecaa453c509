# SPDX-License-Identifier: Apache-2.0
"""`AsyncLLM` in this process, its engine in another: streams, several at once, an abort in mid-prefill."""

import asyncio

import pytest
from driver import prompt
from process_helpers import HANG_LIMIT_S
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHUNK = 64
ARGUMENTS = {
    "max_model_len": 2048,
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
    "max_num_batched_tokens": CHUNK,
    "dtype": "float32",
    "num_gpu_blocks_override": 512,
    "block_size": 32,
}
PROMPTS = {f"prompt {length}": prompt(length, length) for length in (20, 30, 70, 150, 400, 1000)}


def params(max_tokens, kind=RequestOutputKind.DELTA):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=kind)


class Engine:
    """An AsyncLLM and the loop that its tasks run in."""

    def __init__(self, runner, model, additional_config):
        self.runner, self.count = runner, 0
        args = AsyncEngineArgs(model=model, additional_config=additional_config, **ARGUMENTS)
        self.llm = runner.run(self._start(args))

    async def _start(self, args):
        return AsyncLLM.from_engine_args(args)

    def run(self, serve, *args):
        """What the coroutine function `serve` returns; afterwards no request has a block."""

        async def whole():
            result = await asyncio.wait_for(serve(self, *args), HANG_LIMIT_S)
            assert await self.llm.reset_prefix_cache(), "blocks are still in use"
            return result

        return self.runner.run(whole())

    def stream(self, tokens, sampling, request_id=None):
        self.count += 1
        return self.llm.generate({"prompt_token_ids": tokens}, sampling, request_id or f"request {self.count}")


@pytest.fixture(scope="module")
def engines(tiny_model_path):
    """Stock vLLM and the plugin."""
    with asyncio.Runner() as runner:
        made = []
        try:
            for additional in ({}, {"pdmux": {"layers_per_group": 1, "calibration": "off"}}):
                made.append(Engine(runner, tiny_model_path, additional))
            yield made
        finally:
            for engine in made:
                engine.llm.shutdown()


async def pieces(stream):
    return [output async for output in stream]


async def one_by_one(engine):
    """Each prompt alone, in pieces."""
    return {name: await pieces(engine.stream(tokens, params(12))) for name, tokens in PROMPTS.items()}


async def together(engine, kind):
    """All prompts while another request decodes, each when the one before has been sent and some tokens have come."""
    background = engine.stream(prompt(10, 0), params(400))
    asked = {}
    async for _ in background:
        if len(asked) < len(PROMPTS):
            name = list(PROMPTS)[len(asked)]
            asked[name] = asyncio.create_task(pieces(engine.stream(PROMPTS[name], params(12, kind))))
        elif all(task.done() for task in asked.values()):
            break
    await background.aclose()
    return {name: await task for name, task in asked.items()}


def texts(answers):
    return {name: "".join(output.outputs[0].text for output in outputs) for name, outputs in answers.items()}


def last_texts(answers):
    return {name: outputs[-1].outputs[0].text for name, outputs in answers.items()}


@pytest.fixture(scope="module")
def expected(engines):
    """What stock vLLM says to each prompt alone."""
    return texts(engines[0].run(one_by_one))


def test_a_stream_alone_equals_stocks(engines, expected):
    answers = engines[1].run(one_by_one)
    assert texts(answers) == expected
    assert all(len(outputs) > 6 and outputs[-1].finished for outputs in answers.values())


def test_streams_at_once_equal_stocks(engines, expected):
    assert texts(engines[1].run(together, RequestOutputKind.DELTA)) == expected


def test_cumulative_outputs_at_once_equal_stocks(engines, expected):
    assert last_texts(engines[1].run(together, RequestOutputKind.CUMULATIVE)) == expected


def test_final_outputs_at_once_equal_stocks(engines, expected):
    answers = engines[1].run(together, RequestOutputKind.FINAL_ONLY)
    assert last_texts(answers) == expected
    assert {len(outputs) for outputs in answers.values()} == {1}


async def abort_in_mid_prefill(engine, leave):
    """A long prompt comes while another request decodes, and goes when three tokens have come of the other one."""
    background = engine.stream(prompt(10, 0), params(60))
    text, task, after = "", None, 0
    async for output in background:
        text += output.outputs[0].text
        if task is None:
            task = asyncio.create_task(pieces(engine.stream(PROMPTS["prompt 1000"], params(12), "to abort")))
            continue
        after += 1
        if after == 10:
            assert not task.done()
            await leave(engine, task)
    assert after > 10
    (answer,) = await asyncio.gather(task, return_exceptions=True)
    return text, answer


async def by_abort(engine, task):
    await engine.llm.abort("to abort")


async def by_cancelling(engine, task):
    """As a client that hangs up does."""
    task.cancel()


@pytest.mark.parametrize("leave", [by_abort, by_cancelling])
def test_a_prompt_that_is_aborted_in_mid_prefill_leaves_nothing(engines, expected, leave):
    stock, pdmux = engines

    async def background_alone(engine):
        return await pieces(engine.stream(prompt(10, 0), params(60)))

    alone = texts({"": stock.run(background_alone)})[""]
    text, answer = pdmux.run(abort_in_mid_prefill, leave)
    assert text == alone
    if leave is by_abort:
        assert [token for output in answer for token in output.outputs[0].token_ids] == []
        assert answer[-1].outputs[0].finish_reason == "abort"
    else:
        assert isinstance(answer, asyncio.CancelledError)
    assert texts(pdmux.run(one_by_one)) == expected
