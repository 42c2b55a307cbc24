"""The wire, both ways: strict and bounded, and only WireError comes out of bad bytes."""

from __future__ import annotations

import json
import struct

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker.errors import WireError
from broker.task import Limits, check_task
from broker.wire import (
    decode_entry,
    decode_flat,
    decode_packed,
    decode_result,
    encode_packed,
    parse_json,
    salvage,
)

TASK = {"id": "a", "prompt": "Say hi"}


def refusal(function, *arguments) -> WireError:
    with pytest.raises(WireError) as caught:
        function(*arguments)
    return caught.value


def packed_map(*pairs: bytes) -> bytes:
    """A MessagePack map written by hand: alternating encoded keys and values."""
    return bytes([0x80 + len(pairs) // 2]) + b"".join(pairs)


def text(value: str) -> bytes:
    return msgpack.packb(value)


ID = (text("id"), text("a"))
PROMPT = (text("prompt"), text("x"))


# ---------------------------------------------------------------- strategies

TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | TEXT
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "tool"]), "content": TEXT | st.just("")},
        optional={"name": TEXT},
    ),
    min_size=1, max_size=4,
)  # fmt: skip
BODIES = (
    st.fixed_dictionaries({"prompt": TEXT})
    | st.fixed_dictionaries({"messages": TURNS})
    | st.fixed_dictionaries(
        {"token_ids": st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=20)}
    )
)
OPTIONS = {
    "job": st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True),
    "max_tokens": st.integers(1, 1 << 20),
    "temperature": st.floats(0, 10),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(0, 1 << 31),
    "seed": st.integers(0, (1 << 63) - 1),
    "stop": st.lists(TEXT, max_size=4),
    "ignore_eos": st.booleans(),
    "return_token_ids": st.booleans(),
    "prefix_key": TEXT,
    "prompt_tokens": st.integers(1, 1 << 31),
    "expected_output_tokens": st.integers(1, 1 << 20),
    "max_failures": st.integers(0, 100),
}


def tasks(meta):
    options = st.fixed_dictionaries({"id": TEXT}, optional={**OPTIONS, "meta": meta})
    return st.tuples(options, BODIES).map(lambda parts: {**parts[0], **parts[1]})


def as_flat(task) -> dict[bytes, bytes]:
    """A task as a foreign producer would write it with redis-cli."""
    return {
        name.encode(): (value if isinstance(value, str) else json.dumps(value)).encode()
        for name, value in task.items()
    }


# ---------------------------------------------------------------- round trips


@given(tasks(JSON_VALUES))
def test_a_packed_task_comes_back_as_it_was(task):
    assert decode_packed(encode_packed(check_task(dict(task)))) == task


@given(tasks(TEXT))
def test_a_flat_task_means_the_same_as_the_packed_one(task):
    assert decode_flat(as_flat(task)) == task


@given(tasks(JSON_VALUES))
def test_an_entry_says_in_which_encoding_it_came(task):
    assert decode_entry({b"m": encode_packed(task)}) == (task, False)
    assert decode_entry({b"m": encode_packed(task), b"h": b"anything"}) == (task, False)


def test_the_line_of_the_protocol_page_is_a_task():
    fields = {b"id": b"a1", b"prompt": b"Say hi", b"max_tokens": b"16"}
    assert decode_entry(fields) == ({"id": "a1", "prompt": "Say hi", "max_tokens": 16}, True)


def test_a_flat_meta_stays_the_text_that_it_is():
    assert decode_flat({b"id": b"a", b"prompt": b"x", b"meta": b'{"a":1}'})["meta"] == '{"a":1}'


def test_a_flat_stop_may_be_one_json_text():
    assert decode_flat({b"id": b"a", b"prompt": b"x", b"stop": b'"END"'})["stop"] == ["END"]


