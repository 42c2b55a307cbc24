"""Several who do the same thing at the same time: each task moves once, and ends once."""

from __future__ import annotations

import threading

from conftest import fill, new_entries, outcome, requeued, result_ids

from broker.entries import DONE, SUPERSEDED


def together(count, work):
    """Let `work(place)` run in so many threads that begin at the same moment."""
    gate = threading.Barrier(count)

    def run(place):
        gate.wait()
        work(place)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_share_a_store_and_each_task_ends_once(counted):
    fill(counted, new_entries(400))
    codes: list[int] = []

    def drain(place):
        while read := counted.read("0.1", f"c{place}", 7):
            ends = [outcome("0.1", entry) for entry in read]
            codes.extend(counted.settle(ends + ends)[0])

    together(4, drain)
    assert (codes.count(DONE), codes.count(SUPERSEDED)) == (400, 400)
    assert len(set(result_ids(counted))) == len(result_ids(counted)) == 400


def test_brokers_that_promote_at_once_bring_each_delayed_task_back_once(counted):
    fill(counted, new_entries(200))
    for _ in range(5):  # one round may be won by one broker before the others look
        read = counted.read("0.1", "a", 200)
        counted.requeue("0.1", [requeued(entry, delay_ms=1) for entry in read])
        due, promoted = counted.now_ms() + 1000, []
        together(
            4, lambda _, due=due, promoted=promoted: promoted.append(counted.promote(due, 200))
        )
        assert sum(promoted) == 200
        assert (counted.backlog_tasks(), counted.delayed_tasks()) == (200, 0)
