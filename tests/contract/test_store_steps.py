"""What the store promises on a real Redis: each step happens once, wholly or not at all.

After every test the backlog counters are compared with the streams.
"""

from __future__ import annotations

import pytest
from conftest import (
    burial,
    contents,
    fill,
    new_entries,
    new_entry,
    outcome,
    requeued,
    result_ids,
    wait_until,
)

from broker.entries import DONE, OTHER, SUPERSEDED, VANISHED, NewEntry, RoutedEntry
from broker.errors import GeometryMismatch, Overloaded, StoreRefused
from broker.geometry import ENGINES_GROUP
from broker.settings import load_settings
from broker.store import Store
from broker.wire import Header

pytestmark = pytest.mark.usefixtures("counted")


@pytest.fixture
def open_store(settings):
    """Opens stores on the same Redis with other settings, and closes them."""
    stores = []

    def opened(**given) -> Store:
        stores.append(Store(load_settings(redis_url=settings.redis_url, **given)))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


# ---------------------------------------------------------------- submit


def test_a_batch_goes_in_once_however_often_it_is_offered(store, admin):
    batch = [*new_entries(3), *new_entries(2, "1.7", first=3)]
    assert store.submit("j", "", "5", batch) is None
    before = contents(admin)
    assert store.submit("j", "", "5", batch) is None  # the reply was lost, the batch was not
    assert contents(admin) == before
    assert store.backlog().partitions == {"0.1": (3, 30), "1.7": (2, 20)}
    assert (store.job("j").submitted, store.job("j").cursor) == (5, "5")
    assert store.jobs() == ["j"]


def test_batches_follow_one_another_by_the_cursor(store):
    assert store.submit("j", "", "2", new_entries(2)) is None
    assert store.submit("j", "2", "4", new_entries(2, first=2)) is None
    assert store.job("j").submitted == store.backlog().tasks == 4


@pytest.mark.parametrize(("before", "after"), [("", "2"), ("3", "6"), ("", "9")])
def test_a_batch_of_somebody_else_is_refused_with_the_cursor_found(store, admin, before, after):
    store.submit("j", "", "2", new_entries(2))
    store.submit("j", "2", "4", new_entries(2, first=2))
    held = contents(admin)
    assert store.submit("j", before, after, new_entries(2, first=4)) == "4"
    assert contents(admin) == held


def test_without_a_cursor_every_call_adds(store):
    fill(store, new_entries(2))
    fill(store, new_entries(2))
    assert store.backlog().tasks == 4


def test_tasks_of_a_partition_are_read_in_the_order_of_submission(store):
    batch = [new_entry(f"{n}", f"0.{n % 3}") for n in range(300)]
    fill(store, batch)
    for slot in range(3):
        read = store.read(f"0.{slot}", "a", 1000)
        assert [fields[b"m"] for _, fields in read] == [entry.packed for entry in batch[slot::3]]


def test_a_batch_may_be_a_thousand_tasks_over_a_hundred_partitions(store):
    fill(store, [new_entry(f"{n}", f"{n % 10}.{n // 10 % 10}") for n in range(1000)])
    assert store.backlog_tasks() == 1000
    assert len(store.partitions()) == 100


def test_every_byte_comes_back_as_it_was(store):
    packed, header = bytes(range(256)), Header(1).encode()
    fill(store, [NewEntry("0.0", 1, packed, header)])
    assert store.read("0.0", "a", 1)[0][1] == {b"m": packed, b"h": header}


def test_above_the_limit_in_tasks_nothing_of_the_batch_is_accepted(open_store, admin):
    small = open_store(batch_tasks_max=2, backlog_tasks_max=3)
    small.submit("j", "", "2", new_entries(2))
    held = contents(admin)
    for _ in range(2):
        with pytest.raises(Overloaded, match="2 tasks"):
            small.submit("k", "", "2", [new_entry("c", "5.5"), new_entry("d", "6.6")])
    assert contents(admin) == held
    assert small.submit("j", "2", "3", [new_entry("c")]) is None  # exactly at the limit


def test_above_the_limit_in_bytes_nothing_of_the_batch_is_accepted(open_store, admin):
    small = open_store(task_bytes_max=1024, batch_bytes_max=1024, backlog_bytes_max=1 << 16)
    large = [NewEntry("0.0", 1, b"x" * 40_000, Header(1).encode())]
    fill(small, large)
    held = contents(admin)
    with pytest.raises(Overloaded, match="40000 bytes"):
        small.submit("j", "", "", large)
    assert contents(admin) == held
    small.settle([outcome("0.0", entry) for entry in small.read("0.0", "a", 1)])
    fill(small, large)


