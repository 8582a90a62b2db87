"""An adapter that one run left is trained further by another."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from short_training import short_trainer

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.config.run_file import LoraSection, ModelSection, RunConfig
from rloo_kit.evaluation.trained import find_trained
from rloo_kit.job import read_config
from rloo_kit.models.adapters import adapter_tensors, base_of, lora_settings
from rloo_kit.models.loading import load_tokenizer
from rloo_kit.models.shape import read_shape
from rloo_kit.planning.planner import make_plan
from rloo_kit.sampling.engine import active_adapter

ACCURACY = Path(__file__).parents[1] / "scripts" / "plain_peft_accuracy.py"


def write_adapter(folder, settings):
    """Write an adapter as plain PEFT does, its weights moved away from the start."""
    model, _ = rk.load_model("tiny-thinker", max_seq_length=128)
    model = get_peft_model(model, settings)
    torch.manual_seed(5)
    for name, values in model.named_parameters():
        if values.requires_grad and "lora_A" not in name:
            values.data += 0.02 * torch.randn_like(values)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    settings = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]
    )
    return write_adapter(tmp_path_factory.mktemp("first") / "adapter", settings)


def rewritten(adapter, folder, **changes):
    """Copy an adapter with other values in its config."""
    shutil.copytree(adapter, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def scores(model, tokenizer):
    ids = tokenizer("What is 347 + 286?", return_tensors="pt")
    with torch.no_grad():
        return model(**ids).logits.float()


# --- loading -------------------------------------------------------------------------------------


def test_it_is_loaded_on_its_base_and_trains(adapter):
    model, tokenizer = rk.load_model(adapter, max_seq_length=128)
    kept = load_file(adapter / "adapter_model.safetensors")
    mine = adapter_tensors(model)
    assert set(kept) == set(mine)
    assert all(torch.equal(kept[name], mine[name]) for name in kept)
    assert sum(p.requires_grad for p in model.parameters()) == len(kept)
    assert Path(model.peft_config["default"].base_model_name_or_path).name == "tiny-thinker"
    assert rk.attach_lora(model) is model
    assert tokenizer.padding_side == "left"


KINDS = {
    "dora": {"use_dora": True, "target_modules": ["q_proj", "v_proj"]},
    "a pattern of layers": {"target_modules": r".*\.(q|up)_proj"},
    "ranks of their own": {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 8}},
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_lora_computes_what_plain_peft_does(tmp_path, kind):
    settings = LoraConfig(task_type="CAUSAL_LM", r=4, **KINDS[kind])
    folder = write_adapter(tmp_path / "adapter", settings)
    model, tokenizer = rk.load_model(folder, max_seq_length=128)
    base, _ = rk.load_model("tiny-thinker", max_seq_length=128)
    of_base = scores(base, tokenizer)
    plain = scores(PeftModel.from_pretrained(base, folder), tokenizer)
    assert (of_base - plain).abs().max() > 0.1
    assert torch.equal(scores(model, tokenizer), plain)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"r": 16}, r"r is 16, but the adapter in .* has 4: leave r out"),
        ({"target_modules": ["q_proj"]}, r"target_modules is \['q_proj'\], .* leave target_"),
    ],
)
def test_other_lora_settings_are_refused(adapter, asked, message):
    model, _ = rk.load_model(adapter, max_seq_length=128)
    with pytest.raises(rk.ConfigError, match=message):
        rk.attach_lora(model, **asked)
    rk.attach_lora(model, r=4, lora_alpha=8, target_modules=("v_proj", "q_proj"))


def test_the_order_of_layers_in_the_adapters_config_does_not_matter(adapter, tmp_path):
    folder = rewritten(adapter, tmp_path / "adapter", exclude_modules=["up_proj", "k_proj"])
    assert lora_settings(folder, {"exclude_modules": ["k_proj", "up_proj"]})
    for other in (["k_proj"], 5):
        with pytest.raises(rk.ConfigError, match="leave exclude_modules out"):
            lora_settings(folder, {"exclude_modules": other})


def test_the_tokenizer_of_the_adapter_comes_with_it(adapter, tmp_path):
    _, tokenizer = rk.load_model("tiny-thinker", max_seq_length=128)
    folder = rewritten(adapter, tmp_path / "adapter", revision="main")  # as some tools write
    tokenizer.chat_template = "{{ messages[0]['content'] }} (as it was fine-tuned)"
    tokenizer.save_pretrained(folder)
    lost = rewritten(folder, tmp_path / "lost", base_model_name_or_path="/gone")
    assert load_tokenizer(lost).chat_template == tokenizer.chat_template  # without its base
    _, found = rk.load_model(folder, max_seq_length=128)
    assert found.chat_template == tokenizer.chat_template


ON_TRANSFORMERS = """
import sys
import rloo_kit as rk
rk.setup("transformers")
import pytest
sys.exit(pytest.main(["-q", "-n", "0", "--noconftest", sys.argv[1], "-k", sys.argv[2]]))
"""


@pytest.mark.long
def test_plain_transformers_does_the_same():
    chosen = "loaded_on or every_kind or tokenizer or reference_is"
    command = [sys.executable, "-c", ON_TRANSFORMERS, __file__, chosen]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "7 passed" in done.stdout


# --- the base ------------------------------------------------------------------------------------


def test_the_embedded_base_is_found_wherever_the_kit_is(adapter, tmp_path):
    moved = "/elsewhere/site-packages/rloo_kit/assets/tiny-thinker"
    folder = rewritten(adapter, tmp_path / "adapter", base_model_name_or_path=moved)
    assert base_of(folder) == "tiny-thinker"
    assert read_shape(str(folder)).hidden_size == read_shape("tiny-thinker").hidden_size


def test_a_relative_base_starts_from_here_or_from_the_adapter(adapter, tmp_path, monkeypatch):
    (tmp_path / "the-base").mkdir()
    folder = rewritten(adapter, tmp_path / "adapter", base_model_name_or_path="../the-base")
    assert Path(base_of(folder)).samefile(tmp_path / "the-base")
    folder = rewritten(adapter, tmp_path / "other", base_model_name_or_path="./the-base")
    monkeypatch.chdir(tmp_path)
    assert Path(base_of(folder)).samefile(tmp_path / "the-base")


def ia3(adapter, folder):
    settings = IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])
    return write_adapter(folder, settings)


def without_weights(adapter, folder):
    (rewritten(adapter, folder) / "adapter_model.safetensors").unlink()
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            ia3,
            "has peft_type 'IA3' and task_type CAUSAL_LM, but only LoRA adapters for CAUSAL_LM can",
        ),
        (
            lambda adapter, folder: rewritten(adapter, folder, base_model_name_or_path="/no/base"),
            "is for the base '/no/base', which is missing: put the path of the base into",
        ),
        (without_weights, "cannot be put on its base to train further"),
    ],
    ids=["another kind", "no base", "no weights"],
)
def test_what_cannot_be_trained_further_is_one_sentence(adapter, tmp_path, capsys, make, message):
    folder = make(adapter, tmp_path / "adapter")
    with pytest.raises(rk.ModelError, match=message.replace("(", r"\(")) as raised:
        rk.load_model(folder, max_seq_length=128)
    assert "\n" not in str(raised.value)
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump({"model": {"name": str(folder)}, "output_dir": str(tmp_path / "runs")})
    )
    capsys.readouterr()
    assert main(["train", str(file)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


# --- the run file --------------------------------------------------------------------------------


def test_the_run_file_takes_the_adapters_settings(adapter):
    config = RunConfig(model=ModelSection(name=str(adapter)))
    found, _ = read_config(config, [])
    assert found.lora == LoraSection(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]
    )
    made = make_plan(found)
    assert (made.job.rank, made.job.targets) == (4, ("q_proj", "v_proj"))


@pytest.mark.parametrize("rank", [8, 16])  # 16 is what a run file has that does not say it
def test_the_run_file_cannot_give_the_adapter_another_rank(adapter, rank):
    config = RunConfig(model=ModelSection(name=str(adapter)), lora=LoraSection(r=rank))
    with pytest.raises(rk.ConfigError, match=rf"^lora.r is {rank}, .* has 4: leave lora.r out"):
        read_config(config, [])


# --- training ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"trainable_token_indices": [1, 44]}], ids=["", "tokens"])
def test_the_reference_is_the_adapter_as_it_was(tmp_path, more):
    settings = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], **more)
    adapter = write_adapter(tmp_path / "adapter", settings)
    model, tokenizer = rk.load_model(adapter, max_seq_length=128)
    # k3 is never negative, so nothing cancels
    trainer = short_trainer(model, tokenizer, tmp_path / "run", beta=0.5, kl_estimator="k3")
    kept = load_file(adapter / "adapter_model.safetensors")
    trainer.train()
    first, second = (row["kl"] for row in trainer.state.log_history if "kl" in row)
    assert 0 <= first < 1e-9
    assert second > 1e-5
    reference = adapter_tensors(trainer.model, "ref")
    # PEFT keeps the rows of tokens in the dtype of the base
    assert all(torch.equal(reference[name], kept[name].to(reference[name])) for name in kept)
    # what an engine is sent: the active adapter alone, under the names of PEFT's files
    assert active_adapter(trainer.model) == "default"
    sent = adapter_tensors(trainer.model, "default")
    assert set(sent) == set(kept)
    assert not all(torch.equal(sent[name], kept[name]) for name in kept)


def accuracy(adapter):
    """Return what plain PEFT samples right with an adapter, in a process without the kit."""
    done = subprocess.run(
        [sys.executable, ACCURACY, adapter], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


@pytest.mark.long
def test_a_second_run_trains_the_first_ones_adapter_further(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = ["data.held_out=64", "trainer.max_steps=8", "output_dir=runs/first", "lora.r=8"]
    first = rk.train("quickstart", short, say=lambda line: None)
    Path("second.yaml").write_text(
        """
