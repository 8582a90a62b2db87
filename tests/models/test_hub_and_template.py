"""A revision of a hub model, and a chat template from a file."""

import json
import shutil
import sys
from unittest import mock

import pytest
import torch
import yaml
from peft import PeftConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

import rloo_kit as rk
from rloo_kit.errors import ConfigError
from rloo_kit.evaluation.trained import find_trained, load_base
from rloo_kit.export.exporter import export_model
from rloo_kit.job import PreparedJob, read_config
from rloo_kit.models import loading
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.planning.planner import make_plan

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of the hub's with two revisions of a model, whose weights differ."""
    home = tmp_path_factory.mktemp("hub")
    place = home / "models--some-org--thinker"
    (place / "refs").mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(TINY_THINKER)
    for name, commit in COMMITS.items():
        folder = place / "snapshots" / commit
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(TINY_THINKER).save_pretrained(folder)
        (place / "refs" / name).write_text(commit)
        with torch.no_grad():
            model.model.norm.weight += 1.0
    return home


@pytest.mark.long
def test_a_revision_is_loaded_trained_and_found_again_from_its_adapter(
    cache, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

    def load(name="some-org/thinker", **revision):
        return rk.load_model(name, load_in_4bit=False, precision="fp32", **revision)

    def norm(model):
        return model.get_submodule("model.norm").weight.mean().item()

    model, tokenizer = load(revision="v1")
    before = norm(load()[0])
    assert norm(model) == pytest.approx(before + 1, abs=0.01)
    policy = rk.attach_lora(model, r=2)
    config = policy.peft_config["default"]
    assert (config.base_model_name_or_path, config.revision) == ("some-org/thinker", "v1")
    again, _ = load(rk.save_adapter(policy, tokenizer, tmp_path / "adapter"))
    assert norm(again.get_base_model()) == norm(model)
    with pytest.raises(rk.ModelError, match=r"^model 'some-org/thinker' "):
        load(revision="v9")


def test_unsloths_copies_do_not_replace_weights_that_are_here(cache, tmp_path, monkeypatch):
    """Unsloth replaces hub names, also that of a folder, and offline it has not its own copy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    shutil.copytree(TINY_THINKER, tmp_path / "Qwen" / "Qwen3-4B")
    load = mock.Mock()
    monkeypatch.setattr("unsloth.FastLanguageModel.from_pretrained", load)
    found = []
    for offline in (False, True):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        for name in ("Qwen/Qwen3-4B", "some-org/thinker", "some-org/other"):
            loading._load_unsloth(name, None, False)
            found.append(load.call_args.kwargs["use_exact_model_name"])
    assert found == [True, False, False, True, True, False]
    # a copy of Unsloth that is in the cache too: an adapter may have been trained on it
    for copy, exact in (("some-org/other", True), ("some-org/thinker", False)):
        table = mock.Mock(get_model_name=mock.Mock(return_value=copy))
        monkeypatch.setitem(sys.modules, "unsloth.models.loader_utils", table)
        loading._load_unsloth("some-org/thinker", None, False, load_in_4bit=False)
        assert load.call_args.kwargs["use_exact_model_name"] is exact
        table.get_model_name.assert_called_once_with("some-org/thinker", False)
    loading._load_unsloth("Qwen/Qwen3-4B", None, False, use_exact_model_name=False)
    assert load.call_args.kwargs == {"use_exact_model_name": False}


@pytest.mark.parametrize(("in_4bit", "exact"), [(True, True), (False, None)])
def test_the_base_of_an_adapter_is_not_replaced(tmp_path, monkeypatch, in_4bit, exact):
    """Except 4-bit weights, if 16 bit is asked."""
    packed = {"model_type": "qwen3", "quantization_config": {"load_in_4bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(packed))
    found = loading._arguments_of(tmp_path, str(tmp_path), in_4bit, False)
    assert found.get("use_exact_model_name") is exact
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert loading._arguments_of(tmp_path, str(tmp_path), in_4bit, False)["use_exact_model_name"]


@pytest.mark.long
def test_the_revision_of_a_base_is_evaluated_and_exported(cache, tmp_path, monkeypatch):
    """The branch main is not on this machine, and the hub cannot be reached."""
    hub = shutil.copytree(cache, tmp_path / "hub")
    shutil.rmtree(hub / "models--some-org--thinker/snapshots" / COMMITS["main"])
    (hub / "models--some-org--thinker/refs/main").unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    model, tokenizer = rk.load_model("some-org/thinker", revision="v1")
    bare = rk.save_adapter(rk.attach_lora(model, r=2), tokenizer, tmp_path / "bare")
    for run, name in (("first", "some-org/thinker, revision: v1"), ("second", str(bare))):
        shutil.copytree(bare, tmp_path / run / "adapter")
        (tmp_path / run / "run.yaml").write_text(f"model: {{name: {name}}}")
    plan = make_plan(read_config(tmp_path / "first", ())[0])
    assert plan.facts.shape.source == "its config on the hub"
    for place in (bare, tmp_path / "first", tmp_path / "second"):
        rk.evaluate_models([place], num_prompts=1, num_samples=0, base=False, say=str)
        export_model(place, output=place / "out", num_prompts=1, say=str)
        for base, revision in (("some-org/thinker", "v1"), ("other/copy", None)):
            folder = export_model(place, "adapter", output=place / "out", base=base, say=str)
            assert PeftConfig.from_pretrained(folder).revision == revision


def test_a_revision_of_a_folder_is_refused():
    for name in ("tiny-thinker", str(TINY_THINKER)):
        with pytest.raises(ConfigError, match="leave revision out, or give a hub name"):
            rk.load_model(name, revision="v1")


# --- a chat template from a file -----------------------------------------------------------------

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}<think>\n"


def test_the_end_of_a_turn_in_the_template_ends_a_completion(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}<|im_start|>{% endfor %}")
    model, tokenizer = rk.load_model("tiny-thinker", chat_template=file)
    end = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert end in model.generation_config.eos_token_id


@pytest.mark.long
def test_a_template_beside_the_run_file_is_that_of_the_run_and_of_its_adapter(
    tmp_path, monkeypatch
):
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    run = {
        "model": {"chat_template": "mine.jinja", "load_in_4bit": False, "max_seq_length": 128},
        "data": {"num_prompts": 16, "held_out": 4},
        "trainer": {"max_steps": 1, "max_completion_length": 16, "per_device_train_batch_size": 8},
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    monkeypatch.chdir(tmp_path.parent)
    job = PreparedJob(*read_config(tmp_path / "run.yaml", []))
    assert job.tokenizer.chat_template == job.policy[1].chat_template == TEMPLATE
    rk.train(tmp_path / "run.yaml")
    adapter = tmp_path / "run/adapter"
    assert AutoTokenizer.from_pretrained(adapter).chat_template == TEMPLATE
    saved = yaml.safe_load((tmp_path / "run/run.yaml").read_text())
    assert saved["model"]["chat_template"] == str(tmp_path / "mine.jinja")
    (tmp_path / "mine.jinja").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        rk.load_model("tiny-thinker", chat_template=saved["model"]["chat_template"])
    base = load_base(find_trained(tmp_path / "run"))  # the adapter has the template
    assert base.tokenizer.chat_template == TEMPLATE
    (adapter / "chat_template.jinja").rename(tmp_path / "mine.jinja")
    assert find_trained(tmp_path / "run").model.chat_template == str(tmp_path / "mine.jinja")
