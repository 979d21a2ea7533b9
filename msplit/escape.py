"""Text out of a model made harmless for its reader: one function per form of output.

Names of nodes and functions, attributes, keys of signatures and names of files are data from a stranger. In a terminal they could move
the cursor or turn the writing around, in a log of GitHub Actions give commands, in a comment load images and call people. What goes out
passes through here: `line` and `lines` for text, `markdown`, `html`, `workflow_data`, `csv_cell` for single values of a
form, `guarded`, `json_document` and `xml_document` for what is whole. JSON and XML stay the same data: there it is written otherwise.
"""

from __future__ import annotations

import codecs
import html as _html
import re
from collections.abc import Callable

_INVISIBLE = "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef"
"""Characters that Python calls printable and nobody sees: fillers and selectors of variants."""

_UNSEEN = re.compile(f"[{_INVISIBLE}]")

_COMMAND_START = re.compile(r"^([^\S\n]*):(?=:)", re.MULTILINE)
"""`::name::` of GitHub Actions: only blanks may stand before it."""

_COMMAND_INSIDE = re.compile(r"#(?=#\w*\[)")
"""`##[name]` of GitHub Actions, `##vso[name]` of Azure Pipelines, `##teamcity[name]`: read anywhere in a line."""

_RISKY = re.compile(
    r"""[@$] | \#\d | ^\# | \bgh-\d | :// | www\. | !\[ | \]\( | \]\[ | \]: | \[\^ | :[+\-a-z][\w+-]*:""",
    re.IGNORECASE | re.VERBOSE,
)
"""In Markdown: mentions, formulas, numbers of issues, headings, addresses, images, links, footnotes, emoji."""

_SPECIAL = re.compile(r"\\(?=[!-/:-@\[-`{-~]|$)|[*~]|<|&(?=#?\w+;)")
_OPENS = re.compile(r"(?<![^\W_])_")
_CLOSES = re.compile(r"\S_(?![^\W_])")
"""Underscores that emphasize what stands between them."""

_BLOCK = re.compile(r"(?=[-+>=|])|\d+(?=[.)](?:\s|$))")
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

HANDLER = "msplit.escape"
"""Name of the error handler of output streams: what their encoding lacks is replaced, so that no result is lost for want of a µ."""

_PLAIN = {"µ": "u", "×": "x", "–": "-", "—": "-", "…": "...", "→": "->", "≥": ">=", "≤": "<=", "─": "-", "≈": "~"}


def line(text: str) -> str:
    """A text as one line in which nothing is hidden.

    What can not be seen is written as in a string of Python: control characters, line breaks, marks that turn the direction of writing,
    what has no width, halves of surrogate pairs; a byte of a file name that is not UTF-8 is ``\\xff``.
    """
    return guarded(visible(text))


def lines(text: str) -> str:
    """Like `line` for a text whose line breaks are msplit's own."""
    return guarded("\n".join(map(visible, text.split("\n")))) if "\n" in text else line(text)


def guarded(text: str) -> str:
    """A finished text, such as a table, in which no line gives a command to a CI system; that may be for where a renderer cut a name."""
    if "##" in text:
        text = _COMMAND_INSIDE.sub(r"\\x23", text)
    if "::" in text:
        text = _COMMAND_START.sub(r"\1\\x3a", text)
    return text


def visible(text: str) -> str:
    """A text with what can not be seen as in `line`; for what is not a line of its own."""
    return _shown(text, _written)


def _shown(text: str, written: Callable[[str], str]) -> str:
    """A text with what can not be seen as a function writes it."""
    if text.isprintable() and (text.isascii() or _UNSEEN.search(text) is None):
        return text
    return "".join(char if char.isprintable() and _UNSEEN.match(char) is None else written(char) for char in text)