def test_a_cancelled_job_takes_no_more_tasks(store, admin):
    store.set_job("j", "state", "cancelled")
    held = contents(admin)
    with pytest.raises(StoreRefused, match="j was cancelled"):
        store.submit("j", "", "2", new_entries(2))
    assert contents(admin) == held


# ---------------------------------------------------------------- settle


def test_a_settled_task_leaves_its_result_and_nothing_else(store):
    fill(store, new_entries(1))
    (entry,) = store.read("0.1", "a", 10)
    assert store.settle([outcome("0.1", entry)]) == ([DONE], 1)
    assert result_ids(store) == ["t0000"]
    assert store.pending("0.1", "a", 10) == store.waiting("0.1", "0", 10) == []
    view = store.job("j")
    assert (view.ok, view.prompt_tokens, view.cached_tokens, view.output_tokens) == (1, 11, 5, 7)


def test_a_second_settle_is_superseded_and_changes_nothing(store, admin):
    fill(store, new_entries(2))
    read = store.read("0.1", "a", 10)
    ends = [outcome("0.1", entry) for entry in read]
    assert store.settle(ends[:1])[0] == [DONE]
    held = contents(admin)
    assert store.settle([outcome("0.1", read[0], "error")])[0] == [SUPERSEDED]
    assert contents(admin) == held
    assert store.settle([ends[0], ends[1], ends[1]]) == ([SUPERSEDED, DONE, SUPERSEDED], 2)


def test_many_partitions_and_jobs_settle_in_one_call_in_the_order_given(store):
    for job in "jk":
        fill(store, [new_entry(f"{job}{n}", f"0.{n % 2}", job=job) for n in range(6)], job)
    read = [("0.0", entry) for entry in store.read("0.0", "a", 10)]
    read += [("0.1", entry) for entry in store.read("0.1", "b", 10)]
    store.settle([outcome(*read[3])])
    mixed = [read[n] for n in (11, 0, 7, 3, 5, 1, 10, 2, 9, 4, 8, 6)]
    codes, waiting = store.settle([outcome(*delivery) for delivery in mixed])
    assert codes == [DONE] * 3 + [SUPERSEDED] + [DONE] * 8
    assert waiting == 6
    assert sorted(result_ids(store, "j")) == [f"j{n}" for n in range(6)]
    assert sorted(result_ids(store, "k")) == [f"k{n}" for n in range(6)]


def test_every_status_is_counted_apart(store):
    fill(store, new_entries(6))
    read = store.read("0.1", "a", 6)
    statuses = ["ok", "error", "ok", "cancelled", "ok", "error"]
    store.settle([outcome("0.1", entry, status) for entry, status in zip(read, statuses)])
    view = store.job("j")
    assert (view.ok, view.error, view.cancelled, view.settled) == (3, 2, 1, 6)


def test_a_stream_that_is_gone_is_told_from_an_end_that_came_late(store, admin):
    fill(store, [*new_entries(2), new_entry("x", "3.3")])
    gone = [outcome("0.1", entry) for entry in store.read("0.1", "a", 2)]
    there = outcome("3.3", store.read("3.3", "a", 1)[0])
    admin.delete(store.keys.tasks("0.1"))
    assert store.settle([gone[0], there, gone[1], there])[0] == [
        VANISHED, DONE, VANISHED, SUPERSEDED,
    ]  # fmt: skip
    assert result_ids(store) == ["x"]
    assert store.recount(["0.1", "3.3"]) > 0


def test_whoever_read_it_anybody_may_settle_it_once(store):
    fill(store, new_entries(1))
    (entry,) = store.read("0.1", "a", 1)
    assert store.read("0.1", "b", 1) == []
    assert store.settle([outcome("0.1", entry)])[0] == [DONE]


def test_a_result_of_a_megabyte_and_a_batch_of_hundreds_settle(store):
    fill(store, new_entries(700))
    ends = [outcome("0.1", entry) for entry in store.read("0.1", "a", 700)]
    ends[0] = ends[0]._replace(result=[b"m", b"x" * (1 << 20)])
    ends[1] = ends[1]._replace(result=[b"f%d" % n for n in range(900)])
    assert store.settle(ends) == ([DONE] * 700, 700)
    assert store.settle([]) == ([], 0)


