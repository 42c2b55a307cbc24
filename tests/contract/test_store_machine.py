"""Whatever happens in whatever order, each accepted task ends in one result and never in two.

Two readers take, settle, requeue, bury and cancel, early, late and twice; sweeps run in between.
The text of the scripts is checked for what no run can show.
"""

from __future__ import annotations

import re
from importlib import resources

import hypothesis
from conftest import (
    backlog_faults,
    burial,
    new_entry,
    outcome,
    requeued,
    result_ids,
)
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from broker.entries import DONE, SUPERSEDED, VANISHED
from broker.settings import load_settings
from broker.store import Store

JOBS = ("j", "k")
PARTITIONS = ("0.1", "3.2")
READERS = ("a", "b")
FAR_MS = 100_000

some_partition = st.sampled_from(PARTITIONS)
some_job = st.sampled_from(JOBS)
some_reader = st.sampled_from(READERS)
# Which of the deliveries ever made, newest first (modulo their number): late ends are the far ones.
some_deliveries = st.lists(st.integers(0, 30), min_size=1, max_size=5)
something_was_read = precondition(lambda machine: machine.deliveries)


class Broker(RuleBasedStateMachine):
    """The store under random hands. `deliveries` remembers everything that was ever read."""

    server = None  # set by the test

    @initialize()
    def begin(self):
        self.server.admin.flushall()
        self.store = Store(load_settings(redis_url=self.server.url))
        self.accepted = dict.fromkeys(JOBS, 0)
        self.offered = dict.fromkeys(JOBS, ("", "", []))
        self.deliveries = []
        self.ends = 0  # how many calls claimed to have ended a task for good
        for job in JOBS:
            self.submit(job, list(PARTITIONS) * 2)
        self.read("a", 1)

    def teardown(self):
        if hasattr(self, "store"):
            self.finish()
            self.store.close()

    def chosen(self, places):
        count = len(self.deliveries)
        return [self.deliveries[count - 1 - place % count] for place in places]

    # ------------------------------------------------------------ producing

    @rule(job=some_job, partitions=st.lists(some_partition, min_size=1, max_size=6))
    def submit(self, job, partitions):
        first = self.accepted[job]
        batch = [new_entry(f"{job}{first + n}", p, job=job) for n, p in enumerate(partitions)]
        before, after = (str(first) if first else ""), str(first + len(batch))
        assert self.store.submit(job, before, after, batch) is None
        self.offered[job] = (before, after, batch)
        self.accepted[job] += len(batch)

    @rule(job=some_job)
    def submit_again(self, job):
        before, after, batch = self.offered[job]
        if batch:
            assert self.store.submit(job, before, after, batch) is None

    # ------------------------------------------------------------ consuming

    @rule(reader=some_reader, count=st.integers(1, 5))
    def read(self, reader, count):
        for partition in PARTITIONS:
            read = self.store.read(partition, reader, count)
            self.deliveries += [(partition, entry) for entry in read]

    @something_was_read
    @rule(places=some_deliveries, status=st.sampled_from(["ok", "error"]))
    def settle(self, places, status):
        codes, _ = self.store.settle([outcome(*d, status) for d in self.chosen(places)])
        assert set(codes) <= {DONE, SUPERSEDED, VANISHED}
        self.ends += codes.count(DONE)

    @something_was_read
    @rule(places=some_deliveries, delay_ms=st.sampled_from([0, 0, FAR_MS]))
    def requeue(self, places, delay_ms):
        for partition, entry in self.chosen(places):
            back = requeued(entry, delay_ms=delay_ms, crashes=1)
            assert self.store.requeue(partition, [back, back])[1] == SUPERSEDED

    @something_was_read
    @rule(places=some_deliveries)
    def bury(self, places):
        for delivery in self.chosen(places):
            self.ends += self.store.bury(burial(*delivery))

    @rule(partition=some_partition, job=some_job, count=st.integers(1, 4))
    def cancel_waiting(self, partition, job, count):
        entries = self.store.waiting(partition, "0", count)
        ends = [outcome(partition, entry, "cancelled") for entry in entries]
        self.cancel(partition, job, ends)

    @something_was_read
    @rule(places=some_deliveries, job=some_job)
    def cancel_held(self, places, job):
        for partition, entry in self.chosen(places):
            self.cancel(partition, job, [outcome(partition, entry, "cancelled")])

    def cancel(self, partition, job, ends):
        self.ends += self.store.cancel(partition, job, [end for end in ends if end.job == job])

    # ------------------------------------------------------------ sweeps

    @rule(count=st.integers(1, 3))
    def promote(self, count):
        self.store.promote(self.store.now_ms() + FAR_MS, count)

    @rule()
    def recount_finds_nothing(self):
        assert self.store.recount(PARTITIONS) == 0

    @rule()
    def reap(self):
        self.store.reap(PARTITIONS)

    @rule(reader=some_reader)
    def recover(self, reader):
        for partition in PARTITIONS:
            back = [requeued(e, crashes=1) for e in self.store.pending(partition, reader, 3)]
            assert set(self.store.requeue(partition, back)) <= {DONE}
        self.store.forget(reader, PARTITIONS)

    @rule()
    def flush_scripts(self):
        self.server.admin.script_flush()

    # ------------------------------------------------------------ what always holds

    @invariant()
    def the_backlog_equals_the_streams(self):
        if hasattr(self, "store"):
            assert backlog_faults(self.store, self.server.admin) == []

    @invariant()
    def every_accepted_task_waits_or_has_one_result(self):
        if not hasattr(self, "store"):
            return
        found = [name for job in JOBS for name in result_ids(self.store, job)]
        assert len(found) == len(set(found)) == self.ends
        for job in JOBS:
            view = self.store.job(job)
            assert view.settled == len(result_ids(self.store, job))
            assert view.submitted == self.accepted[job]
        waiting = self.store.backlog_tasks() + self.store.delayed_tasks()
        assert waiting + len(found) == sum(self.accepted.values())

    def finish(self):
        """A calm end: promote, recover and settle until nothing is left."""
        due, delayed = self.store.now_ms() + FAR_MS, self.store.delayed_tasks()
        assert self.store.promote(due, 9999) == delayed
        assert self.store.promote(due, 9999) == 0
        for partition in PARTITIONS:
            held = [e for reader in READERS for e in self.store.pending(partition, reader, 999)]
            ends = [outcome(partition, entry) for entry in held]
            ends += [outcome(partition, e) for e in self.store.read(partition, "calm", 999)]
            assert set(self.store.settle(ends)[0]) <= {DONE}
        for job in JOBS:
            names = [f"{job}{number}" for number in range(self.accepted[job])]
            assert sorted(result_ids(self.store, job)) == sorted(names)
        self.store.reap(PARTITIONS)
        assert (self.store.partitions(), self.store.backlog_tasks()) == ([], 0)


