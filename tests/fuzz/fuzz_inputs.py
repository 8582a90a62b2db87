"""Bad inputs: good ones that are changed in places, odd values, and what to think of an error."""

import datetime
import functools
import json
import math
import re

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
    """Functions that change bytes in a few places: more, fewer, or other ones."""
    pieces = st.one_of(st.just(b""), st.sampled_from(NASTY), st.binary(max_size=6))
    lengths = st.one_of(st.just(0), *[st.integers(0, 40)] * 4, st.just(1 << 30))
    places = st.lists(st.tuples(st.floats(0, 1), lengths, pieces), min_size=1, max_size=most)
    return places.map(lambda several: functools.partial(changed, several=several))


def changed(data, several):
    for place, length, piece in several:
        at = int(place * len(data))
        data = data[:at] + piece + data[at + length :]
    return data


def mutated(seeds, most=4):
    """Bytes of one of the seeds, changed in a few places."""
    return st.builds(lambda seed, change: change(seed), st.sampled_from(seeds), changes(most))


VALUE = rb'("[^"]*"|[^][{}",]+|\{[^{}]*\}|\[[^][]*\])'


def with_value(content, place, everywhere, value):
    """JSON with another value of one key, in the first object that has it or in all."""
    keys = re.findall(rb'"([^"]+)": ' + VALUE, content)
    if not keys:
        return content
    key = keys[place % len(keys)][0]
    new = json.dumps({key.decode(): value})[1:-1].encode()
    old = b'"' + re.escape(key) + b'": ' + VALUE
    return re.sub(old, lambda _: new, content, count=0 if everywhere else 1)


def spoilt(files):
    """The files, of which some are gone or changed."""
    how = st.tuples(st.integers(0, 400), st.booleans(), odd_values(for_json=True))
    values = how.map(lambda how: lambda content: with_value(content, *how))
    change = st.one_of(values, values, changes(), st.just(lambda content: None))
    several = st.dictionaries(st.sampled_from(sorted(files)), change, min_size=1, max_size=3)
    return several.map(lambda changes: apply_changes(files, changes))


def apply_changes(files, changes):
    new = files | {name: change(files[name]) for name, change in changes.items()}
    return {name: content for name, content in new.items() if content is not None}


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
