"""Errors that say who is at fault, and so what the caller should do.

    TokenmqError
    ├── WireError            this task or result is malformed: refuse it, never retry it
    ├── SettingsError        the operator's configuration cannot be right: do not start
    ├── GeometryMismatch     this process and the data disagree about partitions: do not start
    ├── InputRefused         a line of the user's file cannot be a task: name the line, stop
    ├── OutputRefused        the results file cannot be written or is not ours: stop
    ├── Overloaded           the backlog is full: wait, then offer the same batch again
    ├── StoreUnavailable     Redis does not answer: back off, reconnect, reconcile, go on
    ├── StoreRefused         Redis answered and will keep answering no: stop, tell the operator
    ├── EngineRefused        this prompt is at fault: an error result, the engine lives on
    └── EngineUnavailable    this engine is at fault: respawn it, suspect what was in flight

`assert` is for our own bugs: crash, and let recovery do its work.
"""

from __future__ import annotations


class TokenmqError(Exception):
    """Anything tokenmq raises on purpose; `str()` is one line for a person."""

    exit_code = 1


class WireError(TokenmqError):
    """A task or result breaks the wire contract. `code` is stable, `name` the field at fault."""

    def __init__(self, code: str, text: str, name: str = "") -> None:
        super().__init__(f"{name}: {text}" if name else text)
        self.code = code
        self.name = name


class SettingsError(TokenmqError):
    """A setting, or a relation between two settings, cannot be right. Nothing was started."""

    exit_code = 2


class GeometryMismatch(TokenmqError):
    """The pinned geometry in Redis differs from this process's. Nothing was started."""

    exit_code = 2


class InputRefused(TokenmqError):
    """The input cannot be read as tasks; the text names the line and the reason."""

    exit_code = 2


class OutputRefused(TokenmqError):
    """The output cannot be written, or belongs to something else."""

    exit_code = 2


class Overloaded(TokenmqError):
    """The backlog limit is reached; nothing of this batch was accepted. Offer it again later."""


class StoreUnavailable(TokenmqError):
    """Redis did not answer (down, loading, timed out). Whether a command took effect is unknown."""

    exit_code = 3


class StoreRefused(TokenmqError):
    """Redis answered no for a reason that waiting does not mend (password, ACL, wrong type)."""

    exit_code = 3


class EngineRefused(TokenmqError):
    """The engine refuses this one prompt; `code` goes into the error result."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class EngineUnavailable(TokenmqError):
    """The engine cannot start, died or hangs."""