def test_tokens_per_byte_follows_the_real_counts_and_forgets(store):
    assert store.job("j").tokens_per_byte is None
    fill(store, new_entries(3))
    first, second, third = store.read("0.1", "a", 3)
    store.settle([outcome("0.1", first, prompt_tokens=25, prompt_bytes=100)])
    assert store.job("j").tokens_per_byte == 0.25
    store.settle([outcome("0.1", second, prompt_tokens=1 << 21, prompt_bytes=1 << 22)])
    assert store.job("j").tokens_per_byte == pytest.approx(0.5, rel=1e-3)
    store.settle([outcome("0.1", third, prompt_tokens=1 << 21, prompt_bytes=1 << 21)])
    assert store.job("j").tokens_per_byte == pytest.approx(0.75, rel=1e-3)  # half the past


# ---------------------------------------------------------------- requeue and promote


def test_a_requeued_task_waits_again_under_its_new_header(store):
    fill(store, new_entries(1))
    (entry,) = store.read("0.1", "a", 1)
    assert store.requeue("0.1", [requeued(entry, crashes=2)]) == [DONE]
    assert store.pending("0.1", "a", 1) == []
    assert store.backlog().partitions == {"0.1": (1, 10)}
    ((again, fields),) = store.read("0.1", "b", 1)
    assert again != entry[0]
    assert fields == {b"m": entry[1][b"m"], b"h": Header(10, crashes=2).encode()}


def test_a_late_requeue_is_superseded_and_changes_nothing(store, admin):
    fill(store, new_entries(2))
    one, two = store.read("0.1", "a", 2)
    store.requeue("0.1", [requeued(one)])
    store.settle([outcome("0.1", two)])
    held = contents(admin)
    late = [requeued(one), requeued(two, delay_ms=60_000)]
    assert store.requeue("0.1", late) == [SUPERSEDED, SUPERSEDED]
    assert store.settle([outcome("0.1", one)])[0] == [SUPERSEDED]
    assert contents(admin) == held
    assert store.requeue("0.1", []) == []
    assert store.requeue("9.9", [requeued(one)]) == [SUPERSEDED]


def test_a_delayed_task_leaves_the_backlog_and_comes_back_when_due(store):
    fill(store, new_entries(1))
    (entry,) = store.read("0.1", "a", 1)
    assert store.requeue("0.1", [requeued(entry, delay_ms=60_000)]) == [DONE]
    assert (store.backlog().tasks, store.delayed_tasks()) == (0, 1)
    assert store.reap(["0.1"]) == 1
    assert store.promote(store.now_ms() + 50_000, 10) == 0
    due = store.now_ms() + 60_000
    assert store.promote(due, 10) == 1
    assert store.promote(due, 10) == 0
    assert store.delayed_tasks() == 0
    assert store.read("0.1", "b", 1)[0][1] == entry[1]


def test_equal_tasks_are_delayed_apart_and_promoted_in_portions(store):
    for partition in ("0.1", "0.2"):
        fill(store, [new_entry("same", partition)] * 3)
        back = [requeued(entry, delay_ms=1) for entry in store.read(partition, "a", 3)]
        assert store.requeue(partition, back) == [DONE] * 3
    due = store.now_ms() + 1000
    assert [store.promote(due, 4), store.promote(due, 4), store.promote(due, 4)] == [4, 2, 0]
    assert store.backlog().partitions == {"0.1": (3, 30), "0.2": (3, 30)}


def test_a_requeued_entry_whose_fields_are_gone_is_told_as_vanished(store, admin):
    fill(store, new_entries(2))
    one, two = store.read("0.1", "a", 2)
    admin.xdel(store.keys.tasks("0.1"), one[0])
    assert store.requeue("0.1", [requeued(one), requeued(two)]) == [VANISHED, DONE]
    assert store.pending("0.1", "a", 2) == []
    assert store.recount(["0.1"]) > 0


# ---------------------------------------------------------------- bury


def test_a_buried_task_leaves_a_dead_letter_and_an_error_result(store):
    fill(store, new_entries(1))
    (entry,) = store.read("0.1", "a", 1)
    assert store.bury(burial("0.1", entry)) is True
    assert store.bury(burial("0.1", entry)) is False
    assert store.dead_letter_count() == 1
    assert store.dead_letters(5)[0][1][b"m"] == entry[1][b"m"]
    assert result_ids(store) == ["t0000"]
    assert (store.job("j").error, store.job("j").submitted) == (1, 1)


def test_a_task_without_a_name_is_buried_without_a_result(store):
    fill(store, new_entries(1))
    (entry,) = store.read("0.1", "a", 1)
    assert store.bury(burial("0.1", entry, with_result=False))
    assert store.dead_letter_count() == 1
    assert result_ids(store) == []
    assert store.job("j").error == 0


