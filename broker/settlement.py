"""How a delivery ends: the pure half of settling, shared by router, recovery and consumers.

    a good task        ──► Outcome      one result
    fails, may go on   ──► Requeued     waits again: failures + 1 after a delay, or crashes + 1 now
    cannot be decoded  ──► Burial       a dead letter, and an error result where an id can be read
    has used it up     ──► Burial       likewise: failures above the task's own limit, or crashes

Failures and crashes are counted apart: a task is not to blame for the death of whoever held it, so
crashes have their own, generous limit, and only a task that was alone is ever convicted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack

from broker.entries import Burial, Outcome, RawEntry, Requeued, body_of
from broker.errors import WireError
from broker.task import DEFAULT_JOB, DEFAULT_MAX_FAILURES, Limits, Task
from broker.wire import Fields, Header, Result, decode_packed, encode_packed, encode_result, salvage


class Delivery(NamedTuple):
    """An entry handed to a consumer, decoded."""

    partition: str
    entry_id: bytes
    header: Header
    task: Task
    size: int  # bytes of the packed task

    @property
    def job(self) -> str:
        return self.task.get("job", DEFAULT_JOB)

    @property
    def submitted_ms(self) -> int:
        """When the task was accepted, on Redis's clock."""
        return self.header.submitted_ms or int(self.entry_id.partition(b"-")[0])

    @property
    def attempts(self) -> int:
        return self.header.failures + self.header.crashes + 1


def open_entry(partition: str, entry: RawEntry, limits: Limits) -> Delivery | Burial:
    """Decode a partition entry; what cannot be decoded is to be buried."""
    entry_id, fields = entry
    packed, header = body_of(fields)
    try:
        if packed is None:
            reason = "the entry vanished" if not fields else "a partition entry needs the field m"
            raise WireError("vanished" if not fields else "no_body", reason)
        return Delivery(partition, entry_id, header, decode_packed(packed, limits), len(packed))
    except WireError as error:
        return undecodable(partition, entry, error, limits)


def result_of(task: Task, status: str, **facts: Any) -> Result:
    """A result that echoes what identifies the task."""
    result: Result = {"id": task["id"], "job": task.get("job", DEFAULT_JOB), "status": status}
    result.update(facts)  # type: ignore[typeddict-item]
    if "meta" in task:
        result["meta"] = task["meta"]
    return result


def ended(delivery: Delivery, result: Result, *, prompt_bytes: int = 0) -> Outcome:
    """The outcome that writes this result."""
    return Outcome(
        partition=delivery.partition,
        entry_id=delivery.entry_id,
        job=delivery.job,
        status=result["status"],
        tokens=delivery.header.tokens,
        size=delivery.size,
        prompt_tokens=result.get("prompt_tokens", 0),
        cached_tokens=result.get("cached_tokens", 0),
        output_tokens=result.get("output_tokens", 0),
        prompt_bytes=prompt_bytes,
        result=encode_result(result, flat=delivery.header.flat),
    )


def refused(delivery: Delivery, code: str, text: str, **facts: Any) -> Outcome:
    """An error result for a prompt that no attempt can make good."""
    error = {"code": code, "message": text}
    result = result_of(delivery.task, "error", error=error, attempts=delivery.attempts, **facts)
    return ended(delivery, result)


def back(delivery: Delivery, header: Header, *, delay_ms: int = 0) -> Requeued:
    """The task waits again under a new header; its time of acceptance is kept."""
    kept = header._replace(submitted_ms=delivery.submitted_ms)
    return Requeued(
        delivery.entry_id, delivery.header.tokens, delivery.size, delay_ms, kept.encode()
    )


def given_back(delivery: Delivery) -> Requeued:
    """Not started: back without using up an attempt."""
    return back(delivery, delivery.header)


def failed(delivery: Delivery, code: str, text: str, *, delay_ms: int) -> Requeued | Burial:
    """An attempt failed for a reason that another attempt may not meet."""
    failures = delivery.header.failures + 1
    if failures > delivery.task.get("max_failures", DEFAULT_MAX_FAILURES):
        return buried(delivery, code, f"failed {failures} times, last: {text}")
    return back(delivery, delivery.header._replace(failures=failures), delay_ms=delay_ms)


def orphaned(delivery: Delivery, *, crashes_max: int) -> Requeued | Burial:
    """Whoever held it died."""
    crashes = delivery.header.crashes + 1
    if crashes > crashes_max:
        return buried(delivery, "crash", f"whoever held this task died, {crashes} times")
    return back(delivery, delivery.header._replace(crashes=crashes))


def buried(delivery: Delivery, code: str, text: str) -> Burial:
    """A dead letter and an error result for a task that was understood."""
    error = {"code": code, "message": text}
    result = result_of(delivery.task, "error", error=error, attempts=delivery.attempts)
    letter = [b"m", encode_packed(delivery.task), b"h", delivery.header.encode()]
    return Burial(
        partition=delivery.partition,
        entry_id=delivery.entry_id,
        tokens=delivery.header.tokens,
        size=delivery.size,
        letter=letter + _why(code, text, delivery.partition, delivery.job, delivery.task["id"]),
        job=delivery.job,
        result=encode_result(result, flat=delivery.header.flat),
        counts=False,
    )


def undecodable(partition: str, entry: RawEntry, error: WireError, limits: Limits) -> Burial:
    """A dead letter with the raw bytes; an error result where job and id can be read.

    `partition` is "" for an entry of the ingress.
    """
    entry_id, fields = entry
    packed, header = body_of(fields)
    named = salvage(fields)
    job, task_id = named or ("", "")
    result: list[bytes] = []
    if named:
        fault = {"code": error.code, "message": str(error)}
        refusal: Result = {"id": task_id, "job": job, "status": "error", "error": fault}  # type: ignore[typeddict-item]
        result = encode_result(refusal, flat=packed is None or header.flat)
    return Burial(
        partition=partition,
        entry_id=entry_id,
        tokens=header.tokens,
        size=len(packed or b""),
        letter=_raw(fields, limits) + _why(error.code, str(error), partition, job, task_id),
        job=job,
        result=result,
        counts=partition == "",
    )


def _why(code: str, text: str, partition: str, job: str, task_id: str) -> list[bytes]:
    pairs = {
        "code": code,
        "reason": text,
        "from": partition or "ingress",
        "job": job,
        "id": task_id,
    }
    flat: list[bytes] = []
    for name, value in pairs.items():
        flat += (name.encode(), value.encode("utf-8", "backslashreplace"))
    return flat


def _raw(fields: Fields, limits: Limits) -> list[bytes]:
    """The refused bytes as they came: `m`, or all fields as one MessagePack array `raw`.

    What is above the size limit is kept up to the limit, with its whole size beside it, so that a
    stranger cannot fill the dead letters with gigabytes.
    """
    name, raw = b"m", fields.get(b"m")
    if raw is None:
        name, raw = b"raw", encode_packed_fields(fields)
    if len(raw) <= limits.task_bytes:
        return [name, raw]
    return [b"raw", raw[: limits.task_bytes], b"raw_bytes", b"%d" % len(raw)]


def encode_packed_fields(fields: Fields) -> bytes:
    """Stream fields as one MessagePack array of byte strings, names and values alternating."""
    packed: bytes = msgpack.packb([part for pair in fields.items() for part in pair])
    return packed
