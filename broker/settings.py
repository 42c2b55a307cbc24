"""Settings: flag > environment `TOKENMQ_*` > file > default, checked before anything starts.

A program that cannot be right does not start: the relations between limits (a lease must outlive
several heartbeats, a batch must fit in the backlog) are checked when the settings are built, not
described in a comment that nobody checks. Units stand last in a name. Secrets are SecretStr, so
that a repr, a log line or `--json` cannot show them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from broker.errors import SettingsError
from broker.geometry import Geometry
from broker.task import Limits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Settings(BaseSettings):
    """Everything that broker, consumers and producers must agree on, or that bounds them."""

    model_config = SettingsConfigDict(
        env_prefix="TOKENMQ_", extra="ignore", frozen=True, validate_default=True
    )

    # Redis
    redis_url: str = Field("redis://127.0.0.1:6379/0", repr=False)  # it may carry a password
    redis_username: str = ""
    redis_password: SecretStr = SecretStr("")
    redis_timeout_ms: int = Field(10_000, ge=100, le=600_000)
    namespace: str = Field("tmq", pattern=r"^[A-Za-z0-9._-]{1,64}$")

    # geometry (pinned in Redis by the first process)
    slots: int = Field(256, ge=1, le=65_536)
    prefix_share_max: float = Field(0.25, gt=0.0, le=1.0)
    tokens_per_byte: float = Field(0.3, gt=0.0, le=4.0)  # until real counts calibrate it

    # limits
    task_bytes_max: int = Field(1 << 20, ge=1024, le=64 << 20)
    batch_tasks_max: int = Field(256, ge=1, le=1000)
    batch_bytes_max: int = Field(4 << 20, ge=1024, le=256 << 20)
    backlog_tasks_max: int = Field(2_000_000, ge=1)
    backlog_bytes_max: int = Field(4 << 30, ge=1 << 16)
    results_waiting_max: int = Field(500_000, ge=100)
    dead_letters_max: int = Field(100_000, ge=1)
    seen_ids_max: int = Field(1_000_000, ge=0)
    seen_ids_ttl_ms: int = Field(3_600_000, ge=1000)

    # liveness and recovery
    heartbeat_ms: int = Field(1_000, ge=50, le=60_000)
    lease_ttl_ms: int = Field(6_000, ge=200, le=600_000)
    sweep_ms: int = Field(1_000, ge=50, le=60_000)
    crashes_max: int = Field(16, ge=1, le=1000)
    crashes_before_alone: int = Field(3, ge=1, le=1000)
    retry_delay_ms: int = Field(2_000, ge=0, le=3_600_000)

    # engine supervision
    engine_start_timeout_s: float = Field(600.0, gt=0)
    engine_stall_timeout_s: float = Field(120.0, gt=0)
    engine_respawns_max: int = Field(8, ge=0)  # in a row, without one completed generation
    drain_timeout_s: float = Field(30.0, ge=0)

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError("must begin with redis://, rediss:// or unix://")
        _ = parts.port  # raises ValueError for what is no port
        return url

    @model_validator(mode="after")
    def _relations(self) -> Settings:
        if self.lease_ttl_ms < 3 * self.heartbeat_ms:
            raise ValueError("lease_ttl_ms must be at least three times heartbeat_ms")
        if self.batch_bytes_max < self.task_bytes_max:
            raise ValueError("batch_bytes_max must be at least task_bytes_max")
        if self.backlog_bytes_max < self.batch_bytes_max:
            raise ValueError("backlog_bytes_max must be at least batch_bytes_max")
        if self.backlog_tasks_max < self.batch_tasks_max:
            raise ValueError("backlog_tasks_max must be at least batch_tasks_max")
        if self.crashes_before_alone > self.crashes_max:
            raise ValueError("crashes_before_alone must be at most crashes_max")
        return self

    @property
    def geometry(self) -> Geometry:
        return Geometry(slots=self.slots)

    @property
    def limits(self) -> Limits:
        return Limits(task_bytes=self.task_bytes_max)

    @property
    def redis_shown(self) -> str:
        """The URL without anything secret in it, for people and logs."""
        parts = urlsplit(self.redis_url)
        host = parts.hostname or ""
        host = f"[{host}]" if ":" in host else host
        return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"

    def environment(self) -> dict[str, str]:
        """The non-default settings as variables, to hand to a child process."""
        shown: dict[str, str] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if value == type(self).model_fields[name].default:
                continue
            secret = isinstance(value, SecretStr)
            shown[f"TOKENMQ_{name.upper()}"] = value.get_secret_value() if secret else str(value)
        return shown


def load_settings(file: Path | None = None, **flags: Any) -> Settings:
    """Settings from flags, environment, a TOML file and defaults. Raises SettingsError.

    Flags that are None were not given. Unknown names in the file are refused by name.
    """
    import os

    given = {name: value for name, value in flags.items() if value is not None}
    from_file = _read_file(file) if file else {}
    present = {name.upper() for name in os.environ}  # pydantic-settings takes any case
    unset = {
        name: value for name, value in from_file.items() if f"TOKENMQ_{name.upper()}" not in present
    }
    try:
        return Settings(**{**unset, **given})
    except ValidationError as error:
        raise SettingsError(_one_line(error)) from None


def _read_file(file: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"settings file {file}: {error}") from None
    unknown = values.keys() - Settings.model_fields.keys()
    if unknown:
        raise SettingsError(f"settings file {file}: {min(unknown)} is not a known setting")
    return values


def _one_line(error: ValidationError) -> str:
    faults = []
    for fault in error.errors(include_input=False, include_url=False):
        where = ".".join(map(str, fault["loc"]))
        text = fault["msg"].removeprefix("Value error, ")
        faults.append(f"{where}: {text}" if where else text)
    return "settings: " + "; ".join(faults)