def test_an_ingress_entry_is_buried_and_counted_as_submitted(store, admin):
    admin.xadd(store.keys.ingress, {"id": "a", "job": "k", "promt": "x"})
    (entry,) = store.ingress("r", 10, 1)
    assert store.bury(burial("", entry, counts=True)) is True
    assert store.bury(burial("", entry, counts=True)) is False
    assert admin.xlen(store.keys.ingress) == 0
    assert (store.job("k").error, store.job("k").submitted) == (1, 1)
    assert result_ids(store, "k") == ["a"]
    assert store.jobs() == ["k"]


def test_dead_letters_are_kept_up_to_their_limit(open_store):
    small = open_store(dead_letters_max=2)
    fill(small, new_entries(4))
    for entry in small.read("0.1", "a", 4):
        assert small.bury(burial("0.1", entry))
    assert small.dead_letter_count() == 2
    assert len(result_ids(small)) == 4


# ---------------------------------------------------------------- cancel


@pytest.mark.parametrize("held", [True, False])
def test_a_task_is_cancelled_whether_somebody_holds_it_or_not(store, held):
    fill(store, new_entries(2))
    if held:
        store.read("0.1", "a", 2)
    ends = [outcome("0.1", entry, "cancelled") for entry in store.waiting("0.1", "0", 10)]
    assert store.cancel("0.1", "j", ends) == 2
    assert store.cancel("0.1", "j", ends) == 0
    assert store.job("j").cancelled == 2
    assert store.read("0.1", "a", 2) == store.pending("0.1", "a", 2) == []
    assert result_ids(store) == ["t0000", "t0001"]


@pytest.mark.parametrize("first", ["cancel", "settle", "requeue", "bury"])
def test_cancel_and_another_end_give_exactly_one_result_in_either_order(store, first):
    fill(store, new_entries(1))
    (entry,) = store.read("0.1", "a", 1)

    def end(way):
        if way == "cancel":
            return store.cancel("0.1", "j", [outcome("0.1", entry, "cancelled")])
        if way == "settle":
            return store.settle([outcome("0.1", entry)])[0][0]
        if way == "requeue":
            return store.requeue("0.1", [requeued(entry)])[0]
        return store.bury(burial("0.1", entry))

    assert end(first) == 1
    assert [end(way) for way in ("cancel", "settle", "requeue", "bury")] == [0, 0, 0, False]
    for again in store.read("0.1", "b", 1):  # only the requeued task is there again
        store.settle([outcome("0.1", again)])
    assert result_ids(store) == ["t0000"]
    assert store.job("j").settled == 1


# ---------------------------------------------------------------- route


def routed(entry_id, task_id, partition="0.1", job="j"):
    return RoutedEntry(entry_id, job, task_id, new_entry(task_id, partition, job=job))


def ingress(store, admin, count):
    for number in range(count):
        admin.xadd(store.keys.ingress, {"id": str(number), "prompt": "x"})
    return [entry_id for entry_id, _ in store.ingress("r", count, 1)]


def test_routed_entries_move_to_their_partitions_once(store, admin):
    ids = ingress(store, admin, 4)
    batch = [
        routed(ids[0], "0"), routed(ids[1], "1", "4.4"), routed(ids[2], "2", "4.4", job="k"),
        routed(ids[3], "3", job="k"),
    ]  # fmt: skip
    assert store.route(batch) == [DONE] * 4
    held = contents(admin)
    assert store.route(batch) == [SUPERSEDED] * 4
    assert contents(admin).keys() == held.keys()
    assert store.backlog().partitions == {"0.1": (2, 20), "4.4": (2, 20)}
    assert (store.job("j").submitted, store.job("k").submitted) == (2, 2)
    assert store.jobs() == ["j", "k"]
    assert admin.xlen(store.keys.ingress) == 0


def test_an_id_that_came_before_in_its_job_becomes_a_dead_letter(store, admin):
    ids = ingress(store, admin, 4)
    assert store.route([routed(ids[0], "a"), routed(ids[1], "a")]) == [DONE, OTHER]
    assert store.route([routed(ids[2], "a"), routed(ids[3], "a", job="k")]) == [OTHER, DONE]
    assert store.job("j").submitted == store.job("k").submitted == 1
    letters = store.dead_letters(9)
    assert [fields[b"code"] for _, fields in letters] == [b"duplicate_id"] * 2


