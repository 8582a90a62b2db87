"""Keys and tokens kept out of what is written and shown.

What is known to be a secret (values of the environment, of ``.env`` and of settings whose names say
so) and what has the shape of one (``hf_...``, ``Bearer ...``, a password in a URL) is replaced by
``[hidden: NAME]`` or ``[hidden]``.
"""

import atexit
import base64
import html
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from urllib.parse import quote, quote_plus, unquote

SHORTEST = 8
"""Characters from which a value is looked for in other texts."""
HIDDEN = re.compile(r"\[hidden(?:: [\w.-]{1,64})?\]")
"""What stands in place of a secret."""

# --- which names say that a value is a secret ----------------------------------------------------

SURE = re.compile(
    r"passw(or)?d|passphrase|secret|credential|api_?keys?(?![a-z])"
    r"|(access|api|auth|hf|hub)token(?![a-z])"
    r"|(access|private|auth|account|encryption|signing|master|session)_(key|token)(?![a-z])"
    r"|(hub|hf|bot|refresh|bearer|push_to_hub)_token(?![a-z])"
)
"""Of a name in lower case with ``_`` between its words: any value is a secret."""
LIKELY = frozenset(
    {"auth", "authorization", "bearer", "cookie", "jwt", "key", "pass", "pat", "pwd", "token"}
)
"""A word of a name: the value is a secret unless it is a plain word, number, path or address."""
NOT_THE_VALUE = frozenset(
    {"column", "dir", "endpoint", "env", "field", "file", "format", "header", "length"}
    | {"limit", "name", "path", "public", "size", "sock", "timeout", "type", "url"}
)
"""A last word that makes the value something about a secret."""
OF_A_TOKENIZER = frozenset(
    {"additional", "audio", "boi", "bos", "cls", "decoder", "end", "eoi", "eos", "forced"}
    | {"image", "mask", "pad", "per", "prefix", "sep", "special", "start", "stop", "think"}
    | {"tool", "unk", "video", "vision"}
)
"""Words before ``token`` that make it one of a vocabulary."""


def is_secret_name(name: str) -> bool:
    """Return whether the name of a variable or a setting says that its value is a secret.

    Args:
        name: Such as ``HF_TOKEN``, ``apiKey`` or ``trainer.hub_token``.

    >>> [is_secret_name(name) for name in ("HF_TOKEN", "apiKey", "pad_token", "max_new_tokens")]
    [True, True, False, False]
    """
    return _how_secret(name) is not None


@lru_cache(maxsize=4096)
def _how_secret(name: str) -> str | None:
    """Return ``sure``, ``likely`` or None."""
    words = _words(name)
    if not words or words[-1] in NOT_THE_VALUE or "public" in words:
        return None
    is_id = words[-1] == "id"  # AWS_ACCESS_KEY_ID holds half of a secret, pad_token_id none
    if SURE.search("_".join(words)):
        return "likely" if is_id else "sure"
    named = set(words) if name.isupper() else {words[-1]}
    if is_id or not LIKELY & named or ("token" in words and OF_A_TOKENIZER & set(words)):
        return None
    return "likely"


def _words(name: str) -> list[str]:
    """Return the lower-case words of the last part of a dotted name."""
    last = name.rsplit(".", 1)[-1]
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last).lower()
    return [word for word in re.split(r"[^a-z]+", split) if word]


def is_plain(value: str) -> bool:
    """Return whether a value is too usual to be hidden wherever it stands.

    That is one below ``SHORTEST`` characters, a number, a few words, a path, or an address without
    a password.

    >>> is_plain("question"), is_plain("/usr/lib/key.pem"), is_plain("wJalrXUtnFEMI7MDENG")
    (True, True, False)
    """
    text = value.strip()
    if len(text) < SHORTEST or HIDDEN.fullmatch(text):
        return True
    if re.fullmatch(r"[0-9]{1,11}|(?=.{1,30}$)[-+0-9]+([-.,:/eE_ ][-+0-9]+)+", text):
        return True
    if re.fullmatch(r"(?=.{1,40}$)([a-z]+(_[a-z]+)*|[A-Z]+(_[A-Z]+)*)", text) and "_" in text:
        return True  # a name in code
    if len(text) <= 16:
        words = re.split(r"[-_.,:/ ]", text)
        if all(re.fullmatch(r"[A-Z]?[a-z]*|[A-Z]+|[0-9]{1,4}", word) for word in words):
            return True
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        return not any(_passwords_in(text))
    return _is_path(text)


