"""Inputs that no one should give: good ones that are changed in places, and odd values."""

import datetime
import math
from dataclasses import dataclass

from hypothesis import strategies as st

NASTY = [
    *(
        b"\x00",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
        b"\t",
        b"\r",
        b"\x1b[31m",
        b"\xc2\x85",
    ),
    *(b"&a [*a]", b"*a", b"&a", b"<<: *a", b"!!python/object/apply:os.getcwd []", b"!!binary x"),
    *(b"!!timestamp x", b"!!int x", b"!!int ''", b"!!bool x", b"!!float x", b"!!set", b"!!omap"),
    *(
        b"!!pairs [1]",
        b"!x",
        b"1e400",
        b".nan",
        b".inf",
        b"-.inf",
        b"0x" + b"f" * 6000,
        b"9" * 5000,
    ),
    *(b"2026-13-01", b"2026-02-28", b"1:2:3", b"null", b"true", b"~", b"=", b"[" * 300, b"]", b"{"),
    *(
        b"}",
        b"? ",
        b"- ",
        b": ",
        b",",
        b"'",
        b'"',
        b"|",
        b">",
        b"%",
        b"@",
        b"`",
        b"#",
        b"---",
        b"...",
    ),
    *(
        b'{"a":' * 200,
        b"NaN",
        b"Infinity",
        b"\\ud800",
        b"\\u0000",
        b"\n",
        b"\n\n",
        b"x" * 3000,
        b"=",
    ),
    *(b"-1", b"0", b"1e308", b"0.1", b"../..", b"/etc/passwd", b"~nobody-here/x", "é😀".encode()),
]
"""Pieces that broke some parser once."""

ODD_TEXTS = [
    *(
        "",
        " ",
        "\x00",
        "a\x00b",
        "\ud800",
        "\n",
        "x\ny",
        "\x1b[2J",
        "é",
        "😀",
        "x" * 5000,
        "../..",
        "~",
    ),
    *("~nobody-here/x", "/", ".", "..", "NaN", "1e400", "null", "true", "{", "[", "&a", "*a", "%s"),
    *(
        "{0}",
        "accuracy",
        "accuracy:0.5",
        "accuracy:x",
        "a:b:c",
        "C:\\x",
        "x.jsonl",
        "\u2028",
        "\ufeff",
    ),
    *("/dev/null/x", "a" * 300 + "/b", "system", "user", "prompt", "answer", "no_such_reward"),
]


def odd_texts():
    return st.one_of(
        st.sampled_from(ODD_TEXTS), st.text(st.characters(exclude_categories=()), max_size=12)
    )


def odd_numbers():
    whole = [0, 1, -1, 2, 3, 7, 8, 64, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 10**30, 1 << 6000]
    real = [0.0, -0.0, 0.5, 1e-300, 1e300, 1e308, -1e308, math.inf, -math.inf, math.nan, 1e-5]
    return st.one_of(st.sampled_from([*whole, *real]), st.integers(-9, 99), st.floats(-2.0, 2.0))


def odd_values(*, for_json=False):
    """Values as YAML gives them, or as JSON does."""
    others = [datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3), b"\xff\x00", {1, "a"}]
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


def plain_values():
    """Values that a setting of some type may well have."""
    plain = [1, 2, 4, 8, 16, 0, -1, 0.1, 0.5, 1.0, 1e-5, True, False, None, "no", "auto", "steps"]
    plain += ["cosine", "adamw_torch", "none", [], ["x"], [1.0], {}, {"a": 1}, "{}", "[1]"]
    return st.sampled_from(plain)


# --- mutated bytes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    kind: str
    place: float
    """Share of the text before it."""
    length: int
    piece: bytes

    def apply(self, data):
        at = int(self.place * len(data))
        end = min(len(data), at + self.length)
        if self.kind == "delete":
            return data[:at] + data[end:]
        if self.kind == "cut":
            return data[:at]
        if self.kind == "repeat":
            return data[:end] + data[at:end] * 3 + data[end:]
        if self.kind == "replace":
            return data[:at] + self.piece + data[end:]
        if self.kind == "flip":
            flipped = bytes(byte ^ (1 << self.length % 8) for byte in data[at : at + 1])
            return data[:at] + flipped + data[at + 1 :]
        return data[:at] + self.piece + data[at:]


def changes(most=4):
    kinds = ["delete", "cut", "repeat", "replace", "replace", "insert", "insert", "flip"]
    pieces = st.one_of(st.sampled_from(NASTY), st.binary(max_size=6))
    change = st.builds(
        Change,
        st.sampled_from(kinds),
        st.floats(0, 1, allow_nan=False),
        st.integers(0, 40),
        pieces,
    )
    return st.lists(change, min_size=1, max_size=most)


def changed(data, several):
    for change in several:
        data = change.apply(data)
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


DROPPED = "dropped"
"""The key goes, in the place of its value."""


def bomb(levels=9, width=9):
    """A billion laughs: few lines of YAML that stand for as many values."""
    lines = [
        f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]"
        for level in range(1, levels)
    ]
    return "\n".join(["a0: &a0 [lol]", *lines]).encode()
