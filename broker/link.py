"""The connection to Redis: raw bytes, no silent retries, errors that say who is at fault.

redis-py retries commands by default; a lost reply then turns one XADD into two entries and makes a
lost XREADGROUP skip an entry for ever. So nothing is retried here: a caller that does not know
whether a command took effect gets StoreUnavailable and reconciles. RESP2 and no response callbacks:
replies are plain lists of bytes, which is also the fastest that redis-py can be.

Used by `broker.store` alone; together they are the only modules that know redis-py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from broker.errors import Overloaded, StoreRefused, StoreUnavailable
from broker.settings import Settings

# At the start of the text, or, where Redis 6.2 quotes the error of a command in a script, after a
# dash inside a longer one. The blank keeps BUSYGROUP apart from BUSY.
_PASSING = re.compile(
    r"(?:^|-)(?:LOADING|BUSY|TRYAGAIN|MASTERDOWN|READONLY|CLUSTERDOWN|NOREPLICAS) "
)
# redis-py takes the code off the text of these. A demoted primary says READONLY after a failover.
_PASSING_CLASSES = (
    redis.exceptions.ReadOnlyError,
    redis.exceptions.TryAgainError,
    redis.exceptions.MasterDownError,
    redis.exceptions.ClusterDownError,
)


class MissingGroup(StoreUnavailable):
    """The stream or its group is gone (restart without AOF, FLUSHALL). Make it again, from 0."""


def load_scripts() -> dict[str, bytes]:
    """The sections of store.lua by name, each with the prelude in front."""
    text = resources.files("broker").joinpath("store.lua").read_text("utf-8")
    _, *sections = text.split("\n--- ")
    named = dict(section.split("\n", 1) for section in sections)
    prelude = named.pop("prelude")
    return {name: f"{prelude}\n{body}".encode() for name, body in named.items()}


_SCRIPTS = load_scripts()
_DIGESTS = {
    name: hashlib.sha1(body, usedforsecurity=False).hexdigest() for name, body in _SCRIPTS.items()
}


class Link:
    """One process's way to Redis. Safe to share between threads: each call takes a connection."""

    def __init__(self, settings: Settings) -> None:
        self.shown = settings.redis_shown
        timeout = settings.redis_timeout_ms / 1000
        secrets: dict[str, Any] = {}
        if settings.redis_username:
            secrets["username"] = settings.redis_username
        if settings.redis_password.get_secret_value():
            secrets["password"] = settings.redis_password.get_secret_value()
        self._redis: Any = redis.Redis.from_url(
            settings.redis_url,
            protocol=2,
            decode_responses=False,
            retry=Retry(NoBackoff(), 0),
            retry_on_timeout=False,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            **secrets,
        )
        self._redis.response_callbacks.clear()

    def call(self, *words: Any) -> Any:
        """One command. Raises StoreUnavailable, StoreRefused, Overloaded or MissingGroup."""
        with self._faults():
            return self._redis.execute_command(*words)

    def calls(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Several commands in one round trip, not atomic: all run, the first error is raised."""
        if not commands:
            return []
        with self._faults():
            pipeline = self._redis.pipeline(transaction=False)
            for words in commands:
                pipeline.execute_command(*words)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
            return replies

    def script(self, name: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run a section of store.lua; loads it where the server lacks it (restart, flush)."""
        with self._faults():
            try:
                return self._redis.execute_command(
                    "EVALSHA", _DIGESTS[name], len(keys), *keys, *arguments
                )
            except redis.exceptions.NoScriptError:
                return self._redis.execute_command(
                    "EVAL", _SCRIPTS[name], len(keys), *keys, *arguments
                )

    def close(self) -> None:
        self._redis.close()

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Sort redis-py exceptions into ours; refusals first, being ConnectionErrors too."""
        try:
            yield
        except (
            redis.exceptions.AuthenticationError,
            redis.exceptions.AuthorizationError,
            redis.exceptions.NoPermissionError,
        ) as error:
            raise StoreRefused(f"Redis at {self.shown} refuses this user: {error}") from None
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            raise StoreUnavailable(f"Redis at {self.shown} does not answer: {error}") from None
        except redis.ResponseError as error:
            raise self._answered(error) from None

    def _answered(self, error: redis.ResponseError) -> Exception:
        text = str(error)
        if text.startswith("OOM") or "command not allowed when used memory" in text:
            return Overloaded(f"Redis at {self.shown} is at maxmemory")
        # A blocked reader whose stream is deleted hears UNBLOCKED on 7.0, NOGROUP on newer servers.
        if "NOGROUP" in text or text.startswith("UNBLOCKED"):
            return MissingGroup(text)
        if _PASSING.search(text) or isinstance(error, _PASSING_CLASSES):
            return StoreUnavailable(f"Redis at {self.shown} is not ready: {text}")
        return StoreRefused(f"Redis at {self.shown} refused: {text}")