def test_each_accepted_task_ends_in_exactly_one_result_under_random_hands(redis_server):
    Broker.server = redis_server
    run_state_machine_as_test(
        Broker,
        settings=hypothesis.settings(
            max_examples=100, stateful_step_count=30, deadline=None, print_blob=True
        ),
    )


# ---------------------------------------------------------------- the text of the scripts


def sections():
    text = resources.files("broker").joinpath("store.lua").read_text("utf-8")
    return dict(part.split("\n", 1) for part in text.split("\n--- ")[1:])


def key_names(section: str) -> list[str]:
    """The KEYS line of a section, as words."""
    found = re.search(r"^-- KEYS (.*?)(?:   |$)", section, re.MULTILINE)
    return re.findall(r"\w+", found[1].split(",")[0]) if found else []


def test_only_dead_letters_are_ever_trimmed():
    trimmed = 0
    for name, section in sections().items():
        assert "XTRIM" not in section, name
        keys = key_names(section)
        for target, more in re.findall(r"'XADD',\s*([^,]+),\s*([^,]+),", section):
            if "MAXLEN" in more:
                place = re.fullmatch(r"KEYS\[(\d+)\]", target)
                assert place, f"{name} trims {target}"
                assert keys[int(place[1]) - 1] == "dead", f"{name} trims {keys}"
                trimmed += 1
        assert section.count("MAXLEN") + section.count("MINID") == section.count("'MAXLEN'")
    assert trimmed == 2


def test_scripts_touch_no_key_that_was_not_handed_to_them():
    literal = re.compile(r"redis\.p?call\('[A-Z]+',\s*'(?!CREATE|DELCONSUMER)")
    for name, section in sections().items():
        assert not literal.search(section), name
        assert ".." not in re.sub(r"\.\. ':t'|\.\. '\\0' \.\.|'WRONGTYPE.*", "", section), name


def test_every_step_acknowledges_before_it_adds():
    for name, section in sections().items():
        if "'XACK'" in section and name != "cancel":
            assert section.index("'XACK'") < section.index("'XADD'"), name
    cancel = sections()["cancel"]
    assert cancel.index("'XDEL'") < cancel.index("'XACK'") < cancel.index("'XADD'")
