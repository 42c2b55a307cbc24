"""The prefix cutter skips what everybody shares and groups by what comes after it."""

from __future__ import annotations

import random
import sys
import zlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.prefix import CUT_POINTS, Cut, PrefixTraffic, prompt_body

SHARE_MAX = 0.25
COUNTERS = 128


def learned(bodies, share_max=SHARE_MAX) -> Cut:
    traffic = PrefixTraffic(share_max)
    for body in bodies:
        traffic.add(body)
    return traffic.cut()


def filler(seed: object, size: int) -> bytes:
    """Bytes that look like nothing else."""
    return random.Random(str(seed)).randbytes(size)


def groups_of(cut: Cut, bodies: list[bytes]) -> Counter[tuple[int, int]]:
    return Counter(cut.prefix(body) for body in bodies)


# ---------------------------------------------------------------- bodies


def test_the_body_of_a_text_is_its_utf8():
    assert prompt_body({"id": "a", "prompt": "grüß"}) == "grüß".encode()


def test_the_body_of_token_ids_is_four_little_endian_bytes_each():
    body = prompt_body({"id": "a", "token_ids": [1, 256, (1 << 31) - 1]})
    assert body == b"\x01\0\0\0\0\x01\0\0\xff\xff\xff\x7f"


def test_the_body_of_a_chat_is_its_turns_each_ended_by_a_zero_byte():
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert prompt_body({"id": "a", "messages": turns}) == b"system\nBe brief.\0user\nHi\0"


def test_a_chat_that_goes_on_begins_with_the_chat_that_it_continues():
    turns = [{"role": "user", "content": "Hi"}]
    longer = [*turns, {"role": "assistant", "content": "Hello"}]
    start = prompt_body({"id": "a", "messages": turns})
    assert prompt_body({"id": "a", "messages": longer}).startswith(start)


def test_a_cut_of_256_bytes_is_64_token_ids():
    shared, cut = list(range(64)), Cut()
    length, crc = cut.prefix(prompt_body({"id": "a", "token_ids": [*shared, 7, 8]}))
    assert length == 256
    assert crc == cut.prefix(prompt_body({"id": "b", "token_ids": [*shared, 9]}))[1]


# ---------------------------------------------------------------- cutting


def test_without_knowledge_the_first_cut_point_names_the_group():
    body = filler("x", 3000)
    assert Cut().prefix(body) == (256, zlib.crc32(body[:256]))


@pytest.mark.parametrize("size", [1, 255, 256])
def test_a_body_up_to_the_first_cut_point_is_its_own_prefix(size):
    body = filler("short", size)
    assert Cut().prefix(body) == (size, zlib.crc32(body))


@pytest.mark.parametrize("size", [300, 1000, 5000])
def test_the_system_prompt_of_everybody_is_skipped_and_the_groups_after_it_separate(size):
    system = filler("system", size)
    documents = [filler(f"document {number}", 4000) for number in range(10)]
    bodies = [system + documents[n % 10] + filler(n, 50) for n in range(300)]
    found = groups_of(learned(bodies), bodies)
    assert len(found) == 10
    assert set(found.values()) == {30}
    assert all(length > size for length, _ in found)


def test_groups_that_differ_at_once_are_cut_at_the_first_point():
    bodies = [filler(n % 8, 2000) + filler(n, 100) for n in range(200)]
    found = groups_of(learned(bodies), bodies)
    assert {length for length, _ in found} == {256}
    assert len(found) == 8


