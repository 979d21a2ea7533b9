"""Host ops on regular expressions, by RE2, as in TensorFlow: on bytes that are taken for UTF-8."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import re2
from numpy.typing import NDArray

from msplit.engines.host.strings import each
from msplit.engines.host.table import HostNode, NativeNode, NotOurs, Run, as_bytes, host_op

_RE2 = getattr(re2, "_re2", None)
"""RE2 itself: its Python face takes text for UTF-8 only where it is `str`, which strings of a model need not be."""
_REWRITTEN = re.compile(rb"\\([0-9\\])", re.DOTALL)


def _compiled(pattern: str | bytes) -> Callable[[bytes, int, bool], list[tuple[int, int]]]:
    """Gives where a pattern and its groups match a text, from a position on, or all of it; nothing where it does not.

    Raises:
        NotOurs: RE2 does not take it.
    """
    if _RE2 is None:
        raise NotOurs
    options = _RE2.RE2.Options()
    options.log_errors = False
    found = _RE2.RE2(as_bytes(pattern), options)
    if not found.ok():
        raise NotOurs
    free, whole = _RE2.RE2.Anchor.UNANCHORED, _RE2.RE2.Anchor.ANCHOR_BOTH

    def match(text: bytes, start: int, everything: bool) -> list[tuple[int, int]]:
        spans = [*found.Match(whole if everything else free, text, start, len(text))]
        return [] if not spans or spans[0][0] < 0 else spans

    return match


def _step(text: bytes, place: int) -> int:
    """Bytes of the character of UTF-8 that begins there; 1 where none does."""
    for size in range(1, 5):
        try:
            text[place : place + size].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            continue
        return size
    return 1


_BYTES = re.compile(rb"\[(?!\^)([\x20-\x5a\x5e-\x7e]|\\[^a-zA-Z0-9\x80-\xff])+\]")
"""One of some characters of ASCII, such as Keras' punctuation: a byte of its own wherever it is."""


def _replaced_bytes(node: HostNode) -> list[int] | None:
    """What becomes of each byte, -1 for none, where a pattern is one byte and is replaced everywhere by one, or by nothing."""
    pattern, rewrite = (as_bytes(node.attrs[name]) for name in ("pattern", "rewrite"))
    if not _BYTES.fullmatch(pattern) or len(rewrite) > 1 or rewrite == b"\\" or not node.attrs["replace_global"]:
        return None
    match = _compiled(pattern)
    return [(*rewrite, -1)[0] if byte < 128 and match(bytes([byte]), 0, True) else byte for byte in range(256)]


def _table_of_bytes(node: HostNode) -> NativeNode | None:
    found = _replaced_bytes(node)
    return None if found is None else NativeNode(found)


@host_op("StaticRegexReplace", native=_table_of_bytes)
def replace(node: HostNode) -> Run:
    """What matches a pattern replaced, everywhere or where it comes first; \\1 in the replacement is what the first group matched."""
    if (table := _replaced_bytes(node)) is not None:
        changed, gone = bytes(max(byte, 0) for byte in table), bytes(byte for byte in range(256) if table[byte] < 0)
        return lambda texts: each(lambda text: text.translate(changed, gone), texts)
    match, everywhere = _compiled(node.attrs["pattern"]), bool(node.attrs["replace_global"])
    rewrite = as_bytes(node.attrs["rewrite"])
    if b"\\" in _REWRITTEN.sub(b"", rewrite):
        raise NotOurs
    groups = max([int(one) for one in _REWRITTEN.findall(rewrite) if one != b"\\"], default=0)

    def one(text: bytes) -> bytes:
        made, place, last = list[bytes](), 0, -1
        while place <= len(text) and (spans := match(text, place, False)):
            if groups >= len(spans):
                return text
            begin, end = spans[0]
            made.append(text[place:begin])
            if begin == end == last:  # nothing, where the last match ended: goes on behind the next character
                size = _step(text, begin)
                made.append(text[begin : begin + size])
                place = begin + size
                continue
            made.append(_REWRITTEN.sub(lambda part: _part(text, spans, part[1]), rewrite))
            place = last = end
            if not everywhere:
                break
        return b"".join([*made, text[place:]])

    return lambda texts: each(one, texts)


def _part(text: bytes, spans: list[tuple[int, int]], name: bytes) -> bytes:
    if name == b"\\":
        return name
    begin, end = spans[int(name)]
    return text[begin:end] if begin >= 0 else b""


@host_op("StaticRegexFullMatch")
def full_match(node: HostNode) -> Run:
    """Tell of each string whether a pattern matches all of it."""
    match = _compiled(node.attrs["pattern"])

    def run(texts: NDArray[Any]) -> NDArray[Any]:
        found = [bool(match(text, 0, True)) for text in texts.reshape(-1).tolist()]
        return np.array(found, np.bool_).reshape(texts.shape)

    return run
