"""What is written of hostile text, form by form."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt  # comes with rich

from msplit import escape
from tests.hostile import COMMAND, HIDDEN, NAMES, texts


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tower_0/embedding/lookup", "tower_0/embedding/lookup"),
        ("größe/µ×…", "größe/µ×…"),
        (r"back\slash", r"back\slash"),
        ("a\x1b[31mb\x07", r"a\x1b[31mb\x07"),
        ("a\r\n\tb\x7f\x9b", r"a\r\n\tb\x7f\x9b"),
        ("\u202eb\u2066\u061c\u200b\u2028", r"\u202eb\u2066\u061c\u200b\u2028"),
        ("\ud800\udcff", r"\ud800\xff"),
        ("\U000e0041\ufe0f\u3164", r"\U000e0041\ufe0f\u3164"),
        ("::error::x", r"\x3a:error::x"),
        ("  ::error::x", r"  \x3a:error::x"),
        ("a ##[error]x ##vso[task.complete]", r"a #\x23[error]x #\x23vso[task.complete]"),
        ("a::b ## c", "a::b ## c"),
    ],
)
def test_a_line(text: str, shown: str) -> None:
    shown = shown.replace("#\\x23", "\\x23#")
    assert escape.line(text) == shown
    assert escape.line(shown) == shown


@given(texts())
def test_no_line_hides_breaks_or_commands(text: str) -> None:
    shown = escape.line(text)
    assert not HIDDEN.search(shown)
    assert not COMMAND.search(shown)
    assert shown.isprintable()
    assert "\n" not in shown


@given(st.lists(texts(), max_size=3))
def test_lines_keep_their_own_breaks_only(parts: list[str]) -> None:
    shown = escape.lines("\n".join(part.replace("\n", "") for part in parts))
    assert shown.count("\n") == max(len(parts) - 1, 0)
    assert not COMMAND.search(shown)


@given(texts(), texts())
def test_workflow_commands_end_where_they_should(name: str, value: str) -> None:
    line = f"::error file={escape.workflow_property(name)}::{escape.workflow_data(value)}"
    assert line.isprintable()
    head, _, said = line.removeprefix("::error ").partition("::")
    assert "," not in head
    assert head.count("=") == 1 + name.count("=")

    def told(text: str) -> str:
        return text.replace("%3A", ":").replace("%2C", ",").replace("%25", "%")

    assert told(head).removeprefix("file=") == escape.line(name)
    assert told(said) == escape.line(value)


MARKED = (
    ("a `code` b", "a `code` b"),
    ("rules.yaml:4: 'tower_[ab]/.*' < 5", r"rules.yaml:4: 'tower_[ab]/.\*' &lt; 5"),
    ("![x](http://e/p.png)", "`![x](http://e/p.png)`"),
    ("[a b](http://e)", "[a `b](http://e)`"),
    ("see https://e.org now", "see `https://e.org` now"),
    ("by @user in #12, GH-3 :tada: $x$", "by `@user` in `#12,` `GH-3` `:tada:` `$x$`"),
    ("<img src=x>&lt;", "&lt;img src=x>&amp;lt;"),
    ("odd ` @user", "odd &#96; `@user`"),
    ("``two`` `@a` `b", "&#96;&#96;two&#96;&#96; `@a` &#96;b"),
    ("_a_ __b__ c_d_e ~f~", r"\_a_ \_\_b_\_ c_d_e \~f\~"),
    ("_FusedMatMul and _stream_id", "_FusedMatMul and _stream_id"),
    ("a\\`b`", "a\\\\`b`"),
    ("@x`y", r"`@x\x60y`"),
)


@pytest.mark.parametrize(("text", "shown"), MARKED)
def test_markdown(text: str, shown: str) -> None:
    assert escape.markdown(text) == shown
    assert escape.markdown(text, cell=True) == shown


@pytest.mark.parametrize(("text", "shown"), [("# a", "`#` a"), ("- a", r"\- a"), ("1. a", r"1\. a"), ("> a", r"\> a")])
def test_a_paragraph_of_markdown_stays_one(text: str, shown: str) -> None:
    assert escape.markdown(text) == shown


def test_a_bar_is_escaped_in_cells_only() -> None:
    assert escape.markdown("a `b|c` d|e", cell=True) == r"a `b\|c` d\|e"
    assert escape.markdown("a `b|c` d|e") == "a `b|c` d|e"


def read(markdown: str) -> tuple[set[str], str, str]:
    """What CommonMark makes of it: kinds of tokens, text that is not code, and all text."""
    kinds, text, everything = set(), "", ""
    for block in MarkdownIt("commonmark").enable("table").parse(markdown):
        kinds.add(block.type)
        for token in block.children or ():
            kinds.add(token.type)
            text += token.content if token.type == "text" else "\x00"
            everything += token.content
    return kinds, text, everything


HARMLESS = {"paragraph_open", "paragraph_close", "inline", "text", "text_special", "code_inline"}
PIECES = [*NAMES, "`", "``", " `code` ", " ", "\\", "@u", "![x](http://y)"]


@given(st.lists(texts() | st.sampled_from(PIECES), max_size=5))
@example(["`a`", "``@b`x@user``"])
@example(["\\", "`@a`"])
@example([" ", "- a"])
@example(["   ", "1. a"])
@example(["    a"])
def test_markdown_means_nothing_outside_of_code(parts: list[str]) -> None:
    shown = escape.markdown("".join(parts))
    kinds, text, everything = read(shown)
    assert kinds <= HARMLESS, shown
    # What GitHub looks for in the text that is left.
    assert not re.search(r"@|://|#\d|www\.", text, re.IGNORECASE), shown
    assert "\n" not in shown
    assert not COMMAND.search(shown)

    def letters(text: str) -> str:
        return re.sub(r"[`\s]|\\x60", "", text)

    assert letters(everything) == letters(escape.line("".join(parts)))


class _Text(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.said = 0, ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags += 1

    def handle_data(self, data: str) -> None:
        self.said += data


@given(texts())
def test_html_and_xml_say_what_a_line_says(text: str) -> None:
    found = _Text(f"<p>{escape.html(text)}</p>")
    assert (found.tags, found.said) == (1, escape.visible(text))
    element = ElementTree.Element("a", {"b": escape.visible(text)})
    element.text = escape.visible(text)
    document = ElementTree.tostring(element, encoding="unicode")
    for ascii_only in (False, True):
        written = escape.xml_document(document, ascii_only=ascii_only)
        again = ElementTree.fromstring(written)
        assert again.text in (escape.visible(text), None if not text else "")
        assert again.get("b") == escape.visible(text)
        assert not COMMAND.search(written)
        assert written.isascii() or not ascii_only


@given(st.dictionaries(texts(), texts(), max_size=3))
def test_json_is_the_same_data(data: dict[str, str]) -> None:
    document = json.dumps(data, indent=2, ensure_ascii=False)
    for ascii_only in (False, True):
        written = escape.json_document(document, ascii_only=ascii_only)
        assert json.loads(written) == data
        assert written.encode("ascii" if ascii_only else "utf-8")
        assert not HIDDEN.search(written.replace("\n", ""))
        assert not COMMAND.search(written)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("-1.5e3", "-1.5e3"),
        ("=1+1", "'=1+1"),
        ("@SUM(1)", "'@SUM(1)"),
        ("-a", "'-a"),
        ("\t=1", r"\t=1"),
        ("a=1", "a=1"),
    ],
)
def test_a_cell_of_csv(text: str, shown: str) -> None:
    assert escape.csv_cell(text) == shown


@given(texts())
def test_csv_is_one_cell_and_no_formula(text: str) -> None:
    out = io.StringIO()
    csv.writer(out).writerow([escape.csv_cell(text), "b"])
    ((cell, b),) = csv.reader(io.StringIO(out.getvalue()))
    assert (cell.removeprefix("'"), b) == (escape.visible(text).removeprefix("'"), "b")
    assert cell[:1] not in ("=", "@") or not cell


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_every_encoding_has_a_way_to_say_it(encoding: str) -> None:
    text = escape.line("12.3 µs × 2 – größe … \u4e2d \ud800")
    assert text.encode(encoding, escape.HANDLER)
    assert "12.3 µs × 2 - größe ... \\u4e2d \\ud800".encode("latin-1") == text.encode("latin-1", escape.HANDLER)