def _is_path(text: str) -> bool:
    if not re.match(r"~?/|\.{1,2}/|[A-Za-z]:[\\/]", text):
        return False
    parts = re.split(r"[\\/]", text)
    mixed = r"(?=.*[a-z])(?=.*[A-Z])(?=.*[0-9]).{12,}"  # of a key in base64 that begins with /
    return len(parts) > 2 and not any(re.fullmatch(mixed, part) for part in parts)


# --- what is known ------------------------------------------------------------------------------


class _Form(NamedTuple):
    """A way in which a secret may be written."""

    text: str
    head: str
    """Enough of its beginning to know it, where it is cut off; all of it where that is short."""
    shown: str


_remembered: dict[str, str] = {}
"""Value -> name."""
_forms: tuple[_Form, ...] = ()
_seen: dict[Any, Any] | None = None
"""The environment that ``_forms`` were made from."""
_lock = threading.Lock()


def remember_secret(value: object, name: str = "") -> None:
    """Hide a value from now on wherever it stands, unless it is plain (see ``is_plain``).

    Args:
        value: A text or number; anything else is left alone.
        name: Shown in its place.
    """
    global _seen
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return
    text = str(value).strip()
    if not is_plain(text):
        with _lock:
            _remembered.setdefault(text, _label(name))
            _seen = None


def remember_settings(settings: object, name: str = "") -> None:
    """Remember every value in nested dicts and lists whose name says that it is a secret.

    Args:
        settings: As read from a run file.
        name: Of the setting that holds them.
    """
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            remember_settings(value, _inner(key, name))
    elif isinstance(settings, list | tuple):
        for value in settings:
            remember_settings(value, name)
    elif is_secret_name(name):
        remember_secret(settings, name)
    elif isinstance(settings, str):
        _remember_passwords(settings)


def _remember_passwords(text: str) -> None:
    for password in _passwords_in(text):
        remember_secret(password, "password")


def remember_arguments(arguments: Iterable[str]) -> None:
    """Remember the secrets among ``name=value`` arguments of a command.

    Args:
        arguments: Such as ``trainer.hub_token=...``.
    """
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and any(map(is_secret_name, name.split("."))):
            remember_secret(value.strip().strip("'\""), name)
        _remember_passwords(argument)


def _label(name: str) -> str:
    known = re.sub(r"[^\w.-]", "", name.rsplit(".", 1)[-1])[:64]
    return f"[hidden: {known}]" if known else "[hidden]"


def _known() -> tuple[_Form, ...]:
    """Return what to look for, made anew after the environment changed."""
    global _forms, _seen
    present = getattr(os.environ, "_data", os.environ)  # to compare the plain dict takes 1 us
    if _seen != present:
        with _lock:
            seen = dict(present)
            for name, value in os.environ.items():  # one that is taken out stays a secret
                if is_secret_name(name) and not is_plain(value):
                    _remembered.setdefault(value.strip(), _label(name))
                for password in _passwords_in(value):
                    _remembered.setdefault(password, _label(name))
            found = {
                text: shown
                for value, shown in _remembered.items()
                for text in _written_forms(value)
            }
            _forms = tuple(
                _Form(text, _head(text), found[text]) for text in sorted(found, key=len)[::-1]
            )
            _seen = seen
    return _forms


def _passwords_in(text: str) -> Iterator[str]:
    """Yield the passwords of addresses in a text, as they stand and decoded."""
    for match in IN_AN_ADDRESS.finditer(text) if "@" in text else ():
        for password in {match["value"], unquote(match["value"])}:
            if not is_plain(password):
                yield password


def _head(text: str) -> str:
    is_token = len(text) >= 24 and re.fullmatch(r"[\w+/=.~-]+", text) and text[:5] != "-----"
    return text[:16] if is_token else text