def test_old_ids_are_forgotten_above_the_limit_and_never_kept_when_it_is_zero(open_store, admin):
    few = open_store(seen_ids_max=2)
    ids = ingress(few, admin, 8)
    for place, name in enumerate("abc"):
        wait_until(lambda now=few.now_ms(): few.now_ms() > now)
        assert few.route([routed(ids[place], name)]) == [DONE]
    assert admin.zcard(few.keys.seen) == 2
    assert few.route([routed(ids[3], "a"), routed(ids[4], "c")]) == [DONE, OTHER]
    none = open_store(seen_ids_max=0)
    assert none.route([routed(ids[5], "c"), routed(ids[6], "c")]) == [DONE, DONE]
    assert admin.zcard(none.keys.seen) == 0


def test_what_a_router_left_another_takes_over_and_only_one_moves_it(store, admin):
    ids = ingress(store, admin, 3)
    admin.xdel(store.keys.ingress, ids[1])
    taken = store.ingress_orphans("s", 0, 10)
    assert {entry_id for entry_id, fields in taken if fields} == {ids[0], ids[2]}
    assert store.ingress_orphans("r", 60_000, 10) == []
    batch = [routed(ids[0], "0"), routed(ids[2], "2")]
    assert store.route(batch) == [DONE, DONE]
    assert store.route(batch) == [SUPERSEDED, SUPERSEDED]


# ---------------------------------------------------------------- jobs, results, leases


def test_the_first_word_about_a_job_counts_and_the_end_makes_it_finished(store):
    store.open_job("j", {"cut": "256:7", "source": "a.jsonl"})
    store.open_job("j", {"cut": "512:9", "owner": "me"})
    assert store.job_fact("j", "cut") == store.job("j").cut == "256:7"
    assert store.job_fact("j", "owner") == "me"
    assert store.job_fact("j", "nothing") is None
    fill(store, new_entries(1))
    assert not store.job("j").finished
    store.close_job("j", 1)
    assert not store.job("j").finished
    store.settle([outcome("0.1", entry) for entry in store.read("0.1", "a", 1)])
    assert store.job("j").finished


def test_results_are_read_in_pages_and_dropped_when_collected(store):
    fill(store, new_entries(5))
    store.settle([outcome("0.1", entry) for entry in store.read("0.1", "a", 5)])
    page = store.results("j", "0", 3, 0)
    rest = store.results("j", page[-1][0].decode(), 3, 1)
    assert (len(page), len(rest)) == (3, 2)
    store.discard_results("j", page[-1][0])
    store.discard_results("j", page[-1][0])
    assert store.results("j", "0", 9, 0) == rest
    assert store.results_waiting(["j", "nothing"]) == 2
    store.discard_results("j", rest[-1][0])
    assert store.results("j", "0", 9, 1) == []
    assert store.results_waiting([]) == 0


def test_a_geometry_is_pinned_by_the_first_and_refused_to_the_others(store, open_store):
    store.pin_geometry()
    store.pin_geometry()
    with pytest.raises(GeometryMismatch, match=r"slots=256 .*slots=64 "):
        open_store(slots=64).pin_geometry()
    open_store(slots=64, namespace="other").pin_geometry()


def test_a_lease_has_one_owner_until_it_ends(store, admin):
    assert store.take_lease("a", 60_000)
    assert store.take_lease("a", 60_000)
    assert not store.take_lease("b", 60_000)
    admin.pexpire(store.keys.lease, 1)
    wait_until(lambda: store.take_lease("b", 60_000))
    assert not store.take_lease("a", 60_000)


def test_a_heartbeat_lives_as_long_as_its_lease(store):
    store.announce("gpu0", "gpu0-1", b"\x81\xa1a\x01", 60_000)
    store.announce("gpu1", "gpu1-1", b"\x80", 1)
    assert store.consumers()["gpu0"] == {"a": 1}
    wait_until(lambda: store.consumers().keys() == {"gpu0"})
    assert store.roster() == ["gpu0-1", "gpu1-1"]
    store.withdraw("gpu0")
    assert store.consumers() == {}


def test_a_plan_is_published_as_it_is(store):
    assert store.plan() is None
    store.publish_plan(b"\0\xff")
    assert store.plan() == b"\0\xff"


def test_task_streams_have_one_group_that_begins_at_the_beginning(store, admin):
    fill(store, new_entries(2))
    (group,) = admin.xinfo_groups(store.keys.tasks("0.1"))
    assert group["name"] == ENGINES_GROUP.encode()
    assert len(store.read("0.1", "a", 10)) == 2
