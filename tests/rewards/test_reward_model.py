"""The reward model: right rows, right text, memory, calibration, adapters, loading and errors."""

import json
import pickle
import shutil

import pytest
from rloo_kit.rewards import RewardModel
from rloo_kit.rewards._classifier import find_source, fingerprint, load_base, token_ids

from rloo_kit.errors import ModelError
from rloo_kit.models.shape import TINY_THINKER

TEXTS = ["a", "b c d e f g", "h i", "j k l m n o p q r s t", "u v w"]
ROWS = {"completions": TEXTS, "prompts": ["x "] * len(TEXTS)}
ROW = {"completions": ["a b"], "prompts": ["x "]}


def make(folder, **given):
    return RewardModel(str(folder), device="cpu", **given)


def one(folder, **given):
    """Return the score of one text by the model of a folder."""
    return make(folder, **given)(**ROW)[0]


def change(file, **values):
    """Set values in a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture(scope="module")
def reward(model_folder):
    return make(model_folder)


def test_scores_are_the_models_own_logits(reward, model_folder):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(model_folder)
    ids = AutoTokenizer.from_pretrained(model_folder)("x h i", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits[0, 0].item()
    assert reward(completions=["h i"], prompts=["x "]) == pytest.approx([expected], abs=1e-5)


def test_pickle_holds_the_parameters_and_not_the_model(reward):
    reward(**ROW)
    data = pickle.dumps(reward)
    copy = pickle.loads(data)
    assert len(data) < 2000
    assert copy == reward
    assert not copy.is_loaded
    assert reward.is_loaded


def test_a_model_without_a_trained_head_is_refused(base_folder):
    with pytest.raises(ModelError, match=r"score\.weight; give a sequence classifier"):
        one(base_folder)


# --- calibration ---------------------------------------------------------------------------------


@pytest.fixture
def calibrated_folder(model_folder, tmp_path):
    folder = tmp_path / "calibrated"
    shutil.copytree(model_folder, folder)
    (folder / "calibration.json").write_text('{"mean": 0.5, "std": 2.0}')
    return folder


def test_a_calibration_in_the_folder_centres_and_scales(calibrated_folder, model_folder):
    raw = one(model_folder)
    assert one(calibrated_folder) == pytest.approx((raw - 0.5) / 2, abs=1e-5)
    assert one(calibrated_folder, calibrated=False) == pytest.approx(raw, abs=1e-5)


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        ('{"mean": 0, "std": 0}', "std to a number above 0"),
        ("{}", "std to a number above 0"),
        ("[1, 2]", "write it again"),
    ],
)
def test_a_bad_calibration_is_refused(calibrated_folder, content, remedy):
    (calibrated_folder / "calibration.json").write_text(content)
    with pytest.raises(ModelError, match=remedy):
        one(calibrated_folder)


# --- 4 bit, and the place of the weights between calls -------------------------------------------


@pytest.mark.long
def test_in_4_bit_the_head_stays_and_scores_stay_close(reward, model_folder):
    small = make(model_folder, load_in_4bit=True)
    expected = reward(**ROWS)
    found = small(**ROWS)
    kinds = {name: type(m).__name__ for name, m in small._loaded.model.named_modules()}
    assert kinds["score"] == "Linear"
    assert kinds["model.layers.0.mlp.up_proj"] == "Linear4bit"
    assert found == pytest.approx(expected, abs=1.0)
    assert found != pytest.approx(expected, abs=1e-3)


def test_packed_weights_are_computed_in_the_dtype_of_the_device(model_folder, tmp_path):
    packed, _ = load_base(str(model_folder), load_in_4bit=True, device="cpu")
    packed.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["bnb_4bit_compute_dtype"] = "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(config))
    again, _ = load_base(str(tmp_path), load_in_4bit=False, device="cpu")
    layers = [m for m in again.modules() if type(m).__name__ == "Linear4bit"]
    assert {str(layer.compute_dtype) for layer in layers} == {"torch.float32"}


@pytest.mark.gpu
@pytest.mark.parametrize("in_4bit", [False, True])
def test_on_a_gpu_the_weights_wait_in_the_machines_memory(model_folder, in_4bit):
    reward = RewardModel(str(model_folder), load_in_4bit=in_4bit)
    staying = RewardModel(str(model_folder), load_in_4bit=in_4bit, offload=False)
    first = reward(**ROWS)
    for again, device in ((reward, "cpu"), (staying, "cuda")):
        assert again(**ROWS) == pytest.approx(first, abs=1e-3)
        assert {p.device.type for p in again._loaded.model.parameters()} == {device}


# --- adapters ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base_folder(model_folder, tmp_path_factory):
    """Folder of a causal language model, which has no score head."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("bases") / "base"
    shutil.copytree(model_folder, folder)
    LlamaForCausalLM.from_pretrained(model_folder).save_pretrained(folder)
    return folder


