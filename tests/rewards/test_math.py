"""Math: answers are compared as mathematics, in a process that may die without harm."""

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


@pytest.mark.parametrize(
    ("text", "answer", "wanted"),
    [
        ("85", "85", 1), ("85", 85, 1), ("85.0", 85, 1), ("84", "85", 0), ("-3", "3", 0),
        ("The answer is 42.", "42", 1), ("**42**", "42", 1), ("42.", 42.0, 1), ("#### 42", "42", 1),
        ("6 * 7 = 42", "42", 1), ("1,234", "1234", 1), ("$1,234.50", "1234.5", 1),
        (r"$\frac{1}{2}$", "1/2", 1), (r"\[x = \frac12\]", "0.5", 1), (r"\(0.5\)", r"\frac12", 1),
        (r"\boxed{3}, and not 4", "3", 1), (r"\boxed{4}", "3", 0),
        (r"so \boxed{\frac{2}{4}}", "1/2", 1),
        ("50%", "0.5", 1), (r"50\%", "50%", 1), ("5 cm", "5", 1), (r"5\text{ cm}", "5 m", 1),
        (r"2\pi", r"2\pi", 1), (r"2\pi", "2", 0), (r"\sqrt{8}", r"2\sqrt{2}", 1),
        ("x^2 + 2x + 1", "(x+1)^2", 1), ("x = 5", "5", 1), ("5", "x=5", 1), ("x=5", "y=5", 0),
        ("{3, 1, 2}", r"\{1,2,3\}", 1), ("{1, 2}", "{1,2,3}", 0), ("[1, 2)", "[1,2)", 1),
        ("[1, 2)", "(1,2)", 0), (r"$(-\infty, 2] \cup [3, 4)$", r"(-\infty,2]\cup[3,4)", 1),
        (r"$\begin{pmatrix}1\\2\end{pmatrix}$", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
        ("C", r"\text{(C)}", 1), ("B", r"\text{(C)}", 0), ("blue", r"\text{blue}", 1),
        ("I do not know.", "42", 0), ("", "42", 0), ("3\n4", "4", 1),
        ("Sum.\n#### 72", "Long.\nLonger.\n#### 72", 1),
    ],
)  # fmt: skip
def test_answers_are_compared_as_mathematics(reward, text, answer, wanted):
    assert score(reward, text, answer) == wanted


def test_without_an_expected_answer_there_is_no_score(reward):
    said = []
    columns = {"log_metric": lambda name, value: said.append((name, value))}
    answers = [None, float("nan"), "", "  ", "1"]
    assert reward(completions=["1"] * 5, answer=answers, **columns) == [None] * 4 + [1.0]
    assert said == []


@pytest.mark.long
def test_an_expected_answer_that_cannot_be_read_is_no_score_and_is_counted(reward):
    said = []
    columns = {"log_metric": lambda name, value: said.append((name, value))}
    given = reward(completions=["1"] * 4, answer=["$$", "?\n!", "1", "$$"], **columns)
    assert given == [None, None, 1.0, None]
    assert said == [("rewards/math/gold_not_parsed", 3.0)]


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
    assert process_of(reward) is None
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


def test_a_missing_column_and_a_missing_library_are_named(monkeypatch):
    with pytest.raises(RewardContractError, match=r"'gold'.* add it, or name another one"):
        Math(column="gold")(completions=["1"], answer=["1"])
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(RewardLoadError, match="pip install math-verify"):
        Math()(completions=["1"], answer=["1"])


@pytest.mark.long
@pytest.mark.parametrize(
    "text", ["85 " * 100_000, "x" * 10**6, "$" * 10**5, "{" * 10**5, "(" * 4000, "answer: " * 10**4,
             "\\boxed{" * 10**4, "\\frac{1}{" * 300 + "1" + "}" * 300, "1+" * 2000 + "1"],
    ids=lambda text: text[:8],
)  # fmt: skip
def test_an_enormous_answer_is_quick(reward, text):
    began = time.monotonic()
    assert score(reward, text, "86") == 0.0
    assert time.monotonic() - began < 20


@pytest.mark.long
@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("6xy", "6xy", "6"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "2"),
        (r"2\pi rh", r"2\pi rh", "2"),
        ("2pi", r"2\pi", "2"),
        (r"-\frac12 xy^2", r"-\frac{1}{2}xy^2", "2"),
        (r"\$18", "18", "17"),
        (r"\$32,\!348", "32348", "32"),
        ("12 cm^2", "12", "13"),
        ("60 km/h", "60", "6"),
    ],
)
def test_a_bare_gold_is_read_whole(reward, gold, right, wrong):
    boxed = [rf"hm</think>$\boxed{{{text}}}$" for text in (right, wrong)]
    assert reward(completions=[*boxed, f"hm</think>{gold}"], answer=[gold] * 3) == [1.0, 0.0, 1.0]
