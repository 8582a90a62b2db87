"""Vision models: loaded with their processor, trained in their language layers alone."""

import json
from importlib.util import find_spec
from pathlib import Path

import datasets
import pytest
import torch
from PIL import Image
from tiny_vision import RUN, save_model, save_squares

import rloo_kit as rk
from rloo_kit.checkpoints.state import checksum_of_rows
from rloo_kit.models.shape import read_shape

# Names of layers in the vision tower that the language model has too
SAME_NAMES = {"gemma3": "q_proj", "qwen2_5_vl": "gate_proj"}
NEEDS_TORCHVISION = pytest.mark.skipif(
    find_spec("torchvision") is None,
    reason="its processor needs torchvision: make test-gpu-contract runs it",
)
FAMILIES = ["gemma3", pytest.param("qwen2_5_vl", marks=NEEDS_TORCHVISION)]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("vision") / request.param, request.param)


def load(folder, **settings):
    return rk.load_model(folder, load_in_4bit=False, max_seq_length=64, **settings)


def test_adapters_are_on_language_layers_alone(folder):
    model, _ = load(folder, images=True)
    names = {name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    policy = rk.attach_lora(model, r=2)
    trained = {name for name, one in policy.named_parameters() if one.requires_grad}
    adapted = {name.removeprefix("base_model.model.").split(".lora_")[0] for name in trained}
    assert len(adapted) == 2 * 7
    assert all(".language_model." in name for name in adapted)
    others = [name for name in names - adapted if name.endswith(SAME_NAMES[folder.name])]
    assert others, "the vision tower has none of these layers: the test proves nothing"


def test_images_load_the_processor_and_text_the_tokenizer(folder):
    model, processor = load(folder, images=True)
    assert processor.image_processor is not None
    tokenizer = processor.tokenizer
    assert tokenizer.padding_side == "left"
    assert tokenizer.convert_tokens_to_ids("<image>") in model.generation_config.suppress_tokens
    model, tokenizer = load(folder)
    assert not hasattr(tokenizer, "image_processor")
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize("images", [True, False])
def test_an_adapter_of_a_vision_model_is_trained_further_with_images(folder, tmp_path, images):
    model, processor = load(folder, images=images)
    policy = rk.attach_lora(model, r=2, target_modules=["q_proj"])
    again, processor = load(rk.save_adapter(policy, processor, tmp_path), images=True)
    assert processor.image_processor is not None
    assert sum(one.requires_grad for one in again.parameters()) == 2 * 2


def test_a_plan_counts_the_whole_model(folder):
    shape = read_shape(str(folder))
    model, _ = load(folder, images=True)
    assert shape.num_parameters == sum(one.numel() for one in model.parameters())
    assert (shape.num_layers, shape.hidden_size) == (2, 32)


def test_a_text_model_reads_no_images():
    with pytest.raises(rk.ModelError, match="cannot read images"):
        load("tiny-thinker", images=True)


def test_rows_with_images_have_a_checksum_of_their_pixels():
    def checksum(colour):
        image = Image.new("RGB", (4, 4), colour)
        rows = {"prompt": ["what?"], "image": [image]}
        return checksum_of_rows(datasets.Dataset.from_dict(rows))

    assert checksum("red") == checksum("red") != checksum("blue")


def test_a_trainer_loads_the_processor_if_only_the_tokenizer_was_loaded(folder, tmp_path):
    model, _ = load(folder)
    save_squares(tmp_path)
    trainer = rk.LeaveOneOutTrainer(
        model=rk.attach_lora(model, r=2),
        reward_funcs="accuracy",
        train_dataset=rk.load_prompts(tmp_path / "squares.jsonl"),
        args=rk.LeaveOneOutConfig(
            str(tmp_path), per_device_train_batch_size=8, max_completion_length=16, doctor=False
        ),
    )
    assert trainer.processing_class.image_processor is not None


@pytest.mark.long
def test_a_run_trains_resumes_and_keeps_thumbnails(tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_squares(tmp_path)
    Path("run.yaml").write_text(RUN.replace("name: model", f"name: {folder}"))
    rk.train("run.yaml", ["trainer.save_steps=1", "trainer.max_steps=1"])
    rk.train("run.yaml", ["trainer.save_steps=1", "trainer.max_steps=2"], resume=True)
    run = Path("run")
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1, 2}
    image, text = rows[0]["prompt"][0]["content"]
    assert text["text"].startswith("what colour")
    with Image.open(run / image["image"]) as thumbnail:
        assert thumbnail.size == (28, 28)
    scores = json.loads((run / "evaluation.json").read_text())
    assert scores["before"]["samples"][0]["prompt"][0]["content"][0]["image"].startswith("images/")
    assert "data:image/jpeg;base64," in (run / "report.html").read_text()
    assert (run / "adapter" / "processor_config.json").is_file()
    model, processor = load(folder, images=True)
    with pytest.raises(rk.DataError, match="the prompts have images"):
        rk.evaluate(model, processor, rk.load_prompts("squares.jsonl"), ["accuracy"])
