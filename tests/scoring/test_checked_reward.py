"""A checked reward: its time limit, its scores and ``skip``."""

import asyncio
import contextlib
import copy
import functools
import inspect
import pickle
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from rloo_kit.rewards import Accuracy

from rloo_kit.errors import ModelError, RewardContractError
from rloo_kit.scoring.contract import checked, within

LIMIT = 0.2
SOON = 10.0
"""A call with the limit has ended by then, on a busy machine too."""
COLUMNS = {"completions": ["please", "now"], "prompts": ["a", "b"]}
UNIX = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the alarm is Unix's")


def guarded(reward, *, timeout=None, on_error="stop"):
    return replace(checked(reward), timeout=timeout, on_error=on_error)


def call(reward, **columns):
    """Score; an async reward is awaited."""
    output = reward(**(columns or COLUMNS))
    return asyncio.run(output) if inspect.iscoroutine(output) else output


def refusal(reward, **columns):
    """The message of the error, which is one line."""
    with pytest.raises(RewardContractError) as caught:
        call(reward, **columns)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- rewards ---


def loops(completions):
    while True:
        pass


def sleeps(completions):
    time.sleep(30)


def backtracks(completions):
    return [bool(re.match(r"(a+)+$", "a" * 40 + "b")) for _ in completions]


def retries(completions):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(30)


def times_out_itself(completions):
    raise TimeoutError("the judge did not answer")


def divides(completions):
    return [1 / 0 for _ in completions]


def exits(completions):
    sys.exit(0)


def short(completions):
    return [1.0]


def fine(completions):
    return [0.5] * len(completions)


async def sleeps_async(completions):
    await asyncio.sleep(30)


def later(reward):
    """The same reward, async."""

    @functools.wraps(reward)
    async def awaited(**columns):
        await asyncio.sleep(0)
        return reward(**columns)

    return awaited


class FineAsync:
    async def __call__(self, completions, **_):
        return [0.5] * len(completions)


# --- the time limit ---


@UNIX
@pytest.mark.parametrize(
    ("reward", "file"),
    [(loops, __file__), (sleeps, __file__), (retries, __file__), (backtracks, "")],
    ids=["loops", "sleeps", "retries", "backtracks"],
)
def test_a_hang_ends_soon_and_names_its_line(reward, file):
    started = time.monotonic()
    message = refusal(guarded(reward, timeout=LIMIT))
    assert LIMIT <= time.monotonic() - started < SOON
    assert f"reward '{reward.__name__}' took more than 0.2 s" in message
    assert re.search(rf"it was at {re.escape(file)}.*:\d+\)", message)
    assert "trainer.reward_timeout_seconds" in message


def test_async_rewards_wait_at_the_same_time():
    async def many():
        reward = guarded(sleeps_async, timeout=LIMIT)
        calls = [reward(**COLUMNS) for _ in range(100)]
        return await asyncio.gather(*calls, return_exceptions=True)

    started = time.monotonic()
    errors = asyncio.run(many())
    assert time.monotonic() - started < SOON
    assert {type(error) for error in errors} == {RewardContractError}
    assert "took more than 0.2 s" in str(errors[0])


@pytest.mark.parametrize("reward", [fine, later(fine)])
@pytest.mark.parametrize("timeout", [None, 30])
def test_a_reward_within_its_limit_is_scored_in_every_thread(reward, timeout):
    func = guarded(reward, timeout=timeout)
    with ThreadPoolExecutor(1) as pool:
        assert call(func) == pool.submit(call, func).result() == [0.5, 0.5]


@pytest.mark.parametrize("reward", [times_out_itself, later(times_out_itself)])
def test_a_timeout_error_of_the_reward_is_not_the_limit(reward):
    message = refusal(guarded(reward, timeout=30))
    assert "raised TimeoutError: the judge did not answer" in message
    assert "reward_timeout_seconds" not in message


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
@pytest.mark.parametrize("reward", [fine, sleeps, divides])
def test_the_alarm_is_off_and_the_earlier_handler_back(reward, earlier):
    with contextlib.suppress(RewardContractError):
        call(guarded(reward, timeout=LIMIT))
    assert signal.getsignal(signal.SIGALRM) is earlier
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@UNIX
def test_an_earlier_alarm_is_set_again(earlier):
    signal.setitimer(signal.ITIMER_REAL, 30)
    assert within(5, lambda: 7) == 7
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 30


# --- errors ---


@pytest.mark.parametrize("reward", [divides, exits, later(divides)])
def test_whatever_a_reward_raises_names_it(reward):
    message = refusal(guarded(reward, timeout=30))
    kind = "SystemExit" if reward is exits else "ZeroDivisionError"
    assert message.startswith(f"reward {reward.__name__!r}")
    assert f"raised {kind}: " in message


IN_BOTH_FORMS = pytest.mark.parametrize("wrapped", [lambda reward: reward, later])


@IN_BOTH_FORMS
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ModelError("as it was")])
def test_interrupts_and_errors_of_the_kit_pass(error, wrapped):
    def fails(completions):
        raise error

    metrics = []
    with pytest.raises(type(error)) as caught:
        call(
            guarded(wrapped(fails), timeout=30, on_error="skip"),
            **COLUMNS,
            log_metric=lambda *metric: metrics.append(metric),
        )
    assert caught.value is error
    assert metrics == []


