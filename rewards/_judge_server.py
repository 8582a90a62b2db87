"""The server that a judge asks: requests side by side, retried within limits; answers kept."""

import asyncio
import ipaddress
import json
import math
import random
import re
import sqlite3
import ssl
import time
import warnings
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rloo_kit.errors import RewardContractError
from rloo_kit.text.redaction import redact

from ._text import content_text, text_after_thought

if TYPE_CHECKING:
    import httpx

    from .judge import Judge

# Mode -> key of the judge's JSON, and what a template must hold
MODES = {"rubric": ("score", ("completion",)), "pairwise": ("winner", ("first", "second"))}
_RETRIED = frozenset({408, 409, 429})
# Statuses that blame one request (its length, say) and not the server
_ROW_FAULTS = frozenset({400, 413, 422})
# Seconds; a server that asks for a longer pause counts as failed
_LONGEST_WAIT = 60.0
_LONGEST_BACKOFF = 30.0
_CONNECT_SECONDS = 5.0
_MAX_ANSWER_BYTES = 4 * 2**20
# The verdict is looked for in so many last characters of what the judge wrote
_MAX_VERDICT_CHARACTERS = 20_000
_VERDICT_LINE = r"(?i)[ \t>*_#-]*{key}[*_]*\s*[:=][\s*_]*([^\s*_]+)[\s*_]*"
_JITTER = random.Random()  # of its own: the run's seeded random state is left alone


@dataclass
class State:
    """What an instance remembers between calls; never pickled."""

    scores: OrderedDict[str, float] = field(default_factory=OrderedDict)
    next_request: float = 0.0
    """Time (monotonic) before which the rate limit allows no request."""
    is_down: bool = False
    """Whether the server failed so often in a row that the next call tries one request first."""
    ssl_context: ssl.SSLContext | None = None


# --- verdicts -----------------------------------------------------------------------------------


