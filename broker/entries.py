"""What passes between the store and those who decide: plain values, no behaviour to speak of.

Counts are tokens and bytes, times are milliseconds. An *entry id* is Redis's `<ms>-<seq>` in bytes.
Pure, so that deciding modules can speak of deliveries without importing Redis.
"""

from __future__ import annotations

from typing import NamedTuple

from broker.wire import HEADER_FIELD, PACKED_FIELD, Fields, Header

# What the store answers about the end of one delivery.
SUPERSEDED, DONE, OTHER, VANISHED = 0, 1, 2, 3

RawEntry = tuple[bytes, Fields]  # (entry id, fields); the fields are empty when they vanished


class NewEntry(NamedTuple):
    """A task on its way into a partition."""

    partition: str
    tokens: int  # estimated prompt tokens
    packed: bytes
    header: bytes


class RoutedEntry(NamedTuple):
    """An ingress entry on its way into a partition."""

    entry_id: bytes
    job: str
    task_id: str
    entry: NewEntry


class Outcome(NamedTuple):
    """The end of one delivery, with what the counters need. Counts are tokens and bytes."""

    partition: str
    entry_id: bytes
    job: str
    status: str
    tokens: int  # the header's estimate, as it was counted into the backlog
    size: int  # bytes of the packed task
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prompt_bytes: int  # 0: do not calibrate by this one
    result: list[bytes]  # alternating field names and values


class Requeued(NamedTuple):
    """A delivery that goes back; `header` is the new one."""

    entry_id: bytes
    tokens: int
    size: int  # bytes of the packed task
    delay_ms: int
    header: bytes


class Burial(NamedTuple):
    """A delivery that becomes a dead letter. `partition` is "" for an entry of the ingress."""

    partition: str
    entry_id: bytes
    tokens: int
    size: int  # bytes of the packed task
    letter: list[bytes]
    job: str  # "" when no error result can be written, because no id can be read
    result: list[bytes]
    counts: bool  # whether the task was not counted as submitted yet


class JobView(NamedTuple):
    """The counters of a job. `total` is None until its submitter has seen the end of the input."""

    job: str
    total: int | None
    submitted: int
    ok: int
    error: int
    cancelled: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tokens_per_byte: float | None
    cursor: str
    cut: str | None
    state: str

    @property
    def settled(self) -> int:
        return self.ok + self.error + self.cancelled

    @property
    def finished(self) -> bool:
        return self.total is not None and self.settled >= self.total


class Backlog(NamedTuple):
    """What waits or is pending: (tasks, prompt tokens) per partition, and the totals."""

    partitions: dict[str, tuple[int, int]]
    tasks: int
    size: int  # bytes of the packed task


def body_of(fields: Fields) -> tuple[bytes | None, Header]:
    """The packed task (None for an entry that carries none) and the header of a partition entry."""
    packed = fields.get(PACKED_FIELD)
    size = len(packed) if packed is not None else 1
    return packed, Header.decode(fields.get(HEADER_FIELD), body_bytes=size)