model: {name: runs/first/adapter, max_seq_length: 256}
data: {prompts: arithmetic, held_out: 64}
trainer:
  max_steps: 16
  per_device_train_batch_size: 64
  num_generations: 8
  max_completion_length: 48
  learning_rate: 1.0e-3
  beta: 0.02
output_dir: runs/second
"""
    )
    said = []
    second = rk.train("second.yaml", say=said.append)
    assert second.before.rewards == first.after.rewards
    learned = accuracy("runs/second/adapter")
    assert learned > first.after.rewards["accuracy"] + 0.1
    assert abs(learned - second.after.rewards["accuracy"]) < 0.15  # 256 and 64 sampled answers
    record = yaml.safe_load(Path("runs/second/run.yaml").read_text())
    assert record["model"]["name"] == str(tmp_path / "runs/first/adapter")
    assert record["lora"]["r"] == 8
    found = find_trained("runs/second")
    assert (found.base, found.adapter) == ("tiny-thinker", Path("runs/second/adapter"))
    assert main(["doctor", "runs/second"]) == 0
    shutil.rmtree("runs/first")  # the second adapter needs it no more
    assert find_trained("runs/second").base == "tiny-thinker"
    assert main(["export", "runs/second", "--to", "adapter", "--output", "exported"]) == 0
    exported = json.loads(Path("exported/adapter_config.json").read_text())
    assert "first" not in exported["base_model_name_or_path"]
