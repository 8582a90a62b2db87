"""The length rewards: words and the full stop; the band, its units and its parts."""

import pytest
from rloo_kit.rewards import LengthBand, SoftOverlong
from rloo_kit.rewards.length import length

from rloo_kit.errors import RewardContractError, RewardLoadError

OPEN = 151667
CLOSE = 151668  # Qwen3's


@pytest.mark.parametrize(
    ("num_words", "score"), [(0, -0.5), (9, -0.5), (10, 1.0), (50, 1.0), (51, 0.0)]
)
def test_score_follows_the_number_of_words(num_words, score):
    assert length(completions=[" ".join(["word"] * num_words)]) == [score]


def test_a_full_stop_at_the_end_adds_half_a_point():
    assert length(completions=["short. ", "short", ". short"]) == [0.0, -0.5, -0.5]


# --- the band -------------------------------------------------------------------------------------


def score(reward, text, ids=None, prompt="Q"):
    completion_ids = None if ids is None else [ids]
    return reward(completions=[text], completion_ids=completion_ids, prompts=[prompt])[0]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, 0.0),
        (4, 1.0),
        (6, 1.0),
        (7, 0.75),
        (10, 0.0),
    ],
)
def test_band_falls_on_a_line_on_both_sides(size, expected):
    assert score(LengthBand(low=4, high=6, falloff=4), "word " * size) == expected
    assert score(LengthBand(low=4, high=6, falloff=4, unit="characters"), "a" * size) == expected
    tokens = LengthBand(low=4, high=6, falloff=4, unit="tokens")
    assert score(tokens, "", [7] * size) == expected


@pytest.mark.parametrize(
    ("part", "unit", "size"),
    [
        *[
            ("completion", "words", 5),
            ("completion", "characters", 32),
            ("completion", "tokens", 8),
        ],
        *[("thought", "words", 3), ("thought", "characters", 7), ("thought", "tokens", 4)],
        *[("answer", "words", 2), ("answer", "characters", 10), ("answer", "tokens", 2)],
    ],
)
def test_band_counts_its_part_in_its_unit(part, unit, size):
    text = "<think>a b\ncde</think>\ngood one."
    ids = [OPEN, 7, 7, 7, 7, CLOSE, 8, 9]
    exact = LengthBand(low=size, high=size, falloff=0, part=part, unit=unit)
    assert score(exact, text, ids) == 1.0
    assert score(LengthBand(low=size + 1, high=99, falloff=0, part=part, unit=unit), text, ids) == 0
    assert score(LengthBand(low=0, high=size - 1, falloff=0, part=part, unit=unit), text, ids) == 0


@pytest.mark.parametrize("unit", ["words", "tokens"])
@pytest.mark.parametrize(
    ("prompt", "text", "ids", "thought", "answer"),
    [
        ("Q<think>", "a</think>b", [1, CLOSE, 2], 1.0, 1.0),
        ("Q<think>", "a", [1], 0.0, 0.0),
        ("Q", "<think>a", [OPEN, 1], 0.0, 0.0),
        ("Q<think>", "a</think>b<think>c", [1, CLOSE, 2, OPEN, 3], 1.0, 0.0),
        ("Q<think>", "a</think>b</think>c", [1, CLOSE, 2, CLOSE, 3], 1.0, 1.0),
        ("Q", "a", [1], 0.0, 1.0),
    ],
)
def test_a_part_that_an_unclosed_thought_leaves_out_scores_nothing(
    unit, prompt, text, ids, thought, answer
):
    for part, expected in {"thought": thought, "answer": answer}.items():
        reward = LengthBand(low=1, high=1, falloff=0, part=part, unit=unit)
        assert score(reward, text, ids, prompt) == expected


def test_band_binds_to_what_its_part_needs(other_tokenizer, plain_tokenizer, monkeypatch):
    monkeypatch.setattr(other_tokenizer, "chat_template", "Q<think>")
    bound = LengthBand(low=1, high=1, falloff=0, unit="tokens", part="answer").bind(other_tokenizer)
    assert (bound.start_token_id, bound.end_token_id, bound.thought_opened) == (5, 6, True)
    chat = [{"role": "user", "content": "Q"}]
    assert score(bound, "", [2, 6, 2], chat) == 1.0
    assert score(bound, "", [2], chat) == 0.0
    assert LengthBand(unit="tokens").bind(plain_tokenizer) == LengthBand(unit="tokens")
    assert LengthBand(part="thought").bind(plain_tokenizer).thought_opened is False
    with pytest.raises(RewardLoadError, match="give end_token_id"):
        LengthBand(unit="tokens", part="thought").bind(plain_tokenizer)


def test_tokens_that_are_not_there_are_named_with_the_remedy():
    with pytest.raises(RewardContractError, match="set unit to 'words'"):
        LengthBand(unit="tokens")(completions=["a"])


@pytest.mark.parametrize(
    ("parameters", "remedy"),
    [
        ({"low": 5, "high": 4}, "set 0 <= low <= high"),
        ({"falloff": -1}, "set it to 0 or more"),
        ({"unit": "lines"}, "give one of: words, tokens, characters"),
        ({"part": "prompt"}, "give one of: completion, thought, answer"),
    ],
)
def test_a_band_that_cannot_be_is_refused(parameters, remedy):
    with pytest.raises(ValueError, match=remedy):
        LengthBand(**parameters)


# --- soft overlong: equation 13 of DAPO -----------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(16_384, 0.0), (16_385, -1 / 4096), (18_432, -0.5), (20_480, -1.0), (20_481, -1.0)],
)
def test_soft_overlong_follows_the_paper(num_tokens, expected):
    reward = SoftOverlong(max_completion_length=20_480, soft_punish_cache=4_096)
    assert reward(completions=["x"], completion_ids=[[7] * num_tokens]) == [expected]


def test_without_a_cache_the_punishment_drops_at_once():
    reward = SoftOverlong(10, 0)
    assert reward(completions=[""] * 2, completion_ids=[[7] * 10, [7] * 11]) == [0.0, -1.0]
    with pytest.raises(ValueError, match="set 0 <= soft_punish_cache <= max_completion_length"):
        SoftOverlong(10, 11)
