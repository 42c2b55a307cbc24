"""Settings that cannot be right do not start anything, and secrets stay secret."""

from __future__ import annotations

import os

import pytest
from pydantic import ValidationError

from broker.errors import SettingsError
from broker.settings import Settings, load_settings


@pytest.fixture
def file(tmp_path):
    """Writes a settings file and gives its path."""

    def write(text: str):
        path = tmp_path / "tokenmq.toml"
        path.write_text(text, "utf-8")
        return path

    return write


# ---------------------------------------------------------------- relations


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"lease_ttl_ms": 2999, "heartbeat_ms": 1000}, ("lease_ttl_ms", "heartbeat_ms")),
        ({"batch_bytes_max": 1 << 19}, ("batch_bytes_max", "task_bytes_max")),
        ({"backlog_bytes_max": 1 << 21}, ("backlog_bytes_max", "batch_bytes_max")),
        ({"backlog_tasks_max": 255}, ("backlog_tasks_max", "batch_tasks_max")),
        ({"crashes_before_alone": 17}, ("crashes_before_alone", "crashes_max")),
    ],
)
def test_a_relation_that_does_not_hold_is_refused_by_the_names_of_both(given, named):
    with pytest.raises(SettingsError) as caught:
        load_settings(**given)
    for name in named:
        assert name in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "given",
    [
        {"lease_ttl_ms": 3000, "heartbeat_ms": 1000},
        {"batch_bytes_max": 1 << 20},
        {"backlog_bytes_max": 4 << 20},
        {"backlog_tasks_max": 256},
        {"crashes_before_alone": 16},
    ],
)
def test_a_relation_that_just_holds_is_accepted(given):
    settings = load_settings(**given)
    assert {name: getattr(settings, name) for name in given} == given


def test_the_defaults_are_accepted():
    assert load_settings().slots == 256


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slots", 0),
        ("slots", 65_537),
        ("batch_tasks_max", 1001),
        ("redis_timeout_ms", 0),
        ("prefix_share_max", 0.0),
        ("prefix_share_max", "nan"),
        ("tokens_per_byte", -1.0),
        ("namespace", ""),
        ("namespace", "a:b"),
        ("namespace", "a{b}"),
        ("namespace", "a\n"),
        ("retry_delay_ms", -1),
        ("redis_url", "http://localhost"),
        ("redis_url", "localhost:6379"),
        ("redis_url", "redis://localhost:99999/0"),
        ("redis_url", "redis://localhost:port/0"),
        ("slots", "many"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(SettingsError, match=name):
        load_settings(**{name: value})


def test_the_refusal_is_one_line():
    with pytest.raises(SettingsError) as caught:
        load_settings(slots=0, namespace="")
    assert "\n" not in str(caught.value)
    assert "slots" in str(caught.value)
    assert "namespace" in str(caught.value)


def test_settings_do_not_change_once_they_are_built():
    with pytest.raises(ValidationError):
        load_settings().slots = 3


# ---------------------------------------------------------------- precedence


def test_a_flag_goes_before_the_environment_before_the_file_before_the_default(file, monkeypatch):
    path = file("slots = 8\nheartbeat_ms = 800\nsweep_ms = 700\n")
    monkeypatch.setenv("TOKENMQ_SLOTS", "16")
    monkeypatch.setenv("TOKENMQ_HEARTBEAT_MS", "900")
    settings = load_settings(path, slots=32)
    assert settings.slots == 32
    assert settings.heartbeat_ms == 900
    assert settings.sweep_ms == 700
    assert settings.lease_ttl_ms == 6000


def test_the_environment_counts_in_any_case_of_letters(file, monkeypatch):
    monkeypatch.setenv("tokenmq_slots", "16")
    assert load_settings(file("slots = 8")).slots == 16


def test_a_flag_that_was_not_given_hides_nothing(file):
    assert load_settings(file("slots = 8"), slots=None).slots == 8


def test_a_relation_is_checked_across_sources(file, monkeypatch):
    monkeypatch.setenv("TOKENMQ_HEARTBEAT_MS", "5000")
    with pytest.raises(SettingsError, match="lease_ttl_ms"):
        load_settings(file("lease_ttl_ms = 6000"))


def test_a_bad_value_in_the_environment_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("TOKENMQ_SLOTS", "several")
    with pytest.raises(SettingsError, match="slots"):
        load_settings()


def test_an_unknown_name_in_the_file_is_refused_by_name(file):
    with pytest.raises(SettingsError, match="slotz is not a known setting"):
        load_settings(file("slots = 8\nslotz = 9\n"))


@pytest.mark.parametrize("text", ["slots = ", "[redis]\nurl = 'x'\n", "slots = [1]"])
def test_a_file_that_is_not_settings_is_refused(file, text):
    with pytest.raises(SettingsError):
        load_settings(file(text))


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "tokenmq.toml"
    path.write_bytes(b"namespace = '\xff'")
    with pytest.raises(SettingsError, match=r"tokenmq\.toml"):
        load_settings(path)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(SettingsError, match=r"nowhere\.toml"):
        load_settings(tmp_path / "nowhere.toml")


# ---------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    "given",
    [
        {"redis_password": "hush"},
        {"redis_url": "redis://me:hush@example.org:6380/2"},
        {"redis_url": "rediss://:hush@example.org/0"},
        {"redis_url": "unix://me:hush@/run/redis.sock"},
        {"redis_url": "redis://example.org/0?password=hush&username=me"},
    ],
)
def test_a_secret_is_in_no_text_about_the_settings(given):
    settings = load_settings(**given)
    for text in (repr(settings), str(settings), settings.redis_shown):
        assert "hush" not in text


def test_a_secret_is_in_no_refusal():
    with pytest.raises(SettingsError) as caught:
        load_settings(redis_url="http://me:hush@example.org", redis_password="hush", slots=0)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://example.org", "redis://example.org"),
        ("redis://me:hush@example.org:6380/2", "redis://example.org:6380/2"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
    ],
)
def test_the_shown_address_still_says_where(url, shown):
    assert load_settings(redis_url=url).redis_shown == shown


# ---------------------------------------------------------------- children


def test_the_environment_carries_every_setting_to_a_child(monkeypatch):
    given = load_settings(
        redis_url="redis://me:hush@example.org:6380/2",
        redis_password="hush",
        namespace="night",
        slots=64,
        prefix_share_max=0.125,
        lease_ttl_ms=9000,
        drain_timeout_s=1.5,
        engine_respawns_max=0,
    )
    for name, value in given.environment().items():
        monkeypatch.setenv(name, value)
    assert load_settings() == given


def test_the_environment_of_the_defaults_is_empty():
    assert load_settings().environment() == {}


def test_the_environment_names_only_what_differs():
    assert load_settings(slots=64).environment() == {"TOKENMQ_SLOTS": "64"}


def test_limits_and_geometry_follow_the_settings():
    settings = load_settings(task_bytes_max=2048, slots=3)
    assert settings.limits.task_bytes == 2048
    assert settings.geometry.slots == 3


def test_every_setting_can_be_given_by_the_environment(monkeypatch):
    defaults = Settings()
    for name in Settings.model_fields:
        value = getattr(defaults, name)
        text = value.get_secret_value() if hasattr(value, "get_secret_value") else str(value)
        monkeypatch.setenv(f"TOKENMQ_{name.upper()}", text)
    assert sum(name.startswith("TOKENMQ_") for name in os.environ) >= len(Settings.model_fields)
    assert load_settings() == defaults
