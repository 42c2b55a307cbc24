"""Every field of a task: what is accepted, what is refused, and by which name and code."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import WireError
from broker.task import LIMITS, TASK_NAMES, Limits, check_name, check_task, shown

NAN, INFINITY = math.nan, math.inf


def with_field(name, value):
    """The smallest task that has this field."""
    task = {"id": "a", "prompt": "Say hi"}
    if name in ("messages", "token_ids"):
        del task["prompt"]
    return {**task, name: value}


def turn(**more):
    return {"role": "user", "content": "Hi", **more}


ACCEPTED = {
    "id": ["a", "x" * 256, "ü" * 128, "\0", "a b/c:d"],
    "job": ["default", "Night-1.b_2", "x" * 128],
    "prompt": ["x", " ", "\0", "ü\U0001f600"],
    "messages": [
        [turn()],
        [turn(content="")],
        [turn(name="Ada")],
        [turn(role=role) for role in ("system", "developer", "user", "assistant", "tool")],
        [turn()] * LIMITS.turns,
    ],
    "token_ids": [[0], [1, 2, (1 << 31) - 1]],
    "max_tokens": [1, 1 << 20],
    "temperature": [0, 0.0, 1, 0.7, 10.0],
    "top_p": [1e-9, 0.5, 1, 1.0],
    "top_k": [0, 50, 1 << 31],
    "seed": [0, (1 << 63) - 1],
    "stop": [[], ["a"], ["x" * 256], ["a"] * 16],
    "ignore_eos": [True, False],
    "return_token_ids": [True, False],
    "prefix_key": ["k", "x" * 1024],
    "prompt_tokens": [1, 1 << 31],
    "expected_output_tokens": [1, 1 << 20],
    "max_failures": [0, 100],
    "meta": [
        None, True, 0, -1, 1 << 64, 1.5, "", "text", [], {}, {"a": [1, {"b": None}]},
        [[[[[[[[]]]]]]]],
    ],
}  # fmt: skip

REFUSED = {
    "id": [
        ("", "invalid_value"), (7, "wrong_type"), (b"a", "wrong_type"), (None, "wrong_type"),
        ("x" * 257, "too_large"), ("ü" * 129, "too_large"), (["a"], "wrong_type"),
    ],
    "job": [
        ("", "invalid_value"), ("a b", "invalid_value"), ("a:b", "invalid_value"),
        ("{0}", "invalid_value"), ("ü", "invalid_value"), ("a\n", "invalid_value"),
        ("a\0", "invalid_value"), ("x" * 129, "too_large"), (1, "wrong_type"),
    ],
    "prompt": [
        ("", "invalid_value"), (b"x", "wrong_type"), (None, "wrong_type"), (["x"], "wrong_type"),
        ("x" * ((1 << 20) + 1), "too_large"),
    ],
    "messages": [
        ([], "wrong_type"), ("Hi", "wrong_type"), ({}, "wrong_type"), (["Hi"], "wrong_type"),
        ([turn()] * (LIMITS.turns + 1), "too_large"), ([{"role": "user"}], "missing"),
        ([{"content": "Hi"}], "invalid_value"), ([turn(role="robot")], "invalid_value"),
        ([turn(role=1)], "wrong_type"), ([turn(content=None)], "wrong_type"),
        ([turn(content=["Hi"])], "wrong_type"), ([turn(name=3)], "wrong_type"),
        ([turn(colour="red")], "unknown_name"), ([{**turn(), b"role": "x"}], "unknown_name"),
        ([{}], "invalid_value"), ([turn(), 3], "wrong_type"),
    ],
    "token_ids": [
        ([], "wrong_type"), ("1 2", "wrong_type"), ([-1], "wrong_type"), ([1 << 31], "wrong_type"),
        ([1.0], "wrong_type"), ([True], "wrong_type"), (["1"], "wrong_type"),
        ([1, None], "wrong_type"), ([0] * (LIMITS.token_ids + 1), "too_large"),
    ],
    "max_tokens": [
        (0, "invalid_value"), (-1, "invalid_value"), ((1 << 20) + 1, "invalid_value"),
        (1.0, "wrong_type"), ("1", "wrong_type"), (True, "wrong_type"), (None, "wrong_type"),
    ],
    "temperature": [
        (-0.1, "invalid_value"), (10.1, "invalid_value"), (NAN, "invalid_value"),
        (INFINITY, "invalid_value"), (-INFINITY, "invalid_value"), ("1", "wrong_type"),
        (True, "wrong_type"), (10**400, "invalid_value"),
    ],
    "top_p": [
        (0, "invalid_value"), (0.0, "invalid_value"), (1.01, "invalid_value"),
        (NAN, "invalid_value"), (False, "wrong_type"), ([0.5], "wrong_type"),
    ],
    "top_k": [(-1, "invalid_value"), ((1 << 31) + 1, "invalid_value"), (1.5, "wrong_type")],
    "seed": [(-1, "invalid_value"), (1 << 63, "invalid_value"), ("1", "wrong_type")],
    "stop": [
        ("", "invalid_value"), ([""], "invalid_value"), (["x" * 257], "too_large"),
        (["a"] * 17, "too_large"), ([1], "wrong_type"), (5, "wrong_type"), (None, "wrong_type"),
        ({"a": 1}, "wrong_type"),
    ],
    "ignore_eos": [(1, "wrong_type"), ("true", "wrong_type"), (None, "wrong_type")],
    "return_token_ids": [(0, "wrong_type"), ("false", "wrong_type")],
    "prefix_key": [
        ("", "invalid_value"), ("x" * 1025, "too_large"), (3, "wrong_type"), (b"k", "wrong_type"),
    ],
    "prompt_tokens": [
        (0, "invalid_value"), ((1 << 31) + 1, "invalid_value"), (3.0, "wrong_type"),
    ],
    "expected_output_tokens": [
        (0, "invalid_value"), ((1 << 20) + 1, "invalid_value"), (True, "wrong_type"),
    ],
    "max_failures": [(-1, "invalid_value"), (101, "invalid_value"), ("3", "wrong_type")],
    "meta": [
        (NAN, "invalid_value"), ([INFINITY], "invalid_value"), (b"x", "wrong_type"),
        ({1: 2}, "wrong_type"), ({b"k": 2}, "wrong_type"), ((1,), "wrong_type"),
        ([[[[[[[[[]]]]]]]]], "too_deep"), ({"a": {2}}, "wrong_type"),
    ],
}  # fmt: skip


def cases(table):
    return [(name, value) for name, values in table.items() for value in values]


def test_the_tables_speak_of_every_field():
    assert ACCEPTED.keys() == TASK_NAMES
    assert REFUSED.keys() == TASK_NAMES


@pytest.mark.parametrize(("name", "value"), cases(ACCEPTED), ids=lambda value: repr(value)[:30])
def test_a_good_value_is_accepted_as_it_is(name, value):
    task = check_task(with_field(name, value))
    assert task[name] == value
    assert type(task[name]) is type(value)


@pytest.mark.parametrize(("name", "case"), cases(REFUSED), ids=lambda value: repr(value)[:30])
def test_a_bad_value_is_refused_by_name_and_code(name, case):
    value, code = case
    with pytest.raises(WireError) as caught:
        check_task(with_field(name, value))
    assert caught.value.code == code
    assert caught.value.name.startswith(name)
    assert str(caught.value).startswith(name)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "name", ["max_token", "Prompt", "", "id ", "ID", 7, b"id", None, "x" * 9999]
)
def test_an_unknown_name_is_refused_and_never_ignored(name):
    with pytest.raises(WireError) as caught:
        check_task({"id": "a", "prompt": "x", name: 1})
    assert caught.value.code == "unknown_name"
    assert len(str(caught.value)) < 200


def test_a_task_without_an_id_is_refused():
    with pytest.raises(WireError) as caught:
        check_task({"prompt": "x"})
    assert (caught.value.code, caught.value.name) == ("missing", "id")


@pytest.mark.parametrize(
    "bodies",
    [
        {},
        {"prompt": "x", "messages": [turn()]},
        {"prompt": "x", "token_ids": [1]},
        {"messages": [turn()], "token_ids": [1]},
        {"prompt": "x", "messages": [turn()], "token_ids": [1]},
    ],
)
def test_a_task_has_exactly_one_body(bodies):
    with pytest.raises(WireError) as caught:
        check_task({"id": "a", **bodies})
    assert caught.value.code == "invalid_value"
    assert "exactly one of prompt, messages, token_ids" in str(caught.value)
    for name in bodies or ["none"]:
        assert name in str(caught.value).rpartition("found")[2]


def test_a_single_stop_text_becomes_a_list():
    assert check_task({"id": "a", "prompt": "x", "stop": "END"})["stop"] == ["END"]


def test_a_fault_in_a_turn_names_the_turn():
    with pytest.raises(WireError) as caught:
        check_task({"id": "a", "messages": [turn(), turn(role="robot")]})
    assert caught.value.name == "messages[1].role"


def test_texts_are_measured_in_bytes_and_not_in_characters():
    limits = Limits(task_bytes=8)
    assert check_task({"id": "a", "prompt": "ü" * 4}, limits)
    with pytest.raises(WireError, match="8 bytes"):
        check_task({"id": "a", "prompt": "ü" * 5}, limits)


@pytest.mark.parametrize(
    ("limits", "task"),
    [
        (Limits(turns=1), {"id": "a", "messages": [turn(), turn()]}),
        (Limits(token_ids=2), {"id": "a", "token_ids": [1, 2, 3]}),
        (Limits(stops=1), {"id": "a", "prompt": "x", "stop": ["a", "b"]}),
        (Limits(tokens=5), {"id": "a", "prompt": "x", "max_tokens": 6}),
        (Limits(nesting=1), {"id": "a", "prompt": "x", "meta": [[]]}),
        (Limits(job_bytes=2), {"id": "a", "prompt": "x", "job": "abc"}),
    ],
)
def test_limits_can_be_tightened(limits, task):
    assert check_task(dict(task))
    with pytest.raises(WireError):
        check_task(dict(task), limits)


def test_a_single_name_is_checked_like_the_field():
    check_name("job", "night")
    with pytest.raises(WireError, match="job"):
        check_name("job", "a b")


@given(st.text() | st.binary() | st.integers() | st.just("\ud800" * 200))
def test_a_shown_name_is_short_and_can_be_encoded(name):
    assert len(shown(name)) <= 100
    shown(name).encode()


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(sorted(TASK_NAMES)) | st.text(max_size=8), ANYTHING))
def test_whatever_comes_is_checked_or_refused_and_nothing_else(fields):
    try:
        task = check_task(dict(fields))
    except WireError as error:
        assert error.code
    else:
        assert task.keys() <= TASK_NAMES
        assert "id" in task
