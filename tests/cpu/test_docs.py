# SPDX-License-Identifier: Apache-2.0
"""The documentation is whole and true: pages, examples, commands, quoted messages, settings, metrics, the dashboard."""

import functools
import importlib
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import yaml
from markdown_page import Page, rows
from said_texts import is_said

import vllm_pdmux
from vllm_pdmux import cli, support, tensor_parallel
from vllm_pdmux.config import resolve
from vllm_pdmux.config_model import FIELDS, PDMuxConfig
from vllm_pdmux.metrics import definitions
from vllm_pdmux.metrics.definitions import key_of
from vllm_pdmux.metrics.log_line import TROUBLES, log_line
from vllm_pdmux.spatial import stream_groups
from vllm_pdmux.trace_file import TraceFile

OURS = Path(vllm_pdmux.__file__).parent
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
DASHBOARD = json.loads((DOCS / "grafana" / "vllm-pdmux.json").read_text())
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
SPLITS = 6

every_page = pytest.mark.parametrize(
    "page", [Page(path) for path in PAGES], ids=[str(path.relative_to(ROOT)) for path in PAGES]
)


def doc(name):
    return Page(DOCS / name)


# --- the site ---------------------------------------------------------------------------------------------------------


def build(folder, site):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", folder / "mkdocs.yml"]
    return subprocess.run([*command, "--site-dir", site], capture_output=True, text=True, timeout=120)


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr
    pages = {path.relative_to(tmp_path).with_suffix("") for path in tmp_path.rglob("*.html")}
    assert {path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md")} <= pages
    loads = re.compile(r"""<(?:script|img|iframe)[^>]*src=["'](?:https?:)?//|<link[^>]*href=["'](?:https?:)?//""")
    assert not [path.name for path in tmp_path.rglob("*.html") if loads.search(path.read_text())]


@pytest.mark.parametrize("link", ["no-such-page.md", "settings.md#no-such-setting", "#no-such-heading", "/settings.md"])
def test_a_dead_link_fails_the_build(link, tmp_path):
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(DOCS, tmp_path / "docs")
    with (tmp_path / "docs" / "index.md").open("a") as file:
        file.write(f"\n[dead]({link})\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0 and link.strip("/") in built.stderr


@every_page
def test_links_lead_somewhere(page):
    """As GitHub shows the files; the site has its own check."""
    dead = []
    for link in page.links:
        assert "://" not in link or "localhost" in link, f"{link}: another host, which cannot be checked here"
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        if not path.exists() or (anchor and anchor not in Page(path).anchors()):
            dead.append(link)
    assert not dead


@every_page
def test_files_and_folders_that_are_named_exist(page):
    words = " ".join([*page.code_spans, *(block.text for block in page.blocks)]).split()
    named = {
        match[0] for word in words if (match := re.match(r"(docs|benchmarks|tests|vllm_pdmux|\.ci)/[\w./*-]+", word))
    }
    # A module, or a test by its name, is named without its ending in some places.
    gone = [name for name in named if not any(list(ROOT.glob(name.rstrip("/.") + end)) for end in ("", ".py"))]
    assert not gone


# --- commands ---------------------------------------------------------------------------------------------------------

PLACEHOLDERS = {"N": "4096", "SHARE": "0.5"}


def commands(page, program):
    """The words after `program` of each command line of a page, without the brackets of what may be left out."""
    for line in page.command_lines():
        words = re.sub(r"^(\w+=\S+ )+", "", line)
        if words.startswith(program + " "):
            yield words.removeprefix(program)


def plugin_commands():
    for page in map(Page, PAGES):
        for text in [*commands(page, "vllm-pdmux"), *commands(page, "python -m vllm_pdmux")]:
            yield pytest.param(text.strip(), id=f"{page.path.name}: {text.strip()[:40]}")


@pytest.fixture
def parsed(monkeypatch):
    """Parses the words of a command line without running it; the exit status."""

    def parse(words):
        monkeypatch.setattr(importlib.import_module(cli.COMMANDS[words[0]]), "run", lambda args: 0)
        return cli.main(words)

    return parse


@pytest.mark.parametrize("text", list(plugin_commands()))
def test_a_command_line_is_accepted(text, parsed, capsys):
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(re.sub(r"[\[\]]", "", text))]
    assert parsed(words) == 0, capsys.readouterr().err


@every_page
def test_a_command_in_the_text_is_one_that_there_is(page, capsys):
    for span in page.code_spans:
        words = span.split()
        if words[0] != "vllm-pdmux" or len(words) == 1:
            continue
        with pytest.raises(SystemExit):
            cli.main([words[1].rstrip(":"), "--help"])
        shown = capsys.readouterr().out
        assert not [word for word in re.findall(r"--[\w-]+", span) if word not in shown], span


@every_page
def test_the_targets_of_make_exist(page):
    lines = [*page.command_lines(), *page.code_spans]
    targets = {match[1] for line in lines if (match := re.match(r"(?:\w+=\S+ )*make ([a-z][\w-]*)", line))}
    assert targets <= set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@every_page
def test_settings_in_commands_are_accepted(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = re.sub(r"\\\n\s*", "", page.text)
    for given in re.findall(r"--additional-config '(\{.*?\})'", text):
        inline = json.loads(given)["pdmux"]
        resolve({name: value for name, value in inline.items() if value != "FILE"}, {})


@pytest.mark.engine
@every_page
def test_vllm_accepts_its_command_lines(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    texts = [*commands(page, "vllm serve"), *commands(page, "python -m vllm.entrypoints.openai.api_server")]
    for text in texts:
        args = server_parser().parse_args(shlex.split(text))
        assert args.scheduler_cls in (None, "vllm_pdmux.Scheduler")


@functools.cache
def server_parser():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


# --- files and programs -----------------------------------------------------------------------------------------------


@every_page
def test_settings_files_in_the_text_are_accepted(page, tmp_path):
    for block in page.blocks:
        if block.language not in ("", "yaml") or not re.match(rf"({'|'.join(FIELDS)}):", block.text):
            continue
        file = tmp_path / "settings.yml"
        file.write_text(block.text)
        stream_groups(resolve({"config": str(file)}, {}).config, 132, (9, 0))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yml")), ids=lambda path: path.name)
def test_an_example_of_settings_is_accepted(path):
    resolved = resolve({"config": str(path)}, {})
    assert "default" not in (resolved.origins["manual_divisions"], resolved.origins["sharing"])
    assert len(stream_groups(resolved.config, 132, (9, 0))) == resolved.config.sm_group_num


@every_page
def test_python_in_the_text_is_that_of_an_example(page):
    sources = "".join(path.read_text() for path in EXAMPLES.glob("*.py"))
    for block in page.blocks:
        if block.language == "python":
            assert block.text in sources


def test_the_pod_sets_variables_that_there_are():
    (block,) = [block for block in Page(EXAMPLES / "kubernetes.md").blocks if block.language == "yaml"]
    spec = yaml.safe_load(block.text)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert {one["name"] for one in container["env"]} <= variables()
    drain_s = container["args"][container["args"].index("--shutdown-timeout") + 1]
    assert spec["terminationGracePeriodSeconds"] > int(drain_s)
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in spec["volumes"]}


def test_the_image_is_of_a_supported_vllm_and_gets_files_that_there_are():
    text = (EXAMPLES / "docker" / "Dockerfile").read_text()
    version = re.search(r"^FROM vllm/vllm-openai:v([\d.]+)$", text, re.MULTILINE)[1]
    numbers = tuple(map(int, version.split(".")))
    assert support.MIN_VERSION <= numbers[:2] < support.END_VERSION
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    assert set(re.findall(r"\bPDMUX\w*", text)) <= variables()


def test_the_table_of_the_simulator_is_what_it_prints(capsys, monkeypatch):
    page = doc("choosing-targets.md")
    (text,) = [text for text in commands(page, "vllm-pdmux") if text.startswith(" simulate")]
    monkeypatch.chdir(ROOT)
    assert cli.main([*shlex.split(text), "--json"]) == 0
    found = {arm["arm"]: arm for arm in json.loads(capsys.readouterr().out)["arms"]}
    table = rows(page.section("## Simulate"))
    assert len(table) >= 4
    for name, ttft, itl, met in table:
        arm = found[name]
        assert ttft == f"{arm['ttft_p50_ms']:,.0f}, {arm['ttft_p99_ms']:,.0f}"
        assert itl == f"{arm['itl_p50_ms']:.1f}, {arm['itl_p99_ms']:.1f}"
        assert met == f"{arm['met_share'] * 100:.1f} %"


# --- settings ---------------------------------------------------------------------------------------------------------

SPECIAL_TYPES = {
    "manual_divisions": "list of rows `[prefill_sms, decode_sms, min_decode_batch]`",
    "sharing": "`capped` or `disjoint`, or a list with one for each division",
    "calibration": "`auto`, `off` or the path of a profile",
}
TYPES = {bool: "true or false", int: "integer", float: "number", str: "text"}


def first_line(name):
    """What the page says first of a setting: type, limits and default."""
    field = PDMuxConfig.model_fields[name]
    parts = [SPECIAL_TYPES.get(name) or type_of(field.annotation)]
    for limit in field.metadata:
        parts += [f"above {limit.gt}"] if hasattr(limit, "gt") else []
        parts += [f"at least {limit.ge}"] if hasattr(limit, "ge") else []
        parts += [f"at most {limit.le}"] if hasattr(limit, "le") else []
        parts += ["not empty"] if hasattr(limit, "min_length") else []
    return f"Type: {', '.join(parts)}. Default: {default_of(field.default)}."


def type_of(annotation):
    choices = [one for one in get_args(annotation) if one is not type(None)]
    if get_origin(annotation) is Literal:
        *first, last = (f"`{one}`" for one in choices)
        return f"{', '.join(first)} or {last}"
    return TYPES[choices[0] if choices else annotation]


def default_of(value):
    if value is None:
        return "not set"
    if value == ():
        return "none"
    return f"`{value:g}`" if type(value) is float else f"`{str(value).lower()}`"


def test_the_settings_page_has_every_setting_once():
    headings = re.findall(r"^### `(.*)`$", doc("settings.md").text, re.MULTILINE)
    assert sorted(headings) == sorted(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_the_settings_page_says_type_limits_and_default(name):
    line, _, meaning = doc("settings.md").section(f"### `{name}`").strip().partition("\n")
    assert line == first_line(name)
    assert len(meaning.split()) >= 5


@pytest.mark.parametrize("name", FIELDS)
def test_a_setting_can_be_given_everywhere(name, tmp_path):
    value = PDMuxConfig.model_fields[name].default
    value = list(value) if value == () else value
    file = tmp_path / "settings.yml"
    file.write_text(yaml.safe_dump({"sm_group_num": 8, name: value}))
    assert resolve({name: value}, {}).origins[name] == "additional_config"
    assert resolve({"config": str(file)}, {}).origins[name] == f"file {file}"
    assert resolve({}, {"PDMUX_CONFIG": str(file)}).origins[name] == f"file {file} (PDMUX_CONFIG)"


def variables():
    """The environment variables of ours that the code names."""
    text = "".join(path.read_text() for path in [*OURS.rglob("*.py"), ROOT / "Makefile", *(ROOT / ".ci").glob("*.py")])
    return {name for name in re.findall(r"\bPDMUX(?:_[A-Z_]+)?\b", text)} - {"PDMUX_"}


def test_the_settings_page_has_every_environment_variable():
    section = doc("settings.md").section("## Environment variables")
    assert set(re.findall(r"`(PDMUX\w*)`", section)) == variables()


# --- metrics ----------------------------------------------------------------------------------------------------------


def listed_metrics():
    return {name.strip("`"): rest for name, *rest in rows(doc("metrics.md").section("## In /metrics"))}


def test_the_metrics_page_has_every_metric_with_type_and_label():
    metrics = definitions.metrics(SPLITS, True)
    listed = listed_metrics()
    assert list(listed) == [metric.name for metric in metrics]
    for metric in metrics:
        kind, label, meaning = listed[metric.name]
        assert kind == metric.type
        values = [] if metric.label == "group" else list(metric.label_values)
        assert re.findall(r"`(\w+)`", label) == ([metric.label, *values] if metric.label else [])
        assert len(meaning.split()) >= 4


def test_the_metrics_page_has_every_reason_for_a_fused_step():
    listed = [reason.strip("`") for reason, _ in rows(doc("metrics.md").section("## Why steps are fused"))]
    assert listed == list(definitions.FUSED_REASONS)


def test_the_line_of_the_log_is_as_shown():
    values = {key_of(definitions.STEPS, kind): n for kind, n in zip(definitions.KINDS, (412, 3, 5, 96), strict=True)}
    values |= {key_of(definitions.BESIDE_STEPS, 3): 60, key_of(definitions.BESIDE_STEPS, 5): 36}
    values |= {key_of(definitions.BATCHES, definitions.ENDED): 4, definitions.TOKENS: 16384, definitions.LAYERS: 128}
    values |= {definitions.LAYER_GROUPS: 96, key_of(definitions.FUSED_STEPS, definitions.SOONER): 5}
    for kind, ms in (("decode", 412 * 7.0), ("fused", 5 * 21.4), ("beside", 96 * 10.8)):
        values[key_of(key_of(definitions.STEP_SECONDS, kind), definitions.SUM)] = round(ms * 1e3)
    values |= {definitions.JOINS: 4, definitions.DRY_STEPS: 4, definitions.MISSED_STEPS: 2}
    line = log_line({}, values, {"3": "3 capped 84:48", "5": "5 disjoint 84:48"})
    (shown,) = [block.text.strip() for block in doc("metrics.md").blocks if block.language == "text"]
    assert shown == f"Engine 000: PD-multiplexing {line}"


def test_the_parts_of_the_line_are_listed():
    table = rows(doc("metrics.md").section("## The line in the log"))
    expected = []
    for key, said in TROUBLES.items():
        name, _, label = key.removeprefix(definitions.PREFIX).partition("/")
        expected.append([f"`{said.replace('%d', 'N')}`", f"`{name}`" + (f", `{label}`" if label else "")])
    assert table == expected


def test_the_tracks_of_a_trace_are_named(tmp_path):
    path = tmp_path / "trace.json"
    TraceFile(path, pytest.fail).close()
    tracks = [event["args"]["name"] for event in json.loads(path.read_text()) if event["name"] == "thread_name"]
    section = doc("metrics.md").section("## The trace file")
    assert len(tracks) == 2 and all(f"`{track}`" in section for track in tracks)


# --- what is refused and said -----------------------------------------------------------------------------------------


def test_the_compatibility_page_has_every_refusal():
    listed = rows(doc("compatibility.md").section("## Refused at start"))
    assert listed == [[refusal.feature, refusal.remedy] for refusal in support.REFUSALS]


def test_the_compatibility_page_has_every_refusal_with_tensor_parallelism():
    listed = rows(doc("compatibility.md").section("## Tensor parallelism"))
    assert listed == [[refusal.feature, refusal.remedy] for refusal in tensor_parallel.REFUSALS]


def test_the_compatibility_page_has_every_version():
    versions = [row[0].split(",")[0] for row in rows(doc("compatibility.md").section("## vLLM"))]
    (major, first), (_, end) = support.MIN_VERSION, support.END_VERSION
    assert versions == [*(f"{major}.{minor}" for minor in range(first, end)), "others"]


NOT_OURS = (
    "Available memory on node 0 … is less than desired CPU memory utilization",
    "Using custom scheduler class vllm_pdmux.Scheduler",
    "torchvision::nms does not exist",
)
COMMANDS = ("vllm-pdmux ", "pip ", "--", "policy: ", "sharing: ")


def messages():
    """What the page quotes of the plugin's messages."""
    spans = doc("troubleshooting.md").code_spans
    return [span for span in spans if len(span.split()) > 2 and span not in NOT_OURS and not is_command(span)]


def is_command(span):
    return span.startswith(COMMANDS) and not span.startswith(("--scheduler-cls names", "--worker-cls …"))


def test_the_check_of_messages_finds_one_that_nobody_says():
    assert len(messages()) > 30
    assert not is_said("lanes on NVIDIA GPUs are forbidden in this version")


@pytest.mark.parametrize("message", messages())
def test_a_quoted_message_is_one_that_the_code_prints(message):
    assert is_said(message)


# --- the dashboard ----------------------------------------------------------------------------------------------------


def panels():
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions():
    return [target["expr"] for panel in panels() for target in panel["targets"]]


HISTOGRAMS = {metric.name for metric in definitions.metrics(SPLITS, True) if metric.buckets}


def metrics_in(expression):
    """The metrics that are named; of a histogram of ours a part is, and stands for it."""
    names = re.findall(r"\b(vllm(?:_pdmux)?:\w+)", expression)
    return [whole if (whole := re.sub("_(bucket|sum|count)$", "", name)) in HISTOGRAMS else name for name in names]


def test_the_dashboard_has_what_grafana_needs():
    assert DASHBOARD["schemaVersion"] >= 36 and DASHBOARD["title"] and DASHBOARD["uid"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) and all(isinstance(one, int) and one > 0 for one in ids)
    for panel in panels():
        assert panel["title"] and panel["description"] and panel["fieldConfig"] and panel["options"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references)
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])


def test_no_panel_of_the_dashboard_lies_on_another():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] >= 0 and place["w"] > 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below


