"""Command lines of the older TRL: what becomes of every flag, and a run of one."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

from rloo_kit.cli import main
from rloo_kit.config.legacy import DEFAULTS, HARMLESS, MOVED, NEEDLESS, REFUSED, SAME, translate
from rloo_kit.config.run_file import EXAMPLES, read_run_file
from rloo_kit.config.trainer_settings import RENAMED, known_trainer_fields
from rloo_kit.errors import ConfigError
from rloo_kit.models.loading import TINY_THINKER

QUICK = """
    --dataset_name trl-internal-testing/descriptiveness-sentiment-trl-style
    --dataset_train_split descriptiveness
    --learning_rate 3e-6
    --output_dir models/minimal/rloo
    --per_device_train_batch_size 64
    --gradient_accumulation_steps 1
    --total_episodes 10000
    --model_name_or_path EleutherAI/pythia-14m
    --reward_model_path EleutherAI/pythia-14m
    --missing_eos_penalty 1.0
"""
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
    --kl_coef 0.03
"""
SMALLEST = "--dataset_name p.jsonl --model_name_or_path m --reward_model_path r"


def of(line, *overrides):
    return translate(shlex.split(line), overrides)


def trainer_of(flags):
    return of(f"{SMALLEST} {flags}").config.trainer


def refused(flags):
    with pytest.raises(ConfigError) as caught:
        of(f"{SMALLEST} {flags}")
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- the seed's two lines ------------------------------------------------------------------------


def test_the_quick_run_becomes_a_run_file_with_the_older_defaults():
    found = of(f"python examples/scripts/rloo/rloo.py {QUICK}")
    assert found.config.trainer == {
        "per_device_train_batch_size": 64, "gradient_accumulation_steps": 1,
        "steps_per_generation": 1, "num_iterations": 4, "num_generations": 2, "beta": 0.05,
        "epsilon": 0.2, "learning_rate": 3e-6, "max_completion_length": 53, "temperature": 0.7,
        "missing_eos_penalty": 1.0, "max_grad_norm": 0.0, "logging_steps": 4,
        "max_steps": 157 * 4,
    }  # fmt: skip
    assert found.config.model.name == "EleutherAI/pythia-14m"
    assert not found.config.model.load_in_4bit
    assert found.config.data.prompts == "trl-internal-testing/descriptiveness-sentiment-trl-style"
    assert found.config.data.split == "descriptiveness"
    assert (found.config.data.chat, found.config.data.held_out) == (False, 100)
    assert found.config.output_dir == "models/minimal/rloo"
    lines = "\n".join(found.lines)
    assert "python examples/scripts/rloo/rloo.py is skipped" in lines
    assert "--total_episodes 10000 -> trainer.max_steps: 628" in lines
    assert "(default) kl_coef -> trainer.beta: 0.05" in lines
    assert "all weights were trained; here a LoRA adapter learns" in lines


def test_the_benchmark_becomes_the_run_file_that_ships_with_the_kit():
    found, shipped = of(TLDR).config, read_run_file(EXAMPLES / "pythia-1b-tldr.yaml")
    assert found.trainer == {
        "per_device_train_batch_size": 16, "gradient_accumulation_steps": 16,
        "steps_per_generation": 32, "num_iterations": 2, "num_generations": 2, "beta": 0.03,
        "epsilon": 0.2, "learning_rate": 3e-6, "max_completion_length": 53, "temperature": 0.7,
        "missing_eos_penalty": 1.0, "max_grad_norm": 0.0, "logging_steps": 4,
        "max_steps": 1954 * 4,  # 512 completions an update
    }  # fmt: skip
    assert shipped.trainer == found.trainer
    assert shipped.rewards == found.rewards == [{
        "name": "reward_model", "policy_tokens": True,
        "model": "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr",
    }]  # fmt: skip
    assert shipped.model == found.model
    assert shipped.data.prompts == found.data.prompts


