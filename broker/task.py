"""A task, its limits, and the check of every value in it.

A task is a plain dict of checked values: it can be packed again as it is, which keeps the hot path
at one C call each way. A name nobody knows is refused rather than ignored, because a misspelt
`max_token` must not silently mean "default". Every refusal is a WireError whose `code` is stable
and whose `name` is the field at fault.

Pure. Not chosen: a schema library; this table checks a 1 KiB task in about two microseconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

from broker.errors import WireError

DEFAULT_JOB = "default"
DEFAULT_MAX_TOKENS = 256
DEFAULT_TEMPERATURE = 1.0
DEFAULT_MAX_FAILURES = 3


class ChatTurn(TypedDict, total=False):
    role: str
    content: str
    name: str


class Task(TypedDict, total=False):
    """One prompt to generate. `id` and exactly one of prompt, messages, token_ids are there."""

    id: str
    job: str
    prompt: str
    messages: list[ChatTurn]
    token_ids: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: list[str]
    ignore_eos: bool
    return_token_ids: bool
    prefix_key: str
    prompt_tokens: int
    expected_output_tokens: int
    max_failures: int
    meta: Any


class Limits(NamedTuple):
    """Bounds of one task. A task above one of them is refused, never truncated."""

    task_bytes: int = 1 << 20
    id_bytes: int = 256
    job_bytes: int = 128
    prefix_key_bytes: int = 1024
    turns: int = 1024
    token_ids: int = 1 << 18
    stops: int = 16
    stop_bytes: int = 256
    nesting: int = 8
    tokens: int = 1 << 20


LIMITS = Limits()

_JOB = re.compile(r"[A-Za-z0-9._-]+\Z")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_BODIES = ("prompt", "messages", "token_ids")

Check = Callable[[str, Any, Limits], None]


def refuse(name: str, text: str, code: str = "invalid_value") -> WireError:
    """The error for one field, to be raised by the caller."""
    return WireError(code, text, name)


def _text(limit: Callable[[Limits], int]) -> Check:
    def check(name: str, value: Any, limits: Limits) -> None:
        if type(value) is not str:
            raise refuse(name, f"must be text, not {type(value).__name__}", "wrong_type")
        if not value:
            raise refuse(name, "must not be empty")
        # A character is at most 4 bytes: most texts are settled without encoding them.
        most = limit(limits)
        if len(value) * 4 > most and len(value.encode("utf-8", "surrogatepass")) > most:
            raise refuse(name, f"is longer than {most} bytes", "too_large")

    return check


def _integer(low: int, high: Callable[[Limits], int]) -> Check:
    def check(name: str, value: Any, limits: Limits) -> None:
        if type(value) is not int:
            raise refuse(name, f"must be an integer, not {type(value).__name__}", "wrong_type")
        most = high(limits)
        if not low <= value <= most:
            raise refuse(name, f"must lie in {low}..{most}, not {value}")

    return check


def _number(low: float, high: float, *, above: bool = False) -> Check:
    def check(name: str, value: Any, _limits: Limits) -> None:
        if type(value) is not float and type(value) is not int:
            raise refuse(name, f"must be a number, not {type(value).__name__}", "wrong_type")
        # NaN fails every comparison, so it is refused here too.
        if not (low < value <= high if above else low <= value <= high):
            raise refuse(name, f"must lie in {'above ' if above else ''}{low}..{high}, not {value}")

    return check


def _boolean(name: str, value: Any, _limits: Limits) -> None:
    if type(value) is not bool:
        raise refuse(name, f"must be true or false, not {type(value).__name__}", "wrong_type")


def _job(name: str, value: Any, limits: Limits) -> None:
    _text(lambda bound: bound.job_bytes)(name, value, limits)
    if not _JOB.match(value):
        raise refuse(name, "may hold letters, digits, dot, dash and underscore only")


def _messages(name: str, value: Any, limits: Limits) -> None:
    if type(value) is not list or not value:
        raise refuse(name, "must be a list of at least one turn", "wrong_type")
    if len(value) > limits.turns:
        raise refuse(name, f"has more than {limits.turns} turns", "too_large")
    for place, turn in enumerate(value):
        where = f"{name}[{place}]"
        if type(turn) is not dict:
            raise refuse(where, "must be a map with role and content", "wrong_type")
        for key, text in turn.items():
            if key not in ("role", "content", "name"):
                raise refuse(f"{where}.{key}"[:200], "is not a known name", "unknown_name")
            if type(text) is not str:
                raise refuse(f"{where}.{key}", "must be text", "wrong_type")
        if turn.get("role") not in _ROLES:
            raise refuse(f"{where}.role", f"must be one of {', '.join(sorted(_ROLES))}")
        if "content" not in turn:
            raise refuse(f"{where}.content", "is missing", "missing")


def _token_ids(name: str, value: Any, limits: Limits) -> None:
    if type(value) is not list or not value:
        raise refuse(name, "must be a list of at least one token id", "wrong_type")
    if len(value) > limits.token_ids:
        raise refuse(name, f"has more than {limits.token_ids} token ids", "too_large")
    for token in value:
        if type(token) is not int or not 0 <= token < 1 << 31:
            raise refuse(name, "must hold integers in 0..2147483647 only", "wrong_type")


def _stop(name: str, value: Any, limits: Limits) -> None:
    texts = [value] if type(value) is str else value
    if type(texts) is not list:
        raise refuse(name, "must be a text or a list of texts", "wrong_type")
    if len(texts) > limits.stops:
        raise refuse(name, f"has more than {limits.stops} texts", "too_large")
    for text in texts:
        _text(lambda bound: bound.stop_bytes)(name, text, limits)


def _meta(name: str, value: Any, limits: Limits) -> None:
    _plain(name, value, limits.nesting)


def _plain(name: str, value: Any, nesting: int) -> None:
    """Only what JSON can say, so that every result can be a line of JSON."""
    if type(value) in (str, int, bool, type(None)):
        return
    if type(value) is float:
        if not math.isfinite(value):
            raise refuse(name, "holds a number that is not finite")
        return
    if nesting == 0:
        raise refuse(name, "is nested too deeply", "too_deep")
    if type(value) is list:
        for item in value:
            _plain(name, item, nesting - 1)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise refuse(name, "has a key that is not text", "wrong_type")
            _plain(name, item, nesting - 1)
    else:
        raise refuse(name, f"holds a {type(value).__name__}, which JSON cannot say", "wrong_type")


_TASK_CHECKS: dict[str, Check] = {
    "id": _text(lambda limits: limits.id_bytes),
    "job": _job,
    "prompt": _text(lambda limits: limits.task_bytes),
    "messages": _messages,
    "token_ids": _token_ids,
    "max_tokens": _integer(1, lambda limits: limits.tokens),
    "temperature": _number(0.0, 10.0),
    "top_p": _number(0.0, 1.0, above=True),
    "top_k": _integer(0, lambda _: 1 << 31),
    "seed": _integer(0, lambda _: (1 << 63) - 1),
    "stop": _stop,
    "ignore_eos": _boolean,
    "return_token_ids": _boolean,
    "prefix_key": _text(lambda limits: limits.prefix_key_bytes),
    "prompt_tokens": _integer(1, lambda limits: 1 << 31),
    "expected_output_tokens": _integer(1, lambda limits: limits.tokens),
    "max_failures": _integer(0, lambda _: 100),
    "meta": _meta,
}

TASK_NAMES = frozenset(_TASK_CHECKS)


def check_task(fields: dict[str, Any], limits: Limits = LIMITS) -> Task:
    """Check a map of task names in place; a single `stop` text becomes a list.

    Raises WireError that names the field.
    """
    for name, value in fields.items():
        check = _TASK_CHECKS.get(name)
        if check is None:
            raise refuse(shown(name), "is not a known name", "unknown_name")
        check(name, value, limits)
    if "id" not in fields:
        raise refuse("id", "is missing", "missing")
    bodies = [name for name in _BODIES if name in fields]
    if len(bodies) != 1:
        found = " and ".join(bodies) if bodies else "none"
        raise refuse("prompt", f"exactly one of {', '.join(_BODIES)} is needed, found {found}")
    if type(fields.get("stop")) is str:
        fields["stop"] = [fields["stop"]]
    return fields  # type: ignore[return-value]


def check_name(name: str, value: Any) -> None:
    """Check a single value as the field of that name. Raises WireError."""
    _TASK_CHECKS[name](name, value, LIMITS)


def shown(name: object) -> str:
    """A name somebody sent, made fit for an error text."""
    text = name if isinstance(name, str) else repr(name)
    return text.encode("utf-8", "backslashreplace").decode()[:100]