def test_the_dashboard_shows_every_metric_of_ours_and_no_other():
    named = {name for expression in expressions() for name in metrics_in(expression)}
    ours = {metric.name for metric in definitions.metrics(SPLITS, True)}
    assert {name for name in named if name.startswith(definitions.PREFIX)} == ours


def test_the_expressions_use_variables_and_labels_that_there_are():
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    labels = {"model_name", "engine", "le", "kind", "group", "result", "reason"}
    shown_queries = [
        line for one in doc("metrics.md").blocks if one.language == "promql" for line in one.text.splitlines()
    ]
    assert len(shown_queries) >= 5
    for expression in [*expressions(), *shown_queries]:
        assert not HISTOGRAMS & set(re.findall(r"[\w:]+", expression)), "a histogram has no values but in its parts"
        assert set(re.findall(r"\$(\w+)", expression)) <= variables
        matched = {label for one in re.findall(r"\{(.*?)\}", expression) for label in re.findall(r"(\w+)=", one)}
        grouped = {label for one in re.findall(r"by \((.*?)\)", expression) for label in one.split(",")}
        assert matched | grouped <= labels
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing)
    kinds = {kind for expression in expressions() for kind in re.findall(r'kind=~?"([\w|]+)"', expression)}
    assert {one for kind in kinds for one in kind.split("|")} <= set(definitions.KINDS)