def folder_of_a_reward_model(folder):
    """Write a sequence classifier of one output, with the embedded model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY_THINKER)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.long
def test_the_quick_run_trains_and_logs_once_an_update(tmp_path):
    """The quick run's line with files of one's own, two updates long."""
    folder_of_a_reward_model(tmp_path)
    prompts = [json.dumps({"prompt": f"What is {n} + 222?"}) for n in range(100, 140)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    flags = dict(part.split() for part in QUICK.split("--")[1:]) | {
        "per_device_train_batch_size": 8,
        "dataset_name": tmp_path / "prompts.jsonl",
        "model_name_or_path": "tiny-thinker",
        "reward_model_path": tmp_path,
        "output_dir": tmp_path / "run",
        "total_episodes": 16,
        "learning_rate": 3e-4,
    }
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    assert main(["legacy", "--set", "data.held_out=2", *words]) == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [row["step"] for row in map(json.loads, lines) if "reward" in row] == [4, 8]
    assert (tmp_path / "run/report.html").is_file()


# --- the arithmetic ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--total_episodes 1000", {"max_steps": 125 * 4, "steps_per_generation": 1}),
        ("--total_episodes 1001", {"max_steps": 126 * 4}),
        ("--total_episodes 100 --num_ppo_epochs 1", {"max_steps": 13, "logging_steps": 1}),
        (
            "--total_episodes 1000 --num_mini_batches 2 --gradient_accumulation_steps 4",
            {"max_steps": 16 * 8, "steps_per_generation": 8, "logging_steps": 8},
        ),
        (
            "--total_episodes 1000 --num_mini_batches 2 --num_processes 4",
            {"max_steps": 16 * 8, "steps_per_generation": 8, "gradient_accumulation_steps": 4},
        ),
        ("--num_train_epochs 1 --rloo_k 4", {"num_train_epochs": 0.25}),
        ("", {"num_train_epochs": 1.5, "learning_rate": 5e-5}),
        ("--warmup_steps 5 --save_steps 10", {"warmup_steps": 20, "save_steps": 40}),
        ("--warmup_ratio 0.1", {"warmup_steps": 0.1}),
        ("--kl-coef=0", {"beta": 0}),
        ("--normalize_advantage --save_total_limit 3", {"normalize_advantages": True}),
        ("--no_logging_nan_inf_filter", {"logging_nan_inf_filter": False}),
        ("--bf16 False", {"bf16": False}),
    ],
)
def test_the_older_arithmetic(flags, expected):
    found = trainer_of(flags)
    assert {name: found[name] for name in expected} == expected
    assert "total_episodes" not in found


def test_the_processes_of_the_launcher_count():
    found = of(f"accelerate launch --num_processes 4 --config_file x.yaml rloo.py {SMALLEST}")
    assert found.config.trainer["gradient_accumulation_steps"] == 4
    assert found.lines[0] == (
        "accelerate launch --num_processes 4 --config_file x.yaml rloo.py is skipped"
    )


def test_model_and_adapter():
    flags = "--load_in_4bit --lora_r 8 --lora_target_modules q_proj v_proj --seed 7"
    found = of(f"rloo_tldr.py {SMALLEST} --sft_model_path s {flags}", "data.held_out=4").config
    assert (found.model.name, found.model.load_in_4bit, found.lora.r) == ("s", True, 8)
    assert found.lora.target_modules == ["q_proj", "v_proj"]
    assert (found.seed, found.data.held_out, found.data.max_prompt_tokens) == (7, 4, 512)


# --- flags ---------------------------------------------------------------------------------------


def test_every_flag_of_the_older_script_has_one_answer():
    tables = (set(NEEDLESS), set(REFUSED), set(MOVED), set(SAME))
    assert sum(map(len, tables)) == len(set.union(*tables))
    assert set(HARMLESS) <= set(REFUSED)
    assert set(DEFAULTS) <= {*RENAMED, *known_trainer_fields()} - set.union(*tables)
    older = "exp_name reward_model_path num_ppo_epochs whiten_rewards kl_coef cliprange rloo_k " \
        "normalize_reward reward_clip_range normalize_advantage token_level_kl " \
        "ds3_gather_for_generation run_name dataset_num_proc num_mini_batches total_episodes " \
        "local_rollout_forward_batch_size num_sample_generations response_length stop_token " \
        "stop_token_id temperature missing_eos_penalty sft_model_path world_size " \
        "num_total_batches micro_batch_size local_batch_size batch_size local_mini_batch_size " \
        "mini_batch_size push_to_hub model_name_or_path model_revision torch_dtype " \
        "trust_remote_code attn_implementation use_peft lora_r lora_alpha lora_dropout " \
        "lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type " \
        "use_rslora use_dora load_in_8bit load_in_4bit bnb_4bit_quant_type " \
        "use_bnb_nested_quant dataset_name dataset_config dataset_train_split " \
        "dataset_test_split dataset_streaming ignore_bias_buffers"  # fmt: skip
    for flag in older.split():
        with pytest.raises(ConfigError) as caught:
            of(f"--{flag} --unknown_on_purpose")
        assert f"unknown flag --{flag}" not in str(caught.value)


def test_needless_flags_change_nothing():
    found = of(f"{SMALLEST} --{' 3 --'.join(sorted(NEEDLESS))} 3")
    assert asdict(found.config) == asdict(of(SMALLEST).config)
    assert f"--exp_name 3 is needless: {NEEDLESS['exp_name']}" in found.lines


@pytest.mark.parametrize("flag", ["stop_token", "use_dora", "reward_clip_range"])
def test_a_flag_that_would_mean_something_else_is_refused_and_false_is_not(flag):
    assert refused(f"--{flag} 3") == f"--{flag}: {REFUSED[flag]}"
    found = of(f"{SMALLEST} --{flag} {HARMLESS.get(flag, False)}")
    assert asdict(found.config) == asdict(of(SMALLEST).config)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--kl_ceof 0.1", "unknown flag --kl_ceof; did you mean 'kl_coef'?"),
        ("--beta 0.1", "--beta is today's name: the older script has --kl_coef"),
        ("--rloo_k two", "--rloo_k is 'two', must be a whole number of at least 1"),
        ("--rloo_k 3", "not whole groups of num_generations 3"),
        ("--kl_coef much", "trainer.beta is 'much', must be a number"),
        ("--total_episodes 1.5", "must be a whole number of completions"),
        ("--warmup_ratio x", "--warmup_ratio is 'x', must be a number"),
        ("--num_train_epochs", "--num_train_epochs is True, must be a number"),
        ("--lora_r x", "lora.r is 'x', must be a whole number"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(flags, says):
    assert says in refused(flags)


@pytest.mark.parametrize("line", ["", "prompts.jsonl", "--rloo_k 2"])
def test_what_is_missing_is_said_and_nothing_is_written(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["legacy", *shlex.split(line)]) == 2
    assert "give --dataset_name" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# --- the run file --------------------------------------------------------------------------------


def test_the_run_file_is_written_once_and_reads_back(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["legacy", "--write", "run.yaml", *shlex.split(TLDR)]) == 0
    assert read_run_file("run.yaml") == of(TLDR).config
    assert "# --kl_coef 0.03 -> trainer.beta: 0.03\n" in Path("run.yaml").read_text()
    assert "rloo-kit train run.yaml" in capsys.readouterr().out
    assert main(["legacy", "--write", "run.yaml", *shlex.split(TLDR)]) == 2
    assert "exists: give another name" in capsys.readouterr().err
    assert main(["legacy", "--write", "away/run.yaml", *shlex.split(TLDR)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