def _written_forms(value: str) -> set[str]:
    """Return a secret as it stands in a text, JSON, a page, an address, and inside base64."""
    plain = {value}
    lines = [line.strip() for line in value.splitlines()]
    plain |= {line for line in lines if len(line) >= 16 and not line.startswith("-----")}
    found = set(plain)
    for text in plain:
        escaped = {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
        found |= escaped | {json.dumps(form)[1:-1] for form in escaped}
        found |= {repr(text)[1:-1], html.escape(text), html.escape(json.dumps(text)[1:-1])}
        for encoded in (quote(text, safe=""), quote(text), quote_plus(text)):
            found |= {encoded, re.sub("%..", lambda match: match[0].lower(), encoded)}
    return found | _in_base64(value)


def _in_base64(value: str) -> set[str]:
    """Return what base64 of any text that holds the value has in common, for its three offsets."""
    content = value.encode("utf-8", "surrogatepass")
    if len(content) < 12:
        return set()
    found = set()
    for offset in range(3):
        text = base64.b64encode(b"\0" * offset + content).decode()
        first = -(-offset * 8 // 6)
        whole = (offset + len(content)) * 8 // 6
        text = text[first:whole]
        found |= {text, text.replace("+", "-").replace("/", "_")}
    return found


# --- what has the shape of a secret --------------------------------------------------------------

IN_AN_ADDRESS = re.compile(
    r"(?<=:/)/?[^\s/:@\"'<>\\]*:(?P<value>[^\s/@\"'<>\\]+)(?=@)"  # one slash: made a path
)
_VALUE = r"(?P<value>[^\s\"'\\<>&,;(){}\[\]]{8,})"
_BEGINS = r"(?:(?<![A-Za-z0-9-])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))"  # not so "task-"
_ASSIGNED = r"[\"'\\]{0,4}\s{0,3}[:=]\s{0,3}[\"'\\]{0,4}"


@dataclass(frozen=True)
class _Shape:
    """What a kind of secret looks like; the group ``value`` is what is hidden of it, else all."""

    marks: str
    """Characters of which one is in every text that holds it; looked for first, as it is fast."""
    triggers: tuple[str, ...]
    """Lower-case texts of which one is in every such text."""
    pattern: re.Pattern[str]


def _token(mark: str, trigger: str, pattern: str) -> _Shape:
    return _Shape(mark, (trigger,), re.compile(pattern, re.ASCII))


SHAPES = (
    _Shape(
        "-",
        ("private key-----",),
        re.compile(
            r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY-----"
            r"(?:(?:[A-Za-z0-9+/=\s\\:,]++|-(?!-))*+-----END [A-Z0-9 ]{0,30}PRIVATE KEY-----"
            r"|(?:\\[nr]|[A-Za-z0-9+/=\r\n])*)"
        ),
    ),
    _token("_", "hf_", r"hf_[A-Za-z0-9]{20,}"),
    _token("_", "api_org_", r"api_org_[A-Za-z0-9]{20,}"),
    _token("-", "sk-", rf"{_BEGINS}sk-(?=[\w-]{{0,64}}[0-9])[\w-]{{16,}}"),
    _token("_", "k_live_", r"[rs]k_live_[A-Za-z0-9]{16,}"),
    _token("_", "gsk_", r"gsk_[A-Za-z0-9]{32,}"),
    _token("-", "nvapi-", r"nvapi-[\w-]{32,}"),
    *(_token("_", f"gh{kind}_", rf"gh{kind}_[A-Za-z0-9]{{30,}}") for kind in "opurs"),
    _token("_", "github_pat_", r"github_pat_\w{22,}"),
    _token("-", "glpat-", r"glpat-[\w.-]{20,}"),
    _token("-", "xox", r"xox[abeoprs]-[A-Za-z0-9-]{10,}"),
    _token("A", "akia", r"AKIA[A-Z0-9]{16}(?![A-Za-z0-9])"),
    _token("A", "asia", r"ASIA[A-Z0-9]{16}(?![A-Za-z0-9])"),
    _token("A", "aiza", r"AIza[\w-]{30,}"),
    _token("_", "npm_", r"npm_[A-Za-z0-9]{36}"),
    _token("J", "eyj", r"eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,}"),
    _Shape(
        "/",
        ("hooks.slack.com/", "/api/webhooks/"),
        re.compile(r"(?:hooks\.slack\.com/services|/api/webhooks)/(?P<value>[\w/-]{20,})"),
    ),
    _Shape("@", (":/",), IN_AN_ADDRESS),
    _Shape("@", (":/",), re.compile(r"(?<=:/)/?(?P<value>[^\s/:@\"'<>\\]{16,})(?=@)")),
    _Shape(
        "?&;",
        ("=",),
        re.compile(
            r"(?i)[?&;](?:[\w.-]{0,40}(?:token|api[_-]?key|secret|passw(?:or)?d|signature"
            rf"|credential)|access[_-]?key|auth|key|pwd|sig)={_VALUE}"
        ),
    ),
    _Shape(
        ":=",
        ("authorization", "api-key", "-token"),
        re.compile(
            r"(?i)(?:authorization|x-api-key|api-key|x-auth-token|private-token)"
            rf"{_ASSIGNED}(?:(?:basic|bearer|digest|token)\s{{1,3}})?{_VALUE}"
        ),
    ),
    _Shape("0123456789", ("bearer",), re.compile(rf"(?i)\bbearer\s{{1,3}}(?=\S*[0-9]){_VALUE}")),
    _Shape(
        ":=",
        ("_key", "_token", "_secret", "password"),
        re.compile(
            r"\b(?:[A-Z][A-Z0-9_]{0,60}?(?:_KEY|_TOKEN|_SECRET|PASSWORD)|api_key|hub_token"
            rf"|(?:access|auth|secret)_(?:key|token)){_ASSIGNED}(?=\S*[0-9]){_VALUE}"
        ),
    ),
)
"""Kinds of secrets that are hidden wherever they stand."""
MARKS = "".join(dict.fromkeys(mark for shape in SHAPES for mark in shape.marks))


def _hide_shape(match: re.Match[str]) -> str:
    """Return the match without its value, which may stay where it is plain."""
    if "value" not in match.re.groupindex:
        return "[hidden]"
    if match.re is not IN_AN_ADDRESS and is_plain(match["value"]):
        return match[0]
    start, end = (place - match.start() for place in match.span("value"))
    return f"{match[0][:start]}[hidden]{match[0][end:]}"


# --- hiding it -----------------------------------------------------------------------------------


def redact(text: str) -> str:
    """Return a text with every secret in it replaced by ``[hidden: NAME]`` or ``[hidden]``.

    Known values are found also as JSON, HTML, a percent-encoded address or base64 writes them, and
    a long one where its end was cut off. JSON stays valid JSON.

    Args:
        text: Any.

    >>> redact("git clone https://me:hunter2@example.org/x")
    'git clone https://me:[hidden]@example.org/x'
    """
    if len(text) < SHORTEST:
        return text
    cut_off = []
    for form in _known():
        if form.head in text:
            text = text.replace(form.text, form.shown)
            if form.head in text:
                cut_off.append(form)
    marks = {mark for mark in MARKS if mark in text}
    if marks:
        text = _without_shapes(text, marks)
    for form in cut_off:
        text = _without_beginnings(text, form)
    return text


def redacting(say: Callable[[str], Any]) -> Callable[[str], None]:
    """Return ``say`` for lines that may hold secrets.

    Args:
        say: Called with each line, without them.
    """

    def said(line: str) -> None:
        say(redact(line))

    return said


def _without_shapes(text: str, marks: set[str]) -> str:
    lower = text.lower()
    for shape, triggers in _shapes_of(frozenset(marks)):
        for trigger in triggers:
            if trigger in lower:
                text = shape.sub(_hide_shape, text)
                break
    return text


@cache
def _shapes_of(marks: frozenset[str]) -> list[tuple[re.Pattern[str], tuple[str, ...]]]:
    """Return what a text with these marks may hold."""
    return [(shape.pattern, shape.triggers) for shape in SHAPES if marks & set(shape.marks)]


def _without_beginnings(text: str, form: _Form) -> str:
    """Return the text without the beginning of a secret whose end was cut off."""
    parts, place = [], 0
    while (start := text.find(form.head, place)) != -1:
        parts += [text[place:start], form.shown]
        both = zip(text[start:], form.text, strict=False)
        place = start + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    return "".join([*parts, text[place:]])


def redact_tree(value: Any, name: str = "") -> Any:
    """Return nested dicts and lists with every secret in their texts and keys hidden.

    A value whose name says that it is a secret is hidden whatever it is; under a name that only
    may, such as ``token``, unless it is plain (see ``is_plain``).

    Args:
        value: Of dicts, lists, texts and numbers; anything else is returned as it is.
        name: Of the setting that it is.

    >>> redact_tree({"hub_token": "abc", "pad_token": "<pad>"})
    {'hub_token': '[hidden: hub_token]', 'pad_token': '<pad>'}
    """
    if isinstance(value, Mapping):
        return {
            redact(key) if isinstance(key, str) else key: redact_tree(item, _inner(key, name))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [redact_tree(item, name) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, str):
        return _label(name) if value and _hides(name, value) else redact(value)
    if isinstance(value, int) and not isinstance(value, bool) and _how_secret(name) == "sure":
        return _label(name)
    if isinstance(value, Path):
        text = redact(str(value))
        return value if text == str(value) else text
    return value


def _inner(key: object, name: str) -> str:
    """Return the name that counts for a value: its own, or that of a table of secrets."""
    own = str(key)
    return name if not is_secret_name(own) and _how_secret(name) == "sure" else own


def _hides(name: str, value: str) -> bool:
    how = _how_secret(name) if name else None
    return not HIDDEN.fullmatch(value) and (
        how == "sure" or (how == "likely" and not is_plain(value))
    )


def without_hidden(settings: Any) -> tuple[Any, list[str]]:
    """Return settings read back from a run's folder without those that were hidden in it.

    A text that is hidden in part, such as an address without its password, stays: it names
    something that cannot be had without the secret, and a default would be something else.

    Args:
        settings: Nested dicts and lists, as ``redact_tree`` returned them.

    Returns:
        (settings, names of those left out, such as ``trainer.hub_token``).

    >>> without_hidden({"trainer": {"hub_token": "[hidden: hub_token]", "beta": 0.1}})
    ({'trainer': {'beta': 0.1}}, ['trainer.hub_token'])
    """
    names: list[str] = []

    def cleaned(value: Any, place: str) -> Any:
        if isinstance(value, Mapping):
            return dict(inside(value.items(), place))
        if isinstance(value, list):
            return [item for _, item in inside(enumerate(value), place)]
        return value

    def inside(items: Iterable[tuple[Any, Any]], place: str) -> Iterator[tuple[Any, Any]]:
        for key, item in items:
            at = f"{place}.{key}" if place else str(key)
            if isinstance(item, str) and HIDDEN.fullmatch(item):
                names.append(at)
            else:
                yield key, cleaned(item, at)

    return cleaned(settings, ""), names


# --- the terminal --------------------------------------------------------------------------------

OPEN_SHAPE = re.compile(
    r"(?i)(?:(?:hf_|sk-|gh[opurs]_|github_pat_|glpat-|xox|akia|asia|aiza|eyj|://)\S*"
    r"|(?:authorization|bearer|_key|_token|_secret|password)\S*[\s:=\"']*\S*)\Z"
)
"""The beginning of what may become a secret with the next write."""
OPEN_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY-----(?!.*-----END )", re.DOTALL)
LONGEST_HELD = 1 << 14
"""Characters that wait for the end of a secret."""


class RedactingStream:
    """A text stream without secrets; a line is passed on when it is whole or flushed.

    What is flushed and may be the beginning of a secret waits for what follows.

    Args:
        stream: Where it is written to; everything but writing is left to it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting = ""
        self._writing = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_stream"), name)  # a copy that is being made has none

    def write(self, text: str) -> int:
        """Take in a text and pass on the lines that are whole; return its length."""
        with self._writing:
            self._waiting += text
            self._pass_on(max(self._waiting.rfind("\n"), self._waiting.rfind("\r")) + 1)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Take in several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Pass on what cannot become a secret any more, and flush the stream."""
        with self._writing:
            self._pass_on(len(self._waiting) - _open_end(self._waiting))
            self._stream.flush()

    def finish(self) -> None:
        """Pass on everything."""
        with self._writing:
            waiting, self._waiting = self._waiting, ""
            if waiting and not self._stream.closed:
                self._stream.write(redact(waiting))
                self._stream.flush()

    def _pass_on(self, end: int) -> None:
        if "-----BEGIN " in self._waiting and len(self._waiting) < LONGEST_HELD:
            opened = OPEN_KEY.search(self._waiting, 0, max(end, 0))
            end = min(end, opened.start()) if opened else end
        if end > 0:
            whole, self._waiting = self._waiting[:end], self._waiting[end:]
            self._stream.write(redact(whole))


def _open_end(text: str) -> int:
    """Return how many last characters may be the beginning of a secret."""
    match = OPEN_SHAPE.search(text, max(0, len(text) - 300))
    longest = len(text) - match.start() if match else 0
    for form in _known():
        for length in range(min(len(form.text) - 1, len(text)), longest, -1):
            if text.endswith(form.text[:length]):
                longest = length
                break
    return longest if longest < LONGEST_HELD else 0


def hide_on_terminal() -> Callable[[], None]:
    """Put a ``RedactingStream`` before stdout and stderr, tracebacks and warnings included.

    What a library in C or a child process writes by itself does not pass through it.

    Returns:
        What ends it.
    """
    wrapped: list[tuple[TextIO, RedactingStream]] = []
    for before in (sys.stdout, sys.stderr):
        if before is not None and not isinstance(before, RedactingStream):
            stream = RedactingStream(before)
            wrapped.append((before, stream))
            _put_in_place_of(before, stream)
            atexit.register(stream.finish)

    def end() -> None:
        for before, stream in wrapped:
            stream.finish()
            atexit.unregister(stream.finish)
            _put_in_place_of(stream, before)

    return end


def _put_in_place_of(old: Any, new: Any) -> None:
    """Put a stream in the place of another, under each name that ``sys`` has for it."""
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        if getattr(sys, name) is old:
            setattr(sys, name, new)
