"""The wire, version 1: what a task and a result look like as bytes, and what is refused.

    flat     one stream field per name, UTF-8 text; structured values as JSON text
    packed   one field `m` that holds a MessagePack map of the same names

Decoding is strict (see `broker.task`) and bounded: size first, then one MessagePack or JSON value
without extensions, duplicate keys, half surrogates or numbers that are not finite.

Beside the task, an entry in a partition stream carries the field `h`, the `Header`: what tokenmq
itself knows about the delivery. A foreign producer that writes to a partition may leave it out.

Pure. Not chosen: raw bytes as texts, because a result must be able to be a line of JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

import msgpack

from broker.errors import WireError
from broker.task import DEFAULT_JOB, LIMITS, Limits, Task, check_name, check_task, refuse, shown

PACKED_FIELD = b"m"
HEADER_FIELD = b"h"

Fields = dict[bytes, bytes]

_INTEGER = re.compile(rb"-?[0-9]{1,19}\Z")
# float() alone also takes underscores, blanks, "infinity" and digits of other scripts.
_NUMBER = re.compile(rb"-?[0-9]{1,64}(\.[0-9]{1,64})?([eE][+-]?[0-9]{1,3})?\Z")
# Whoever may write to a partition writes headers: bounded, because Lua counts in doubles.
_HEADER = re.compile(
    rb"([0-9]{1,10}):([0-9]{1,10}):([0-9]{1,6}):([0-9]{1,6}):([0-9]{1,15}):([01])\Z"
)
# How a flat field's text becomes a value; names in none of these sets are text as they are.
_JSON_NAMES = frozenset({"messages", "token_ids", "stop"})
_FLAT_BOOLEANS = frozenset({"ignore_eos", "return_token_ids"})
_FLAT_NUMBERS = frozenset({"temperature", "top_p"})
_FLAT_INTEGERS = frozenset(
    {"max_tokens", "top_k", "seed", "prompt_tokens", "expected_output_tokens", "max_failures"}
)


class ResultError(TypedDict):
    code: str
    message: str


class Result(TypedDict, total=False):
    """The one end of one task. `status` is ok, error or cancelled; token counts are tokens."""

    id: str
    job: str
    status: str
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    error: ResultError
    consumer: str
    attempts: int
    queued_ms: int
    generate_ms: int
    simulated: bool
    meta: Any


class Header(NamedTuple):
    """What tokenmq knows about an entry. `tokens` is the estimated prompt length in tokens."""

    tokens: int
    prefix: int = 0  # CRC-32 of the prefix key
    failures: int = 0  # times an engine refused or failed it for a reason worth a retry
    crashes: int = 0  # times whoever held it died
    submitted_ms: int = 0  # Redis clock; 0 means: the entry id says so
    flat: bool = False  # the result goes back in the flat encoding

    def encode(self) -> bytes:
        return b"%d:%d:%d:%d:%d:%d" % self

    @classmethod
    def decode(cls, data: bytes | None, *, body_bytes: int) -> Header:
        """Absent or damaged headers are replaced by an estimate: advice must never lose a task."""
        found = _HEADER.match(data or b"")
        if found is None:
            return cls(tokens=max(1, body_bytes // 4))
        tokens, prefix, failures, crashes, submitted, flat = map(int, found.groups())
        return cls(max(1, tokens), prefix, failures, crashes, submitted, bool(flat))


# ---------------------------------------------------------------- packed


def _unique_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        raise refuse("", "a map names the same key twice", "duplicate_key")
    return built


def _no_extension(code: int, _data: bytes) -> Any:
    raise refuse("", f"MessagePack extension type {code} is not part of the wire", "wrong_type")


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, object_pairs_hook=_unique_map, ext_hook=_no_extension)
    except UnicodeDecodeError as error:
        raise WireError("not_utf8", f"a text is not UTF-8: {error.reason}") from None
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise WireError("not_msgpack", f"not one MessagePack value: {reason[:200]}") from None


def decode_packed(data: bytes, limits: Limits = LIMITS) -> Task:
    """A task from one MessagePack map. Raises WireError."""
    _bounded(len(data), limits)
    fields = _unpack(data)
    if type(fields) is not dict:
        raise WireError("wrong_type", f"must be a map, not {type(fields).__name__}")
    return check_task(fields, limits)


def encode_packed(value: Mapping[str, Any]) -> bytes:
    """A checked task or result as a MessagePack map. Raises WireError on a lone surrogate."""
    try:
        packed: bytes = msgpack.packb(value)
    except UnicodeEncodeError as error:
        raise WireError("not_utf8", f"a text cannot be UTF-8: {error.reason}") from None
    except OverflowError:
        raise WireError("invalid_value", "an integer does not fit in 64 bits") from None
    return packed


def _bounded(size: int, limits: Limits) -> None:
    if size == 0:
        raise WireError("empty", "the entry is empty")
    if size > limits.task_bytes:
        text = f"{size} bytes are above the limit of {limits.task_bytes} bytes for a task"
        raise WireError("too_large", text)


# ---------------------------------------------------------------- flat


def decode_flat(fields: Mapping[bytes, bytes], limits: Limits = LIMITS) -> Task:
    """A task from stream fields of UTF-8 text. Raises WireError."""
    _bounded(sum(map(len, fields)) + sum(map(len, fields.values())), limits)
    values: dict[str, Any] = {}
    for raw_name, raw in fields.items():
        name = _utf8("", raw_name)
        values[name] = _flat_value(name, raw)
    return check_task(values, limits)


def _flat_value(name: str, raw: bytes) -> Any:
    if name in _JSON_NAMES:
        return parse_json(name, _utf8(name, raw))
    if name in _FLAT_BOOLEANS:
        if raw in (b"true", b"1"):
            return True
        if raw in (b"false", b"0"):
            return False
        raise refuse(name, "must be true or false", "wrong_type")
    if name in _FLAT_NUMBERS:
        if not _NUMBER.match(raw):
            raise refuse(name, "must be a number", "wrong_type")
        return float(raw)
    if name in _FLAT_INTEGERS:
        if not _INTEGER.match(raw):
            raise refuse(name, "must be an integer", "wrong_type")
        return int(raw)
    return _utf8(shown(name), raw)


def _utf8(name: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise WireError("not_utf8", f"is not UTF-8: {error.reason}", name) from None


def _no_constant(text: str) -> Any:
    raise refuse("", f"{text} is not a number that JSON knows", "not_json")


def parse_json(name: str, text: str) -> Any:
    """One strict JSON value: no NaN, no duplicate keys, no lone surrogates. Raises WireError."""
    try:
        value = json.loads(text, object_pairs_hook=_unique_map, parse_constant=_no_constant)
    except WireError as error:
        raise WireError(error.code, str(error), name) from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise WireError("not_json", f"is not JSON: {reason}", name) from None
    if "\\u" in text:
        _no_surrogates(name, value)
    return value


def _no_surrogates(name: str, value: Any) -> None:
    """A `\\ud800` in JSON text becomes half a character, which no UTF-8 can carry."""
    try:
        msgpack.packb(value)
    except UnicodeEncodeError:
        raise WireError("not_utf8", "holds half a surrogate pair", name) from None
    except (OverflowError, ValueError):
        return  # other faults are named by the field's own check


# ---------------------------------------------------------------- entries


def decode_entry(fields: Fields, limits: Limits = LIMITS) -> tuple[Task, bool]:
    """A task from the fields of an ingress entry, and whether it came flat. Raises WireError."""
    packed = fields.get(PACKED_FIELD)
    if packed is None:
        return decode_flat(fields, limits), True
    extra = fields.keys() - {PACKED_FIELD, HEADER_FIELD}
    if extra:
        name = shown(min(extra).decode("utf-8", "backslashreplace"))
        raise WireError("unknown_name", "stands beside the packed field m", name)
    return decode_packed(packed, limits), False


def salvage(fields: Fields) -> tuple[str, str] | None:
    """(job, id) of an entry that was refused, when both can still be read, else None."""
    try:
        packed = fields.get(PACKED_FIELD)
        values = (
            _unpack(packed)
            if packed is not None
            else {
                name: fields[name.encode()].decode()
                for name in ("id", "job")
                if name.encode() in fields
            }
        )
        if type(values) is not dict:
            return None
        job = values.get("job", DEFAULT_JOB)
        check_name("id", values.get("id"))
        check_name("job", job)
        encode_packed({"id": values["id"]})
    except (WireError, UnicodeDecodeError):
        return None
    return job, values["id"]


# ---------------------------------------------------------------- results


def encode_result(result: Result, *, flat: bool) -> list[bytes]:
    """A result as alternating stream field names and values. Raises WireError."""
    if not flat:
        return [PACKED_FIELD, encode_packed(result)]
    pairs: list[bytes] = []
    try:
        for name, value in result.items():
            pairs += (name.encode(), _flat_text(value).encode())
    except UnicodeEncodeError as error:
        raise WireError("not_utf8", f"a text cannot be UTF-8: {error.reason}") from None
    return pairs


def _flat_text(value: Any) -> str:
    if type(value) is str:
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


_RESULT_INTEGERS = (
    "prompt_tokens", "cached_tokens", "output_tokens", "attempts", "queued_ms", "generate_ms",
)  # fmt: skip


def decode_result(fields: Fields) -> Result:
    """A result from the fields of a results entry. Raises WireError."""
    packed = fields.get(PACKED_FIELD)
    if packed is not None:
        values = _unpack(packed)
        if type(values) is not dict:
            raise WireError("wrong_type", "a result must be a map")
        return values  # type: ignore[return-value]
    result: dict[str, Any] = {}
    for raw_name, raw in fields.items():
        name, text = _utf8("", raw_name), _utf8("", raw)
        structured = name in ("token_ids", "error", "simulated") or name in _RESULT_INTEGERS
        result[name] = parse_json(name, text) if structured else text
    return result  # type: ignore[return-value]