# --- the examples -----------------------------------------------------------------------------------------------------


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_client_says_ttft_and_itl():
    client = example("openai_client")
    assert client.describe([0.2, 0.21, 0.25, 0.26]) == "TTFT 200 ms, ITL median 10.0 ms, longest 40.0 ms"
    assert client.describe([0.2]) == "TTFT 200 ms"


kept = []  # when an engine is collected, vLLM tears down the process groups that all of a process share


@pytest.mark.engine
def test_the_offline_example_answers_as_stock(tiny_model_path, stock, tmp_path, monkeypatch):
    from driver import ENGINE

    monkeypatch.setenv("PDMUX_CACHE", str(tmp_path))
    offline = example("offline")
    kept.append(offline.engine(tiny_model_path, **ENGINE))
    answers = offline.answers(kept[-1], max_tokens=16)
    assert len(answers) == len(offline.PROMPTS) and all(answers)
    assert answers == offline.answers(stock.llm, max_tokens=16)
    assert type(kept[-1].llm_engine.engine_core.engine_core.scheduler).__module__ == "vllm_pdmux.scheduler"


@pytest.fixture(scope="module")
def served(tiny_model_path, tmp_path_factory):
    """A server with the example of targets after the example of a client: what the client got, /metrics, the log."""
    from server import serving

    folder = tmp_path_factory.mktemp("docs")
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    arguments = ("--max-model-len", "1024", "--enforce-eager", "--dtype", "float32", "--chat-template", template)
    environ = {"PDMUX": "1", "PDMUX_CONFIG": str(EXAMPLES / "pdmux.yml"), "PDMUX_CACHE": str(folder)}
    with serving(folder / "log", tiny_model_path, arguments, OMP_NUM_THREADS="1", **environ) as server:
        address = f"http://127.0.0.1:{server.port}/v1"
        # The tiny model's tokens are bytes: printable ones alone, so that each is a piece of text.
        extra = {"ignore_eos": True, "allowed_token_ids": [*range(94)]}
        request = {"max_tokens": 16, "temperature": 0, "extra_body": extra}
        got = example("openai_client").stream(address, "Why is the sky blue?", **request)
        yield got, server.get("metrics"), server.log.read_text()