# ---------------------------------------------------------------- packed pitfalls


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "empty"),
        (encode_packed(TASK)[:-1], "not_msgpack"),
        (encode_packed(TASK)[:1], "not_msgpack"),
        (encode_packed(TASK) + b"\0", "not_msgpack"),
        (encode_packed(TASK) * 2, "not_msgpack"),
        (b"\xc1", "not_msgpack"),
        (b"\x91" * 10_000 + b"\xc0", "not_msgpack"),
        (b"\x81\xa1a" * 10_000 + b"\xc0", "not_msgpack"),
        (b"\xdd\xff\xff\xff\xff", "not_msgpack"),
        (b"\xdf\xff\xff\xff\xff", "not_msgpack"),
        (b"\xdb\xff\xff\xff\xff", "not_msgpack"),
        (b"\xc6\xff\xff\xff\xff", "not_msgpack"),
        (b"\xc9\xff\xff\xff\xff\x01", "not_msgpack"),
        (packed_map(*ID, text("prompt"), b"\xdd\x7f\xff\xff\xff"), "not_msgpack"),
        (b"\xc0", "wrong_type"),
        (b"\x90", "wrong_type"),
        (b"\x07", "wrong_type"),
        (text("id"), "wrong_type"),
        (packed_map(), "missing"),
        (packed_map(*ID, *ID, *PROMPT), "duplicate_key"),
        (packed_map(*ID, *PROMPT, text("meta"), packed_map(*ID, *ID)), "duplicate_key"),
        (packed_map(*ID, *PROMPT, b"\x90", b"\x01"), "not_msgpack"),
        (packed_map(*ID, *PROMPT, b"\x80", b"\x01"), "not_msgpack"),
        (packed_map(*ID, *PROMPT, b"\x07", b"\x01"), "not_msgpack"),
        (packed_map(*ID, *PROMPT, b"\xc0", b"\x01"), "not_msgpack"),
        (packed_map(*ID, *PROMPT, b"\xc4\x04meta", b"\x01"), "unknown_name"),
        (packed_map(*PROMPT, b"\xc4\x02id", text("a")), "unknown_name"),
        (packed_map(*ID, text("prompt"), b"\xa2\xff\xfe"), "not_utf8"),
        (packed_map(*ID, text("prompt"), b"\xa3\xed\xa0\x80"), "not_utf8"),
        (packed_map(*ID, b"\xa1\xff", text("x")), "not_utf8"),
        (packed_map(*ID, text("prompt"), b"\xc4\x01x"), "wrong_type"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bytes_that_are_no_task_are_refused_with_their_code(data, code):
    assert refusal(decode_packed, data).code == code


@pytest.mark.parametrize(
    "value",
    [
        b"\xd4\x2a\x00",  # ext 0x2a
        b"\xc7\x00\x2a",  # ext of no bytes
        b"\xd6\xff\x00\x00\x00\x01",  # timestamp32
        b"\xd7\xff" + bytes(8),  # timestamp64
        b"\xd7\xff" + b"\xff" * 8,  # timestamp64 with too many nanoseconds
        b"\xc7\x0c\xff" + bytes(12),  # timestamp96
        b"\xc7\x03\xff\x00\x00\x00",  # a timestamp of a length that there is not
        b"\xd4\xff\x00",
        b"\xc4\x01x",  # binary
    ],
)
def test_what_json_cannot_say_is_refused_wherever_it_stands(value):
    for data in (
        packed_map(*ID, *PROMPT, text("meta"), value),
        packed_map(*ID, *PROMPT, text("meta"), b"\x91" + value),
        packed_map(*ID, text("prompt"), value),
        packed_map(*ID, *PROMPT, text("seed"), value),
        value,
    ):
        assert refusal(decode_packed, data).code in ("wrong_type", "not_msgpack")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(number):
    for encoded in (b"\xcb" + struct.pack(">d", number), b"\xca" + struct.pack(">f", number)):
        for name in ("temperature", "top_p", "meta"):
            data = packed_map(*ID, *PROMPT, text(name), encoded)
            assert refusal(decode_packed, data).name == name


def test_an_integer_above_64_bits_is_refused_on_the_way_out():
    assert refusal(encode_packed, {**TASK, "meta": 1 << 64}).code == "invalid_value"


def test_half_a_surrogate_pair_is_refused_on_the_way_out():
    for fields in ({"id": "a", "prompt": "\ud800"}, {"id": "a", "prompt": "x", "meta": ["\udc80"]}):
        assert refusal(encode_packed, check_task(fields)).code == "not_utf8"


@pytest.mark.parametrize("size", [2048, 2049])
def test_a_task_is_refused_from_one_byte_above_the_limit(size):
    data = encode_packed({"id": "a", "prompt": "x" * (size - 16)})
    assert len(data) == size
    limits = Limits(task_bytes=2048)
    if size > limits.task_bytes:
        error = refusal(decode_packed, data, limits)
        assert error.code == "too_large"
        assert "2048" in str(error)
        assert "2049" in str(error)
    else:
        assert decode_packed(data, limits)["id"] == "a"


def test_a_flat_task_is_measured_with_its_names():
    fields = {b"id": b"a", b"prompt": b"x" * 100}
    assert decode_flat(fields, Limits(task_bytes=109))
    assert refusal(decode_flat, fields, Limits(task_bytes=108)).code == "too_large"


# ---------------------------------------------------------------- flat pitfalls


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("messages", b'[{"role":"user","role":"user","content":"x"}]', "duplicate_key"),
        ("messages", b'[{"role":"user","content":"\\ud800"}]', "not_utf8"),
        ("messages", b'[{"role":"user","content":"\\udc80x"}]', "not_utf8"),
        ("messages", b'[{"role":"user","content":"x","\\ud800":"y"}]', "not_utf8"),
        ("messages", b"[" * 100_000, "not_json"),
        ("messages", b"[" * 1000 + b"]" * 1000, None),
        ("messages", b"Hi", "not_json"),
        ("messages", b"", "not_json"),
        ("messages", b"[] []", "not_json"),
        ("messages", b'"\xff"', "not_utf8"),
        ("messages", b"\xef\xbb\xbf[]", "not_json"),
        ("token_ids", b"[NaN]", "not_json"),
        ("token_ids", b"[Infinity]", "not_json"),
        ("token_ids", b"[-Infinity]", "not_json"),
        ("token_ids", b"[1e999]", "wrong_type"),
        ("token_ids", b"[1.0]", "wrong_type"),
        ("token_ids", b"[" + b"9" * 5000 + b"]", None),
        ("token_ids", b"1 2 3", "not_json"),
        ("stop", b"END", "not_json"),
        ("stop", b'["a",]', "not_json"),
        ("temperature", b"nan", "wrong_type"),
        ("temperature", b"inf", "wrong_type"),
        ("temperature", b"1e999", "invalid_value"),
        ("temperature", b"1_0", "wrong_type"),
        ("temperature", b" 1", "wrong_type"),
        ("temperature", b"", "wrong_type"),
        ("temperature", "١".encode(), "wrong_type"),
        ("temperature", b"0x1", "wrong_type"),
        ("top_p", b"half", "wrong_type"),
        ("max_tokens", b"1.0", "wrong_type"),
        ("max_tokens", b"1_0", "wrong_type"),
        ("max_tokens", b"16\n", "wrong_type"),
        ("max_tokens", b"+16", "wrong_type"),
        ("max_tokens", b"", "wrong_type"),
        ("max_tokens", b"9" * 5000, "wrong_type"),
        ("max_tokens", b"0", "invalid_value"),
        ("seed", b"-1", "invalid_value"),
        ("seed", b"9223372036854775808", "invalid_value"),
        ("ignore_eos", b"yes", "wrong_type"),
        ("ignore_eos", b"True", "wrong_type"),
        ("prompt", b"\xff", "not_utf8"),
        ("prompt", b"\xed\xa0\x80", "not_utf8"),
        ("prompt", b"", "invalid_value"),
        ("id", b"\xc3", "not_utf8"),
        ("max_token", b"16", "unknown_name"),
        ("h", b"1:2:3:4:5:0", "unknown_name"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_flat_value_that_is_wrong_is_refused_by_name(name, value, code):
    fields = {b"id": b"a", b"prompt": b"x"}
    if name in ("messages", "token_ids"):
        del fields[b"prompt"]
    error = refusal(decode_flat, {**fields, name.encode(): value})
    assert error.name.startswith(name)
    assert code in (None, error.code)
    assert len(str(error)) < 1000


@pytest.mark.parametrize("value", [b"1", b"true"])
def test_a_flat_boolean_is_true_or_1(value):
    assert decode_flat({b"id": b"a", b"prompt": b"x", b"ignore_eos": value})["ignore_eos"] is True


@pytest.mark.parametrize("value", [b"0", b"0.5", b"1e-3", b"1E0", b"10.0"])
def test_a_flat_number_is_written_as_json_writes_it(value):
    task = decode_flat({b"id": b"a", b"prompt": b"x", b"temperature": value})
    assert task["temperature"] == float(value)


def test_a_field_name_that_is_not_utf8_is_refused():
    assert refusal(decode_flat, {b"id": b"a", b"\xff": b"x"}).code == "not_utf8"


def test_a_long_unknown_name_does_not_fill_the_error():
    assert len(str(refusal(decode_flat, {b"x" * 100_000: b"\xff"}))) < 300
    assert len(str(refusal(decode_flat, {b"x" * 100_000: b"x"}))) < 300


@pytest.mark.parametrize("raw", [b"", b"[]"])
def test_an_entry_without_fields_is_refused(raw):
    assert refusal(decode_entry, {}).code == "empty"
    assert refusal(decode_entry, {b"": raw}).code in ("empty", "unknown_name")


def test_a_field_beside_the_packed_one_is_refused():
    error = refusal(decode_entry, {b"m": encode_packed(TASK), b"max_tokens": b"3"})
    assert (error.code, error.name) == ("unknown_name", "max_tokens")
    assert refusal(decode_entry, {b"m": encode_packed(TASK), b"\xff": b""}).code == "unknown_name"


def test_a_whole_character_written_as_two_escapes_is_json():
    assert parse_json("stop", '"\\ud83d\\ude00"') == "\U0001f600"


# ---------------------------------------------------------------- arbitrary bytes


def only_wire_errors(data: bytes) -> None:
    for function, argument in (
        (decode_packed, data),
        (decode_entry, {b"m": data}),
        (decode_result, {b"m": data}),
    ):
        try:
            function(argument)
        except WireError as error:
            str(error).encode()
    salvage({b"m": data})


@given(st.binary(max_size=200))
@example(b"\xd7\xff" + b"\xff" * 8)
@example(b"\xc7\x0c\xff" + b"\xff" * 12)
@example(b"\x81" * 600)
def test_arbitrary_bytes_raise_nothing_but_wire_errors(data):
    only_wire_errors(data)


@given(tasks(JSON_VALUES).map(encode_packed), st.data())
def test_a_valid_task_with_bytes_changed_raises_nothing_but_wire_errors(packed, data):
    changed = bytearray(packed)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(changed) - 1))
        byte = data.draw(st.integers(0, 255) | st.sampled_from([0xC1, 0xC7, 0xD4, 0xDD, 0xDF]))
        if data.draw(st.booleans()):
            changed[place] = byte
        else:
            changed.insert(place, byte)
    only_wire_errors(bytes(changed))
    only_wire_errors(bytes(changed[: data.draw(st.integers(0, len(changed)))]))