def test_a_heavy_document_is_divided_and_a_light_one_is_not():
    heavy, light = filler("heavy", 1024), [filler(f"light {n}", 1024) for n in range(10)]
    bodies = [(heavy if n % 2 else light[n // 2 % 10]) + filler(n, 2000) for n in range(400)]
    found = groups_of(learned(bodies), bodies)
    assert sorted(found.values())[-10:] == [20] * 10  # each light document in one piece
    assert sum(1 for count in found.values() if count == 1) == 200  # the heavy one scattered


def test_identical_short_prompts_end_at_their_own_length():
    bodies = [b"Say hi"] * 100
    assert groups_of(learned(bodies), bodies) == {(6, zlib.crc32(b"Say hi")): 100}


def test_bodies_beyond_the_last_cut_point_end_there():
    body = filler("long", CUT_POINTS[-1] + 10)
    bodies = [body + bytes([n]) for n in range(20)]
    assert {length for length, _ in groups_of(learned(bodies), bodies)} == {CUT_POINTS[-1]}


def test_one_body_alone_makes_nothing_heavy():
    assert learned([filler("x", 5000)]) == Cut()
    assert learned([]) == Cut()


def test_a_share_of_exactly_the_maximum_is_not_heavy():
    bodies = [filler(n % 4, 300) for n in range(400)]
    assert learned(bodies, share_max=0.25) == Cut()
    assert len(learned(bodies, share_max=0.24).heavy) == 4


# ---------------------------------------------------------------- counting


@given(st.lists(st.integers(0, 400).map(lambda n: n * n // 400), min_size=2, max_size=600))
def test_shares_at_the_first_cut_are_known_to_within_one_128th(names):
    bodies = [str(name).encode().ljust(300, b".") for name in names]
    exact = Counter(zlib.crc32(body[:256]) for body in bodies)
    for share_max in (0.02, 0.1, 0.25):
        cut = learned(bodies, share_max)
        for crc, count in exact.items():
            share = count / len(bodies)
            if (256, crc) in cut.heavy:
                assert share > share_max
            else:
                assert share <= share_max + 1 / COUNTERS


@given(st.lists(st.integers(0, 300), min_size=2, max_size=400), st.integers(1, 4))
def test_shares_behind_a_prompt_of_everybody_are_known_to_within_one_128th(names, depth):
    size = CUT_POINTS[depth - 1]
    system = filler("system", size)
    bodies = [system + str(name).encode().ljust(size + 1, b".") for name in names]
    exact = Counter(zlib.crc32(body[: 2 * size]) for body in bodies)
    cut = learned(bodies)
    for crc, count in exact.items():
        share = count / len(bodies)
        if (2 * size, crc) in cut.heavy:
            assert share > SHARE_MAX
        else:
            assert share <= SHARE_MAX + 1 / COUNTERS


def test_a_hundred_thousand_distinct_bodies_keep_a_bounded_memory():
    traffic = PrefixTraffic(SHARE_MAX)
    system = filler("system", 600)
    for number in range(100_000):
        traffic.add(system + b"%d" % number if number % 2 else (b"%d" % number).ljust(300, b"."))
    counts = traffic._counts
    assert max(map(len, counts.values())) <= COUNTERS
    assert sum(sys.getsizeof(table) for table in counts.values()) < 100_000
    assert traffic.total == 100_000
    assert traffic.cut().heavy == {(256, zlib.crc32(system[:256])), (512, zlib.crc32(system[:512]))}


# ---------------------------------------------------------------- agreement


@given(
    st.frozensets(
        st.tuples(st.sampled_from(CUT_POINTS), st.integers(0, (1 << 32) - 1)), max_size=30
    )
)
def test_a_cut_survives_its_text(heavy):
    assert Cut.decode(Cut(heavy).encode()) == Cut(heavy)


def test_equal_cuts_have_equal_texts():
    pairs = [(cut, crc) for cut in CUT_POINTS for crc in (5, 3, 4_000_000_000)]
    assert Cut(frozenset(pairs)).encode() == Cut(frozenset(reversed(pairs))).encode()


@given(st.lists(st.sampled_from([filler(n % 3, 300 + 200 * n) for n in range(9)]), max_size=60))
def test_the_same_traffic_gives_the_same_cut(bodies):
    assert learned(bodies).encode() == learned(bodies).encode()


@given(st.binary(min_size=1, max_size=3000), st.binary(max_size=300), st.integers(1, 4))
def test_the_prefix_is_a_true_prefix_and_deeper_only_under_heavy_ones(body, tail, rounds):
    whole = body + tail
    cut = learned([body] * rounds + [whole])
    length, crc = cut.prefix(whole)
    assert 0 < length <= len(whole)
    assert crc == zlib.crc32(whole[:length])
    for shallower in CUT_POINTS:
        if shallower < length:
            assert (shallower, zlib.crc32(whole[:shallower])) in cut.heavy