def read_verdict(text: str, key: str = "score") -> float | None:
    """Return the number a judge gave, or None.

    It is the value of ``key`` in the last JSON object of the text; where there is no object, the
    last line that is ``key: number`` and nothing else. A thought before it is left out.

    >>> read_verdict('{"score": 2} no, {"score": "3.5"}'), read_verdict("**Score:** 7")
    (3.5, 7)
    >>> read_verdict("Score: 7 of 10"), read_verdict('{"score": null} Score: 7')
    (None, None)
    """
    tail = text_after_thought(text)[-_MAX_VERDICT_CHARACTERS:]
    found = _last_object(tail)
    if found is not None:
        value = found.get(key)
        if isinstance(value, str):
            return _number(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value if is_number else None
    for line in reversed(tail.splitlines()):
        if match := re.fullmatch(_VERDICT_LINE.format(key=re.escape(key)), line):
            return _number(match[1])
    return None


def _last_object(text: str) -> dict[str, Any] | None:
    decoder, found, start = json.JSONDecoder(), None, text.find("{")
    while start != -1:
        try:
            found, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
    return found


def _number(text: str) -> float | None:
    match = re.fullmatch(r"\s*(-?[0-9]{1,15})(\.[0-9]{0,15})?\.?\s*", text)
    if match is None:
        return None
    return float(match[1] + match[2]) if match[2] else int(match[1])


# --- one call -------------------------------------------------------------------------------------


class _Failure(Exception):  # noqa: N818 - becomes a KitError or a warning
    """A question without an answer: what happened, and what to do about it."""

    def __init__(self, what: str, remedy: str, *, is_down: bool = True) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.is_down = is_down
        """Whether the server is to blame, rather than one question or answer."""


class _Temporary(_Failure):
    """A failure that another attempt may cure."""

    wait: float | None = None
    """Seconds the server asks to wait."""


class _Unusable(_Failure):
    """An answer that holds no score."""


class Batch:
    """The questions of one call: its client, its counts, and the first failure."""

    def __init__(self, judge: "Judge", state: State, key: str | None, cache: "Cache") -> None:
        self.failure: _Failure | None = None
        self.asked = 0
        """Questions that were not in the cache."""
        self.tokens = 0
        self.latencies: list[float] = []
        self._judge = judge
        self._state = state
        self._secret = key
        self._cache = cache
        self._in_a_row = 0
        self._answers: dict[str, float] = {}
        self._client: httpx.AsyncClient
        self._gate = asyncio.Lock()

    async def answers(self, questions: list[str]) -> dict[str, float]:
        """Return the judge's number for every question that has one.

        Raises:
            RewardContractError: With ``on_failure="stop"``, one of them has none.
        """
        found = {text: self._cache.get(self._judge.cache_key(text)) for text in questions}
        self._answers = {
            text: number for text, number in found.items() if self._judge.accepts(number)
        }
        waiting = [text for text in questions if text not in self._answers]
        self.asked = len(waiting)
        if waiting:
            await self._ask_all(waiting)
        return self._answers

    def sentence(self, failure: _Failure) -> str:
        """Return a failure as one sentence."""
        judge = self._judge
        skip = ", or set on_failure: skip" if judge.on_failure == "stop" else ""
        return f"reward {judge.__name__!r}: {judge.url} {failure.what}; {failure.remedy}{skip}"

    # --- questions side by side ------------------------------------------------------------------

    async def _ask_all(self, waiting: list[str]) -> None:
        judge = self._judge
        limit = asyncio.timeout(judge.batch_timeout_seconds)
        try:
            async with limit, self._new_client() as self._client:
                await self._work(waiting)
        except TimeoutError:
            if not limit.expired():
                raise
            self.failure = self.failure or _Failure(
                f"did not answer all questions of a batch in {judge.batch_timeout_seconds:g} s",
                "raise batch_timeout_seconds, max_concurrency or requests_per_minute",
            )
            self._state.is_down = not self.latencies
        except _Failure as failure:
            self.failure = self.failure or failure
        if self.failure is not None and judge.on_failure == "stop":
            raise RewardContractError(self.sentence(self.failure)) from None

    async def _work(self, waiting: list[str]) -> None:
        """Ask with ``max_concurrency`` workers; the first failure that counts ends them all."""
        questions = iter(waiting)
        if self._state.is_down:
            await self._try(next(questions), max_retries=0)

        async def work() -> None:
            for text in questions:
                await self._try(text, max_retries=self._judge.max_retries)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._judge.max_concurrency, len(waiting))):
                    group.create_task(work())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _try(self, text: str, *, max_retries: int) -> None:
        """Ask one question and keep its answer.

        Raises:
            _Failure: There is none, and no other question is to be asked.
        """
        judge = self._judge
        try:
            self._answers[text] = number = await self._ask(text, max_retries)
        except _Failure as failure:
            self.failure = self.failure or failure
            self._in_a_row = self._in_a_row + 1 if failure.is_down else 0
            probed = self._state.is_down and failure.is_down
            self._state.is_down = probed or self._in_a_row >= judge.max_consecutive_failures
            if self._state.is_down or judge.on_failure == "stop":
                raise
        else:
            self._in_a_row, self._state.is_down = 0, False
            self._cache.put(judge.cache_key(text), number)

    # --- one question ----------------------------------------------------------------------------

    async def _ask(self, text: str, max_retries: int) -> float:
        """Return the judge's number; an answer without one is asked for again once."""
        try:
            return self._read(await self._request(self._judge.body(text), max_retries))
        except _Unusable:
            body = self._judge.body(text, again=True)
            return self._read(await self._request(body, max_retries))

    async def _request(self, body: bytes, max_retries: int) -> bytes:
        judge = self._judge
        for attempt in range(max_retries + 1):
            await self._turn()
            try:
                return await self._post(body)
            except _Temporary as failure:
                if (failure.wait or 0) > _LONGEST_WAIT:
                    failure.what += f" and asks for a pause of {failure.wait:g} s"
                    raise
                if attempt == max_retries:
                    failure.what += f", {attempt + 1} times" if attempt else ""
                    raise
                backoff = min(judge.backoff_seconds * 2**attempt, _LONGEST_BACKOFF)
                jitter = backoff * _JITTER.uniform(0.5, 1.0)
                await asyncio.sleep(jitter if failure.wait is None else failure.wait + jitter / 10)
        raise AssertionError("the last attempt returns or raises")

    async def _turn(self) -> None:
        """Wait until the rate limit allows a request."""
        if self._judge.requests_per_minute is None:
            return
        async with self._gate:
            await asyncio.sleep(max(0.0, self._state.next_request - time.monotonic()))
            self._state.next_request = time.monotonic() + 60 / self._judge.requests_per_minute

    async def _post(self, body: bytes) -> bytes:
        """Return the body of an answer with status 200."""
        import httpx

        judge = self._judge
        started = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        if self._secret is not None:
            headers["Authorization"] = f"Bearer {self._secret}"
        content = bytearray()
        try:
            # httpx's own limit is for each read; a server that trickles never exceeds it.
            async with (
                asyncio.timeout(judge.timeout_seconds),
                self._client.stream(
                    "POST", f"{judge.url}/chat/completions", content=body, headers=headers
                ) as answer,
            ):
                async for chunk in answer.aiter_bytes():
                    content += chunk
                    if len(content) > _MAX_ANSWER_BYTES:
                        break
        except TimeoutError:
            raise _Temporary(
                f"gave no answer in {judge.timeout_seconds:g} s",
                "look at the server's log, lower max_concurrency, or raise timeout_seconds",
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as exc:
            broke_off = isinstance(exc, httpx.HTTPError) and not isinstance(
                exc, httpx.ConnectError | httpx.ConnectTimeout
            )
            raise _Temporary(
                f"{'broke the connection off' if broke_off else 'cannot be reached'} "
                f"({self._excerpt(str(exc) or type(exc).__name__)})",
                "start the server, or correct base_url",
            ) from None
        if answer.status_code != httpx.codes.OK:
            raise self._refusal(answer, content)
        self.latencies.append(time.perf_counter() - started)
        return bytes(content)

    def _read(self, content: bytes) -> float:
        """Return the number of a chat completion.

        Raises:
            _Unusable: It is none, or holds no number that counts.
        """
        judge = self._judge
        try:
            answer = json.loads(content)
            choice = answer["choices"][0]
            text = str(content_text(choice["message"]["content"]))
            self.tokens += _tokens(answer)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            raise _Unusable(
                f"gives no chat completion ({self._excerpt(content)})",
                "check base_url, which ends in /v1 as a rule",
            ) from None
        key = MODES[judge.mode][0]
        number = None if choice.get("finish_reason") == "length" else read_verdict(text, key)
        if judge.accepts(number) and number is not None:
            return number
        why = f"no {key}" if number is None else f"a {key} that is not asked for"
        if choice.get("finish_reason") == "length":
            why = f"an answer cut off at max_tokens ({judge.max_tokens})"
        raise _Unusable(
            f"gave {why} ({self._excerpt(text)})",
            "ask for JSON with response_format in extra_body, raise max_tokens, or take a "
            "stronger model",
            is_down=False,
        )

    def _refusal(self, answer: "httpx.Response", content: bytes | bytearray) -> _Failure:
        judge, status = self._judge, answer.status_code
        what = f"answers {status} ({self._excerpt(content)})"
        if status in _RETRIED or status >= 500:
            remedy = "lower max_concurrency, or set requests_per_minute"
            failure = _Temporary(what, remedy if status == 429 else "look at the server's log")
            failure.wait = _seconds_to_wait(answer.headers.get("Retry-After"))
            return failure
        if status == 401:
            sent = "refuses the key" if self._secret else "asks for a key"
            return _Failure(
                f"{sent} (401)",
                f"set the environment variable {judge.api_key_env or 'that api_key_env names'}",
            )
        if 300 <= status < 400:
            return _Failure(f"redirects ({status})", "give the final address as base_url")
        return _Failure(
            what,
            f"check base_url, model {judge.model!r}, extra_body and the server's context length",
            is_down=status not in _ROW_FAULTS,
        )

    def _excerpt(self, content: str | bytes | bytearray) -> str:
        """Return the beginning of a text in one line, without the key and other secrets."""
        text = content if isinstance(content, str) else bytes(content).decode("utf-8", "replace")
        if self._secret:
            text = text.replace(self._secret, "***")
        return repr(" ".join(redact(text).split())[:160])

    def _new_client(self) -> "httpx.AsyncClient":
        """Return a client of this event loop."""
        import httpx

        judge, state = self._judge, self._state
        parts = urlsplit(judge.url)
        if state.ssl_context is None:  # to read the certificates takes a while
            is_https = parts.scheme == "https"
            plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            state.ssl_context = httpx.create_ssl_context() if is_https else plain
        return httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=min(_CONNECT_SECONDS, judge.timeout_seconds)),
            limits=httpx.Limits(max_connections=None),
            verify=state.ssl_context,
            trust_env=not _is_near(parts.hostname or ""),
        )


