""""""

import re
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.errors import RulesError
from msplit.rules import streamfile
from tests.rules import nvidia_reader

NAMES = st.text("ab01_./\\>-", min_size=1, max_size=8)
STRANGE = st.text(min_size=1, max_size=6).filter(lambda name: "\x00" not in name and name.isprintable())


def ids_of(text, names):
    """Read by msplit: the first pattern wins."""
    entries = streamfile.parse(text, "f")
    number, node = streamfile.match([entry.pattern for entry in entries], names)
    found = [-1] * len(names)
    for entry, at in zip(number.tolist(), node.tolist(), strict=True):
        if found[at] < 0:
            found[at] = entries[entry].stream
    return found


def test_reads_the_forks_format():
    entries = streamfile.parse("1:.*user.*,.*item.*\n2:gate_[0-9]/.*\n", "s.txt")
    assert [(e.stream, e.pattern, e.where) for e in entries] == [
        (1, ".*user.*", "s.txt:1"),
        (1, ".*item.*", "s.txt:1"),
        (2, "gate_[0-9]/.*", "s.txt:2"),
    ]


def test_comments_blank_lines_spaces_and_windows_line_ends_are_allowed():
    entries = streamfile.parse("# towers\r\n\r\n  1 : a , b \r\n3:c", "f")
    assert [(e.stream, e.pattern) for e in entries] == [(1, "a"), (1, "b"), (3, "c")]


def test_an_id_may_have_several_lines_and_the_order_of_the_file_decides():
    assert ids_of("2:tower_a/x\n1:tower_a/.*\n2:tower_b/.*\n", ["tower_a/x", "tower_a/y", "tower_b/z", "c"]) == [
        2,
        1,
        2,
        -1,
    ]


@pytest.mark.parametrize(
    ("pattern", "hit", "miss"),
    [
        ("a{1,2}b", "aab", "aaab"),
        ("[a,b]+c", "abc", "xc"),
        ("(?:x|y)/z", "x/z", "z"),
        (r"a\,b", "a,b", "ab"),
        (r"[\]]a", "]a", "a"),
        (r"a\.b", "a.b", "acb"),
    ],
)
def test_commas_and_colons_inside_a_pattern_belong_to_it(pattern, hit, miss):
    (entry,) = streamfile.parse(f"4:{pattern}", "f")
    assert entry.pattern == pattern
    assert ids_of(f"4:{pattern}\n", [hit, miss]) == [4, -1]


def test_every_broken_line_is_reported_with_its_number():
    with pytest.raises(RulesError) as error:
        streamfile.parse("1:ok\nno colon\nx:a\n2:\n3:(a\n-1:b\n4:a,,b\n5:(?=a)b\n6:(a)\\1\n", "s.txt")
    text = str(error.value)
    assert error.value.where == "s.txt"
    assert text.startswith("s.txt: 8 broken lines")
    for line, why in [
        (2, "no ':'"),
        (3, "'x' is not a number"),
        (4, "empty"),
        (5, "missing )"),
        (6, "'-1' is not a number"),
        (7, "empty"),
        (8, "look-ahead"),
        (9, "back-reference"),
    ]:
        (shown,) = [part for part in text.splitlines() if part.startswith(f"  line {line}:")]
        assert why in shown


def test_one_broken_line_is_named_by_file_and_line():
    with pytest.raises(RulesError) as error:
        streamfile.parse("1:a\n\n2:b(\n", "s.txt")
    assert error.value.where == "s.txt:3"
    assert error.value.fix


def test_a_thousand_broken_lines_are_counted_and_not_all_shown():
    with pytest.raises(RulesError, match="1000 broken lines") as error:
        streamfile.parse("x\n" * 1000, "s.txt")
    assert len(str(error.value).splitlines()) < 30
    assert "980 more" in str(error.value)


def test_long_patterns_are_shortened_in_messages():
    with pytest.raises(RulesError) as error:
        streamfile.parse(f"1:({'a' * 500}", "s.txt")
    assert len(str(error.value)) < 400


@given(st.lists(st.tuples(NAMES, st.integers(0, 7)), max_size=30, unique_by=lambda pair: pair[0]))
def test_emitted_files_mean_the_same_to_both_readers(pairs):
    names, ids = [name for name, _ in pairs], [stream for _, stream in pairs]
    text = streamfile.emit(names, ids)
    rules = nvidia_reader.read(text)
    assert [nvidia_reader.stream_of(name, rules, groups=8) for name in names] == ids
    assert ids_of(text, names) == ids
    assert streamfile.traps(text) == ()


@given(st.lists(st.tuples(st.one_of(NAMES, STRANGE), st.integers(0, 3)), max_size=10, unique_by=lambda pair: pair[0]))
def test_even_names_that_no_tensorflow_allows_survive(pairs):
    names, ids = [name for name, _ in pairs], [stream for _, stream in pairs]
    text = streamfile.emit(names, ids)
    rules = nvidia_reader.read(text)
    assert [nvidia_reader.stream_of(name, rules, groups=8) for name in names] == ids
    assert ids_of(text, names) == ids


