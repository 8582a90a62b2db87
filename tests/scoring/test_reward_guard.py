"""The time limit of a reward, what skip counts, and the row that a fault names."""

import asyncio
import contextlib
import copy
import inspect
import io
import itertools
import os
import re
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from rloo_kit.errors import ModelError, RewardContractError
from rloo_kit.scoring.contract import MAX_ROWS_TRIED, OverdueError, checked, within

LIMIT = 0.2
SOON = 10.0
"""A call with the limit has ended by then, on a busy machine too."""
COLUMNS = {"completions": ["please", "now"], "prompts": ["a", "b"]}
UNIX = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the alarm is Unix's")
MAIN_AND_OTHER = pytest.mark.parametrize("on", ["main thread", "other thread"])


def guarded(reward, *, timeout=None, on_error="stop"):
    return replace(checked(reward), timeout=timeout, on_error=on_error)


def call(reward, *, on="main thread", **columns):
    """Score here or in another thread; an async reward is awaited."""

    def scores():
        output = reward(**(columns or COLUMNS))
        return asyncio.run(output) if inspect.iscoroutine(output) else output

    if on == "main thread":
        return scores()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(scores).result()


def refusal(reward, **columns):
    """The message of the error, which is one line."""
    with pytest.raises(RewardContractError) as caught:
        call(reward, **columns)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Metrics(list):
    """What a reward logged, as (name, value)."""

    def __call__(self, name, value):
        self.append((name, value))


@pytest.fixture
def released():
    """An event that a hanging reward waits for, set afterwards so that no thread is left."""
    event = threading.Event()
    yield event
    event.set()


# --- rewards ---


def loops(completions):
    while True:
        pass


def sleeps(completions):
    time.sleep(30)


def backtracks(completions):
    return [bool(re.match(r"(a+)+$", "a" * 40 + "b")) for _ in completions]


def swallows(completions):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            time.sleep(1)
        except Exception:
            continue


def times_out_itself(completions):
    raise TimeoutError("the judge did not answer")


def divides(completions):
    return [1 / 0 for _ in completions]


def short(completions):
    return [1.0]


def mapping(completions):
    return dict.fromkeys(completions, 1.0)


def fine(completions):
    return [0.5] * len(completions)


async def sleeps_async(completions):
    await asyncio.sleep(30)


async def times_out_itself_async(completions):
    raise TimeoutError("the judge did not answer")


async def divides_async(completions):
    return [1 / 0 for _ in completions]


async def short_async(completions):
    return [1.0]


async def fine_async(completions):
    await asyncio.sleep(0)
    return [0.5] * len(completions)


def place_in(function):
    """A pattern of every file:line of a function."""
    lines, first = inspect.getsourcelines(function)
    numbers = "|".join(str(first + i) for i in range(len(lines)))
    return rf"{re.escape(inspect.getsourcefile(function))}:({numbers})"


# --- the time limit ---


@UNIX
@pytest.mark.parametrize(
    ("reward", "place"),
    [
        (loops, place_in(loops)),
        (sleeps, place_in(sleeps)),
        (swallows, place_in(swallows)),
        (backtracks, r".*\.py:\d+"),  # a line of the library
    ],
    ids=["loops", "sleeps", "swallows", "backtracks"],
)
def test_a_hang_ends_soon_and_says_where_it_was(reward, place):
    started = time.monotonic()
    message = refusal(guarded(reward, timeout=LIMIT))
    assert LIMIT <= time.monotonic() - started < SOON
    assert re.fullmatch(
        rf"reward '{reward.__name__}' took more than 0\.2 s \(it was at {place}\); make it faster, "
        r"give its requests a time limit, or raise trainer\.reward_timeout_seconds",
        message,
    )


def test_a_hang_off_the_main_thread_ends_soon_too(released):
    def waits(completions):
        released.wait(30)

    started = time.monotonic()
    message = refusal(guarded(waits, timeout=LIMIT), on="other thread")
    assert LIMIT <= time.monotonic() - started < SOON
    assert "reward 'waits' took more than 0.2 s; make it faster" in message
    assert "trainer.reward_timeout_seconds" in message
    assert not released.is_set()


def test_a_system_without_the_alarm_uses_a_thread(released, monkeypatch):
    def waits(completions):
        released.wait(30)

    monkeypatch.delattr(signal, "setitimer", raising=False)
    assert "took more than 0.2 s; make" in refusal(guarded(waits, timeout=LIMIT))
    assert call(guarded(fine, timeout=LIMIT)) == [0.5, 0.5]


