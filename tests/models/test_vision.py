"""Vision models: loaded with their processor, trained in their language layers alone."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rloo_kit as rk
from rloo_kit.models.shape import read_shape

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from tiny_vision import save_model

# Names of layers in the vision tower that the language model has too
SAME_NAMES = {"gemma3": "q_proj", "qwen2_5_vl": "gate_proj"}


@pytest.fixture(scope="module", params=SAME_NAMES)
def folder(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("vision") / request.param, request.param)


def load(folder, **settings):
    return rk.load_model(folder, load_in_4bit=False, max_seq_length=64, **settings)


def test_adapters_are_on_language_layers_alone(folder):
    model, _ = load(folder, images=True)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    in_tower = {name for name in linear if SAME_NAMES[folder.name] in name.split(".")}
    policy = rk.attach_lora(model, r=2)
    trained = {name for name, one in policy.named_parameters() if one.requires_grad}
    adapted = {name.removeprefix("base_model.model.").split(".lora_")[0] for name in trained}
    assert len(adapted) == 2 * 7
    assert all(".language_model." in name for name in adapted)
    assert in_tower - adapted, "the vision tower has none of these layers: the test proves nothing"


def test_images_load_the_processor_and_text_the_tokenizer(folder):
    model, processor = load(folder, images=True)
    assert processor.image_processor is not None
    tokenizer = processor.tokenizer
    assert tokenizer.padding_side == "left"
    assert tokenizer.convert_tokens_to_ids("<image>") in model.generation_config.suppress_tokens
    model, tokenizer = load(folder)
    assert not hasattr(tokenizer, "image_processor")
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_an_adapter_of_a_vision_model_is_trained_further(folder, tmp_path):
    model, processor = load(folder, images=True)
    policy = rk.attach_lora(model, r=2, target_modules=["q_proj"])
    place = rk.save_adapter(policy, processor, tmp_path / "adapter")
    assert len(load_file(place / "adapter_model.safetensors")) == 2 * 2
    again, processor = load(place, images=True)
    assert processor.image_processor is not None
    assert sum(one.requires_grad for one in again.parameters()) == 2 * 2


def test_a_plan_counts_the_whole_model(folder):
    shape = read_shape(str(folder))
    model, _ = load(folder, images=True)
    assert shape.num_parameters == sum(one.numel() for one in model.parameters())
    assert (shape.num_layers, shape.hidden_size) == (2, 32)


def test_a_text_model_reads_no_images():
    with pytest.raises(rk.ModelError, match="reads no images"):
        load("tiny-thinker", images=True)