def test_all_special_characters_and_many_ids_survive():
    """What the fork's own function, compiled with GCC, gave for 400 files of such names: the ids that were written."""
    special = [chr(code) for code in (*range(1, 128), 0xE9, 0x65E5, 0x1F600)]
    names = [f"{before}{char}{after}" for char in special for before, after in (("", ""), ("a", "b"), ("scope/", "_1"))]
    names += ["n" * 4000, "n" * 4000 + "."]
    ids = [number % 64 for number in range(len(names))]
    text = streamfile.emit(names, ids)
    assert text.replace("\n", "").isprintable()
    lines = text.splitlines()
    assert [int(line.partition(":")[0]) for line in lines] == sorted(set(ids))  # a line per id, none of them empty
    assert all(line.count(":") == 1 and all(line.partition(":")[2].split(",")) for line in lines)
    rules = nvidia_reader.read(text)
    assert [nvidia_reader.stream_of(name, rules, groups=64) for name in names] == ids
    assert ids_of(text, names) == ids
    assert streamfile.emit([], []) == streamfile.emit(["a"], [-1]) == ""


def test_emitted_names_match_nothing_else():
    text = streamfile.emit(["a.b", "a+"], [1, 2])
    assert ids_of(text, ["a.b", "axb", "aa", "a+"]) == [1, -1, -1, 2]


def test_emit_writes_one_line_per_id_and_leaves_out_nodes_without_one():
    assert streamfile.emit(["a", "b", "c", "d"], np.asarray([2, 0, -1, 2])) == "0:b\n2:a,d\n"


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("# c\n1:a\n", 1, "comment"),
        ("1:a\n\n2:b\n", 2, "blank"),
        ("1:a\n2:b\n1:c\n", 3, "forgets"),
        ("1: a\n", 1, "space"),
        ("1:a \n", 1, "space"),
        ("1:a\r\n", 1, "space"),
        ("1:a ,b\n", 1, "space"),
        ("1:(?:a)b\n", 1, "':'"),
        ("1:a{1,2}\n", 1, "','"),
        pytest.param(f"1:b\n2:a,{'n' * 70_000}\n", 2, "stack", id="long"),
    ],
)
def test_what_nvidias_reader_takes_differently_is_named(text, line, why):
    streamfile.parse(text, "f")
    found = streamfile.traps(text)
    assert [(trap.line, why in trap.text) for trap in found] == [(line, True)]


PIECES = st.sampled_from(
    ["a", "b", "/", "_", ".", ".*", "[ab]", "(a|b)", "a+", "b?", r"\.", r"\x61", "x{1,2}", "^", "$"]
)


def pairs(*arguments, **options):
    number, node = streamfile.match(*arguments, **options)
    return list(zip(number.tolist(), node.tolist(), strict=True))


@given(
    st.lists(st.lists(PIECES, min_size=1, max_size=5).map("".join), max_size=6),
    st.lists(st.text("ab/_.x", max_size=5)),
    st.booleans(),
)
def test_agrees_with_pythons_engine(texts, names, full):
    texts = [text for text in texts if streamfile.problem(text) is None and _python_takes(text)]
    expected = []
    for number, text in enumerate(texts):
        compiled = re.compile(text)
        test = compiled.fullmatch if full else compiled.search
        # Python's `$` also matches before a line end; names have none.
        expected += [(number, node) for node, name in enumerate(names) if test(name)]
    assert pairs(texts, names, full=full) == expected


def _python_takes(text):
    try:
        re.compile(text)
    except re.error:
        return False
    return True


@pytest.mark.parametrize("pattern", ["(a", "a)", "*a", "[z-a]", "a{2,1}", r"\q", "(?P<n", "a{1,999999}"])
def test_bad_patterns_are_explained(pattern):
    assert streamfile.problem(pattern)


@pytest.mark.parametrize("pattern", ["(?=a)b", "(?!a)b", "(?<=a)b", "(?<!a)b", r"(a)\1"])
def test_what_needs_backtracking_is_refused_by_name(pattern):
    assert "linear time" in streamfile.problem(pattern)


@pytest.mark.parametrize("pattern", ["a", r"a\.b", "tower_0/.*", r"(?i)A", r"\\1", "[^/]*", "", r"\pL", "é.*"])
def test_good_patterns_have_no_problem(pattern):
    assert streamfile.problem(pattern) is None


def test_a_pattern_that_needs_too_large_an_automaton_is_refused():
    assert "too large" in streamfile.problem("(a|b)" * 40_000)
    assert "too large" in streamfile.problem("a{0,1000}" * 20)


@pytest.mark.no_cover
@pytest.mark.parametrize("pattern", ["(x+x+)+y", "(a*)*b", "(a|a)*b", "(.*)*x" * 3])
def test_patterns_that_explode_elsewhere_take_no_time(pattern):
    assert streamfile.problem(pattern) is None
    begin = time.process_time()
    assert pairs([pattern], ["x" * 5_000 + "a" * 5_000 + "!"]) == []
    assert time.process_time() - begin < 1.0


def test_large_patterns_run_beside_small_ones():
    large = "(a|b)" * 4_000
    assert pairs([large, "a", ".*"], ["ab" * 2_000, "a"]) == [(0, 0), (1, 1), (2, 0), (2, 1)]


def test_search_finds_any_part_and_full_wants_all():
    names = ["tower_a/x", "a", "b"]
    assert pairs(["a"], names, full=False) == [(0, 0), (0, 1)]
    assert pairs(["a"], names) == [(0, 1)]


def test_exact_names_may_be_there_twice():
    assert pairs(["n", "n", r"\x6e"], ["m", "n", "n"]) == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)]


def test_nothing_matches_nothing():
    assert pairs([], ["a"]) == []
    assert pairs(["a", ".*"], []) == []
