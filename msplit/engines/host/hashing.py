"""Hashes of strings as TensorFlow has them: FarmHash's Fingerprint64, SipHash, and TensorFlow's own; compiled where the wheel has it.

The C beside it (host_ops.c) does the same for all strings of a tensor at once.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.environment import HOST_OPS
from msplit.engines.host.table import objects

FARM, SIP, PLAIN = 0, 1, 2
"""Kinds of hashes: Fingerprint64, SipHash-2-4 with a key, and the hash of StringToHashBucket."""

_BYTES_HEAD = 32
"""Bytes in front of what a `bytes` holds, on CPython of 64 bits."""
_MASK = (1 << 64) - 1
_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F


@functools.cache
def native() -> Any:
    """The compiled library; None where it was not compiled, or where a `bytes` does not lie in memory as it takes it to."""
    try:
        library = ctypes.CDLL(str(HOST_OPS))
        library.take_values  # noqa: B018  # one that was compiled before there was this has other functions, too
    except (OSError, AttributeError):
        return None
    address, count, data, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_uint64
    library.looks_like.argtypes = (address, data, count)
    library.first_other.argtypes = (address, count, address)
    library.hash_strings.argtypes = (ctypes.c_int, address, count, address, number, number, number, address)
    library.fill_slots.argtypes = (address, count, address, number)
    library.fill_number_slots.argtypes = (address, count, count, address, number)
    library.view_strings.argtypes = (address, count, address, address)
    library.step_number.argtypes = (data,)
    library.run_steps.argtypes = (address, address, address)
    library.end_steps.argtypes = (address,)
    library.take_values.argtypes = (count, data, count, address, count, count)
    for name in ("first_other", "hash_strings", "step_number", "take_values"):
        getattr(library, name).restype = count
    library.run_steps.restype = address
    sample = b"looks like this"
    if sys.implementation.name != "cpython" or bytes.__basicsize__ != _BYTES_HEAD + 1:
        return None
    return library if library.looks_like(id(sample), sample, len(sample)) else None


def all_bytes(texts: NDArray[Any]) -> bool:
    """True if all objects of an array are `bytes`."""
    if texts.size > 32 and (library := native()) is not None:  # to call C takes as long as to look at these
        lying = np.ascontiguousarray(texts)
        return bool(library.first_other(lying.ctypes.data, lying.size, id(bytes)) < 0)
    return set(map(type, texts.reshape(-1).tolist())) <= {bytes}


@functools.cache
def _read_strings() -> Any:
    """The compiled function that makes objects, which keeps Python's lock; None as of `native`."""
    library, address, count = native(), ctypes.c_void_p, ctypes.c_int64
    made = ctypes.PYFUNCTYPE(count, address, count, count, address, address)
    return None if library is None else made(("read_strings", library))


_MAKE = ctypes.cast(ctypes.pythonapi.PyBytes_FromStringAndSize, ctypes.c_void_p)
bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(_MAKE.value or 0)
"""Makes a `bytes` of so many that lie at an address."""


def strings_in(data: bytes, start: int, end: int, most: int) -> tuple[int, Callable[[], NDArray[Any]]] | None:
    """Strings that lie in a block, each behind its length in four bytes: their count, and what makes an array of them. None where nothing
    is compiled, lengths do not fit, or there are more than `most`."""
    function = _read_strings()
    place = id(data) + _BYTES_HEAD + start, end - start, most
    count = -1 if function is None or type(data) is not bytes else function(*place, None, None)

    def made() -> NDArray[Any]:
        texts = np.empty(count, object)
        function(*place, texts.ctypes.data, _MAKE)
        assert data is not None  # which is how it lies there until now
        return texts

    return None if count < 0 else (count, made)


VIEW = np.dtype([("place", np.int64), ("size", np.int64)])
"""Where a string lies, and its bytes, as the compiled library knows it."""


class Texts(np.ndarray[Any, Any]):
    """Strings that lie in the bytes of a request, as an array of `VIEW`: no object is made of any. Only a `HostProgram` reads them.

    Attributes:
        held: These bytes.
    """

    held: bytes


def as_objects(value: Any) -> Any:
    """A value, which is an array of `bytes` where it was one of `Texts`."""
    return (
        objects([bytes_at(*one) for one in value.reshape(-1).tolist()], value.shape) if type(value) is Texts else value
    )


