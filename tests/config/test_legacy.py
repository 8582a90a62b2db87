"""Command lines of TRL's rloo.py before 0.22: the run file of each, and a training of both."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from rloo_kit.cli import main
from rloo_kit.config.legacy import legacy_run_file
from rloo_kit.config.run_file import EXAMPLES, make_run_config, read_run_file
from rloo_kit.errors import ConfigError
from rloo_kit.models.shape import TINY_THINKER

QUICK = """python examples/scripts/rloo/rloo.py
    --dataset_name trl-internal-testing/descriptiveness-sentiment-trl-style
    --dataset_train_split descriptiveness
    --learning_rate 3e-6
    --output_dir models/minimal/rloo
    --per_device_train_batch_size 64
    --gradient_accumulation_steps 1
    --total_episodes 10000
    --model_name_or_path EleutherAI/pythia-14m
    --reward_model_path EleutherAI/pythia-14m
    --missing_eos_penalty 1.0"""
TLDR = """accelerate launch --config_file examples/accelerate_configs/deepspeed_zero2.yaml
    --output_dir models/minimal/rloo_tldr
    --dataset_name trl-internal-testing/tldr-preference-sft-trl-style
    --dataset_test_split validation
    --num_ppo_epochs 2
    --num_mini_batches 2
    --learning_rate 3e-6
    --per_device_train_batch_size 16
    --gradient_accumulation_steps 16
    --total_episodes 1000000
    --model_name_or_path EleutherAI/pythia-1b-deduped
    --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr
    --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr
    --local_rollout_forward_batch_size 16
    --missing_eos_penalty 1.0
    --stop_token eos
    --kl_coef 0.03"""
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SMALLEST = """--dataset_name p.jsonl --model_name_or_path m --reward_model_path r
    --total_episodes 100"""


def read(line):
    return make_run_config(yaml.safe_load(legacy_run_file(shlex.split(line))))


QUICK_TRAINER = """
per_device_train_batch_size: 64
gradient_accumulation_steps: 1
num_iterations: 4
num_generations: 2
learning_rate: 3.0e-6
max_completion_length: 53
temperature: 0.7
missing_eos_penalty: 1.0
max_grad_norm: 0.0
max_steps: 628  # 157 updates of 64 completions, 4 steps each
"""


def test_the_quick_run_becomes_a_run_file_with_the_older_defaults(capsys):
    assert main(["legacy", "--", *shlex.split(QUICK)]) == 0
    config = make_run_config(yaml.safe_load(capsys.readouterr().out))
    assert config.trainer == yaml.safe_load(QUICK_TRAINER)
    assert (config.model.name, config.model.load_in_4bit) == ("EleutherAI/pythia-14m", False)
    assert config.data.prompts == "trl-internal-testing/descriptiveness-sentiment-trl-style"
    assert (config.data.split, config.data.chat) == ("descriptiveness", False)
    assert config.output_dir == "models/minimal/rloo"


def test_the_benchmark_becomes_the_run_file_that_ships_with_the_kit():
    found = read(TLDR)
    shipped = read_run_file(EXAMPLES / "pythia-1b-tldr.yaml")
    # 1,954 updates of 512 completions, and one line of metrics for each
    assert shipped.trainer == found.trainer | {"logging_steps": 4, "epsilon": 0.2}
    assert shipped.rewards == found.rewards
    assert shipped.model == found.model
    assert shipped.data == found.data
    assert set(shipped.lora.target_modules) < set(found.lora.target_modules)
    with_script = TLDR.replace("zero2.yaml\n", "zero2.yaml examples/scripts/rloo/rloo_tldr.py\n")
    assert read(with_script) == found


def test_flags_are_read_as_the_older_parser_reads_them():
    flags = (
        "--sft_model_path=s --normalize-advantage --seed 7 --num_mini_batches 2 --warmup_ratio 0.1"
    )
    config = read(f"{SMALLEST} {flags}")
    assert (config.model.name, config.seed) == ("s", 7)
    assert config.trainer["normalize_advantages"]
    assert config.trainer["warmup_steps"] == 0.1
    assert config.trainer["max_steps"] == 7 * 8  # updates of 16 completions, 8 steps each


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "does not give --dataset_name and --model_name_or_path and --reward_model_path and"),
        (f"{SMALLEST} --rlook 3", "unknown trainer setting 'rlook'; did you mean 'rloo_k'?"),
        (f"{SMALLEST} --stop_token period", "'stop_token': leave it out, completions end at"),
        (f"{SMALLEST} --save_steps x", "trainer.save_steps is 'x', must be"),
    ],
)
def test_what_is_wrong_is_one_sentence(line, says):
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        legacy_run_file(shlex.split(line))
    assert says in str(caught.value)


# --- both command lines, with what stands here for their models and data sets --------------------

SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """Folders for the base, a reward model with a trained score head, and both data sets."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, GPTNeoXConfig
    from transformers import GPTNeoXForCausalLM as Policy
    from transformers import GPTNeoXForSequenceClassification as Reward

    folder = tmp_path_factory.mktemp("legacy")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY_THINKER)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = {**SHAPE, **ends, "vocab_size": len(tokenizer), "num_attention_heads": 2}
    policy = Policy(GPTNeoXConfig(**shape))
    reward = Reward(GPTNeoXConfig(**shape, num_labels=1))
    torch.nn.init.normal_(reward.score.weight)
    for name, model in (("pythia", policy), ("sft", policy), ("reward", reward)):
        torch.nn.init.normal_(model.get_input_embeddings().weight)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    said = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]
    rows = [{"prompt": f"{n} + 1 =", "chosen": said, "messages": said} for n in range(360)]
    for file in ("sentiment/data/descriptiveness", "tldr/data/train", "tldr/data/validation"):
        Dataset.from_list(rows).to_parquet(folder / f"{file}-00000-of-00001.parquet")
    return folder


QUICK_HERE = {"total_episodes": 64, "dataset_name": "sentiment", "model_name_or_path": "pythia"}
TLDR_HERE = {"total_episodes": 512, "dataset_name": "tldr", "sft_model_path": "sft"}


@pytest.mark.long
@pytest.mark.parametrize(("line", "here"), [(QUICK, QUICK_HERE), (TLDR, TLDR_HERE)])
def test_both_command_lines_train(stand_ins, tmp_path, monkeypatch, capsys, line, here):
    from safetensors.torch import load_file

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    for flag, name in {**here, "reward_model_path": "reward"}.items():
        value = stand_ins / name if isinstance(name, str) else name
        words[words.index(f"--{flag}") + 1] = str(value)
    assert main(["legacy", "--", *words]) == 0
    Path("run.yaml").write_text(capsys.readouterr().out)
    assert main(["train", "run.yaml"]) == 0
    folder = Path(words[words.index("--output_dir") + 1])
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == 4
    assert max(row.get("episode", 0) for row in rows) == here["total_episodes"]
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert any(values.any() for name, values in adapter.items() if "lora_B" in name)
