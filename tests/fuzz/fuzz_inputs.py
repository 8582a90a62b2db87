"""Bad inputs: good ones that are changed in places, odd values, and what to think of an error."""

import datetime
import math

from hypothesis import strategies as st

NASTY = [
    b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\t", b"\r", b"\x1b[31m", b"\xc2\x85",
    b"&a [*a]", b"*a", b"<<: *a", b"!!python/object/apply:os.getcwd []", b"!!int x", b"!!set",
    b"1e400", b".nan", b"-.inf", b"0x" + b"f" * 6000, b"9" * 5000, b"2026-13-01", b"null", b"true",
    b"[" * 300, b"]", b"{", b"}", b"? ", b"- ", b": ", b"'", b'"', b"|", b"%", b"#", b"---",
    b'{"a":' * 200, b"NaN", b"\\ud800", b"\\u0000", b"\n\n", b"x" * 3000, b"-1", b"0", b"../..",
    "é😀".encode(),
]  # fmt: skip
"""Pieces that broke some parser once."""

ODD_TEXTS = [
    "", " ", "\x00", "\ud800", "\n", "x\ny", "\x1b[2J", "é", "x" * 5000, "../..", "~nobody-here/x",
    "/", ".", "NaN", "1e400", "null", "{", "[", "&a", "*a", "%s", "{0}", "accuracy:0.5",
    "accuracy:x", "a:b:c", "x.jsonl", "\ufeff", "/dev/null/x", "a" * 300 + "/b", "user", "prompt",
]  # fmt: skip

DROPPED = "dropped"
"""The key goes, in the place of its value."""


def odd_texts():
    return st.one_of(
        st.sampled_from(ODD_TEXTS), st.text(st.characters(exclude_categories=()), max_size=12)
    )


def odd_numbers():
    whole = [0, 1, -1, 8, 1 << 31, 1 << 63, 1 << 64, 10**30, 1 << 6000]
    real = [-0.0, 0.5, 1e-300, 1e308, math.inf, math.nan]
    return st.one_of(st.sampled_from([*whole, *real]), st.integers(-9, 99), st.floats(-2.0, 2.0))


def odd_values(*, for_json=False):
    """Values as YAML gives them, or as JSON does."""
    others = [datetime.date(2026, 1, 2), b"\xff\x00", {1, "a"}]
    leaves = [st.none(), st.booleans(), odd_numbers(), odd_texts()]
    if not for_json:
        leaves.append(st.sampled_from(others))
    keys = odd_texts() if for_json else st.one_of(odd_texts(), st.integers(-1, 3), st.none())
    return st.recursive(
        st.one_of(leaves),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)
        ),
        max_leaves=8,
    )


def changes(most=3):
    """Where bytes are changed, and how: (kind, share of the text before it, length, piece)."""
    kinds = st.sampled_from(["delete", "cut", "repeat", "replace", "insert"])
    pieces = st.one_of(st.sampled_from(NASTY), st.binary(max_size=6))
    change = st.tuples(kinds, st.floats(0, 1), st.integers(0, 40), pieces)
    return st.lists(change, min_size=1, max_size=most)


def changed(data, several):
    for kind, place, length, piece in several:
        at = int(place * len(data))
        end = min(len(data), at + length)
        middle = {"delete": b"", "cut": b"", "repeat": data[at:end] * 3, "replace": piece}
        tail = b"" if kind == "cut" else data[at:] if kind == "insert" else data[end:]
        data = data[:at] + middle.get(kind, piece) + tail
    return data


def mutated(seeds, most=4):
    """Bytes of one of the seeds, changed in a few places."""
    return st.builds(changed, st.sampled_from(list(seeds)), changes(most))


def replaced(content, where, value):
    """A copy of a JSON value with another value, or none, at the place that the numbers lead to."""
    if not where or not isinstance(content, dict | list) or not content:
        return value
    first, *others = where
    if isinstance(content, list):
        at = first % len(content)
        return [*content[:at], replaced(content[at], others, value), *content[at + 1 :]]
    key = sorted(content)[first % len(content)]
    if value is DROPPED and not others:
        return {name: item for name, item in content.items() if name != key}
    return {**content, key: replaced(content[key], others, value)}


def spoilt_files(names):
    """What is done to files of a folder, each a tuple: (kind, name, how, where, value)."""
    name = st.sampled_from(sorted(names))
    where = st.lists(st.integers(0, 40), min_size=1, max_size=4)
    value = st.one_of(odd_values(for_json=True), st.just(DROPPED))
    rows = st.tuples(st.sampled_from(["row", "every row"]), name, st.integers(0, 80), where, value)
    data = st.tuples(st.just("bytes"), name, changes(), st.none(), st.none())
    gone = st.tuples(st.just("gone"), name, st.none(), st.none(), st.none())
    return st.lists(st.one_of(rows, rows, data, gone), min_size=1, max_size=3)


def fault_of_text(text):
    """What is wrong with an error's text; "" where it is one sentence a person can act on."""
    if len(text.splitlines()) != 1 or not text.isprintable():
        return "is no single line"
    if len(text) > 900:
        return f"has {len(text)} characters"
    if " object at 0x" in text or "Traceback" in text:
        return "shows the inside of a program"
    marks = (":", ";", ", must ", "did you mean")
    return "" if any(mark in text for mark in marks) else "has no remedy"
