"""A revision of a hub model, and a chat template from a file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import rloo_kit as rk
from rloo_kit.config.run_file import make_run_config
from rloo_kit.errors import ConfigError
from rloo_kit.job import PreparedJob
from rloo_kit.models.shape import TINY_THINKER

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
def test_a_revision_is_loaded_trained_and_found_again_from_its_adapter(cache, tmp_path):
    code = (
        "import rloo_kit as rk\n"
        "import functools\n"
        "how = {'load_in_4bit': False, 'max_seq_length': 64, 'precision': 'fp32'}\n"
        "load = functools.partial(rk.load_model, **how)\n"
        "norm = lambda model: round(float(model.get_base_model().model.norm.weight.mean()), 3)\n"
        "model, tokenizer = load('some-org/thinker', revision='v1')\n"
        "model = rk.attach_lora(model, r=2)\n"
        "config = model.peft_config['default']\n"
        "print(config.base_model_name_or_path, config.revision)\n"
        "rk.save_adapter(model, tokenizer, 'adapter')\n"
        "main = rk.attach_lora(load('some-org/thinker')[0], r=2)\n"
        "again, _ = load('adapter')\n"
        "print(norm(model) - norm(main), norm(again) - norm(model))\n"
        "try:\n"
        "    load('some-org/thinker', revision='v9')\n"
        "except rk.ModelError as exc:\n"
        "    print(exc)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, check=False,
        env={**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    named, norms, refused = done.stdout.strip().splitlines()[-3:]
    assert named == "some-org/thinker v1"
    assert [float(one) for one in norms.split()] == [1.0, 0.0]
    assert refused.startswith("model 'some-org/thinker' ")


def test_a_revision_of_a_folder_is_refused():
    for name in ("tiny-thinker", str(TINY_THINKER)):
        with pytest.raises(ConfigError, match="leave revision out, or give a hub name"):
            rk.load_model(name, revision="v1")


# --- a chat template from a file -----------------------------------------------------------------

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}<think>\n"


def test_a_template_beside_the_run_file_is_the_policys_and_the_adapters(tmp_path, monkeypatch):
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    monkeypatch.chdir(tmp_path.parent)
    run = {"model": {"chat_template": "mine.jinja", "load_in_4bit": False}}
    job = PreparedJob(make_run_config(run), tmp_path)
    model, tokenizer = job.policy
    expected = "[user] 2 + 2\n<think>"  # Jinja drops a last newline
    for one in (job.tokenizer, tokenizer):
        turn = [{"role": "user", "content": "2 + 2"}]
        assert one.apply_chat_template(turn, tokenize=False) == expected
    folder = rk.save_adapter(model, tokenizer, tmp_path / "adapter")
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE


@pytest.mark.long
def test_a_run_with_a_template_is_evaluated_with_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    run = {
        "model": {"chat_template": "mine.jinja", "load_in_4bit": False, "max_seq_length": 128},
        "data": {"num_prompts": 16, "held_out": 4},
        "trainer": {"max_steps": 1, "max_completion_length": 16, "per_device_train_batch_size": 8},
        "output_dir": "run",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    monkeypatch.chdir(tmp_path)
    rk.train("run.yaml")
    saved = yaml.safe_load(Path("run/run.yaml").read_text())
    assert saved["model"]["chat_template"] == str(tmp_path / "mine.jinja")
    (tmp_path / "mine.jinja").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        rk.load_model("tiny-thinker", chat_template=saved["model"]["chat_template"])
