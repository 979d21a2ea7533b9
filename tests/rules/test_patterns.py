import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.rules import patterns

PIECES = st.sampled_from(
    ["a", "b", "/", "_", ".", ".*", "[ab]", "(a|b)", "a+", "b?", r"\.", r"\x61", "x{1,2}", "^", "$"]
)


def pairs(*arguments, **options):
    number, node = patterns.match(*arguments, **options)
    return list(zip(number.tolist(), node.tolist(), strict=True))


@given(
    st.lists(st.lists(PIECES, min_size=1, max_size=5).map("".join), max_size=6),
    st.lists(st.text("ab/_.x", max_size=5)),
    st.booleans(),
)
def test_agrees_with_pythons_engine(texts, names, full):
    texts = [text for text in texts if patterns.problem(text) is None and _python_takes(text)]
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
    assert patterns.problem(pattern)


@pytest.mark.parametrize("pattern", ["(?=a)b", "(?!a)b", "(?<=a)b", "(?<!a)b", r"(a)\1"])
def test_what_needs_backtracking_is_refused_by_name(pattern):
    assert "linear time" in patterns.problem(pattern)


@pytest.mark.parametrize("pattern", ["a", r"a\.b", "tower_0/.*", r"(?i)A", r"\\1", "[^/]*", "", r"\pL", "é.*"])
def test_good_patterns_have_no_problem(pattern):
    assert patterns.problem(pattern) is None


def test_a_pattern_that_needs_too_large_an_automaton_is_refused():
    assert "too large" in patterns.problem("(a|b)" * 40_000)
    assert "too large" in patterns.problem("a{0,1000}" * 20)


@pytest.mark.no_cover
@pytest.mark.parametrize("pattern", ["(x+x+)+y", "(a*)*b", "(a|a)*b", "(.*)*x" * 3])
def test_patterns_that_explode_elsewhere_take_no_time(pattern):
    assert patterns.problem(pattern) is None
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
