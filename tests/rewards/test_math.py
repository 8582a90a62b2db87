"""Math: answers are compared as mathematics, in a process that may end at any time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rloo_kit.rewards import Math

from rloo_kit.errors import RewardContractError, RewardLoadError
from rloo_kit.scoring.contract import OverdueError, within

pytest.importorskip("math_verify")
BOMB = "9^{9^{9^9}}"


@pytest.fixture(scope="module")
def reward():
    reward = Math()
    yield reward
    reward.release()


def score(reward, text, answer, **columns):
    return reward(completions=[f"hm</think>{text}"], answer=[answer], **columns)[0]


def process_of(reward):
    return reward._worker._process


RIGHT = {
    "85.0": 85, "**42**": "42", "The answer is 42.": "42", "6 * 7 = 42": "42",
    "$1,234.50": "1234.5", r"\[x = \frac12\]": "0.5", r"\boxed{3}, and not 4": "3",
    r"50\%": "0.5", r"5\text{ cm}": "5 m", r"\sqrt{8}": r"2\sqrt{2}",
    "x^2 + 2x + 1": "(x+1)^2", "x = 5": "5", "5": "x=5", "{3, 1, 2}": r"\{1,2,3\}",
    r"$(-\infty, 2] \cup [3, 4)$": r"(-\infty,2]\cup[3,4)", "C": r"\text{(C)}",
    "blue": r"\text{blue}", "3\n4": "4", "Sum.\n#### 72": "Long.\nLonger.\n#### 72",
    # An expected answer without delimiters is read whole.
    "6xy": "6xy", r"$\boxed{2\pi}$": "2pi", r"$-\frac{1}{2}xy^2$": r"-\frac12 xy^2",
    r"$\begin{pmatrix}1\\2\end{pmatrix}$": r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    "32348": r"\$32,\!348", "60": "60 km/h",
    "<answer>4</answer>": "4", "Adding 2 and 2 gives it.\n<answer>4</answer>": "4",
    "We get 5 \u2212 8 = \u22123.": "-3", "It is 72\u202f000.": "72000",
}  # fmt: skip
WRONG = {
    "84": "85", "-3": "3", r"\boxed{4}": "3", r"$\boxed{2}$": r"2\pi", "x=5": "y=5",
    "{1, 2}": "{1,2,3}", "[1, 2)": "(1,2)", "B": r"\text{(C)}", "": "42", "6": "6xy", "2": "2pi",
    "2.": r"-\frac12 xy^2", "2.0": r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "6.": "60 km/h",
    "2 and 2 make\n<answer>4</answer>": "2", "We get 5 \u2212 8 = \u22123.": "8",
}  # fmt: skip


@pytest.mark.parametrize(("text", "answer"), RIGHT.items())
def test_answers_are_compared_as_mathematics(reward, text, answer):
    assert score(reward, text, answer) == 1


@pytest.mark.parametrize(("text", "answer"), WRONG.items())
def test_another_answer_is_wrong(reward, text, answer):
    assert score(reward, text, answer) == 0


@pytest.mark.long
def test_an_answer_that_is_missing_or_cannot_be_read_is_no_score_and_the_latter_is_counted(reward):
    said = {}
    golds = [None, float("nan"), "  ", "$$", "?\n!", "1", "$$"]
    given = reward(completions=["1"] * 7, answer=golds, log_metric=said.__setitem__)
    assert given == [None] * 5 + [1.0, None]
    assert said == {"rewards/math/gold_not_parsed": 3.0}
    reward(completions=["1"] * 2, answer=golds[:2], log_metric=pytest.fail)


@pytest.mark.long
def test_a_box_can_be_asked_for():
    boxed = Math(require_boxed=True)
    texts = ["4", r"\boxed{4}", r"\boxed{4} or \boxed{5}", r"\boxed{5}. The final answer is $4$.",
             r"\boxed{4", r"$\boxed{\frac{8}{2}}$, done"]  # fmt: skip
    assert boxed(completions=texts, answer=["4"] * 6) == [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    boxed.release()


def test_a_row_that_takes_too_long_or_too_much_costs_itself_alone():
    reward = Math(timeout_seconds=1, memory_mib=512)
    try:
        texts = ["1", rf"\boxed{{{BOMB}}}", "2", "10000000!!!!!!", "3"]
        given = reward(completions=texts, answer=["1", "7", "2", "7", "3"])
        assert given == [1.0, 0.0, 1.0, 0.0, 1.0]
        assert score(reward, "7", "7") == 1.0
        os.kill(process_of(reward).pid, signal.SIGKILL)
        process_of(reward).wait()
        assert score(reward, "8", "8") == 1.0
    finally:
        reward.release()


@pytest.mark.long
def test_release_ends_the_process_and_the_next_call_starts_one():
    reward = Math()
    assert score(reward, "1", "1") == 1.0
    first = process_of(reward)
    reward.release()
    assert first.poll() is not None
    reward.release()
    assert score(reward, "1", "1") == 1.0
    second = process_of(reward)
    del reward
    assert second.wait(5) is not None


@pytest.mark.long
def test_the_alarm_of_the_trainer_stays_and_a_late_reply_is_not_the_next_ones(reward):
    assert score(reward, "1", "1") == 1.0
    with pytest.raises(OverdueError):
        within(0.5, lambda: score(reward, f"${BOMB}$", "7"))
    assert score(reward, "4", "5") == 0.0
    assert score(reward, "5", "5") == 1.0
    assert within(60, lambda: score(reward, "6", "6")) == 1.0
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


@pytest.mark.long
def test_the_process_ends_with_its_parent():
    code = (
        "import time\nfrom rloo_kit.rewards import Math\nr = Math()\n"
        "r(completions=['1'], answer=['1'])\nprint(r._worker._process.pid, flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        assert b"_math_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        parent.kill()
    deadline = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_missing_column_and_a_missing_library_are_named(monkeypatch, tmp_path):
    with pytest.raises(RewardContractError, match=r"'gold'.* add it, or name another column"):
        Math(column="gold")(completions=["1"], answer=["1"])
    (tmp_path / "math_verify.py").write_text("raise ImportError('not here')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardLoadError, match="ImportError: not here; run `pip install math-ver"):
        Math()(completions=["1"], answer=["1"])


@pytest.mark.long
@pytest.mark.parametrize(
    "text", ["$" * 10**5, "{" * 10**5, "answer: " * 10**4, "\\boxed{" * 10**4,
             "\\frac{1}{" * 300 + "1" + "}" * 300, "1+" * 2000 + "1"],
    ids=lambda text: text[:8],
)  # fmt: skip
def test_an_enormous_answer_is_quick(reward, text):
    began = time.monotonic()
    assert score(reward, text, "86") == 0.0
    assert time.monotonic() - began < 20