class _Scratch(threading.local):
    """Memory of a thread that `values_of` writes to."""

    def __init__(self) -> None:
        numbers: Any = np.empty((_MOST_VALUES * VIEW.itemsize + _MOST_REST) // 8, np.int64)
        self.address, self.values = numbers.ctypes.data, memoryview(numbers)


_MOST_VALUES, _MOST_REST = 1 << 16, 1 << 16
"""Values of a request, and bytes of it beside them, of those that are looked for."""
_SCRATCH = _Scratch()


def values_of(data: bytes, *, infers: bool) -> tuple[bytes, memoryview] | None:
    """A PredictRequest, or a ModelInferRequest, without the values of its inputs, behind their number in 8 bytes. Of equal ones, each value
    belongs to the same input. And until the next call of this thread, two numbers for each value: where it lies (of a string the address,
    of others how far behind the beginning), and its bytes. None where nothing is compiled, the request is damaged, or has too many."""
    if (library := native()) is None or type(data) is not bytes:
        return None
    size = library.take_values(infers, data, len(data), _SCRATCH.address, _MOST_VALUES, _MOST_REST)
    return None if size < 0 else (bytes_at(_SCRATCH.address + _MOST_VALUES * VIEW.itemsize, size), _SCRATCH.values)


def hashes(
    texts: NDArray[Any], kind: int = FARM, key: tuple[int, int] = (0, 0), buckets: int = 0
) -> NDArray[np.uint64]:
    """The hash of each string of an array that is flat, modulo `buckets` where that is not 0."""
    first, second = (value & _MASK for value in key)
    if (library := native()) is not None:
        texts, made = np.ascontiguousarray(texts), np.empty(len(texts), np.uint64)
        place = texts.ctypes.data
        wrong = library.hash_strings(kind, place, len(texts), id(bytes), first, second, buckets, made.ctypes.data)
        if wrong >= 0:
            raise TypeError(f"a string is a {type(texts[wrong]).__name__}")
        return made
    function: Callable[[bytes], int] = {FARM: farm, PLAIN: plain}.get(kind, lambda text: sip(text, first, second))
    found = map(function, texts.tolist())
    return np.fromiter((one % buckets for one in found) if buckets else found, np.uint64, len(texts))


class KeyPlaces:
    """The places of keys, all of them different, in their array.

    Args:
        keys: Strings, or whole numbers.

    Attributes:
        keys: They, one behind the other.
        slots: Where the compiled search for each begins, as `fill_slots` has it; None where nothing is compiled, or there are too many.
    """

    def __init__(self, keys: NDArray[Any]) -> None:
        self.keys = np.ascontiguousarray(keys)
        self.slots: NDArray[np.int32] | None = None
        library, texts = native(), keys.dtype.hasobject
        if library is not None and len(keys) < 1 << 30 and (texts or keys.dtype in (np.int32, np.int64)):
            self.slots = np.zeros(1 << (2 * len(keys)).bit_length(), np.int32)
            fill = (self.keys.ctypes.data, len(keys), self.slots.ctypes.data, len(self.slots) - 1)
            if texts:
                library.fill_slots(*fill)
            else:
                library.fill_number_slots(fill[0], keys.itemsize == 8, *fill[1:])

    @functools.cached_property
    def _dict(self) -> dict[Any, int]:
        return {key: place for place, key in enumerate(self.keys.tolist())}

    def of(self, asked: NDArray[Any]) -> NDArray[np.int64]:
        """The place of each element of a flat array, the number of keys where it is none of them."""
        return np.array([*map(self._dict.get, asked.tolist(), itertools.repeat(len(self.keys)))], np.int64)


def concatenated(first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """FingerprintCat64: the fingerprint of two fingerprints."""
    mul, shift = np.uint64(0xC6A4A7935BD1E995), np.uint64(47)

    def mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return value ^ (value >> shift)

    made = (first ^ mul) ^ (mix(second * mul) * mul)
    return mix(mix(made * mul) * mul)


def _rotate(value: int, bits: int) -> int:
    return ((value >> bits) | (value << (64 - bits))) & _MASK


def _mix(value: int) -> int:
    return value ^ (value >> 47)


def _pair(u: int, v: int, mul: int) -> int:
    a = _mix((u ^ v) * mul & _MASK)
    return _mix((v ^ a) * mul & _MASK) * mul & _MASK


def farm(text: bytes) -> int:
    """FarmHash's Fingerprint64 of one string."""
    size = len(text)
    mul = (_K2 + size * 2) & _MASK

    def at(place: int) -> int:
        return int.from_bytes(text[place : place + 8], "little")

    if size <= 16:
        if size >= 8:
            a, b = (at(0) + _K2) & _MASK, at(size - 8)
            return _pair((_rotate(b, 37) * mul + a) & _MASK, (_rotate(a, 25) + b) * mul & _MASK, mul)
        if size >= 4:
            low, high = struct.unpack_from("<I", text)[0], struct.unpack_from("<I", text, size - 4)[0]
            return _pair((size + (low << 3)) & _MASK, high, mul)
        if size:
            y, z = text[0] + (text[size >> 1] << 8), size + (text[-1] << 2)
            return _mix((y * _K2 ^ z * _K0) & _MASK) * _K2 & _MASK
        return _K2
    if size <= 32:
        a, b, c, d = at(0) * _K1 & _MASK, at(8), at(size - 8) * mul & _MASK, at(size - 16) * _K2
        return _pair(
            (_rotate((a + b) & _MASK, 43) + _rotate(c, 30) + d) & _MASK,
            (a + _rotate((b + _K2) & _MASK, 18) + c) & _MASK,
            mul,
        )
    if size <= 64:
        a, b, c, d = at(0) * _K2 & _MASK, at(8), at(size - 8) * mul & _MASK, at(size - 16) * _K2
        y = (_rotate((a + b) & _MASK, 43) + _rotate(c, 30) + d) & _MASK
        z = _pair(y, (a + _rotate((b + _K2) & _MASK, 18) + c) & _MASK, mul)
        e, f = at(16) * mul & _MASK, at(24)
        g, h = (y + at(size - 32)) * mul & _MASK, (z + at(size - 24)) * mul & _MASK
        return _pair(
            (_rotate((e + f) & _MASK, 43) + _rotate(g, 30) + h) & _MASK,
            (e + _rotate((f + a) & _MASK, 18) + g) & _MASK,
            mul,
        )
    return _farm_long(text, at)


def _farm_long(text: bytes, at: Callable[[int], int]) -> int:
    """Fingerprint64 of more than 64 bytes."""

    def weak(place: int, a: int, b: int) -> tuple[int, int]:
        w, x, y, z = at(place), at(place + 8), at(place + 16), at(place + 24)
        a = (a + w) & _MASK
        b, c = _rotate((b + a + z) & _MASK, 21), a
        a = (a + x + y) & _MASK
        return (a + z) & _MASK, (b + _rotate(a, 44) + c) & _MASK

    size, seed = len(text), 81
    y = (seed * _K1 + 113) & _MASK
    z = _mix((y * _K2 + 113) & _MASK) * _K2 & _MASK
    v, w, x, place = (0, 0), (0, 0), (seed * _K2 + at(0)) & _MASK, 0
    while place < (size - 1) // 64 * 64:
        x = _rotate((x + y + v[0] + at(place + 8)) & _MASK, 37) * _K1 & _MASK ^ w[1]
        y = (_rotate((y + v[1] + at(place + 48)) & _MASK, 42) * _K1 + v[0] + at(place + 40)) & _MASK
        z = _rotate((z + w[0]) & _MASK, 33) * _K1 & _MASK
        v, w = (
            weak(place, v[1] * _K1 & _MASK, (x + w[0]) & _MASK),
            weak(place + 32, (z + w[1]) & _MASK, (y + at(place + 16)) & _MASK),
        )
        z, x, place = x, z, place + 64
    mul, place = (_K1 + ((z & 0xFF) << 1)) & _MASK, size - 64
    first = (w[0] + ((size - 1) & 63)) & _MASK
    v = ((v[0] + first) & _MASK, v[1])
    w = ((first + v[0]) & _MASK, w[1])
    x = _rotate((x + y + v[0] + at(place + 8)) & _MASK, 37) * mul & _MASK ^ (w[1] * 9 & _MASK)
    y = (_rotate((y + v[1] + at(place + 48)) & _MASK, 42) * mul + v[0] * 9 + at(place + 40)) & _MASK
    z = _rotate((z + w[0]) & _MASK, 33) * mul & _MASK
    v, w = (
        weak(place, v[1] * mul & _MASK, (x + w[0]) & _MASK),
        weak(place + 32, (z + w[1]) & _MASK, (y + at(place + 16)) & _MASK),
    )
    z, x = x, z
    return _pair((_pair(v[0], w[0], mul) + _mix(y) * _K0 + z) & _MASK, (_pair(v[1], w[1], mul) + x) & _MASK, mul)


def sip(text: bytes, first: int, second: int) -> int:
    """SipHash-2-4 of one string with a key of two numbers."""
    v = [
        first ^ 0x736F6D6570736575,
        second ^ 0x646F72616E646F6D,
        first ^ 0x6C7967656E657261,
        second ^ 0x7465646279746573,
    ]

    def rounds(count: int) -> None:
        for _ in range(count):
            v[0], v[2] = (v[0] + v[1]) & _MASK, (v[2] + v[3]) & _MASK
            v[1], v[3] = _rotate(v[1], 51) ^ v[0], _rotate(v[3], 48) ^ v[2]
            v[0] = _rotate(v[0], 32)
            v[2], v[0] = (v[2] + v[1]) & _MASK, (v[0] + v[3]) & _MASK
            v[1], v[3] = _rotate(v[1], 47) ^ v[2], _rotate(v[3], 43) ^ v[0]
            v[2] = _rotate(v[2], 32)

    whole = len(text) // 8 * 8
    words = [*struct.unpack(f"<{whole // 8}Q", text[:whole])]
    words.append(int.from_bytes(text[whole:].ljust(7, b"\0") + bytes([len(text) & 0xFF]), "little"))
    for word in words:
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xFF
    rounds(4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def plain(text: bytes) -> int:
    """TensorFlow's Hash64, of MurmurHash's kind, of one string."""
    mul, size = 0xC6A4A7935BD1E995, len(text)
    made = (0xDECAFCAFFE ^ size * mul) & _MASK
    whole = size // 8 * 8
    for word in struct.unpack(f"<{whole // 8}Q", text[:whole]):
        mixed = _mix(word * mul & _MASK) * mul & _MASK
        made = (made ^ mixed) * mul & _MASK
    if size > whole:
        made = (made ^ int.from_bytes(text[whole:], "little")) * mul & _MASK
    made = _mix(made) * mul & _MASK
    return _mix(made)
