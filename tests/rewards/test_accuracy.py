"""The accuracy reward: text, numbers, letters, missing answers, unclosed thoughts."""

from decimal import Decimal

import pytest
from rloo_kit.rewards import Accuracy
from rloo_kit.rewards.accuracy import accuracy, chosen_letter, last_number


def score(text, answer, prompt="?", reward=accuracy):
    return reward(completions=[text], prompts=[prompt], answer=[answer])[0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("85", "85"),
        (" 85\n", 85),
        ("85.0", "85"),
        ("1,234", 1234),
        ("12345678901234567891", 12345678901234567891),
        ("Paris", "Paris"),
        ("1/2", "1/2"),
    ],
)
def test_equal_texts_and_equal_numbers_are_right(text, answer):
    assert score(f"so</think>{text}", answer) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("86", 85),
        ("", "85"),
        ("the answer is 85", "85"),
        ("$85", "85"),
        ("12,34", "1234"),
        ("0.5", "1/2"),
        ("12345678901234567890", 12345678901234567891),
        ("0.30000000000000004", "0.3"),
        ("paris", "Paris"),
    ],
)
def test_anything_else_is_wrong(text, answer):
    assert score(f"so</think>{text}", answer) == 0.0


@pytest.mark.parametrize("answer", [None, float("nan"), "", "  "])
def test_a_row_without_an_answer_does_not_count(answer):
    assert score("so</think>85", answer) is None


def test_only_what_follows_the_last_close_counts():
    assert score("85</think>86", "85") == 0.0
    assert score("a</think>b</think>85", "85") == 1.0
    assert score("85", "85") == 1.0


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("Q\n<think>\n", "85"), ("Q", "<think>85"), ("Q<think>", "so</think>then<think>85")],
)
def test_an_unclosed_thought_is_wrong(prompt, text):
    assert score(text, "85", prompt) == 0.0


def test_bind_reads_from_the_chat_template_whether_the_thought_is_opened(qwen3_tokenizer):
    body = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    prompt = [{"role": "user", "content": "Q"}]
    completion = [{"role": "assistant", "content": "85"}]
    expected = {"<think>\n": 0.0, "": 1.0, "<think>\n\n</think>\n\n": 1.0}
    for ending, wanted in expected.items():
        qwen3_tokenizer.chat_template = (
            body + "{% if add_generation_prompt %}" + ending + "{% endif %}"
        )
        assert score(completion, "85", prompt, accuracy.bind(qwen3_tokenizer)) == wanted
    qwen3_tokenizer.chat_template = None
    assert accuracy.bind(qwen3_tokenizer).thought_opened is False
    assert score(completion, "85", prompt) == 1.0


# --- other ways to compare ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"), [("85", 1.0), (" 85 ", 1.0), ("85.0", 0.0), ("85.", 0.0), ("1,234", 0.0)]
)
def test_exact_takes_equal_texts_alone(text, expected):
    answer = "1234" if "," in text else "85"
    assert score(f"so</think>{text}", answer, reward=Accuracy(match="exact")) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("85", "85"),
        ("It is 4, no, 85.", "85"),
        ("$1,234.50 in total", "1234.50"),
        ("x = -3", "-3"),
        ("x = \u22123", "-3"),
        (".5", "0.5"),
        ("1,2,3", "3"),
        ("1,234,5678", "5678"),
        ("1/2", "2"),
        ("\\boxed{42}", "42"),
        ("12345678901234567890123456789012345", "12345678901234567890123456789012345"),
    ],
)
def test_the_last_number_of_the_answer_is_found(text, number):
    assert last_number(text) == Decimal(number)
    assert score(f"99</think>{text}", number, reward=Accuracy(match="number")) == 1.0
    assert score(f"{number}</think>{text} 98", number, reward=Accuracy(match="number")) == 0.0


@pytest.mark.parametrize(
    ("given", "expected"), [("3.14", 1.0), ("3.15", 1.0), ("3.1401", 1.0), ("3.151", 0.0)]
)
def test_tolerance_is_an_absolute_difference(given, expected):
    assert score(given, 3.14, reward=Accuracy(match="number", tolerance=0.01)) == expected


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("Answer: B", "B"),
        ("**Answer: B**", "B"),
        ("The correct answer is **B. London**.", "B"),
        ("the answer is (b)", "B"),
        ("$\\boxed{B}$", "B"),
        ("\\boxed{\\text{B}}", "B"),
        ("A. Paris\nB. London\nC. Rome\nThe answer is B.", "B"),
        ("The answer is B. (A) and (C) are wrong.", "B"),
        ("Answer: A. Wait, no. Answer: B", "B"),
        ("(A) is wrong, so (B)", "B"),
        ("It must be A because nothing else fits.", "A"),
        ("\u7b54\u6848\u662fB", "B"),
        ("", None),
        ("A cat, I think.", None),
        ("Either B or C", None),
    ],
)
def test_the_chosen_letter_is_found(text, letter):
    assert chosen_letter(text) == letter
    reward = Accuracy(match="choice")
    assert score(f"(D)</think>{text}", "B", reward=reward) == float(letter == "B")


@pytest.mark.parametrize(
    ("match", "answer"),
    [
        *[("number", answer) for answer in (None, float("nan"), " ", "four", "1/2")],
        *[("choice", answer) for answer in (None, float("nan"), " ", "Paris", 2, "AB")],
        *[("exact", answer) for answer in (None, float("nan"), " ")],
    ],
)
def test_a_row_whose_answer_is_of_another_kind_does_not_count(match, answer):
    assert score("so</think>4 (B)", answer, reward=Accuracy(match=match)) is None


@pytest.mark.parametrize(
    ("parameters", "remedy"),
    [
        ({"match": "fuzzy"}, "give one of: auto, exact, number, choice"),
        ({"match": "number", "tolerance": -1}, "finite number of 0 or more"),
        ({"match": "number", "tolerance": float("inf")}, "finite number of 0 or more"),
        ({"tolerance": 0.1}, "set match to 'number', or remove tolerance"),
    ],
)
def test_parameters_that_cannot_be_are_refused(parameters, remedy):
    with pytest.raises(ValueError, match=remedy):
        Accuracy(**parameters)