@pytest.mark.engine
@pytest.mark.slow
def test_the_client_streams_from_a_server_with_the_example_of_targets(served):
    text, arrived_s = served[0]
    assert text and len(arrived_s) >= 16 and arrived_s == sorted(arrived_s)


@pytest.mark.engine
@pytest.mark.slow
def test_a_server_shows_the_listed_metrics_and_those_of_the_dashboard(served):
    from metrics_page import PREFIX
    from metrics_page import Page as MetricsPage

    page = MetricsPage(served[1])
    assert {PREFIX + name: kind for name, kind in page.types.items()} == {
        name: kind for name, (kind, *_) in listed_metrics().items()
    }
    shown = set(metrics_in("\n".join(re.findall(r"^([\w:]+)[{ ]", served[1], re.MULTILINE))))
    texts = [*expressions(), doc("metrics.md").text.partition("## The line in the log")[0], *queries()]
    named = {name for text in texts for name in metrics_in(text)} - {definitions.PREFIX}
    assert named <= shown


def queries():
    return [one["definition"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]


@pytest.mark.engine
@pytest.mark.slow
def test_the_lines_that_say_that_it_is_active_are_in_the_log(served):
    (block,) = [block.text for block in doc("quick-start.md").blocks if block.language == "text"]
    active, settings, *changed, worker, scheduler = block.splitlines()
    assert settings.partition(" all defaults")[0] in served[2]
    for line in (active, *changed, worker, scheduler.replace("policy table", "policy slo")):
        assert line in served[2], line
    assert served[2].count("PD-multiplexing changed") == len(changed)