@pytest.fixture
def adapter_folder(base_folder, tmp_path):
    """(folder, expected score) of runs/mine, an adapter on models/base in the same project."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    shutil.copytree(base_folder, tmp_path / "project" / "models" / "base")
    folder = tmp_path / "project" / "runs" / "mine"
    torch.manual_seed(3)
    base = AutoModelForSequenceClassification.from_pretrained(base_folder, num_labels=1)
    lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(base, lora)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.5 if "lora" in name else 1.0)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    tokenizer.save_pretrained(folder)
    facts = {"base": "models/base", "base_folder": "../../models/base"}
    facts["base_fingerprint"] = fingerprint(base_folder)
    (folder / "reward_model.json").write_text(json.dumps(facts))
    model.eval()
    with torch.no_grad():
        ids = tokenizer("x a b", return_tensors="pt")["input_ids"]
        return folder, pytest.approx(model(ids).logits[0, 0].item(), abs=1e-4)


def test_an_adapter_is_attached_to_its_base(adapter_folder):
    folder, expected = adapter_folder
    reward = make(folder)
    assert reward(**ROW) == [expected]
    with reward._loaded.model.disable_adapter():
        assert reward(**ROW) != [expected]  # the adapter matters


def test_the_base_is_found_from_another_place(adapter_folder, tmp_path, monkeypatch):
    _, expected = adapter_folder
    moved = tmp_path / "elsewhere"
    (tmp_path / "project").rename(moved)
    monkeypatch.chdir(tmp_path)
    assert one("elsewhere/runs/mine") == expected
    (moved / "runs" / "mine").rename(tmp_path / "alone")
    monkeypatch.chdir(moved)  # models/base, as it was given
    assert one("../alone") == expected


def test_a_base_that_is_not_here_is_named_with_the_remedy(adapter_folder, base_folder, tmp_path):
    folder, expected = adapter_folder
    shutil.rmtree(tmp_path / "project" / "models")
    with pytest.raises(ModelError, match=r"on 'models/base', which is missing; give the folder"):
        one(folder)
    assert one(folder, base=str(base_folder)) == expected


def test_an_adapter_that_records_no_base_does_not_take_the_working_folder(
    adapter_folder, base_folder, monkeypatch
):
    folder, _ = adapter_folder
    (folder / "reward_model.json").write_text("{}")
    change(folder / "adapter_config.json", base_model_name_or_path=None)
    monkeypatch.chdir(base_folder)
    with pytest.raises(ModelError, match="is an adapter on '', which is missing; give the folder"):
        one(folder)


def test_a_file_with_the_name_of_an_organisation_hides_no_model_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").write_text("notes")
    assert find_source("org/taste").facts == {}


def test_another_model_in_the_place_of_the_base_is_refused(adapter_folder, model_folder, tmp_path):
    folder, _ = adapter_folder
    shutil.copy(model_folder / "model.safetensors", tmp_path / "project" / "models" / "base")
    with pytest.raises(ModelError, match="was trained on base model 'models/base', but"):
        one(folder)


@pytest.mark.long
def test_an_adapter_reads_as_it_was_trained_by_default(adapter_folder):
    folder, _ = adapter_folder
    trained = {"keep_thought": True, "max_length": 7, "load_in_4bit": True}
    change(folder / "reward_model.json", **trained)
    for given in ({}, {"keep_thought": False, "max_length": 9, "load_in_4bit": False}):
        reward = make(folder, **given)
        reward(**ROW)
        loaded = reward._loaded
        found = {"keep_thought": loaded.keep_thought, "max_length": loaded.max_length}
        in_4bit = "Linear4bit" in {type(m).__name__ for m in loaded.model.modules()}
        assert found | {"load_in_4bit": in_4bit} == trained | given


def test_an_adapter_without_a_score_head_is_refused(adapter_folder):
    from safetensors.torch import load_file, save_file

    folder, _ = adapter_folder
    weights = load_file(folder / "adapter_model.safetensors")
    weights.pop("base_model.model.score.weight")
    save_file(weights, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"score\.weight; give a sequence classifier"):
        one(folder)


# --- weights and code of unknown origin ----------------------------------------------------------


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_pickled_weights_are_never_read(model_folder, adapter_folder, tmp_path):
    import torch

    sprung = tmp_path / "sprung"
    whole = tmp_path / "whole"
    shutil.copytree(model_folder, whole)
    (whole / "model.safetensors").unlink()
    torch.save(Trap(sprung), whole / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded"):
        one(whole)
    adapter, _ = adapter_folder
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(Trap(sprung), adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match="save the adapter again"):
        one(adapter)
    assert not sprung.exists()
    torch.load(whole / "pytorch_model.bin", weights_only=False)
    assert sprung.exists()  # the trap works


def test_code_that_comes_with_a_model_is_not_run(model_folder, tmp_path):
    folder = tmp_path / "own"
    shutil.copytree(model_folder, folder)
    change(folder / "config.json", model_type="mine", auto_map={"AutoConfig": "code.Config"})
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match="cannot be loaded"):
        one(folder)
    assert not (tmp_path / "ran").exists()


# --- the policy's own tokens ---------------------------------------------------------------------


def test_the_policys_tokens_are_read_with_their_eos(model_folder):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForSequenceClassification.from_pretrained(model_folder).eval()
    texts = ["c d", "e", "c d f"]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids[0].append(tokenizer.eos_token_id)  # the pad token too, since the model has none
    prompt = tokenizer.encode("a b")
    given = {"completions": texts, "prompts": ["a b"] * 3, "completion_ids": ids}
    scores = make(model_folder, policy_tokens=True)(**given)
    model.config.pad_token_id = None  # then the last position is read
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([prompt + own])).logits.item() for own in ids]
    assert scores == pytest.approx(alone, abs=1e-5)
    of_texts = make(model_folder)(**given)
    assert of_texts[0] != pytest.approx(scores[0], abs=1e-3)


# --- the thought ---------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", ["", "<think>\n"])
def test_a_thought_is_read_also_where_the_template_cuts_it_out(opened):
    """The embedded model's template opens thoughts and cuts them out of answers."""
    from transformers import AutoTokenizer

    thinker = AutoTokenizer.from_pretrained(TINY_THINKER)
    prompt = [{"role": "user", "content": "2+2?"}]
    completion = [{"role": "assistant", "content": f"{opened}2+2=4\n</think>\n\n4"}]
    text = thinker.decode(token_ids(thinker, prompt, completion, keep_thought=True))
    assert text == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
        "2+2=4\n</think>\n\n4<|im_end|>"
    )
    text = thinker.decode(token_ids(thinker, prompt, completion))
    assert text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"


@pytest.mark.parametrize("prompt", ["x <think>", [{"role": "user", "content": "x"}]])
def test_a_thought_that_never_closes_leaves_nothing_to_score(
    model_folder, other_tokenizer, monkeypatch, prompt
):
    monkeypatch.setattr(other_tokenizer, "chat_template", "<think>")
    rows = {"prompts": [prompt] * 3, "completions": ["a b c", "", "d </think>a b c"]}
    cut, empty, closed = make(model_folder).bind(other_tokenizer)(**rows)
    assert cut == pytest.approx(empty, abs=1e-5)
    assert cut != pytest.approx(closed, abs=1e-3)
    cut, empty, _ = make(model_folder, keep_thought=True).bind(other_tokenizer)(**rows)
    assert cut != pytest.approx(empty, abs=1e-3)
