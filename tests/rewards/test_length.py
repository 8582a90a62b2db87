"""The length rewards: words and the full stop; the band, its units and its parts."""

import pytest
from rloo_kit.rewards import LengthBand, SoftOverlong
from rloo_kit.rewards.length import length

from rloo_kit.errors import RewardContractError, RewardLoadError

OPEN = 151667
CLOSE = 151668  # Qwen3's


@pytest.mark.parametrize(
    ("text", "score"),
    [("word " * 9, -0.5), ("word " * 10, 1.0), ("word " * 50, 1.0), ("word " * 51, 0.0),
     ("short. ", 0.0), (". short", -0.5)],
)  # fmt: skip
def test_score_follows_the_number_of_words_and_a_full_stop_at_the_end(text, score):
    assert length(completions=[text]) == [score]


def test_prompts_that_are_not_read_may_be_missing():
    assert length(completions=["word", "word"], prompts=["Q"]) == [-0.5, -0.5]


# --- the band -------------------------------------------------------------------------------------


def score(reward, text, ids=None, prompt="Q"):
    completion_ids = None if ids is None else [ids]
    return reward(completions=[text], completion_ids=completion_ids, prompts=[prompt])[0]


@pytest.mark.parametrize(
    ("part", "words", "characters", "tokens"),
    [("completion", 5, 32, 8), ("thought", 3, 7, 4), ("answer", 2, 10, 2)],
)
def test_band_counts_its_part_in_its_unit(part, words, characters, tokens):
    text = "<think>a b\ncde</think>\ngood one."
    ids = [OPEN, 7, 7, 7, 7, CLOSE, 8, 9]
    for unit, size in {"words": words, "characters": characters, "tokens": tokens}.items():
        exact = LengthBand(low=size, high=size, falloff=0, part=part, unit=unit)
        assert score(exact, text, ids) == 1.0


@pytest.mark.parametrize(
    ("prompt", "text", "ids", "thought", "answer"),
    [
        ("Q<think>", "a", [1], 0.0, 0.0),
        ("Q<think>", "a</think>b<think>c", [1, CLOSE, 2, OPEN, 3], 1.0, 0.0),
        ("Q<think>", "a</think>b</think>c", [1, CLOSE, 2, CLOSE, 3], 1.0, 1.0),
        ("Q", "a", [1], 0.0, 1.0),
    ],
)
def test_a_part_that_an_unclosed_thought_leaves_out_scores_nothing(
    prompt, text, ids, thought, answer
):
    for part, expected in {"thought": thought, "answer": answer}.items():
        for unit in ("words", "tokens"):
            reward = LengthBand(low=1, high=1, falloff=0, part=part, unit=unit)
            assert score(reward, text, ids, prompt) == expected


def test_band_binds_to_what_its_part_needs(plain_tokenizer):
    assert LengthBand(unit="tokens").bind(plain_tokenizer) == LengthBand(unit="tokens")
    assert LengthBand(part="thought").bind(plain_tokenizer).thought_opened is False
    with pytest.raises(RewardLoadError, match="give end_token_id"):
        LengthBand(unit="tokens", part="thought").bind(plain_tokenizer)


def test_tokens_that_are_not_there_are_named_with_the_remedy():
    with pytest.raises(RewardContractError, match="set unit to 'words'"):
        LengthBand(unit="tokens")(completions=["a"])


# --- soft overlong: equation 13 of DAPO -----------------------------------------------------------


def test_without_a_cache_the_punishment_drops_at_once():
    reward = SoftOverlong(10, 0)
    assert reward(completions=[""] * 2, completion_ids=[[7] * 10, [7] * 11]) == [0.0, -1.0]