def _tokens(answer: dict[str, Any]) -> int:
    usage = answer.get("usage")
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    return total if isinstance(total, int) else 0


def _seconds_to_wait(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header, which gives a number or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            at = parsedate_to_datetime(value)
            seconds = (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
        except (ValueError, OverflowError):
            return None
    return None if math.isnan(seconds) else max(0.0, seconds)


def _is_near(host: str) -> bool:
    """Return whether a host is this machine or its network, where no proxy of the world counts."""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return "." not in host


class Cache:
    """Answers by key: the latest in memory, and all of them in a file where there is one."""

    def __init__(self, scores: OrderedDict[str, float], size: int, path: str | None) -> None:
        self._scores = scores
        self._size = size
        self._path = path
        self._file = None if path is None else self._open(path)

    def get(self, key: str) -> Any:
        """Return what is kept under a key, or None."""
        if key in self._scores:
            self._scores.move_to_end(key)
            return self._scores[key]
        row = self._execute("SELECT number FROM answers WHERE key = ?", key)
        return row[0] if row else None

    def put(self, key: str, number: float) -> None:
        """Keep a number; in the file at once, so that a crash loses none."""
        self._scores[key] = number
        while len(self._scores) > self._size:
            self._scores.popitem(last=False)
        self._execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", key, number)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _execute(self, command: str, *values: Any) -> Any:
        """Return the first row; a file that fails (a full disk) is left alone from then on."""
        if self._file is None:
            return None
        try:
            return self._file.execute(command, values).fetchone()
        except sqlite3.Error as exc:
            self.close()
            warnings.warn(
                f"cache_file {self._path!r} of reward 'judge' is not used for this batch ({exc}); "
                "make room, or remove a broken file",
                RuntimeWarning,
                stacklevel=2,
            )
            return None

    @staticmethod
    def _open(path: str) -> sqlite3.Connection:
        file = None
        try:
            # Without transactions of Python's own, every INSERT is one by itself.
            file = sqlite3.connect(Path(path).expanduser(), timeout=5.0, isolation_level=None)
            file.execute("PRAGMA journal_mode=WAL")
            file.execute("PRAGMA synchronous=NORMAL")
            file.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, number REAL)")
            file.execute("SELECT key, number FROM answers LIMIT 1").fetchone()
        except sqlite3.Error as exc:
            if file is not None:
                file.close()
            raise RewardContractError(
                f"cache_file {path!r} of reward 'judge' cannot be used ({exc}); name another file, "
                "or remove this one"
            ) from exc
        return file
