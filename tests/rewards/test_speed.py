"""The cheap rewards are cheap: 10,000 completions of 512 tokens in a second on one core."""

import time

import pytest
from rloo_kit.rewards import (
    Accuracy,
    Length,
    LengthBand,
    RegexFormat,
    TagFormat,
    Thinking,
    ThinkingFormat,
)

COUNT, TOKENS, CLOSE = 10_000, 512, 151668
TEXT = "So the sum of two odd numbers is even why ? Let me check it again , that is 4 + 4 = 8 ."
REWARDS = {
    "length": Length(),
    "length_band words": LengthBand(low=10, high=600),
    "length_band words of the thought": LengthBand(low=10, high=600, part="thought"),
    "length_band tokens": LengthBand(low=10, high=600, unit="tokens"),
    "length_band tokens of the thought": LengthBand(
        low=10, high=600, unit="tokens", part="thought"
    ),
    "thinking": Thinking(),
    "thinking_format": ThinkingFormat(),
    "accuracy auto": Accuracy(),
    "accuracy number": Accuracy(match="number"),
    "accuracy choice": Accuracy(match="choice", column="letter"),
    "format pattern": RegexFormat(r"<think>.*</think>\s*<answer>.*</answer>"),
    "format tags": TagFormat(tags=("think", "answer")),
}


def columns(thought):
    """Columns of completions, each its own object, of which so many tokens are the thought."""
    vocabulary = TEXT.split()
    completions, completion_ids = [], []
    for row in range(COUNT):
        words = [vocabulary[(row + i) % len(vocabulary)] for i in range(TOKENS - 5)]
        text = " ".join(words[:thought]), " ".join(words[thought:])
        completions.append("<think>{}</think><answer>{} 7</answer>".format(*text))
        ids = [1000 + (row + i) % 5000 for i in range(TOKENS)]
        ids[0], ids[thought + 1] = 151667, CLOSE
        completion_ids.append(ids)
    return {
        "completions": completions,
        "completion_ids": completion_ids,
        "prompts": ["What is 3 + 4?"] * COUNT,
        "answer": ["7"] * COUNT,
        "letter": ["B"] * COUNT,
    }


@pytest.fixture(scope="module", params=[480, 20], ids=["long thought", "long answer"])
def batch(request):
    return columns(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("name", REWARDS)
def test_ten_thousand_completions_take_less_than_a_second_of_one_core(name, batch):
    seconds = []
    for _ in range(3):
        began = time.process_time()
        scores = REWARDS[name](**batch)
        seconds.append(time.process_time() - began)
    assert len(scores) == COUNT
    print(f"{name}: {min(seconds):.3f} s")  # noqa: T201
    assert min(seconds) < 1.0
