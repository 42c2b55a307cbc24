"""The partition map: the same in every process and every language, and keys that stay together."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.geometry import BUCKET_EDGES, Geometry, Keys, prefix_crc, slot_major

GEOMETRY = Geometry()


def test_bucket_edges_are_the_powers_from_128_to_65536():
    assert BUCKET_EDGES == (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [
        (1, 0), (127, 0), (128, 0), (129, 1), (256, 1), (257, 2), (512, 2), (513, 3),
        (32_768, 8), (32_769, 9), (65_536, 9), (65_537, 10), (1 << 31, 10),
    ],
)  # fmt: skip
def test_a_bucket_includes_its_upper_edge(tokens, bucket):
    assert GEOMETRY.bucket(tokens) == bucket


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 20))
def test_a_longer_prompt_never_goes_to_a_lower_bucket(tokens, more):
    assert GEOMETRY.bucket(tokens) <= GEOMETRY.bucket(tokens + more)


@pytest.mark.parametrize(
    ("prefix_key", "crc"),
    [
        # The check values of CRC-32/IEEE 802.3, as every language's library computes it.
        (b"", 0x00000000),
        (b"123456789", 0xCBF43926),
        (b"The quick brown fox jumps over the lazy dog", 0x414FA339),
        (b"a", 0xE8B7BE43),
        ("grüße".encode(), 0x346E49ED),
        (bytes(32), 0x190A55AD),
        (b"\xff" * 32, 0xFF6CAB0B),
    ],
)
def test_the_prefix_crc_is_the_ieee_crc_32_of_every_library(prefix_key, crc):
    assert prefix_crc(prefix_key) == crc
    assert GEOMETRY.slot(crc) == crc % 256
    assert Geometry(slots=1000).slot(crc) == crc % 1000


def test_a_partition_is_written_bucket_dot_slot():
    assert GEOMETRY.partition(100, prefix_crc(b"123456789")) == f"0.{0x26}"
    assert GEOMETRY.partition(70_000, prefix_crc(b"a")) == f"10.{0x43}"
    assert Geometry(slots=1).partition(300, prefix_crc(b"a")) == "2.0"


@given(st.integers(1, 1 << 31), st.integers(0, (1 << 32) - 1), st.integers(1, 65_536))
def test_every_partition_that_is_computed_is_one_of_the_geometry(tokens, crc, slots):
    geometry = Geometry(slots=slots)
    partition = geometry.partition(tokens, crc)
    assert geometry.holds(partition)
    if geometry.bucket(tokens) < len(geometry.edges):
        assert tokens <= geometry.upper_tokens(partition)


@pytest.mark.parametrize("partition", ["0.0", "10.255", "3.17"])
def test_partitions_inside_the_geometry_are_held(partition):
    assert GEOMETRY.holds(partition)


@pytest.mark.parametrize(
    "partition",
    [
        "", ".", "0", "0.", ".0", "11.0", "0.256", "-1.0", "0.-1", "0.0.0", "a.b", "0.1:t", "².1",
        "٣.1", " 0.1", "0.1 ", "+0.1", "0.1_0", "9" * 5000 + ".0", "0." + "9" * 5000, "tasks",
        "bytes",
    ],
)  # fmt: skip
def test_names_outside_the_geometry_are_not_held(partition):
    assert not GEOMETRY.holds(partition)


def test_the_top_bucket_is_expected_to_hold_up_to_twice_the_last_edge():
    assert GEOMETRY.upper_tokens("10.3") == 131_072
    assert GEOMETRY.upper_tokens("0.3") == 128


def test_slot_major_order_keeps_the_buckets_of_a_slot_together():
    mixed = ["10.2", "2.10", "0.2", "1.10", "0.1"]
    assert sorted(mixed, key=slot_major) == ["0.1", "0.2", "10.2", "1.10", "2.10"]


def test_two_geometries_describe_themselves_alike_only_when_they_are_equal():
    ways = [
        Geometry(), Geometry(slots=128), Geometry(shards=2), Geometry(version=2),
        Geometry(edges=BUCKET_EDGES[:-1]),
    ]  # fmt: skip
    assert len({way.describe() for way in ways}) == len(ways)
    assert Geometry().describe() == (
        "version=1 shards=1 slots=256 edges=128,256,512,1024,2048,4096,8192,16384,32768,65536"
    )


# ---------------------------------------------------------------- keys


def shard_keys(keys: Keys) -> list[str]:
    return [
        keys.ingress, keys.backlog, keys.delayed, keys.dead, keys.seen, keys.roster, keys.jobs,
        keys.tasks("3.17"), keys.results("night-1"), keys.job("night-1"),
    ]  # fmt: skip


def hash_tag(key: str) -> str:
    found = re.search(r"\{([^}]+)\}", key)
    assert found, f"{key} has no hash tag"
    return found[1]


@pytest.mark.parametrize("shard", [0, 7])
def test_all_keys_of_a_shard_share_its_hash_tag(shard):
    assert {hash_tag(key) for key in shard_keys(Keys("tmq", shard))} == {str(shard)}


def test_keys_are_spelled_as_the_protocol_says():
    keys = Keys()
    assert keys.ingress == "tmq:ingress:{0}"
    assert keys.tasks("3.17") == "tmq:tasks:{0}:3.17"
    assert keys.results("night") == "tmq:results:{0}:night"
    assert keys.job("night") == "tmq:job:{0}:night"
    assert keys.dead == "tmq:dead:{0}"
    assert keys.backlog == "tmq:backlog:{0}"
    assert keys.delayed == "tmq:delayed:{0}"
    assert keys.geometry == "tmq:geometry"
    assert keys.plan == "tmq:plan"
    assert keys.consumer("gpu0") == "tmq:consumer:gpu0"


def test_no_two_things_share_a_key():
    keys = Keys()
    names = [*shard_keys(keys), keys.geometry, keys.plan, keys.lease, keys.consumer("night-1")]
    assert len(set(names)) == len(names)


def test_namespaces_do_not_meet():
    assert not set(shard_keys(Keys("a"))) & set(shard_keys(Keys("b")))


@given(st.integers(0, 10), st.integers(0, 255))
def test_the_partition_can_be_read_back_from_its_key(bucket, slot):
    keys = Keys("some.name-space", 3)
    partition = f"{bucket}.{slot}"
    assert keys.partition_of(keys.tasks(partition)) == partition
    assert keys.tasks(partition).startswith(keys.tasks_pattern()[:-1])