def _written(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # how Python keeps a byte that is not UTF-8
        code -= 0xDC00
    named = {9: "\\t", 10: "\\n", 13: "\\r"}.get(code)
    return named or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def workflow_data(text: str) -> str:
    """A value as the message of a workflow command of GitHub Actions."""
    return guarded(visible(text)).replace("%", "%25")


def workflow_property(text: str) -> str:
    """A value as a property of a workflow command of GitHub Actions."""
    return workflow_data(text).replace(":", "%3A").replace(",", "%2C")


def markdown(text: str, *, cell: bool = False) -> str:
    """A text of one line as GitHub-flavoured Markdown that links nothing, loads nothing, calls nobody and is read as it stands.

    Code spans between single backticks stay what they are. Elsewhere a word that means something to GitHub becomes a code span, for
    a mention or an address is found in whatever else escaping gives.

    Args:
        text: What to say.
        cell: Whether it goes into a table.
    """
    text = guarded(visible(text))
    emphasis = _CLOSES.search(text) is not None
    parts = _code_spans(text)
    shown = "".join(f"`{part}`" if number % 2 else _prose(part, emphasis) for number, part in enumerate(parts))
    if cell:
        return shown.replace("|", "\\|")
    # Behind up to three spaces a list, a quotation or a line may begin; behind four, a block of code.
    if shown.startswith(" "):
        return f"&#32;{shown[1:]}"
    block = _BLOCK.match(shown)
    return f"{shown[: block.end()]}\\{shown[block.end() :]}" if block else shown


def _code_spans(text: str) -> list[str]:
    """Prose and the insides of code spans in turn, as CommonMark finds them; backticks that open nothing are written as characters."""
    runs = [run for run in re.finditer("`+", text) if len(run[0]) == 1]
    parts, start = [], 0
    for opening, closing in zip(runs[::2], runs[1::2], strict=False):
        parts += [text[start : opening.start()], text[opening.end() : closing.start()]]
        start = closing.end()
    return [*parts, text[start:]]


def _prose(text: str, emphasis: bool) -> str:
    return " ".join(_word(word, emphasis) for word in text.split(" "))


def _word(word: str, emphasis: bool) -> str:
    if _RISKY.search(word):
        return f"`{word.replace('`', chr(92) + 'x60')}`"
    word = _SPECIAL.sub(lambda found: _MARKDOWN.get(found[0], f"\\{found[0]}"), word).replace("`", "&#96;")
    return _OPENS.sub(r"\\_", word) if emphasis else word


_MARKDOWN = {"<": "&lt;", "&": "&amp;"}


def html(text: str) -> str:
    """A value as text or attribute of HTML."""
    return _html.escape(visible(text), quote=True)


def xml_document(text: str, *, ascii_only: bool = False) -> str:
    """A finished document of XML: the same data, without a line that commands a CI system."""
    text = _COMMAND_START.sub(r"\1&#58;", _COMMAND_INSIDE.sub("&#35;", text))
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii") if ascii_only else text


def json_document(text: str, *, ascii_only: bool = False) -> str:
    """A finished document of JSON: the same data, in which nothing is hidden, commands a CI system, or has no UTF-8.

    Args:
        text: The document, as `json.dumps` gives it.
        ascii_only: For a stream that is not UTF-8.
    """
    if ascii_only and not text.isascii():
        text = "".join(char if char.isascii() else _json_written(char) for char in text)
    text = "\n".join(_shown(line, _json_written) for line in text.split("\n"))
    return _COMMAND_INSIDE.sub(r"\\u0023", text)


def _json_written(char: str) -> str:
    code = ord(char)
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


def csv_cell(text: str) -> str:
    """A value for a CSV file, which no spreadsheet takes for a formula; the writer of `csv` quotes it. Numbers stay numbers."""
    shown = visible(text)
    return f"'{shown}" if _FORMULA.match(shown) and _NUMBER.fullmatch(shown) is None else shown


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(
        _PLAIN.get(char) or char.encode("ascii", "backslashreplace").decode("ascii") for char in text
    ), error.end


codecs.register_error(HANDLER, _replaced)
