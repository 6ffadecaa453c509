# SPDX-License-Identifier: Apache-2.0
"""Stream groups: the same split as SGLang on the same GPU, and a start on every GPU that can be split."""

import re
from types import SimpleNamespace

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pdmux.spatial import Group, SplitError, automatic_split, stream_groups


def settings(sm_group_num=8, manual_divisions=(), sharing="capped"):
    return SimpleNamespace(sm_group_num=sm_group_num, manual_divisions=manual_divisions, sharing=sharing)


def sharings(groups):
    """Of the mixed groups, in order."""
    return [group.sharing for group in groups[1:-1]]


@pytest.mark.parametrize(
    "total_sms, compute_capability, expected",
    [
        (132, (9, 0), [(112, 20), (104, 28), (96, 36), (88, 44), (80, 52), (72, 60)]),
        (108, (8, 0), [(84, 24), (78, 30), (72, 36), (66, 42), (60, 48), (54, 54)]),
        (114, (9, 0), [(96, 18), (88, 26), (80, 34), (72, 42), (64, 50)]),
        (78, (9, 0), [(56, 22), (48, 30), (40, 38)]),
    ],
)
def test_the_automatic_split_is_that_of_sglang(total_sms, compute_capability, expected):
    assert list(automatic_split(total_sms, compute_capability, 6)) == expected


@pytest.mark.parametrize("compute_capability", [(10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)])
def test_a_gpu_newer_than_the_table_is_split_like_the_newest_in_it(compute_capability):
    assert automatic_split(132, compute_capability, 6) == automatic_split(132, (9, 0), 6)
    assert len(stream_groups(settings(), 148, compute_capability)) == 8


@pytest.mark.parametrize("compute_capability", [(5, 2), (3, 5), (0, 0)])
def test_a_gpu_too_old_to_split_is_an_error_that_says_so(compute_capability):
    with pytest.raises(SplitError, match=r"compute capability \d\.\d is below 6\.0.*newer GPU"):
        automatic_split(80, compute_capability, 6)


def test_a_device_too_small_to_split_is_an_error_with_the_remedy():
    with pytest.raises(SplitError, match=r"sm_group_num .*20 SMs.*at least 16.*manual_divisions"):
        stream_groups(settings(), 20, (9, 0))


@hypothesis.settings(deadline=None)
@given(
    st.integers(32, 300),
    st.tuples(st.integers(6, 13), st.integers(0, 9)),
    st.integers(1, 20),
)
def test_every_automatic_split_uses_the_whole_device_and_starves_no_lane(total_sms, compute_capability, splits):
    try:
        pairs = automatic_split(total_sms, compute_capability, splits)
    except SplitError:
        assert total_sms < 40  # in steps of 8, a few of the smallest devices have no pair
        return
    assert 1 <= len(pairs) <= splits
    assert all(prefill + decode == total_sms and prefill >= decode >= 16 for prefill, decode in pairs)
    assert list(pairs) == sorted(set(pairs), reverse=True)


def test_the_first_group_is_prefill_alone_and_the_last_decode_alone():
    groups = stream_groups(settings(), 132, (9, 0))
    assert groups[0] == Group(0, prefill_sms=132, decode_sms=0, min_decode_batch=None)
    assert groups[1] == Group(1, prefill_sms=112, decode_sms=20, min_decode_batch=None)
    assert groups[7] == Group(7, prefill_sms=0, decode_sms=132, min_decode_batch=None)
    assert [group.index for group in groups] == list(range(8))


def test_manual_rows_keep_the_order_of_the_file():
    rows = [(64, 68, 10), (112, 20, 5), (80, 52, 7)]
    groups = stream_groups(settings(5, rows), 132, (9, 0))
    assert [(group.prefill_sms, group.decode_sms, group.min_decode_batch) for group in groups[1:-1]] == rows


def test_manual_rows_need_no_known_compute_capability():
    assert len(stream_groups(settings(3, [(66, 66, 1)]), 132, (5, 0))) == 3


def test_a_small_device_has_fewer_groups_than_asked_for():
    assert [group.index for group in stream_groups(settings(8), 78, (9, 0))] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("word", ["capped", "disjoint"])
def test_one_word_is_the_sharing_of_every_mixed_group(word):
    manual = stream_groups(settings(4, [(112, 20, 5), (64, 68, 10)], word), 132, (9, 0))
    assert sharings(manual) == [word] * 2
    assert sharings(stream_groups(settings(sharing=word), 132, (9, 0))) == [word] * 6


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("rows", [[], [(112, 20, 1), (88, 44, 2), (64, 68, 3)]], ids=["automatic", "manual"])
def test_a_sequence_has_one_sharing_for_each_mixed_group_in_order(rows, kind):
    words = ["disjoint", "capped", "disjoint"]
    assert sharings(stream_groups(settings(5, rows, kind(words)), 132, (9, 0))) == words


def test_a_small_device_uses_the_first_sharings_of_a_sequence():
    words = ("disjoint", "capped", "disjoint", "capped", "capped", "capped")
    assert sharings(stream_groups(settings(8, sharing=words), 78, (9, 0))) == ["disjoint", "capped", "disjoint"]


@pytest.mark.parametrize(
    "row, consequence", [((112, 28, 1), "140 SMs, .*8 do not exist"), ((112, 16, 1), "128 SMs, .*4 would be left idle")]
)
def test_a_row_that_is_not_the_device_names_file_row_values_total_and_remedy(row, consequence):
    with pytest.raises(SplitError) as raised:
        stream_groups(settings(4, [(66, 66, 1), row]), 132, (9, 0), source="file mine.yml")
    message = str(raised.value)
    assert message.startswith("file mine.yml: manual_divisions row 2 is [112, ")
    assert message.endswith("make prefill and decode sum to 132")
    assert re.search(consequence, message)
    assert "\n" not in message


def test_all_wrong_rows_are_in_one_message():
    with pytest.raises(SplitError, match=r"row 1 is .*; manual_divisions row 3 is "):
        stream_groups(settings(5, [(1, 1, 1), (66, 66, 2), (200, 1, 3)]), 132, (9, 0))
