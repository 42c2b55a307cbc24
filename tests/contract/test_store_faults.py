"""The store when something goes wrong: dead readers, foreign hands, a full, empty or absent Redis.

After every test the backlog counters are compared with the streams.
"""

from __future__ import annotations

import pytest
from conftest import (
    backlog_faults,
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

from broker.entries import DONE, SUPERSEDED, VANISHED, RoutedEntry
from broker.errors import Overloaded, StoreRefused, StoreUnavailable
from broker.geometry import ENGINES_GROUP, ROUTERS_GROUP
from broker.settings import load_settings
from broker.store import Store
from broker.wire import encode_packed


@pytest.fixture
def own_store(own_server):
    """A store on a server that belongs to this test."""
    opened = Store(load_settings(redis_url=own_server.url, redis_timeout_ms=2000))
    yield opened
    opened.close()


# ---------------------------------------------------------------- recovery of a dead reader


def test_what_a_dead_reader_held_is_found_with_its_fields(counted, admin):
    fill(counted, new_entries(5))
    held = counted.read("0.1", "dead", 3)
    counted.read("0.1", "alive", 2)
    assert counted.pending("0.1", "dead", 10) == held
    assert counted.pending("0.1", "dead", 2) == held[:2]
    assert counted.pending("0.1", "nobody", 10) == counted.pending("7.7", "dead", 10) == []
    admin.xdel(counted.keys.tasks("0.1"), held[1][0])
    assert counted.pending("0.1", "dead", 10) == [held[0], (held[1][0], {}), held[2]]
    counted.recount(["0.1"])


def test_a_reader_is_not_forgotten_while_anything_is_pending_for_it(counted, admin):
    counted.announce("gpu0", "dead", b"\x80", 60_000)
    fill(counted, [*new_entries(3), new_entry("x", "2.2"), new_entry("y", "3.3")])
    held = counted.read("0.1", "dead", 3)
    (other,) = counted.read("2.2", "dead", 1)
    partitions = ["0.1", "2.2", "3.3", "4.4"]
    assert counted.forget("dead", partitions) == 2
    assert counted.roster() == ["dead"]
    assert counted.pending("0.1", "dead", 9) == held  # DELCONSUMER would have dropped them for ever
    counted.settle([outcome("2.2", other)])
    assert counted.forget("dead", partitions) == 1
    assert counted.requeue("0.1", [requeued(entry, crashes=1) for entry in held]) == [DONE] * 3
    assert counted.forget("dead", partitions) == counted.forget("dead", partitions) == 0
    assert counted.roster() == []
    assert admin.xinfo_consumers(counted.keys.tasks("0.1"), ENGINES_GROUP) == []
    assert len(counted.read("0.1", "alive", 9)) == 3


def test_two_who_recover_the_same_reader_requeue_each_task_once(counted):
    fill(counted, new_entries(4))
    held = counted.read("0.1", "dead", 4)
    again = [requeued(entry, crashes=1) for entry in held]
    assert counted.requeue("0.1", again[:3]) == [DONE] * 3
    assert counted.requeue("0.1", again) == [SUPERSEDED] * 3 + [DONE]
    assert counted.settle([outcome("0.1", entry) for entry in held])[0] == [SUPERSEDED] * 4
    assert counted.backlog().tasks == 4


# ---------------------------------------------------------------- reap


def test_a_stream_that_holds_anything_is_never_removed(counted, admin):
    fill(counted, [new_entry("waits", "0.0"), new_entry("held", "0.1"), new_entry("gone", "0.2")])
    fill(counted, [new_entry("done", "0.3")])
    (held,), (gone,), (done,) = (counted.read(f"0.{slot}", "a", 1) for slot in (1, 2, 3))
    admin.xdel(counted.keys.tasks("0.2"), gone[0])  # nothing in it, but pending
    counted.settle([outcome("0.3", done)])
    everything = [f"0.{slot}" for slot in range(6)]
    assert counted.reap(everything) == 1
    assert sorted(counted.partitions()) == ["0.0", "0.1", "0.2"]
    assert counted.settle([outcome("0.1", held)])[0] == [DONE]
    assert counted.settle([outcome("0.2", gone)])[0] == [DONE]
    assert counted.reap(everything) == 2
    assert counted.reap([]) == 0


def test_a_removed_stream_begins_again_with_the_next_task(counted):
    fill(counted, new_entries(1))
    counted.settle([outcome("0.1", entry) for entry in counted.read("0.1", "a", 1)])
    assert counted.reap(["0.1"]) == 1
    assert counted.read("0.1", "a", 1) == []
    fill(counted, new_entries(1))
    assert len(counted.read("0.1", "a", 1)) == 1


# ---------------------------------------------------------------- recount


def test_recount_mends_the_backlog_after_a_stream_was_deleted(counted, admin):
    fill(counted, [*new_entries(3), *new_entries(2, "2.2", first=3)])
    admin.delete(counted.keys.tasks("0.1"))
    assert backlog_faults(counted, admin)
    assert counted.recount(["0.1", "2.2"]) > 0
    assert counted.recount(["0.1", "2.2"]) == 0
    assert counted.backlog().partitions == {"2.2": (2, 20)}
    assert counted.backlog().tasks == 2


def test_recount_counts_what_a_foreign_hand_wrote_and_forgets_it_when_it_is_done(counted, admin):
    fill(counted, new_entries(1))
    for number in range(3):
        packed = encode_packed({"id": f"f{number}", "prompt": "x"})
        admin.xadd(counted.keys.tasks("3.3"), {"m": packed})
    assert counted.recount(["0.1", "3.3"]) > 0
    assert counted.backlog().partitions["3.3"][0] == 3
    assert counted.backlog().tasks == 4
    counted.settle([outcome("3.3", entry) for entry in counted.read("3.3", "a", 9)])
    counted.settle([outcome("0.1", entry) for entry in counted.read("0.1", "a", 9)])
    counted.recount(["0.1", "3.3"])
    assert admin.hgetall(counted.keys.backlog) == {}


def test_foreign_entries_that_were_settled_uncounted_leave_no_debt(counted, admin):
    admin.xadd(counted.keys.tasks("3.3"), {"m": encode_packed({"id": "f", "prompt": "x"})})
    counted.settle([outcome("3.3", entry) for entry in counted.read("3.3", "a", 9)])
    assert counted.backlog().partitions == {}
    assert counted.recount(["3.3"]) > 0
    assert counted.backlog_tasks() == 0


def test_recount_leaves_a_partition_alone_that_the_caller_did_not_see(counted):
    fill(counted, [*new_entries(2), new_entry("late", "5.5")])
    assert counted.recount(["0.1"]) == 0
    assert counted.recount([]) == 0
    assert counted.backlog().tasks == 3


def test_a_header_beyond_counting_cannot_break_the_counters(counted, admin):
    for header in (b"99999999999999999999:0:0:0:0:0", b"-5:0:0:0:0:0", b"1e300", b""):
        fields = {"m": encode_packed({"id": "f", "prompt": "x"}), "h": header}
        admin.xadd(counted.keys.tasks("3.3"), fields)
    counted.recount(["3.3"])
    ends = [outcome("3.3", entry) for entry in counted.read("3.3", "a", 9)]
    assert counted.settle(ends)[0] == [DONE] * 4
    counted.recount(["3.3"])
    assert admin.hgetall(counted.keys.backlog) == {}


# ---------------------------------------------------------------- missing streams and groups


def test_a_stream_that_is_not_there_reads_as_empty(counted):
    assert counted.read("0.1", "a", 5) == []
    assert counted.pending("0.1", "a", 5) == []
    assert counted.waiting("0.1", "0", 5) == []
    assert counted.partitions() == []


def test_foreign_entries_without_a_group_are_read_from_the_first(counted, admin):
    for number in range(3):
        admin.xadd(counted.keys.tasks("3.3"), {"m": encode_packed({"id": str(number)})})
    assert len(counted.read("3.3", "a", 2)) == 2
    assert len(counted.read("3.3", "b", 2)) == 1
    counted.recount(["3.3"])
    for entry in counted.pending("3.3", "a", 9) + counted.pending("3.3", "b", 9):
        counted.bury(burial("3.3", entry))
    counted.recount(["3.3"])


def test_a_destroyed_group_is_made_again_and_nothing_is_skipped(counted, admin):
    fill(counted, new_entries(3))
    (held, *_) = counted.read("0.1", "a", 2)
    admin.xgroup_destroy(counted.keys.tasks("0.1"), ENGINES_GROUP)
    assert counted.settle([outcome("0.1", held)])[0] == [SUPERSEDED]
    assert len(counted.read("0.1", "a", 9)) == 3


def test_after_flushall_everything_starts_again(counted, admin):
    fill(counted, new_entries(2))
    counted.announce("gpu0", "a", b"\x80", 60_000)
    held = counted.read("0.1", "a", 1)
    admin.xadd(counted.keys.ingress, {"id": "x", "prompt": "x"})
    assert len(counted.ingress("r", 1, 1)) == 1
    admin.flushall()
    assert counted.read("0.1", "a", 1) == []
    assert counted.ingress("r", 1, 1) == []
    assert counted.ingress_orphans("r", 0, 1) == []
    assert counted.settle([outcome("0.1", held[0])])[0] == [VANISHED]
    assert counted.requeue("0.1", [requeued(held[0])]) == [SUPERSEDED]
    assert counted.bury(burial("0.1", held[0])) is False
    assert counted.forget("a", ["0.1"]) == 0
    fill(counted, new_entries(2, first=5))
    admin.xadd(counted.keys.ingress, {"id": "y", "prompt": "x"})
    assert len(counted.read("0.1", "a", 9)) == 2
    assert len(counted.ingress("r", 9, 1)) == 1


def test_ingress_entries_from_before_the_first_router_are_read(counted, admin):
    for number in range(3):
        admin.xadd(counted.keys.ingress, {"id": str(number), "prompt": "x"})
    assert len(counted.ingress("r", 9, 1)) == 3
    (group,) = admin.xinfo_groups(counted.keys.ingress)
    assert group["name"] == ROUTERS_GROUP.encode()


def test_scripts_are_loaded_again_when_the_server_lost_them(counted, admin):
    for number in range(3):
        admin.script_flush()
        fill(counted, [new_entry(str(number))])
        admin.script_flush()
        (entry,) = counted.read("0.1", "a", 1)
        assert counted.settle([outcome("0.1", entry)])[0] == [DONE]
    assert len(result_ids(counted)) == 3


def test_keys_with_strange_names_do_not_stop_the_search_for_partitions(counted, admin):
    prefix = counted.keys.tasks_pattern()[:-1].encode()
    for name in (b"\xff\xfe", b"9999.1", b"1", b"a.b", b"9" * 5000 + b".0"):
        admin.set(prefix + name, "x")
    fill(counted, new_entries(1))
    assert counted.partitions() == ["0.1"]
    for name in (b"\xff\xfe", b"9999.1", b"1", b"a.b", b"9" * 5000 + b".0"):
        admin.delete(prefix + name)


# ---------------------------------------------------------------- wrong types lose nothing


def wrong_type_calls(store, entry):
    """name of the wrong key -> the calls that would write to it."""
    keys = store.keys
    settle = (store.settle, [outcome("0.1", entry)])
    bury = (store.bury, burial("0.1", entry))
    cancel = (store.cancel, "0.1", "j", [outcome("0.1", entry, "cancelled")])
    requeue = (store.requeue, "0.1", [requeued(entry, delay_ms=5)])
    submit = (store.submit, "j", "", "", new_entries(1))
    return {
        keys.results("j"): [settle, bury, cancel],
        keys.job("j"): [settle, bury, cancel, submit],
        keys.backlog: [settle, bury, cancel, requeue, submit],
        keys.delayed: [requeue],
        keys.dead: [bury],
        keys.jobs: [bury, submit],
        keys.tasks("0.1"): [settle, bury, cancel, requeue, submit],
    }


@pytest.mark.parametrize("name", ["results", "job", "backlog", "delayed", "dead", "jobs", "tasks"])
def test_a_key_of_the_wrong_type_stops_the_step_before_its_first_write(counted, admin, name):
    fill(counted, new_entries(1))
    (entry,) = counted.read("0.1", "a", 1)
    wrong = {
        key: calls for key, calls in wrong_type_calls(counted, entry).items() if f":{name}:" in key
    }
    assert len(wrong) == 1
    for key, calls in wrong.items():
        aside = admin.exists(key) and admin.rename(key, "{0}aside")
        admin.set(key, "somebody else's")
        held = contents(admin)
        for call, *arguments in calls:
            with pytest.raises(StoreRefused, match=key.replace("{", ".").replace("}", ".")):
                call(*arguments)
        assert contents(admin) == held
        admin.delete(key)
        if aside:
            admin.rename("{0}aside", key)
    assert counted.pending("0.1", "a", 9) == [entry]
    assert counted.settle([outcome("0.1", entry)])[0] == [DONE]
    assert result_ids(counted) == ["t0000"]


def test_a_route_to_a_wrong_type_leaves_the_entry_with_its_router(counted, admin):
    admin.xadd(counted.keys.ingress, {"id": "a", "prompt": "x"})
    (entry,) = counted.ingress("r", 1, 1)
    move = [RoutedEntry(entry[0], "j", "a", new_entry("a", "4.4"))]
    admin.set(counted.keys.tasks("4.4"), "x")
    held = contents(admin)
    with pytest.raises(StoreRefused):
        counted.route(move)
    assert contents(admin) == held
    admin.delete(counted.keys.tasks("4.4"))
    assert counted.route(move) == [DONE]


# ---------------------------------------------------------------- a full Redis


def test_a_full_redis_refuses_tasks_and_still_drains_to_nothing(own_server, own_store):
    admin, store = own_server.admin, own_store
    fill(store, [new_entry(f"first{n}", f"0.{n % 3}") for n in range(60)])
    admin.config_set("maxmemory", admin.info("memory")["used_memory"] + 500_000)
    accepted = 60
    with pytest.raises(Overloaded):
        for number in range(1000):
            batch = [new_entry(f"{number}-{n}", f"0.{n % 3}", meta="x" * 2000) for n in range(20)]
            assert store.submit("j", "", "", batch) is None
            accepted += 20
    assert 100 < accepted < 10_000
    assert store.backlog_tasks() == accepted
    assert backlog_faults(store, admin) == []
    admin.config_set("maxmemory", 1)  # and from here on nothing may grow at all
    held = contents(admin)
    with pytest.raises(Overloaded):
        fill(store, [new_entry("new", "9.9")])
    assert contents(admin) == held
    while store.backlog_tasks():
        for partition in ("0.0", "0.1", "0.2"):
            for place, entry in enumerate(store.read(partition, "a", 30)):
                if place % 10 == 0:
                    assert store.bury(burial(partition, entry))
                elif place % 10 == 1 and entry[1][b"h"].split(b":")[3] == b"0":
                    assert store.requeue(partition, [requeued(entry, crashes=1)]) == [DONE]
                elif place % 10 == 2:
                    assert store.cancel(partition, "j", [outcome(partition, entry, "cancelled")])
                else:
                    assert store.settle([outcome(partition, entry)])[0] == [DONE]
        assert backlog_faults(store, admin) == []
    assert len(set(result_ids(store))) == len(result_ids(store)) == accepted
    assert store.reap(["0.0", "0.1", "0.2"]) == 3


def test_a_full_redis_still_takes_heartbeats_and_promotes(own_server, own_store):
    admin, store = own_server.admin, own_store
    store.announce("gpu0", "a", b"\x81\xa1n\x01", 60_000)
    fill(store, new_entries(2))
    (entry, _) = store.read("0.1", "a", 2)
    assert store.requeue("0.1", [requeued(entry, delay_ms=1)]) == [DONE]
    admin.config_set("maxmemory", 1)
    store.announce("gpu0", "a", b"\x81\xa1n\x02", 60_000)
    store.announce("gpu1", "b", b"\x80", 60_000)
    assert store.consumers() == {"gpu0": {"n": 2}, "gpu1": {}}
    assert store.roster() == ["a", "b"]
    assert store.promote(store.now_ms() + 1000, 9) == 1
    assert backlog_faults(store, admin) == []


def test_a_full_redis_refuses_facts_about_jobs_as_overloaded(own_server, own_store):
    own_server.admin.config_set("maxmemory", 1)
    with pytest.raises(Overloaded):
        own_store.open_job("j", {"cut": "1:1"})
    with pytest.raises(Overloaded):
        own_store.close_job("j", 3)


# ---------------------------------------------------------------- refused and unavailable


def test_a_wrong_or_missing_password_is_refused_and_never_shown(own_server):
    own_server.admin.config_set("requirepass", "hush")
    for given in (
        {},
        {"redis_password": "wrong-one"},
        {"redis_username": "x", "redis_password": "y"},
    ):
        store = Store(load_settings(redis_url=own_server.url, **given))
        with pytest.raises(StoreRefused) as caught:
            store.ping()
        assert own_server.url in str(caught.value)
        assert "wrong-one" not in str(caught.value)
        with pytest.raises(StoreRefused):
            store.settle([])
        with pytest.raises(StoreRefused):
            store.announce("a", "b", b"\x80", 1000)
        store.close()
    store = Store(load_settings(redis_url=own_server.url, redis_password="hush"))
    store.ping()
    store.close()


def test_a_password_that_the_server_does_not_want_is_refused(settings):
    store = Store(load_settings(redis_url=settings.redis_url, redis_password="hush"))
    with pytest.raises(StoreRefused):
        store.ping()
    store.close()


def test_a_command_that_the_user_may_not_run_is_refused_by_name(own_server):
    own_server.admin.execute_command("ACL", "SETUSER", "low", "on", ">pw", "~*", "+ping", "+hget")
    given = {"redis_username": "low", "redis_password": "pw"}
    store = Store(load_settings(redis_url=own_server.url, **given))
    store.ping()
    with pytest.raises(StoreRefused, match=r"(?i)evalsha"):
        store.settle([])
    with pytest.raises(StoreRefused, match=r"(?i)sadd|evalsha|hsetnx"):
        store.open_job("j", {"cut": ""})
    store.close()


def test_no_server_is_unavailable(tmp_path):
    store = Store(load_settings(redis_url=f"unix://{tmp_path}/nobody"))
    for call in (store.ping, store.backlog, lambda: store.open_job("j", {"a": 1})):
        with pytest.raises(StoreUnavailable, match="nobody"):
            call()
    store.close()


def test_a_server_that_went_away_is_unavailable_until_it_is_back(own_server, own_store):
    fill(own_store, new_entries(1))
    own_server.stop()
    for call in (own_store.ping, own_store.backlog, lambda: own_store.settle([])):
        with pytest.raises(StoreUnavailable):
            call()
    with pytest.raises(StoreUnavailable):
        own_store.announce("a", "b", b"\x80", 1000)
    own_server.start()
    own_store.ping()
    assert own_store.backlog().tasks == 0


def test_a_server_that_answers_nothing_is_unavailable_within_the_timeout(own_server):
    store = Store(load_settings(redis_url=own_server.url, redis_timeout_ms=150))
    own_server.freeze()
    with pytest.raises(StoreUnavailable):
        store.ping()
    own_server.thaw()
    wait_until(lambda: store.ping() is None)
    store.close()


def test_a_replica_is_unavailable_and_not_refused(own_server, own_store):
    own_store.ping()
    own_server.admin.replicaof("127.0.0.1", "1")  # a demoted primary after a failover
    for call in (
        lambda: own_store.close_job("j", 1),
        lambda: own_store.open_job("j", {"a": 1}),
        lambda: own_store.announce("a", "b", b"\x80", 1000),
        lambda: fill(own_store, new_entries(1)),
    ):
        with pytest.raises(StoreUnavailable):
            call()
    own_server.admin.replicaof("NO", "ONE")
    fill(own_store, new_entries(1))


def test_a_call_whose_reply_was_lost_happens_once_although_it_is_repeated(own_server):
    store = Store(load_settings(redis_url=own_server.url, redis_timeout_ms=150))
    fill(store, [])  # so that the connection is made and the script is loaded
    own_server.freeze()
    with pytest.raises(StoreUnavailable):
        store.submit("j", "", "1", new_entries(1))  # waits in the socket, the caller gives up
    with pytest.raises(StoreUnavailable):
        fill(store, new_entries(1))  # a new connection, and no greeting: this one is never sent
    own_server.thaw()
    wait_until(lambda: store.backlog_tasks() == 1)
    assert store.submit("j", "", "1", new_entries(1)) is None
    assert store.job("j").submitted == store.backlog_tasks() == 1
    assert backlog_faults(store, own_server.admin) == []
    store.close()
