"""A reply that is lost on the way: nothing is sent twice by itself, and what took effect is found.

A proxy stands between store and server. It forwards requests, and on demand swallows the reply to
the next one and closes the connection.
"""

from __future__ import annotations

import contextlib
import select
import socket
import tempfile
import threading
from pathlib import Path

import pytest
from conftest import backlog_faults, burial, fill, new_entries, outcome, requeued, result_ids

from broker.entries import DONE, SUPERSEDED
from broker.errors import StoreUnavailable
from broker.settings import load_settings
from broker.store import Store


class LossyProxy:
    """Forwards a unix socket to another; `lose_next` loses one reply after it was made."""

    def __init__(self, folder: Path, target: str) -> None:
        self._target = target
        self.lose_next = threading.Event()
        self.url = f"unix://{folder}/p"
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(f"{folder}/p")
        self._door.listen()
        self._threads = [threading.Thread(target=self._welcome)]
        self._threads[0].start()

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._door.accept()
                self._threads.append(threading.Thread(target=self._forward, args=(client,)))
                self._threads[-1].start()

    def _forward(self, client: socket.socket) -> None:
        """Both ways at once, because a request may come in several pieces."""
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.connect(self._target)
            other = {client: server, server: client}
            while True:
                for end in select.select([client, server], [], [])[0]:
                    piece = end.recv(1 << 20)
                    if end is server and self.lose_next.is_set():
                        self.lose_next.clear()
                        return
                    if not piece:
                        return
                    other[end].sendall(piece)

    def close(self) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def proxy(redis_server, settings):
    with tempfile.TemporaryDirectory(prefix="tmq") as folder:
        opened = LossyProxy(Path(folder), redis_server.url.removeprefix("unix://"))
        yield opened
        opened.close()


@pytest.fixture
def lossy(proxy, counted):
    """A store behind the proxy, with its connection made and its scripts loaded."""
    opened = Store(load_settings(redis_url=proxy.url))
    fill(opened, new_entries(1))
    (entry,) = opened.read("0.1", "warm", 1)
    opened.requeue("0.1", [requeued(entry)])
    (entry,) = opened.read("0.1", "warm", 1)
    opened.settle([outcome("0.1", entry, job="warm")])
    fill(opened, new_entries(1))
    (entry,) = opened.read("0.1", "warm", 1)
    opened.bury(burial("0.1", entry)._replace(job="warm"))
    yield opened
    opened.close()


def lost(proxy, call, *arguments):
    """Make the call with its reply lost."""
    proxy.lose_next.set()
    with pytest.raises(StoreUnavailable):
        call(*arguments)
    assert not proxy.lose_next.is_set()


def test_a_task_is_added_once_although_the_reply_was_lost(lossy, proxy):
    lost(proxy, lossy.submit, "j", "", "", new_entries(3))  # no cursor: a second call would add
    assert lossy.backlog_tasks() == 3


def test_a_batch_with_a_cursor_may_be_offered_again(lossy, proxy):
    lost(proxy, lossy.submit, "k", "", "3", new_entries(3))
    assert lossy.submit("k", "", "3", new_entries(3)) is None
    assert lossy.backlog_tasks() == lossy.job("k").submitted == 3


def test_entries_whose_delivery_was_lost_are_found_among_the_pending(lossy, proxy):
    fill(lossy, new_entries(4))
    lost(proxy, lossy.read, "0.1", "a", 2)
    second = lossy.read("0.1", "a", 9)
    assert len(second) == 2  # the first two are not delivered again, they are ours already
    held = lossy.pending("0.1", "a", 9)
    assert held[2:] == second
    assert lossy.settle([outcome("0.1", entry) for entry in held])[0] == [DONE] * 4


def test_a_result_exists_once_although_the_reply_was_lost(lossy, proxy):
    fill(lossy, new_entries(1), "j")
    (entry,) = lossy.read("0.1", "a", 1)
    settled = lossy.job("j").ok
    lost(proxy, lossy.settle, [outcome("0.1", entry)])
    assert lossy.settle([outcome("0.1", entry)])[0] == [SUPERSEDED]
    assert lossy.job("j").ok == settled + 1
    assert result_ids(lossy) == ["t0000"]


def test_a_requeue_and_a_burial_happen_once_although_the_reply_was_lost(lossy, proxy, admin):
    fill(lossy, new_entries(1))
    (entry,) = lossy.read("0.1", "a", 1)
    lost(proxy, lossy.requeue, "0.1", [requeued(entry, crashes=1)])
    assert lossy.requeue("0.1", [requeued(entry, crashes=1)]) == [SUPERSEDED]
    (entry,) = lossy.read("0.1", "a", 9)
    letters = lossy.dead_letter_count()
    lost(proxy, lossy.bury, burial("0.1", entry))
    assert lossy.bury(burial("0.1", entry)) is False
    assert lossy.dead_letter_count() == letters + 1
    assert result_ids(lossy) == ["t0000"]
    assert backlog_faults(lossy, admin) == []