def test_a_thread_that_is_left_behind_does_not_keep_the_process_alive(released):
    before = set(threading.enumerate())

    def waits(completions):
        released.wait(30)

    refusal(guarded(waits, timeout=0.05), on="other thread")
    (left,) = set(threading.enumerate()) - before
    assert left.daemon


def test_an_async_reward_ends_soon():
    started = time.monotonic()
    message = refusal(guarded(sleeps_async, timeout=LIMIT))
    assert LIMIT <= time.monotonic() - started < SOON
    assert message.startswith("reward 'sleeps_async' took more than 0.2 s; make it faster")
    assert message.endswith("or raise trainer.reward_timeout_seconds")


def test_async_rewards_wait_at_the_same_time():
    async def both():
        calls = [guarded(sleeps_async, timeout=LIMIT)(**COLUMNS) for _ in range(100)]
        return await asyncio.gather(*calls, return_exceptions=True)

    started = time.monotonic()
    errors = asyncio.run(both())
    assert {type(error) for error in errors} == {RewardContractError}
    assert time.monotonic() - started < SOON


@MAIN_AND_OTHER
@pytest.mark.parametrize("reward", [fine, fine_async])
@pytest.mark.parametrize("timeout", [None, 30])
def test_a_reward_within_its_limit_is_scored(reward, timeout, on):
    started = time.monotonic()
    assert call(guarded(reward, timeout=timeout), on=on) == [0.5, 0.5]
    assert time.monotonic() - started < SOON


@MAIN_AND_OTHER
@pytest.mark.parametrize("reward", [times_out_itself, times_out_itself_async])
@pytest.mark.parametrize("timeout", [None, 30])
def test_a_timeout_error_of_the_reward_is_not_the_limit(reward, timeout, on):
    message = refusal(guarded(reward, timeout=timeout), on=on)
    assert message.startswith(f"reward {reward.__name__!r}")
    assert "raised TimeoutError: the judge did not answer" in message
    assert "reward_timeout_seconds" not in message


def test_the_limit_is_for_each_call():
    reward = guarded(lambda completions: time.sleep(LIMIT / 4) or [1.0, 1.0], timeout=LIMIT)
    for _ in range(6):
        assert call(reward) == [1.0, 1.0]


def test_another_name_keeps_the_limit_and_the_choice():
    renamed = checked(guarded(fine, timeout=LIMIT, on_error="skip"), name="fine_2")
    assert (renamed.name, renamed.timeout, renamed.on_error) == ("fine_2", LIMIT, "skip")


# --- what the alarm leaves ---


@pytest.fixture
def earlier():
    """An earlier handler of SIGALRM."""

    def handler(number, frame):
        raise AssertionError("the alarm rang after the call")

    before = signal.signal(signal.SIGALRM, handler)
    yield handler
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@UNIX
@pytest.mark.parametrize("reward", [fine, sleeps, divides, short, fine_async, sleeps_async])
@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_alarm_is_off_and_the_earlier_handler_back(reward, on_error, earlier):
    try:
        call(guarded(reward, timeout=LIMIT, on_error=on_error))
    except RewardContractError:
        assert reward not in (fine, fine_async)
    assert signal.getsignal(signal.SIGALRM) is earlier
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@UNIX
def test_the_handler_is_back_after_an_interrupt(earlier):
    with pytest.raises(KeyboardInterrupt):
        within(30, lambda: signal.raise_signal(signal.SIGINT))
    assert signal.getsignal(signal.SIGALRM) is earlier
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@UNIX
def test_an_earlier_alarm_is_still_set_afterwards(earlier):
    signal.setitimer(signal.ITIMER_REAL, 30)
    assert within(5, lambda: 7) == 7
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 30


@UNIX
def test_an_alarm_that_rings_once_the_call_is_over_stays_inside(earlier, monkeypatch):
    set_alarm = signal.setitimer

    def set_late(which, seconds, *interval):
        if seconds == 0:
            time.sleep(0.1)  # the alarm rings before it can be turned off
        return set_alarm(which, seconds, *interval)

    monkeypatch.setattr(signal, "setitimer", set_late)
    with contextlib.suppress(OverdueError):  # as right: it was that close
        assert within(0.05, lambda: 7) == 7
    assert signal.getsignal(signal.SIGALRM) is earlier


@UNIX
def test_no_limit_sets_no_alarm(earlier):
    def state():
        return signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)

    assert within(None, state) == (earlier, (0.0, 0.0))
    handler, (left, _) = within(30, state)
    assert handler is not earlier
    assert 0 < left <= 30


