"""What tokenmq writes beside and after a task: headers that cannot lose one, results both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import WireError
from broker.wire import Header, decode_result, encode_result

TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)

# ---------------------------------------------------------------- headers

HEADERS = st.builds(
    Header,
    tokens=st.integers(1, 1 << 31),
    prefix=st.integers(0, (1 << 32) - 1),
    failures=st.integers(0, 100),
    crashes=st.integers(0, 1000),
    submitted_ms=st.integers(0, 1 << 43),
    flat=st.booleans(),
)


@given(HEADERS)
def test_a_header_comes_back_as_it_was(header):
    assert Header.decode(header.encode(), body_bytes=4) == header


@pytest.mark.parametrize(
    "data",
    [
        None, b"", b"7", b"1:2:3", b"1:2:3:4:5:0:7", b"a:b:c:d:e:f", b"1:2:3:4:5:", b":::::",
        b"-1:0:0:0:0:0", b"1:-2:0:0:0:0", b"1:0:-3:0:0:0", b"1:0:0:-4:0:0", b"1:0:0:0:-5:0",
        b"1:0:0:0:0:2", b"1_0:0:0:0:0:0", b" 1:0:0:0:0:0", b"1.5:0:0:0:0:0", b"1:0:0:0:0:0\n",
        b"99999999999999999999:0:0:0:0:0", b"9" * 400 + b":0:0:0:0:0", b"9" * 9999, b"\xff\xfe",
        "١:0:0:0:0:0".encode(),
    ],
)  # fmt: skip
def test_a_damaged_header_becomes_an_estimate_by_size(data):
    assert Header.decode(data, body_bytes=400) == Header(tokens=100)
    assert Header.decode(data, body_bytes=0) == Header(tokens=1)


@given(st.binary(max_size=40) | st.text("0123456789:-", max_size=60).map(str.encode))
def test_whatever_stands_in_a_header_its_counts_can_be_counted(data):
    header = Header.decode(data, body_bytes=100)
    assert 1 <= header.tokens < 1 << 53
    assert all(0 <= value < 1 << 53 for value in header)
    assert Header.decode(header.encode(), body_bytes=0) == header


def test_a_prompt_of_no_tokens_counts_as_one():
    assert Header.decode(b"0:0:0:0:0:0", body_bytes=400).tokens == 1


# ---------------------------------------------------------------- results

RESULTS = st.fixed_dictionaries(
    {
        "id": TEXT,
        "job": st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True),
        "status": st.sampled_from(["ok", "error", "cancelled"]),
    },
    optional={
        "text": TEXT | st.just(""),
        "token_ids": st.lists(st.integers(0, (1 << 31) - 1), max_size=5),
        "finish_reason": st.sampled_from(["stop", "length"]),
        "prompt_tokens": st.integers(0, 1 << 31),
        "cached_tokens": st.integers(0, 1 << 31),
        "output_tokens": st.integers(0, 1 << 31),
        "error": st.fixed_dictionaries({"code": TEXT, "message": TEXT}),
        "consumer": TEXT,
        "attempts": st.integers(1, 100),
        "queued_ms": st.integers(0, 1 << 40),
        "generate_ms": st.integers(0, 1 << 40),
        "simulated": st.booleans(),
        "meta": TEXT,
    },
)


@given(RESULTS, st.booleans())
def test_a_result_comes_back_as_it_was_in_both_encodings(result, flat):
    words = encode_result(result, flat=flat)
    assert all(type(word) is bytes for word in words)
    assert decode_result(dict(zip(words[::2], words[1::2], strict=True))) == result


@given(st.dictionaries(TEXT, JSON_VALUES, max_size=3))
def test_a_packed_result_echoes_any_meta(meta):
    result = {"id": "a", "job": "j", "status": "ok", "meta": meta}
    name, packed = encode_result(result, flat=False)
    assert decode_result({name: packed}) == result


def test_a_flat_result_reads_like_its_line_of_json():
    result = {
        "id": "a", "job": "j", "status": "error", "attempts": 2, "simulated": True,
        "error": {"code": "crash", "message": "grüß"}, "token_ids": [1, 2],
    }  # fmt: skip
    assert encode_result(result, flat=True) == [
        b"id", b"a", b"job", b"j", b"status", b"error", b"attempts", b"2", b"simulated", b"true",
        b"error", '{"code":"crash","message":"grüß"}'.encode(), b"token_ids", b"[1,2]",
    ]  # fmt: skip


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("half", ["\ud800", "\udc80"])
def test_a_result_with_half_a_surrogate_pair_is_refused_in_both_encodings(flat, half):
    for result in ({"id": "a", "text": half}, {"id": "a", "error": {"code": "c", "message": half}}):
        with pytest.raises(WireError) as caught:
            encode_result(result, flat=flat)
        assert caught.value.code == "not_utf8"


@pytest.mark.parametrize("fields", [{b"m": b"\x90"}, {b"m": b"\xc1"}, {b"attempts": b"x"}])
def test_a_damaged_result_is_refused(fields):
    with pytest.raises(WireError):
        decode_result(fields)