NAMES = st.sampled_from(
    [name.encode() for name in [*OPTIONS, "id", "prompt", "messages", "m", "h"]]
)
JSON_NOISE = st.text('[]{}",:0123456789eE.-\\udc8tfnNaI ', max_size=30).map(str.encode)


@given(st.dictionaries(NAMES | st.binary(max_size=4), st.binary(max_size=20) | JSON_NOISE))
def test_arbitrary_fields_raise_nothing_but_wire_errors(fields):
    for function in (decode_entry, decode_flat, decode_result):
        try:
            function(fields)
        except WireError as error:
            str(error).encode()
    salvage(fields)


# ---------------------------------------------------------------- salvage


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({b"id": b"a", b"promt": b"x"}, ("default", "a")),
        ({b"id": b"a", b"job": b"night", b"prompt": b"\xff"}, ("night", "a")),
        ({b"m": encode_packed({"id": "a", "job": "night", "promt": 1})}, ("night", "a")),
        ({b"m": encode_packed({"id": "a"}), b"x": b"y"}, ("default", "a")),
        ({b"prompt": b"x"}, None),
        ({b"id": b"", b"prompt": b"x"}, None),
        ({b"id": b"\xff"}, None),
        ({b"id": b"x" * 257}, None),
        ({b"id": b"a", b"job": b"not a job"}, None),
        ({b"m": encode_packed({"id": 7})}, None),
        ({b"m": encode_packed({"id": "a", "job": 7})}, None),
        ({b"m": encode_packed({"prompt": "x"})}, None),
        ({b"m": b"\x90"}, None),
        ({b"m": b"\xc1"}, None),
        ({b"m": b""}, None),
        ({}, None),
    ],
)
def test_a_refused_entry_keeps_its_name_where_both_parts_can_be_read(fields, named):
    refusal(decode_entry, fields)
    assert salvage(fields) == named