@MAIN_AND_OTHER
@pytest.mark.parametrize("error", [ValueError("x"), TimeoutError("x"), SystemExit(3)])
def test_within_hands_on_what_the_call_raises(error, on):
    def fails(**_):
        raise error

    with pytest.raises(type(error)) as caught:
        call(lambda **_: within(30, fails), on=on)
    assert caught.value is error


# --- skip: the whole call ---

WHOLE = {
    "divides": (divides, "raised ZeroDivisionError: division by zero"),
    "short": (short, "returned 1 scores for 2 completions"),
    "mapping": (mapping, "returned a dict; return a list"),
    "sleeps": (sleeps, "took more than 0.2 s"),
    "times_out_itself": (times_out_itself, "raised TimeoutError: the judge did not answer"),
    "divides_async": (divides_async, "raised ZeroDivisionError: division by zero"),
    "short_async": (short_async, "returned 1 scores for 2 completions"),
    "sleeps_async": (sleeps_async, "took more than 0.2 s"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_skip_makes_a_call_that_fails_unscorable_and_counts_its_rows(case):
    reward, reason = WHOLE[case]
    metrics = Metrics()
    with pytest.warns(RuntimeWarning) as caught:
        scores = call(
            guarded(reward, timeout=LIMIT, on_error="skip"), **COLUMNS, log_metric=metrics
        )
    assert scores == [None, None]
    assert metrics == [(f"rewards/{case}/errors", 2.0)]
    (warning,) = caught
    assert str(warning.message).startswith(f"2 completions count as unscorable: reward {case!r} ")
    assert reason in str(warning.message)


def test_skip_off_the_main_thread(released):
    def waits(completions):
        released.wait(30)

    metrics = Metrics()
    with pytest.warns(RuntimeWarning, match="took more than 0.2 s"):
        scores = call(
            guarded(waits, timeout=LIMIT, on_error="skip"),
            on="other thread", **COLUMNS, log_metric=metrics,
        )  # fmt: skip
    assert scores == [None, None]
    assert metrics == [("rewards/waits/errors", 2.0)]


def test_skip_needs_no_log():
    with pytest.warns(RuntimeWarning, match="raised ZeroDivisionError"):
        assert call(guarded(divides, on_error="skip")) == [None, None]


def test_skip_calls_a_reward_that_fails_once():
    calls = itertools.count()

    def fails(completions):
        next(calls)
        raise ValueError

    with pytest.warns(RuntimeWarning, match="raised ValueError"):
        call(guarded(fails, on_error="skip"))
    assert next(calls) == 1


# --- skip: single rows ---


@pytest.fixture
def _no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


WRONG = [float("nan"), float("inf"), -float("inf"), "1.0", [1.0], 1j, 10**400]


@pytest.mark.usefixtures("_no_warning")
@pytest.mark.parametrize("value", WRONG, ids=lambda value: str(value)[:8])
@pytest.mark.parametrize("is_async", [False, True])
def test_skip_makes_the_rows_without_a_number_unscorable_and_counts_them(value, is_async):
    def odd(completions):
        return [1.0, value, None, value, 0]

    async def odd_async(completions):
        return odd(completions)

    reward = odd_async if is_async else odd
    metrics = Metrics()
    scores = call(guarded(reward, on_error="skip"), completions=list("abcde"), log_metric=metrics)
    assert scores == [1.0, None, None, None, 0.0]
    assert metrics == [(f"rewards/{reward.__name__}/errors", 2.0)]


@pytest.mark.parametrize("value", WRONG, ids=lambda value: str(value)[:8])
def test_stop_names_the_row_without_a_number(value):
    message = refusal(guarded(lambda completions: [1.0, value]))
    assert "in row 1; return a finite float, or None" in message
    assert "(completion: 'now')" in message


@pytest.mark.usefixtures("_no_warning")
@pytest.mark.parametrize("reward", [fine, fine_async])
def test_skip_counts_zero_when_all_is_well(reward):
    metrics = Metrics()
    for _ in range(2):
        scores = call(guarded(reward, on_error="skip"), **COLUMNS, log_metric=metrics)
        assert scores == [0.5, 0.5]
    assert metrics == [(f"rewards/{reward.__name__}/errors", 0.0)] * 2


@pytest.mark.usefixtures("_no_warning")
def test_none_of_the_reward_itself_is_no_error():
    metrics = Metrics()
    reward = guarded(lambda completions: [None, 1.0], on_error="skip")
    assert call(reward, **COLUMNS, log_metric=metrics) == [None, 1.0]
    assert [value for _, value in metrics] == [0.0]


def test_the_count_has_the_name_of_the_metric():
    metrics = Metrics()
    renamed = checked(guarded(fine, on_error="skip"), name="fine_2")
    call(renamed, **COLUMNS, log_metric=metrics)
    assert metrics == [("rewards/fine_2/errors", 0.0)]


@pytest.mark.parametrize("reward", [fine, divides, short, fine_async, divides_async])
def test_stop_counts_nothing(reward):
    metrics = Metrics()
    try:
        call(guarded(reward), **COLUMNS, log_metric=metrics)
    except RewardContractError:
        assert reward not in (fine, fine_async)
    assert metrics == []


# --- stop: the row ---


def doubts(completions, answer=None, **_):
    """Raise at a completion with a question mark, or where the answer is not in it."""
    for row, text in enumerate(completions):
        if "?" in str(text) or (answer and answer[row] not in text):
            raise ValueError("cannot say")
    return [1.0] * len(completions)


@MAIN_AND_OTHER
@pytest.mark.parametrize("timeout", [None, 30])
def test_the_row_that_raises_is_named_with_its_completion(timeout, on):
    message = refusal(
        guarded(doubts, timeout=timeout), on=on, completions=["one", "two", "three?", "four?"]
    )
    for part in ("reward 'doubts'", "raised ValueError", "cannot say; correct it, or"):
        assert part in message
    assert "in row 2 (completion: 'three?')" in message


def test_a_row_is_tried_with_its_own_values_of_all_columns():
    columns = {"completions": ["1 2", "3", "4"], "answer": ["2", "3", "5"], "step": 3}
    message = refusal(guarded(doubts), **columns)
    assert "in row 2 (completion: '4')" in message


def test_a_list_that_is_not_one_value_per_row_is_passed_whole():
    def listed(completions, allowed):
        return [float(allowed.index(text)) for text in completions]

    columns = {"completions": ["c", "x"], "allowed": ["a", "b", "c"]}
    assert "in row 1 (completion: 'x')" in refusal(guarded(listed), **columns)


def test_a_conversation_is_quoted_by_its_last_message():
    completions = [
        [{"role": "assistant", "content": "sure"}],
        [{"role": "user", "content": "first"}, {"role": "assistant", "content": "last?"}],
    ]
    assert "in row 1 (completion: 'last?')" in refusal(guarded(doubts), completions=completions)


def test_a_very_long_completion_is_shortened():
    message = refusal(guarded(doubts), completions=["fine", "why " * 5000 + "?"])
    quoted = re.search(r"in row 1 \(completion: ('why why [why ]*\.\.\.)\)", message)[1]
    assert len(quoted) == 200


def test_a_reward_that_fails_for_the_whole_batch_alone_gives_no_row():
    def single(completions):
        if len(completions) > 1:
            raise ValueError("one at a time")
        return [1.0]

    message = refusal(guarded(single))
    assert message.startswith("reward 'single' raised ValueError: one at a time; correct it, or")


def test_the_cause_is_kept():
    with pytest.raises(RewardContractError) as caught:
        call(guarded(doubts), completions=["?"])
    assert type(caught.value.__cause__) is ValueError


@pytest.mark.parametrize(("count", "named"), [(MAX_ROWS_TRIED, True), (MAX_ROWS_TRIED + 1, False)])
def test_a_batch_beyond_the_rows_tried_gives_no_row(count, named):
    message = refusal(guarded(doubts), completions=["fine"] * (count - 1) + ["?"])
    assert (f"in row {count - 1} (completion: '?')" in message) == named
    assert ("in row" in message) == named


def test_an_async_reward_that_raises_is_named():
    message = refusal(guarded(divides_async))
    assert message.startswith(
        "reward 'divides_async' raised ZeroDivisionError: division by zero; correct it, or"
    )


# --- errors of the kit ---


@MAIN_AND_OTHER
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("timeout", [None, 30])
def test_an_error_of_the_kit_passes_unchanged(on, is_async, on_error, timeout):
    error = ModelError("as it was")
    metrics = Metrics()

    def judge(completions):
        raise error

    async def judge_async(completions):
        raise error

    reward = guarded(judge_async if is_async else judge, timeout=timeout, on_error=on_error)
    with pytest.raises(ModelError) as caught:
        call(reward, on=on, **COLUMNS, log_metric=metrics)
    assert caught.value is error
    assert metrics == []


# --- what a reward does to the process, and to what it is given ---


class OwnError(BaseException):
    """No ``except Exception`` catches it."""


ENDS = {
    "SystemExit: 0": lambda: sys.exit(0),
    "RecursionError": lambda: deep(0),
    "MemoryError": lambda: bytearray(2**62),
    "OwnError: out": lambda: throw(OwnError("out")),
    "CancelledError": lambda: throw(asyncio.CancelledError()),
    "ValueError: a b": lambda: throw(ValueError("a\n   b" + " c" * 10_000)),
}


def deep(level):
    return deep(level + 1)


def throw(error):
    raise error


@MAIN_AND_OTHER
@pytest.mark.parametrize("timeout", [None, 30])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("case", ENDS)
def test_whatever_a_reward_raises_names_it_in_one_line(case, is_async, timeout, on):
    def ends(completions):
        ENDS[case]()

    async def ends_async(completions):
        ENDS[case]()

    reward = ends_async if is_async else ends
    message = refusal(guarded(reward, timeout=timeout), on=on)
    assert f"raised {case}" in message
    assert message.endswith("correct it, or return None for a row it cannot score")
    assert len(message) < 400
    with pytest.warns(RuntimeWarning, match="2 completions count as unscorable"):
        assert call(guarded(reward, timeout=timeout, on_error="skip"), on=on) == [None, None]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_an_interrupt_is_the_users_and_passes(on_error, is_async):
    def interrupted(completions):
        raise KeyboardInterrupt

    async def interrupted_async(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(guarded(interrupted_async if is_async else interrupted, on_error=on_error))


def test_an_async_reward_that_is_cancelled_from_outside_says_nothing():
    async def cancel():
        task = asyncio.create_task(guarded(sleeps_async, on_error="skip")(**COLUMNS))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())


@UNIX
def test_a_reward_that_catches_the_alarm_too_is_ended():
    def stubborn(completions):
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                return [time.sleep(5)]
            except:  # noqa: E722  as a retry around a request does
                continue
        return [1.0] * len(completions)

    before, started = sys.gettrace(), time.monotonic()
    assert "took more than 0.2 s (it was at" in refusal(guarded(stubborn, timeout=LIMIT))
    assert time.monotonic() - started < SOON
    assert sys.gettrace() is before


def vandal(completions, prompts, answer, meta, completion_ids):
    """Change everything that it is given."""
    for value in (prompts, answer, completion_ids, meta):
        value.append("more")
    completions[0][-1]["content"] = "hacked"
    completions.pop()
    answer[0] = "other"
    meta[0]["nested"].clear()
    completion_ids[0].clear()
    raise ValueError("and then it fails")


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_reward_may_change_its_lists_and_nobody_else_sees_it(on_error):
    columns = {
        "completions": [[{"role": "assistant", "content": "sure"}] for _ in range(2)],
        "prompts": ["a", "b"],
        "answer": ["1", "2"],
        "meta": [{"nested": [1, 2]}, None],
        "completion_ids": [[1, 2, 3], [4]],
    }
    before = copy.deepcopy(columns)
    with contextlib.suppress(RewardContractError):
        call(guarded(vandal, on_error=on_error), **columns)
    assert columns == before


def test_scores_are_counted_against_the_completions_there_were():
    def drops(completions):
        completions.pop()
        return [1.0] * len(completions)

    assert "returned 1 scores for 2 completions" in refusal(guarded(drops))


def test_a_large_list_of_tokens_is_copied_in_no_time():
    ids = [list(range(4000)) for _ in range(64)]
    reward = guarded(lambda completions, completion_ids: [1.0] * 64)

    def seconds(work):
        started = time.process_time()
        work()
        return time.process_time() - started

    called, copied = [], []
    for _ in range(3):
        called.append(seconds(lambda: call(reward, completions=["x"] * 64, completion_ids=ids)))
        copied.append(seconds(lambda: copy.deepcopy(ids)))
    assert min(called) < min(copied) / 2


RUBBISH = {
    "generator": (lambda n: (1.0 for _ in range(n)), "returned a generator"),
    "set": (lambda n: {1.0, 2.0}, "returned a set"),
    "text": (lambda n: "ab", "returned a str"),
    "None": (lambda n: None, "returned a NoneType"),
    "a number": (lambda n: 1.0, "returned a float"),
    "nested": (lambda n: [[1.0]] * n, r"returned \[1.0\] in row 0"),
    "a tensor of rows": (lambda n: torch.ones(n, 2), r"returned \[1.0, 1.0\] in row 0"),
    "a scalar tensor": (lambda n: torch.ones(()), "returned a Tensor"),
    "a tensor without numbers": (lambda n: torch.ones(n, device="meta"), "returned a Tensor"),
    "beyond float32": (lambda n: [1e39] * n, "1e.39 in row 0.*float32 holds up to 3.4e.38"),
    "NaN": (lambda n: torch.full((n,), torch.nan), "returned nan in row 0"),
    "infinity": (lambda n: np.array([np.inf] * n), "returned inf in row 0"),
    "of its own mind": (lambda n: [Stubborn()] * n, "returned a Stubborn in row 0"),
    "too many": (lambda n: [1.0] * 1000, "returned 1000 scores for 2"),
}


class Stubborn(float):
    def __float__(self):
        raise RuntimeError

    def __repr__(self):
        raise RuntimeError


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("case", RUBBISH)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rubbish_is_refused_or_unscorable(case, on_error):
    make, message = RUBBISH[case]
    reward = guarded(lambda completions: make(len(completions)), on_error=on_error)
    if on_error == "stop":
        assert re.search(message, refusal(reward))
    else:
        assert call(reward) == [None, None]


@pytest.mark.parametrize(
    "value", ["text", None, torch.ones(2), object()], ids=["text", "none", "two", "thing"]
)
def test_a_metric_that_is_no_number_is_the_rewards_error(value):
    def logs(completions, log_metric):
        log_metric("length", value)
        return [1.0] * len(completions)

    metrics = Metrics()
    message = refusal(guarded(logs), **COLUMNS, log_metric=metrics)
    assert "raised TypeError: log_metric wants a number, not" in message
    assert metrics == []


def test_a_metric_that_is_a_number_is_logged_as_a_float():
    def logs(completions, log_metric):
        for value in (1, True, np.float32(0.5), torch.tensor(2)):
            log_metric("n", value)
        return [1.0] * len(completions)

    metrics = Metrics()
    call(guarded(logs), **COLUMNS, log_metric=metrics)
    assert metrics == [("n", 1.0), ("n", 1.0), ("n", 0.5), ("n", 2.0)]
    assert {type(value) for _, value in metrics} == {float}


def surroundings():
    return (
        os.getcwd(),
        signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGTERM),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_rng_state().tolist(),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_reward_changes_in_the_process_is_put_back(fails, tmp_path):
    def meddles(completions):
        os.chdir(tmp_path)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL if fails else signal.SIG_IGN)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        torch.rand(3)
        if fails:
            raise ValueError
        return [1.0] * len(completions)

    torch.manual_seed(12345)
    torch.rand(2)
    before = surroundings()
    with contextlib.suppress(RewardContractError):
        call(guarded(meddles))
    assert surroundings() == before


def test_random_numbers_that_a_reward_draws_stay_drawn():
    def noisy(completions):
        return torch.rand(len(completions))

    torch.manual_seed(12345)
    assert call(guarded(noisy)) != call(guarded(noisy))


def test_a_reward_that_removes_the_folder_it_is_in_is_scored(tmp_path):
    here = os.getcwd()

    def removes(completions):
        os.rmdir(os.getcwd())
        return [1.0, 1.0]

    os.chdir(tmp_path)
    try:
        assert call(guarded(removes)) == [1.0, 1.0]
        assert call(guarded(fine)) == [0.5, 0.5]
    finally:
        os.chdir(here)


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_reward_that_closes_what_the_run_writes_to_is_named(on_error, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())

    def closes(completions):
        sys.stdout.close()
        return [1.0] * len(completions)

    message = refusal(guarded(closes, on_error=on_error))
    assert message.startswith("reward 'closes' closed sys.stdout, to which the run writes: leave")


@UNIX
@pytest.mark.parametrize(("ends", "code"), [(None, 1), (0, 0), (7, 7), ("words", 1)])
def test_a_child_that_a_reward_forked_never_goes_on_as_the_run(ends, code):
    def forks(completions):
        child = os.fork()
        if not child:
            if ends is None:
                return [0.0] * len(completions)
            sys.exit(ends)
        _, status = os.waitpid(child, 0)
        return [float(os.waitstatus_to_exitcode(status))] * len(completions)

    parent = os.getpid()
    try:
        scores = call(guarded(forks))
    finally:
        if os.getpid() != parent:
            os._exit(99)  # a child that came back; its parent sees the code
    assert scores == [code, code]
