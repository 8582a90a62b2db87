"""Loading, and what a loaded model promises."""

import pytest
import torch
from rloo_kit.rewards import end_of_thinking_id

import rloo_kit as rk
from rloo_kit.chat_templates import end_of_turn_id


@pytest.fixture(scope="module")
def loaded():
    return rk.load_model("tiny-thinker", max_seq_length=256)


def test_the_tokenizer_is_ready_for_batches(loaded):
    _, tokenizer = loaded
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token not in (None, tokenizer.eos_token)


def test_every_end_of_turn_token_stops_the_model(loaded):
    model, tokenizer = loaded
    ends = model.generation_config.eos_token_id
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in ends
    assert end_of_turn_id(tokenizer) in ends
    assert tokenizer.convert_ids_to_tokens(end_of_thinking_id(tokenizer)) == "</think>"


def test_the_weights_are_nf4(loaded):
    model, _ = loaded
    layers = [m for m in model.modules() if type(m).__name__ == "Linear4bit"]
    assert len(layers) == 4 * 7
    assert {m.weight.quant_state.quant_type for m in layers} == {"nf4"}
    assert not any(m.support_avx512bf16_for_cpu for m in layers)


def test_the_template_opens_the_thought_in_the_prompt(loaded):
    _, tokenizer = loaded
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 1 + 2?"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize("text", ["What is 347 + 286?", "žluťoučký kůň 😀", "<think>a</think>b"])
def test_the_tokenizer_gives_every_text_back(loaded, text):
    _, tokenizer = loaded
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_embedded_model_is_small_and_has_a_card():
    from rloo_kit.models import TINY_THINKER

    assert (TINY_THINKER / "model.safetensors").stat().st_size <= 4 * 1024**2
    card = (TINY_THINKER / "README.md").read_text()
    assert "0.52 sampled" in card


def test_an_adapter_is_saved_whole_and_loads_again(loaded, tmp_path):
    from peft import PeftModel
    from safetensors.torch import load_file

    model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=256)
    policy = rk.attach_lora(model, r=4, seed=3)
    folder = rk.save_adapter(policy, tokenizer, tmp_path / "adapter")
    assert not list(tmp_path.glob(".*"))
    weights = load_file(folder / "adapter_model.safetensors")
    assert len(weights) == 4 * 7 * 2
    fresh, _ = rk.load_model("tiny-thinker", max_seq_length=256)
    again = PeftModel.from_pretrained(fresh, folder)
    mine = {n: p for n, p in policy.named_parameters() if "lora_" in n}
    theirs = dict(again.named_parameters())
    assert all(torch.equal(p.float(), theirs[n].float()) for n, p in mine.items())


def test_a_folder_of_other_files_is_not_replaced(tmp_path):
    model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=256)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(rk.ModelError, match="give a folder of its own"):
        rk.save_adapter(rk.attach_lora(model), tokenizer, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_seed_fixes_the_adapters_start():
    def start(seed):
        model, _ = rk.load_model("tiny-thinker", max_seq_length=256)
        policy = rk.attach_lora(model, seed=seed)
        return torch.cat([p.flatten() for n, p in policy.named_parameters() if "lora_A" in n])

    first, same, other = start(1), start(1), start(2)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_a_run_folders_adapter_can_be_trained_on(tmp_path):
    model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=256)
    folder = rk.save_adapter(rk.attach_lora(model), tokenizer, tmp_path / "adapter")
    again, _ = rk.load_model(folder, max_seq_length=256)
    assert hasattr(again, "peft_config")


def test_too_big_for_the_memory_says_how_much(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(400 * 1024**3)  # sparse
    with pytest.raises(rk.ModelError, match=r"needs \d+\.\d GiB .* or use a smaller model"):
        rk.load_model(tmp_path)
