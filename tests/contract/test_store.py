"""The store on a real server: a delivery ends once, a repeated call changes nothing."""

from __future__ import annotations

from broker.entries import DONE, SUPERSEDED, NewEntry, Outcome
from broker.store import Store
from broker.wire import Header, encode_packed, encode_result

PACKED = encode_packed({"id": "a", "prompt": "hi"})
ENTRY = NewEntry("0.1", 3, PACKED, Header(3).encode())


def _outcome(entry_id: bytes) -> Outcome:
    result = encode_result({"id": "a", "status": "ok"}, flat=False)
    return Outcome("0.1", entry_id, "j", "ok", 3, len(PACKED), 4, 1, 2, 2, result)


def test_a_repeated_submit_adds_nothing(store: Store) -> None:
    assert store.submit("j", "", "f:2", [ENTRY, ENTRY]) is None
    assert store.submit("j", "", "f:2", [ENTRY, ENTRY]) is None
    assert store.submit("j", "", "f:9", [ENTRY]) == "f:2"
    assert store.backlog().partitions == {"0.1": (2, 6)}
    assert store.job("j").submitted == 2


def test_a_delivery_is_settled_once(store: Store) -> None:
    store.submit("j", "", "f:2", [ENTRY, ENTRY])
    ends = [_outcome(entry_id) for entry_id, _ in store.read("0.1", "c:1", 10)]
    assert store.settle(ends) == ([DONE, DONE], 2)
    assert store.settle(ends) == ([SUPERSEDED, SUPERSEDED], 2)
    assert store.job("j").ok == 2
    assert store.backlog() == ({}, 0, 0)


def test_a_cancelled_entry_supersedes_its_late_result(store: Store) -> None:
    store.submit("j", "", "f:1", [ENTRY])
    held = [_outcome(entry_id) for entry_id, _ in store.read("0.1", "c:1", 10)]
    assert store.cancel("0.1", "j", held) == 1
    assert store.settle(held)[0] == [SUPERSEDED]
    assert len(store.results("j", "0", 10, 0)) == 1


def test_a_dead_name_is_kept_while_it_holds_entries(store: Store) -> None:
    store.submit("j", "", "f:1", [ENTRY])
    store.announce("c", "c:1", b"\x80", 1000)
    store.read("0.1", "c:1", 10)
    assert store.forget("c:1", ["0.1"]) == 1
    assert store.roster() == ["c:1"]
