# SPDX-License-Identifier: Apache-2.0
"""No layer of a model runs on a stream of its own: it would leave the lane's SMs."""

import pytest
import torch
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts

from vllm_pdmux.support import UnsupportedError
from vllm_pdmux.worker import side_streams


class Stream:
    """In the place of torch.cuda.Stream, of which there is none on a CPU."""


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    monkeypatch.setattr(side_streams.torch.cuda, "Stream", Stream)


def shared_experts():
    made = SharedExperts.__new__(SharedExperts)
    torch.nn.Module.__init__(made)
    made._stream = Stream()
    return made


def model(**layers):
    made = torch.nn.Module()
    made.layers = torch.nn.ModuleDict(layers)
    return made


def layer(**attributes):
    made = torch.nn.Linear(1, 1)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def test_shared_experts_run_after_the_others():
    made = model(one=shared_experts(), two=shared_experts(), other=layer(size=3))
    assert side_streams.turn_off(made) == 2
    assert made.layers["one"]._stream is None and made.layers["two"]._stream is None
    assert side_streams.turn_off(made) == 0


@pytest.mark.parametrize("attributes", [{"router_stream": Stream()}, {"streams": [None, Stream()]}, {"s": (Stream(),)}])
def test_another_layer_with_a_stream_is_refused_by_name(attributes):
    made = model(one=shared_experts(), attention=layer(**attributes))
    with pytest.raises(
        UnsupportedError, match=f"such as layers.attention.{next(iter(attributes))}.* without the plugin"
    ):
        side_streams.turn_off(made)


def test_a_model_without_streams_is_left_alone():
    assert side_streams.turn_off(model(one=layer(), two=layer(streams=[]))) == 0
