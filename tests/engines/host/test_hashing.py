"""Hashes of strings: compiled and in Python, beside TensorFlow's kernels."""

from __future__ import annotations

import importlib
import random

import numpy as np
import pytest

from msplit.engines.host import hashing

pytestmark = pytest.mark.tf

KEY = (3, -(2**63) + 5)
MOST = 2**63 - 1
LENGTHS = [bytes(random.Random(size).randrange(256) for _ in range(size)) for size in range(301)]
TEXTS = [*LENGTHS, b"", b"\0", b"\xff" * 8, "ümläut".encode(), b"x" * 5000]
KINDS = {"farm": hashing.FARM, "sip": hashing.SIP, "plain": hashing.PLAIN}


@pytest.fixture(scope="module")
def expected():
    """Remainders of TensorFlow's hashes of all texts."""
    tf = importlib.import_module("tensorflow")
    values = np.array(TEXTS, object)
    raw = tf.raw_ops
    return {
        "farm": raw.StringToHashBucketFast(input=values, num_buckets=MOST).numpy(),
        "sip": raw.StringToHashBucketStrong(input=values, num_buckets=MOST, key=KEY).numpy(),
        "plain": raw.StringToHashBucket(string_tensor=values, num_buckets=MOST).numpy(),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [True, False])
def test_every_length_has_tensorflows_hash(kind, compiled, expected, monkeypatch):
    if not compiled:
        monkeypatch.setattr(hashing, "native", lambda: None)
    elif hashing.native() is None:
        pytest.skip("no C compiler has made host_ops.native: python hatch_build.py says why")
    found = hashing.hashes(np.array(TEXTS, object), KINDS[kind], KEY) % np.uint64(MOST)
    np.testing.assert_array_equal(found.astype(np.int64), expected[kind])


def test_googles_own_fingerprints():
    """As farmhash's sources have them: of nothing, and of the empty string's neighbours."""
    assert hashing.farm(b"") == 0x9AE16A3B2F90404F
    assert [hex(hashing.sip(bytes(range(size)), 0x0706050403020100, 0x0F0E0D0C0B0A0908)) for size in (0, 1, 8, 15)] == [
        "0x726fdb47dd0e0e31",
        "0x74f839c593dc67fd",
        "0x93f5f5799a932462",
        "0xa129ca6149be45e5",
    ]


def test_no_strings_have_no_hashes():
    assert hashing.hashes(np.zeros(0, object)).shape == (0,)


@pytest.mark.parametrize("compiled", [True, False])
def test_places_of_keys(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(hashing, "native", lambda: None)
    for count in (0, 1, 2, 3, 1000):
        keys = np.array(
            [
                f"key {number}".encode() * (number % 20) + bytes([number % 256, number // 256])
                for number in range(count)
            ],
            object,
        )
        places = hashing.KeyPlaces(keys)
        assert places.of(keys).tolist() == [*range(count)]
        assert places.of(np.repeat(keys[::-1], 2)[::2]).tolist() == [*range(count)][::-1]
        assert places.of(np.array([b"", b"\0", b"none"], object)).tolist() == [count] * 3
    assert hashing.KeyPlaces(np.array([7, -1])).of(np.array([-1, 0, 7])).tolist() == [1, 2, 0]


@pytest.mark.parametrize("wrong", [None, 7, "text", bytearray(b"x"), np.float32(1)])
def test_what_is_no_string_is_never_read_as_one(wrong):
    texts = np.empty(2, object)
    texts[:] = [b"right", wrong]
    assert not hashing.all_bytes(texts)
    with pytest.raises((TypeError, AttributeError)):
        hashing.hashes(texts)
