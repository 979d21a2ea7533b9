"""Host ops on regular expressions beside TensorFlow's kernels, both on RE2."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.campaign import examples
from tests.engines.host.kernels import agree, texts

pytestmark = pytest.mark.tf

PATTERNS = [
    "a",
    "a*",
    "",
    "(a)(b)?",
    "[^a-z ]",
    r"\s+",
    "ä|ö",
    "^a",
    "b$",
    ".",
    r"\bab\b",
    "(?i)AB",
    "x*",
    "[!a-]",
    r"[ -\]]",
    r"[!\"#$%&()\*\+,-\./:;<=>?@\[\\\]^_`{|}~\']",
]
TEXTS = st.text("ab xäö!A\n\0", max_size=8).map(str.encode) | st.binary(max_size=6)


@settings(max_examples=examples(60, 400), deadline=None)
@given(
    st.lists(TEXTS, min_size=1, max_size=4),
    st.sampled_from(PATTERNS),
    st.sampled_from(["", "-", r"<\0>", r"\1", r"[\2\1]", r"\\", r"\9"]),
    st.booleans(),
)
@example(
    [b"\xed\xa0\x80x", b"\xf4\x90\x80\x80", b"\xc0\x80\xc3"], "", "-", True
)  # half a surrogate pair is a character
def test_replaced(items, pattern, rewrite, everywhere):
    agree("StaticRegexReplace", input=texts(*items), pattern=pattern, rewrite=rewrite, replace_global=everywhere)


@settings(max_examples=examples(20, 100), deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.sampled_from(PATTERNS))
def test_matched_as_a_whole(items, pattern):
    agree("StaticRegexFullMatch", input=texts(*items), pattern=pattern)
