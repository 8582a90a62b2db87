"""Messages show what is wrong on one short line, whatever the value is."""

import math
from pathlib import PureWindowsPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rloo_kit.text.wording import (
    did_you_mean,
    first_line,
    format_duration,
    format_errors,
    format_name,
    format_value,
    printable,
    resume_command,
)

ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
)
ENDLESS = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize("value", ["x", 3, -0.5, math.inf, None, True, [1, "a"], {"b": [2]}, (1,)])
def test_short_value_is_shown_as_python_writes_it(value):
    assert format_value(value) == repr(value)


@settings(max_examples=20, deadline=None)
@given(ANY)
def test_any_value_fits_one_short_line(value):
    text = format_value(value)
    assert text.isprintable()
    assert len(text) <= 104


@pytest.mark.parametrize(
    "value", ["x" * 10**6, 1 << 10**6, [[[[[[]]]]]] * 10**5, "\ud800\n\x1b", ENDLESS], ids=range(5)
)
def test_huge_or_unprintable_value_fits_one_short_line(value):
    assert format_value(value).isprintable()
    assert len(format_value(value)) <= 104


def test_name_is_shown_without_quotation_marks():
    assert [format_name(name) for name in ("beta", "a\nb", 5)] == ["beta", "a\\nb", "5"]
    assert printable("é 😀") == "é 😀"


@pytest.mark.parametrize(
    ("exc", "text"),
    [(ValueError("one\ntwo"), "one"), (ValueError("\n\n  late "), "late"),
     (ValueError(), "ValueError"), (ValueError("x" * 1000), "x" * 300),
     (ValueError("\x1b[2J"), "\\x1b[2J")],
    ids=range(5),
)  # fmt: skip
def test_error_is_shown_by_its_first_line(exc, text):
    assert first_line(exc) == text


def test_first_of_many_errors_are_shown_and_the_rest_counted():
    assert format_errors(["a", "b"]) == "a; b"
    assert format_errors(["fault"] * 999).endswith(
        "; and 987 more errors, shown once these are fixed"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"), (9.96, "10 s"), (59.6, "1 min"), (61, "1 min 1 s"), (3599.6, "1 h"),
        (3660, "1 h 1 min"), (100 * 3600, "100 h"),
    ],
)  # fmt: skip
def test_duration_has_at_most_two_units(seconds, text):
    assert format_duration(seconds) == text


def test_a_misspelling_is_recognised_and_nothing_unlike():
    assert did_you_mean("betta", ["beta"]) == "; did you mean 'beta'?"
    assert (did_you_mean("zzz", ["beta"]), did_you_mean(3, ["beta"])) == ("", "")


def test_a_command_can_be_pasted_into_any_shell():
    """cmd.exe takes the single quotes that a backslash would bring for a part of the name."""
    command = resume_command(PureWindowsPath(r"runs\mine"))
    assert command == resume_command("runs/mine") == "rloo-kit train runs/mine --resume"
