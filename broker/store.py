"""The store: everything tokenmq asks of Redis, in tokenmq's words.

    accepted ──submit / route──► waiting ──read──► pending ──settle──► a result, once
                                    ▲                 │├──requeue──► waiting again (or delayed)
                                    └──promote────────┘└──bury─────► dead letter + error result

Each arrow is one atomic section of store.lua behind the fence of DESIGN 1.2: XACK answers 1 exactly
once per delivery. An end that came too late is answered SUPERSEDED, which is news and not an error.

This module and `broker.link` are the only ones that speak Redis. Methods are synchronous and safe
to call from several threads. All raise StoreUnavailable (unknown whether it took effect; every
call here may simply be repeated, but after a lost `read` compare `pending` with what you hold),
StoreRefused, or Overloaded where that is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgpack

from broker.entries import (
    DONE,
    OTHER,
    SUPERSEDED,
    VANISHED,
    Backlog,
    Burial,
    JobView,
    NewEntry,
    Outcome,
    RawEntry,
    Requeued,
    RoutedEntry,
)
from broker.errors import GeometryMismatch, Overloaded, StoreRefused
from broker.geometry import ENGINES_GROUP, ROUTERS_GROUP, Geometry, Keys
from broker.link import Link, MissingGroup
from broker.settings import Settings

_CANCELLED = -1


class Store:
    """One shard of one namespace."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._link = Link(settings)
        self.keys = Keys(settings.namespace)
        self.geometry: Geometry = settings.geometry

    def close(self) -> None:
        self._link.close()

    def ping(self) -> None:
        self._link.call("PING")

    # ------------------------------------------------------------ geometry

    def pin_geometry(self) -> None:
        """Pin this process's geometry, or refuse to go on. Raises GeometryMismatch."""
        mine = self.geometry.describe()
        self._link.call("SET", self.keys.geometry, mine, "NX")
        pinned = self._link.call("GET", self.keys.geometry)
        if pinned.decode() != mine:
            raise GeometryMismatch(
                f"Redis holds tasks laid out as [{pinned.decode()}],"
                f" this process is set to [{mine}]"
            )

    # ------------------------------------------------------------ producing

    def submit(self, job: str, before: str, after: str, entries: Sequence[NewEntry]) -> str | None:
        """Add a batch and move the job's cursor from `before` to `after` in one step.

        Returns None when the batch is in (now, or by an earlier call whose reply was lost), or the
        cursor found instead of `before`: somebody else submits this job. With after == "" there is
        no cursor and a repeated call adds the batch again. Raises Overloaded, and StoreRefused for
        a cancelled job.
        """
        settings, groups = self._settings, _by_partition(entries)
        size = sum(len(entry.packed) for entry in entries)
        arguments: list[Any] = [
            ENGINES_GROUP, job, before, after,
            settings.backlog_tasks_max, settings.backlog_bytes_max, len(entries), size,
        ]  # fmt: skip
        for partition, group in groups.items():
            tokens = sum(entry.tokens for entry in group)
            arguments += (partition, len(group), tokens, sum(len(entry.packed) for entry in group))
            for entry in group:
                arguments += (entry.packed, entry.header)
        keys = [self.keys.job(job), self.keys.backlog, self.keys.jobs, *self._streams(groups)]
        reply = self._link.script("submit", keys, arguments)
        if reply[0] == OTHER:
            return str(reply[1].decode())
        if reply[0] == VANISHED:
            raise Overloaded(f"the backlog holds {reply[1]} tasks, {reply[2]} bytes")
        if reply[0] == _CANCELLED:
            raise StoreRefused(f"job {job} was cancelled")
        return None

    def open_job(self, job: str, facts: Mapping[str, Any]) -> None:
        """Write facts of a job that nobody has written yet (the first one wins)."""
        key = self.keys.job(job)
        commands = [("HSETNX", key, name, value) for name, value in facts.items()]
        self._link.calls([*commands, ("SADD", self.keys.jobs, job)])

    def close_job(self, job: str, total: int) -> None:
        """The input has ended: the job has so many tasks."""
        self._link.call("HSET", self.keys.job(job), "total", total)

    def set_job(self, job: str, name: str, value: str) -> None:
        self._link.call("HSET", self.keys.job(job), name, value)

    def job_fact(self, job: str, name: str) -> str | None:
        reply = self._link.call("HGET", self.keys.job(job), name)
        return None if reply is None else str(reply.decode())

    def job(self, job: str) -> JobView:
        flat = self._link.call("HGETALL", self.keys.job(job))
        found = {name.decode(): value.decode() for name, value in _pairs(flat)}
        seen_bytes = int(found.get("calibration_bytes", 0))
        return JobView(
            job=job,
            total=int(found["total"]) if "total" in found else None,
            submitted=int(found.get("submitted", 0)),
            ok=int(found.get("ok", 0)),
            error=int(found.get("error", 0)),
            cancelled=int(found.get("cancelled", 0)),
            prompt_tokens=int(found.get("prompt_tokens", 0)),
            cached_tokens=int(found.get("cached_tokens", 0)),
            output_tokens=int(found.get("output_tokens", 0)),
            tokens_per_byte=int(found["calibration_tokens"]) / seen_bytes if seen_bytes else None,
            cursor=found.get("cursor", ""),
            cut=found.get("cut"),
            state=found.get("state", ""),
        )

    def jobs(self) -> list[str]:
        return sorted(name.decode() for name in self._link.call("SMEMBERS", self.keys.jobs))

    # ------------------------------------------------------------ results

    def results(self, job: str, after: str, count: int, block_ms: int) -> list[RawEntry]:
        """Results of a job behind the entry id `after` ("0" for all), waiting up to block_ms."""
        words: list[Any] = ["XREAD", "COUNT", count, "STREAMS", self.keys.results(job), after]
        if block_ms:
            words[3:3] = ["BLOCK", block_ms]
        reply = self._link.call(*words)
        return _entries(reply[0][1]) if reply else []

    def discard_results(self, job: str, upto: bytes) -> None:
        """The collector has these safely on disk: drop everything up to and with that entry."""
        ms, _, seq = upto.partition(b"-")
        beyond = b"%s-%d" % (ms, int(seq) + 1)
        self._link.call("XTRIM", self.keys.results(job), "MINID", beyond)

    def results_waiting(self, jobs: Iterable[str]) -> int:
        """The length of the longest results stream of these jobs."""
        replies = self._link.calls([("XLEN", self.keys.results(job)) for job in jobs])
        return max(replies, default=0)

    # ------------------------------------------------------------ consuming

    def backlog(self) -> Backlog:
        flat = self._link.call("HGETALL", self.keys.backlog)
        counts = {name.decode(): int(value) for name, value in _pairs(flat)}
        tasks, size = counts.pop("tasks", 0), counts.pop("bytes", 0)
        partitions = {
            name: (count, counts.get(f"{name}:t", 0))
            for name, count in counts.items()
            if count > 0 and self.geometry.holds(name)
        }
        return Backlog(partitions, tasks, size)

    def backlog_tasks(self) -> int:
        return int(self._link.call("HGET", self.keys.backlog, "tasks") or 0)

    def read(self, partition: str, incarnation: str, count: int) -> list[RawEntry]:
        """Up to `count` new entries of a partition become pending for this incarnation."""
        key = self.keys.tasks(partition)
        words = (
            "XREADGROUP",
            "GROUP",
            ENGINES_GROUP,
            incarnation,
            "COUNT",
            count,
            "STREAMS",
            key,
            ">",
        )
        try:
            reply = self._link.call(*words)
        except MissingGroup:
            if not self._make_group(key, ENGINES_GROUP):
                return []
            reply = self._link.call(*words)
        return _entries(reply[0][1]) if reply else []

    def _make_group(self, key: str, group: str, *options: str) -> bool:
        """Create a group from 0, so that nothing is skipped; False when there is no stream."""
        try:
            self._link.call("XGROUP", "CREATE", key, group, "0", *options)
        except StoreRefused as error:
            if "requires the key to exist" in str(error):
                return False
            if "BUSYGROUP" not in str(error):  # somebody else was faster, which is fine
                raise
        return True

    def settle(self, outcomes: Sequence[Outcome]) -> tuple[list[int], int]:
        """End deliveries with a result each. Groups are settled in one step.

        Returns a code per outcome, in order (DONE, SUPERSEDED, VANISHED), and how many results wait
        in the fullest results stream touched.
        """
        groups: dict[tuple[str, str], list[int]] = {}
        for place, outcome in enumerate(outcomes):
            groups.setdefault((outcome.partition, outcome.job), []).append(place)
        keys = [self.keys.backlog]
        arguments: list[Any] = [ENGINES_GROUP]
        for (partition, job), places in groups.items():
            keys += [self.keys.tasks(partition), self.keys.results(job), self.keys.job(job)]
            arguments += [partition, len(places)]
            for place in places:
                arguments += _outcome_words(outcomes[place])
        answers, waiting = self._link.script("settle", keys, arguments)
        codes = [SUPERSEDED] * len(outcomes)
        order = (place for places in groups.values() for place in places)
        for place, code in zip(order, answers, strict=True):
            codes[place] = code
        return codes, waiting

    def requeue(self, partition: str, back: Sequence[Requeued]) -> list[int]:
        """End deliveries by letting the tasks wait again. A code per entry."""
        if not back:
            return []
        keys = [self.keys.tasks(partition), self.keys.backlog, self.keys.delayed]
        arguments: list[Any] = [ENGINES_GROUP, partition]
        for entry in back:
            arguments += entry
        codes: list[int] = self._link.script("requeue", keys, arguments)
        return codes

    def bury(self, burial: Burial) -> bool:
        """End a delivery as a dead letter; False when it was superseded."""
        ingress = burial.partition == ""
        keys = [
            self.keys.ingress if ingress else self.keys.tasks(burial.partition),
            self.keys.backlog,
            self.keys.dead,
        ]
        if burial.job:
            keys += [self.keys.results(burial.job), self.keys.job(burial.job), self.keys.jobs]
        arguments = [
            ROUTERS_GROUP if ingress else ENGINES_GROUP,
            burial.partition, burial.entry_id, burial.tokens, burial.size,
            self._settings.dead_letters_max, int(burial.counts), burial.job,
            len(burial.letter), *burial.letter, len(burial.result), *burial.result,
        ]  # fmt: skip
        return bool(self._link.script("bury", keys, arguments) == DONE)

    # ------------------------------------------------------------ liveness

    def announce(self, consumer: str, incarnation: str, facts: bytes, ttl_ms: int) -> None:
        """A heartbeat: the roster first, so that what this incarnation reads is found."""
        self._link.script("enrol", [self.keys.roster], [incarnation])
        self._link.script("renew", [self.keys.consumer(consumer)], [facts, ttl_ms])

    def withdraw(self, consumer: str) -> None:
        """A clean goodbye: the consumer's lease ends now."""
        self._link.call("DEL", self.keys.consumer(consumer))

    def consumers(self) -> dict[str, dict[str, Any]]:
        """The live consumers' last heartbeats by consumer id."""
        names = self._scan(self.keys.consumers_pattern())
        found = {}
        for name, facts in zip(names, self._values(names), strict=True):
            if facts is not None:
                found[name.rpartition(":")[2]] = msgpack.unpackb(facts)
        return found

    def _values(self, names: Sequence[str]) -> list[bytes | None]:
        return self._link.calls([("GET", name) for name in names])

    def _scan(self, pattern: str) -> list[str]:
        cursor = b"0"
        found: set[str] = set()
        while True:
            cursor, names = self._link.call("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            # A foreign key need not be UTF-8; what it becomes here names nothing of ours.
            found.update(name.decode("utf-8", "replace") for name in names)
            if cursor == b"0":
                return sorted(found)

    def roster(self) -> list[str]:
        return sorted(name.decode() for name in self._link.call("SMEMBERS", self.keys.roster))

    def partitions(self) -> list[str]:
        """Every partition that has a stream now, whether the backlog knows it or not."""
        names = self._scan(self.keys.tasks_pattern())
        found = (self.keys.partition_of(name) for name in names)
        return [partition for partition in found if self.geometry.holds(partition)]

    def pending(self, partition: str, incarnation: str, count: int) -> list[RawEntry]:
        """The oldest entries that are pending for an incarnation, with their fields."""
        key = self.keys.tasks(partition)
        try:
            held = self._link.call("XPENDING", key, ENGINES_GROUP, "-", "+", count, incarnation)
        except MissingGroup:
            return []
        ids = [row[0] for row in held]
        commands = [("XRANGE", key, entry_id, entry_id) for entry_id in ids]
        replies = self._link.calls(commands)
        return [
            _entry(reply[0]) if reply else (entry_id, {})
            for entry_id, reply in zip(ids, replies, strict=True)
        ]

    def forget(self, incarnation: str, partitions: Sequence[str]) -> int:
        """Remove a dead incarnation's name; returns in how many partitions it holds entries."""
        keys = [self.keys.roster, *self._streams(partitions)]
        return int(self._link.script("forget", keys, [ENGINES_GROUP, incarnation]))

    # ------------------------------------------------------------ broker

    def ingress(self, router: str, count: int, block_ms: int) -> list[RawEntry]:
        """New ingress entries for this router; creates the group, from 0, where it is missing."""
        words = [
            "XREADGROUP", "GROUP", ROUTERS_GROUP, router, "COUNT", count, "BLOCK", block_ms,
            "STREAMS", self.keys.ingress, ">",
        ]  # fmt: skip
        try:
            reply = self._link.call(*words)
        except MissingGroup:
            self._make_group(self.keys.ingress, ROUTERS_GROUP, "MKSTREAM")
            reply = self._link.call(*words)
        return _entries(reply[0][1]) if reply else []

    def ingress_orphans(self, router: str, idle_ms: int, count: int) -> list[RawEntry]:
        """Take over ingress entries whose router has not finished them for idle_ms.

        Safe against a router that is only slow: routing is fenced by XACK like everything else.
        """
        words = (
            "XAUTOCLAIM",
            self.keys.ingress,
            ROUTERS_GROUP,
            router,
            idle_ms,
            "0",
            "COUNT",
            count,
        )
        try:
            reply = self._link.call(*words)
        except MissingGroup:
            return []
        vanished: list[RawEntry] = [
            (entry_id, {}) for entry_id in (reply[2] if len(reply) > 2 else [])
        ]
        return [_entry(entry) for entry in reply[1] if entry is not None] + vanished

    def route(self, routed: Sequence[RoutedEntry]) -> list[int]:
        """Move ingress entries to their partitions: DONE, SUPERSEDED, or OTHER for a duplicate."""
        jobs = list(dict.fromkeys(entry.job for entry in routed))
        partitions = list(dict.fromkeys(entry.entry.partition for entry in routed))
        keys = [
            self.keys.ingress,
            self.keys.backlog,
            self.keys.seen,
            self.keys.dead,
            self.keys.jobs,
        ]
        keys += [self.keys.job(job) for job in jobs] + self._streams(partitions)
        settings = self._settings
        arguments: list[Any] = [
            ROUTERS_GROUP, ENGINES_GROUP, settings.seen_ids_max, settings.seen_ids_ttl_ms,
            settings.dead_letters_max, len(jobs), len(partitions), *jobs, *partitions,
        ]  # fmt: skip
        for entry_id, job, task_id, entry in routed:
            arguments += (entry_id, jobs.index(job) + 1, partitions.index(entry.partition) + 1)
            arguments += (entry.tokens, len(entry.packed), task_id, entry.packed, entry.header)
        codes: list[int] = self._link.script("route", keys, arguments)
        return codes

    def promote(self, now_ms: int, count: int) -> int:
        """Bring back delayed entries whose time (Redis clock) has come."""
        due = self._link.call("ZRANGEBYSCORE", self.keys.delayed, "-inf", now_ms, "LIMIT", 0, count)
        entries = [(msgpack.unpackb(member, raw=True), member) for member in due]
        partitions = list(dict.fromkeys(fields[0].decode() for fields, _ in entries))
        if not partitions:
            return 0
        arguments: list[Any] = [ENGINES_GROUP]
        for (partition, tokens, size, packed, header, _), member in entries:
            place = partitions.index(partition.decode()) + 1
            arguments += (place, partition, tokens, size, packed, header, member)
        keys = [self.keys.delayed, self.keys.backlog, *self._streams(partitions)]
        return int(self._link.script("promote", keys, arguments))

    def delayed_tasks(self) -> int:
        return int(self._link.call("ZCARD", self.keys.delayed))

    def waiting(self, partition: str, after: str, count: int) -> list[RawEntry]:
        """Entries of a partition, held or not, behind the entry id `after`."""
        reply = self._link.call(
            "XRANGE", self.keys.tasks(partition), f"({after}", "+", "COUNT", count
        )
        return _entries(reply)

    def cancel(self, partition: str, job: str, ended: Sequence[Outcome]) -> int:
        """End entries, held by a consumer or not, with a cancelled result each."""
        keys = [
            self.keys.tasks(partition), self.keys.backlog, self.keys.results(job),
            self.keys.job(job),
        ]  # fmt: skip
        arguments: list[Any] = [ENGINES_GROUP, partition]
        for outcome in ended:
            arguments += (outcome.entry_id, outcome.tokens, outcome.size)
            arguments += (len(outcome.result), *outcome.result)
        return int(self._link.script("cancel", keys, arguments))

    def reap(self, partitions: Sequence[str]) -> int:
        """Remove the streams of partitions that hold nothing."""
        return int(self._link.script("reap", self._streams(partitions), [ENGINES_GROUP]))

    def recount(self, partitions: Sequence[str]) -> int:
        """Make the backlog counters equal the streams; returns how many were wrong."""
        keys = [self.keys.backlog, *self._streams(partitions)]
        return int(self._link.script("recount", keys, list(partitions)))

    def now_ms(self) -> int:
        """Redis's clock: the only wall clock that decides anything."""
        seconds, micros = self._link.call("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def dead_letters(self, count: int) -> list[RawEntry]:
        return _entries(self._link.call("XRANGE", self.keys.dead, "-", "+", "COUNT", count))

    def dead_letter_count(self) -> int:
        return int(self._link.call("XLEN", self.keys.dead))

    def take_lease(self, owner: str, ttl_ms: int) -> bool:
        """Whether this broker plans until ttl_ms from now. It only avoids double work."""
        if self._link.call("SET", self.keys.lease, owner, "NX", "PX", ttl_ms) is not None:
            return True
        if self._link.call("GET", self.keys.lease) != owner.encode():
            return False
        return bool(self._link.call("PEXPIRE", self.keys.lease, ttl_ms))

    def publish_plan(self, plan: bytes) -> None:
        self._link.call("SET", self.keys.plan, plan)

    def plan(self) -> bytes | None:
        reply: bytes | None = self._link.call("GET", self.keys.plan)
        return reply

    def _streams(self, partitions: Iterable[str]) -> list[str]:
        return [self.keys.tasks(partition) for partition in partitions]


def _by_partition(entries: Iterable[NewEntry]) -> dict[str, list[NewEntry]]:
    groups: dict[str, list[NewEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.partition, []).append(entry)
    return groups


def _outcome_words(outcome: Outcome) -> list[Any]:
    """An outcome as the settle script reads it: all but partition and job, then the result."""
    return [
        outcome.entry_id, outcome.status, outcome.tokens, outcome.size, outcome.prompt_tokens,
        outcome.cached_tokens, outcome.output_tokens, outcome.prompt_bytes,
        len(outcome.result), *outcome.result,
    ]  # fmt: skip


def _pairs(flat: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _entry(raw: Any) -> RawEntry:
    entry_id, flat = raw
    return entry_id, dict(_pairs(flat)) if flat else {}


def _entries(raw: Any) -> list[RawEntry]:
    return [_entry(entry) for entry in raw]
