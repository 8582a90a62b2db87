"""The reward model: right rows, right text, truncation, loading and its errors."""

import pickle
import shutil

import pytest
from rloo_kit.rewards import RewardModel
from rloo_kit.rewards.reward_model import reward_model

from rloo_kit.errors import ModelError

TEXTS = ["a", "b c d e f g", "h i", "j k l m n o p q r s t", "u v w"]
PROMPTS = ["x "] * len(TEXTS)


@pytest.fixture(scope="module")
def reward(model_folder):
    return RewardModel(str(model_folder), batch_size=2, device="cpu")


def test_scores_do_not_depend_on_the_batch_and_keep_their_rows(reward):
    together = reward(completions=TEXTS, prompts=PROMPTS)
    alone = [reward(completions=[text], prompts=["x "])[0] for text in TEXTS]
    assert together == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 3) for score in together}) == len(TEXTS)


def test_scores_are_the_models_own_logits(reward, model_folder):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(model_folder)
    ids = AutoTokenizer.from_pretrained(model_folder)("x h i", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits[0, 0].item()
    assert reward(completions=["h i"], prompts=["x "]) == pytest.approx([expected], abs=1e-5)


def test_conversations_go_through_the_models_chat_template(reward):
    prompt = [{"role": "user", "content": "x"}]
    completion = [{"role": "assistant", "content": "a b"}]
    chat = reward(completions=[completion], prompts=[prompt])
    assert chat == pytest.approx(
        reward(completions=["a b"], prompts=["user: x assistant: "]), abs=1e-5
    )


def test_the_thought_is_read_only_if_kept(reward, model_folder):
    plain = reward(completions=["a"], prompts=["x "])
    assert reward(completions=["b c </think>a"], prompts=["x "]) == pytest.approx(plain, abs=1e-5)
    keeping = reward_model(str(model_folder), keep_thought=True, device="cpu")
    assert keeping(completions=["b c </think> a"], prompts=["x "]) != pytest.approx(plain, abs=1e-5)


def test_long_texts_lose_their_left_end(model_folder):
    reward = RewardModel(str(model_folder), max_length=3, device="cpu")
    long = reward(completions=["c d e"], prompts=["a b "])
    assert long == pytest.approx(reward(completions=["c d e"], prompts=[""]), abs=1e-5)
    assert long != pytest.approx(reward(completions=["a b c"], prompts=[""]), abs=1e-5)


def test_the_models_own_limit_holds_without_max_length(reward):
    end = "a b " * 32  # 64 tokens, the model's limit
    assert reward(completions=[end], prompts=["c " * 500]) == pytest.approx(
        reward(completions=[end], prompts=[""]), abs=1e-5
    )


def test_an_empty_prompt_and_completion_has_a_score(reward):
    assert len(reward(completions=[""], prompts=[""])) == 1


def test_pickle_holds_the_parameters_and_not_the_model(reward):
    reward(completions=["a"], prompts=["x"])
    data = pickle.dumps(reward)
    copy = pickle.loads(data)
    assert len(data) < 2000
    assert copy == reward
    assert not copy.is_loaded
    assert reward.is_loaded


def test_release_drops_the_model_and_a_call_loads_it_again(model_folder):
    reward = RewardModel(str(model_folder), device="cpu")
    before = reward(completions=["a"], prompts=["x"])
    reward.release()
    assert not reward.is_loaded
    assert reward(completions=["a"], prompts=["x"]) == before


def test_a_missing_folder_is_named_with_the_remedy(tmp_path):
    with pytest.raises(ModelError, match=r"give a folder with config\.json"):
        RewardModel(str(tmp_path / "none"))(completions=["a"], prompts=["x"])


def test_a_folder_that_is_no_model_is_named_with_the_remedy(tmp_path):
    with pytest.raises(ModelError, match=r"cannot be loaded .* give a folder with config\.json"):
        RewardModel(str(tmp_path))(completions=["a"], prompts=["x"])


def test_a_model_without_a_trained_head_is_refused(model_folder, tmp_path):
    from transformers import LlamaForCausalLM

    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    LlamaForCausalLM.from_pretrained(model_folder).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"score\.weight; give a sequence classifier"):
        RewardModel(str(tmp_path), device="cpu")(completions=["a"], prompts=["x"])


def test_a_tokenizer_with_neither_pad_nor_eos_is_refused(model_folder, tmp_path):
    from transformers import AutoTokenizer

    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"set pad_token in its tokenizer_config\.json"):
        RewardModel(str(tmp_path), device="cpu")(completions=["a"], prompts=["x"])


@pytest.mark.parametrize("parameter", ["batch_size", "max_length"])
def test_sizes_below_one_are_refused(parameter):
    with pytest.raises(ValueError, match="set it to 1 or more"):
        RewardModel("anywhere", **{parameter: 0})