def test_cancelling_an_async_reward_is_no_error_of_it():
    async def cancel():
        task = asyncio.create_task(guarded(sleeps_async, on_error="skip")(**COLUMNS))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())


# --- scores ---


@pytest.mark.parametrize(
    "make",
    [
        lambda torch: [1, True],
        lambda torch: (1.0, 1.0),
        lambda torch: np.ones(2, dtype=np.float32),
        lambda torch: torch.ones(2, dtype=torch.bfloat16),
        lambda torch: [torch.tensor(1.0), np.float32(1)],
    ],
)
def test_scores_may_be_a_list_tuple_tensor_or_array(make):
    import torch

    scores = checked(lambda completions: make(torch))(**COLUMNS)
    assert scores == [1.0, 1.0]
    assert {type(score) for score in scores} == {float}


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ((score for score in [1.0, 1.0]), "returned a generator"),
        (None, "returned a NoneType"),
        ([1.0] * 1000, "returned 1000 scores for 2"),
        ([1.0, "x"], r"returned 'x' in row 1.*completion: 'now'"),
        ([1e39] * 2, r"1e.39 in row 0"),
        ([0, 10**400], "in row 1"),
        (np.array([0, -np.inf]), "returned -inf in row 1"),
        (np.ones((2, 2)), r"returned \[1.0, 1.0\] in row 0"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rubbish_is_refused_or_unscorable(output, message):
    assert re.search(message, refusal(guarded(lambda completions: output)))
    scores = call(guarded(lambda completions: output, on_error="skip"))
    assert None in scores
    assert len(scores) == 2


# --- skip ---


@pytest.mark.parametrize(
    "reward", [divides, short, sleeps, exits, later(divides), later(short), sleeps_async]
)
def test_skip_makes_a_failed_call_unscorable_and_counts_it(reward):
    metrics = {}
    func = guarded(reward, timeout=LIMIT, on_error="skip")
    with pytest.warns(RuntimeWarning, match="2 completions count as unscorable: reward "):
        assert call(func, **COLUMNS, log_metric=metrics.__setitem__) == [None, None]
    assert metrics == {f"rewards/{reward.__name__}/errors": 2.0}


@IN_BOTH_FORMS
@pytest.mark.filterwarnings("error")
def test_skip_counts_single_rows_without_a_number(wrapped):
    def odd(completions):
        return [1.0, float("nan"), None, "1.0", 0][: len(completions)]

    metrics = {}
    reward = guarded(checked(wrapped(odd), name="odd_2"), on_error="skip")
    scores = call(reward, completions=list("abcde"), log_metric=metrics.__setitem__)
    assert scores == [1.0, None, None, None, 0.0]
    assert metrics == {"rewards/odd_2/errors": 2.0}
    assert call(reward, completions=["a"], log_metric=metrics.__setitem__) == [1.0]
    assert metrics == {"rewards/odd_2/errors": 0.0}


# --- columns, metrics, the process ---


def test_missing_columns_are_named():
    def with_answer(completions, answer):
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    assert "asks for 'answer'" in refusal(checked(with_answer))
    assert checked(with_answer)(**COLUMNS, answer=["please", "x"]) == [1.0, 0.0]


@IN_BOTH_FORMS
def test_what_a_reward_changes_stays_its_own(wrapped):
    def change(completions, completion_ids):
        completions[0][0]["content"] = "changed"
        completions.pop()
        completion_ids[0].pop()
        return [1.0, 1.0]

    columns = {
        "completions": [[{"role": "assistant", "content": text}] for text in "ab"],
        "completion_ids": [[1, 2], [3]],
    }
    before = copy.deepcopy(columns)
    assert call(guarded(wrapped(change)), **columns) == [1.0, 1.0]
    assert columns == before


def test_only_numbers_are_logged_and_secrets_are_masked():
    def logs(completions, log_metric, value):
        log_metric("of https://me:s3cr3t-word@example.org", value)
        return [1.0] * len(completions)

    metrics = {}
    columns = {**COLUMNS, "log_metric": metrics.__setitem__}
    call(checked(logs), **columns, value=np.float32(0.5))
    assert metrics == {"of https://me:[hidden]@example.org": 0.5}
    assert "raised ValueError" in refusal(checked(logs), **columns, value="text")


# --- the wrapper ---


@pytest.mark.parametrize("reward", [later(fine), FineAsync(), functools.partial(later(fine))])
def test_an_async_reward_stays_async(reward):
    func = checked(reward)
    assert inspect.iscoroutinefunction(type(func).__call__)
    assert not inspect.iscoroutinefunction(type(checked(fine)).__call__)
    assert asyncio.run(func(**COLUMNS)) == [0.5, 0.5]


def test_a_checked_reward_pickles():
    func = guarded(Accuracy(column="gold"), timeout=3)
    assert pickle.loads(pickle.dumps(func)) == func
    assert checked(func, name="other").timeout == 3
