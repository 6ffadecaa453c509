# SPDX-License-Identifier: Apache-2.0
"""While the prefill lane runs, whoever looks for a group of ranks finds the lane's communicators in it."""

from types import SimpleNamespace

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_pdmux.support import UnsupportedError
from vllm_pdmux.worker.communicators import LaneCommunicators, groups_of_a_forward
from vllm_pdmux.worker.process_state import ProcessState

CONTENTS = ("device_communicator", "device_group", "cpu_group", "mq_broadcaster")


class Communicator:
    def __init__(self, of):
        self.of = of

    def all_reduce(self, tensor):
        return self.of


class Group(GroupCoordinator):
    """A group of `ranks` ranks, of which no other process knows."""

    def __init__(self, name, ranks=2, queue=True):
        self.unique_name, self.world_size = name, ranks
        self.group_ranks, self.local_rank, self.torch_distributed_backend = [list(range(ranks))], 0, "gloo"
        self.use_device_communicator, self.use_custom_op_call = True, False
        self.device_communicator = Communicator(name)
        self.device_group, self.cpu_group = SimpleNamespace(of=name), SimpleNamespace(of=name)
        self.mq_broadcaster = SimpleNamespace(of=name) if queue else None
        self.destroyed = False

    def destroy(self):
        self.destroyed = True


@pytest.fixture
def made(monkeypatch):
    """What was made, as vLLM was asked for it."""
    asked = []

    def init_model_parallel_group(group_ranks, local_rank, backend, **options):
        asked.append((group_ranks, local_rank, backend, options))
        return Group(f"{options['group_name']}:9", queue=options["use_message_queue_broadcaster"])

    monkeypatch.setattr(parallel_state, "init_model_parallel_group", init_model_parallel_group)
    return asked


@pytest.fixture
def groups(monkeypatch):
    """Those of an engine with two ranks. The engram group has no ranks of its own, most others have one."""
    tp, ep = Group("tp:0"), Group("ep:0", queue=False)
    everything = {"_TP": tp, "_ETP": tp, "_EP": ep, "_WORLD": Group("world:0"), "_INNER_DP_WORLD": Group("world:1")}
    everything |= {name: Group(f"{name}:0", ranks=1) for name in ("_DCP", "_PCP", "_PP", "_DP")}
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, GroupCoordinator):
            monkeypatch.setattr(parallel_state, name, None)
    for name, group in everything.items():
        monkeypatch.setattr(parallel_state, name, group)
    return SimpleNamespace(tp=tp, ep=ep)


def test_each_group_of_several_ranks_counts_once_and_the_worlds_do_not(groups):
    assert {id(group) for group in groups_of_a_forward()} == {id(groups.tp), id(groups.ep)}


def test_they_are_made_as_vllm_makes_its_own(groups, made):
    """Of the same kind, which vLLM tells by the name."""
    LaneCommunicators()
    options = {"use_message_queue_broadcaster": True, "group_name": "tp", "use_device_communicator": True}
    assert made[0] == ([[0, 1]], 0, "gloo", options)
    assert made[1] == ([[0, 1]], 0, "gloo", options | {"use_message_queue_broadcaster": False, "group_name": "ep"})


def seen(group):
    return {name: getattr(getattr(group, name), "of", None) for name in CONTENTS}


def test_by_global_by_name_and_by_a_layer_that_has_kept_it_the_lanes_own_is_found(groups, made, monkeypatch):
    kept = parallel_state.get_tp_group()  # as a layer does when it is made
    monkeypatch.setitem(parallel_state._groups, "tp:0", lambda: groups.tp)
    tensor = torch.zeros(1)

    def found():
        by_name = parallel_state.all_reduce(tensor, "tp:0")  # as a compiled graph does
        return {parallel_state.get_tp_group().all_reduce(tensor), kept.all_reduce(tensor), by_name}

    state = ProcessState([LaneCommunicators()])
    assert found() == {"tp:0"}
    state.swap()
    assert found() == {"tp:9"} and set(seen(groups.tp).values()) == {"tp:9"}
    assert seen(groups.ep) == dict.fromkeys(CONTENTS, "ep:9") | {"mq_broadcaster": None}
    assert groups.tp.unique_name == "tp:0" and groups.tp.world_size == 2
    state.swap()
    assert found() == {"tp:0"} and set(seen(groups.tp).values()) == {"tp:0"}


def test_they_are_given_back_and_vllms_are_not(groups, made, monkeypatch):
    communicators = LaneCommunicators()
    own = [own for _, own in communicators._pairs]
    communicators.destroy()
    assert all(one.destroyed for one in own) and not groups.tp.destroyed and not groups.ep.destroyed


class Layer(torch.nn.Module):
    def __init__(self, kept=None):
        super().__init__()
        self.group = kept


@pytest.mark.parametrize("what", CONTENTS)
def test_a_layer_that_keeps_a_communicator_is_refused(groups, made, what):
    communicators = LaneCommunicators()
    model = torch.nn.Sequential(Layer(), Layer(getattr(groups.tp, what)))
    with pytest.raises(UnsupportedError, match=r"Sequential keeps a communicator in 1\.group, which both lanes"):
        communicators.check(model)


def test_a_layer_that_keeps_a_group_or_nothing_is_served(groups, made):
    LaneCommunicators().check(torch.nn.Sequential(Layer(groups.tp), Layer(None), Layer(2)))


@pytest.mark.parametrize(
    "module", ["vllm.models.inkling.nvidia.model", "vllm.model_executor.layers.minimax_rms_norm.x"]
)
def test_a_layer_with_collectives_of_its_own_is_refused(groups, made, module, monkeypatch):
    monkeypatch.setattr(Layer, "__module__", module)
    with pytest.raises(UnsupportedError, match="has collectives of its own in 0, which both lanes"):
        LaneCommunicators().check(torch.nn.Sequential(Layer()))
