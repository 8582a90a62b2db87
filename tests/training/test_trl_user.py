"""What a user of TRL tries first: its parser, its config, its rewards by name, its arguments."""

import dataclasses
import json
import re
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
)
from trl import ModelConfig, RLOOConfig, ScriptArguments, TrlParser

import rloo_kit as rk
from rloo_kit.config.engine_settings import OBEYED_BY, check_settings
from rloo_kit.errors import GenerationError
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.scoring.specs import load_rewards, with_tokenizers
from rloo_kit.training.arguments import BY_DEVICE, _own_config

HERE = Path(__file__).parents[1]


def short(completions, **_):
    return [-len(completion[-1]["content"]) / 100 for completion in completions]


# --- parsers -------------------------------------------------------------------------------------


def parse(*flags):
    parser = TrlParser((ScriptArguments, rk.LeaveOneOutConfig, ModelConfig))
    return parser.parse_args_and_config(["--dataset_name", "none", *flags])[1]


def values_of(config):
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def test_a_parsed_config_is_the_one_that_python_makes(tmp_path):
    same = {"output_dir": str(tmp_path)}
    parsed = parse("--output_dir", str(tmp_path))
    made = rk.LeaveOneOutConfig(**same)
    different = {n for n, v in values_of(made).items() if values_of(parsed)[n] != v}
    assert different <= {"accelerator_config"}  # an object without equality
    assert (parsed.follows_model, parsed.memory_share_given) == (True, False)
    (other,) = HfArgumentParser(rk.LeaveOneOutConfig).parse_args_into_dataclasses([])
    assert other.num_generations == made.num_generations == 4


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--normalize_reward", "true"], "normalize_reward", True),
        (["--stop_on", "kl_explosion", "no_signal"], "stop_on", ["kl_explosion", "no_signal"]),
        (["--no_canary"], "canary", False),
        (["--vllm_gpu_memory_utilization", "0.3"], "memory_share_given", True),
    ],
)
def test_flags_arrive(flags, name, value):
    assert getattr(parse(*flags), name) == value


OLDER = {
    "rloo_k": 4,
    "kl_coef": 0.03,
    "num_ppo_epochs": 2,
    "num_mini_batches": 2,
    "gradient_accumulation_steps": 2,
    "total_episodes": 128,
    "local_rollout_forward_batch_size": 16,
    "stop_token": "eos",
    "normalize_advantage": True,
}


def test_flags_of_the_older_trl_mean_what_python_makes_of_them(tmp_path):
    flags = [word for name, value in OLDER.items() for word in (f"--{name}", str(value))][:-1]
    with pytest.warns(FutureWarning, match="stop_token='eos' is not needed"):
        parsed = parse("--output_dir", str(tmp_path), *flags)
    with pytest.warns(FutureWarning, match="total_episodes is max_steps here: max_steps=16"):
        made = rk.LeaveOneOutConfig(str(tmp_path), **OLDER)
    assert parsed.to_dict() == made.to_dict()


def test_a_flag_of_grpo_is_refused_by_the_kits_sentence():
    with pytest.raises(rk.ConfigError, match="'loss_type': leave it out, RLOO has one loss"):
        parse("--loss_type", "dapo")


@pytest.mark.long
def test_a_script_in_trls_style_trains(tmp_path, monkeypatch, capsys):
    rows = [
        {"prompt": [{"role": "user", "content": f"{n} + 1 ="}], "answer": str(n + 1)}
        for n in range(8)
    ]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = str(HERE / "scripts" / "trl_script.py")
    flags = f"""--model_name_or_path {TINY_THINKER} --dataset_name {data} --output_dir out
        --use_peft --lora_r 4 --lora_target_modules q_proj v_proj --dtype float32
        --normalize_reward moving --doctor false --max_steps 2 --max_completion_length 24
        --learning_rate 1e-3 --beta 0 --save_strategy no --no_canary"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *flags.split()])
    runpy.run_path(script)
    said = capsys.readouterr().out
    assert "steps 2 only lora True\nmoved True\n" in said
    assert "moving moving False False 4 0.001 None 2" in said


# --- TRL's own config ----------------------------------------------------------------------------


def test_trls_config_trains_with_the_values_it_shows(new_trainer, tmp_path):
    given = RLOOConfig(
        str(tmp_path), max_steps=1, max_completion_length=16, learning_rate=1e-3, beta=0.0, seed=7
    )
    before = values_of(given)
    trainer = new_trainer(given)
    trainer.train()
    used = trainer.args
    assert isinstance(used, rk.LeaveOneOutConfig)
    assert (used.num_generations, used.logging_steps) == (2, 10), "TRL's defaults, not the kit's"
    assert (used.max_steps, used.learning_rate, used.seed) == (1, 1e-3, 7)
    assert (used.doctor, used.generation) == (True, "auto"), "the kit's own settings"
    assert values_of(given) == before


UNUSUAL = {
    "generation_batch_size": 16, "per_device_train_batch_size": 4, "num_iterations": 2,
    "bf16": False, "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1},
    "warmup_steps": 0.1, "gradient_checkpointing": False, "vllm_gpu_memory_utilization": 0.5,
    "reward_clip_range": (-1.0, 1.0), "generation_kwargs": {"do_sample": True},
    "accelerator_config": {"split_batches": True}, "chat_template_kwargs": {"a": 1},
}  # fmt: skip


@pytest.mark.parametrize("settings", [{}, UNUSUAL, {"steps_per_generation": 2}])
def test_every_value_of_trls_config_is_kept(tmp_path, settings):
    given = RLOOConfig(str(tmp_path), **settings)
    taken = _own_config(given)
    own = taken.to_dict()
    different = {name for name, value in given.to_dict().items() if own[name] != value}
    assert different <= {"hub_token", *BY_DEVICE} - set(settings)  # a token is not shown
    assert (taken.bf16, taken.fp16) == (given.bf16, given.fp16)
    assert taken.memory_share_given is ("vllm_gpu_memory_utilization" in settings)
    assert taken.follows_model is ("gradient_checkpointing" not in settings)


def test_a_reference_that_follows_the_policy_is_refused_for_an_adapter(new_trainer, config):
    with pytest.raises(rk.ConfigError, match=r"sync_ref_model updates .*: leave it out"):
        new_trainer(config(sync_ref_model=True))


def test_a_padding_token_of_a_given_tokenizer_is_replaced(policy, new_trainer):
    policy[1].add_special_tokens({"pad_token": "<|padding|>"})  # without a row in the embedding
    assert new_trainer().processing_class.pad_token_id == policy[1].eos_token_id


UNDER_UNSLOTH = """
import rloo_kit as rk
from rloo_kit.cli import main
rk.setup()
from unsloth.models.rl import patch_trl_rl_trainers
patch_trl_rl_trainers()
import trl
assert hasattr(trl.RLOOConfig("x"), "unsloth_num_chunks"), "Unsloth has not patched the class"
given = trl.RLOOConfig("out", unsloth_num_chunks=2, max_steps=1,
                       max_completion_length=16, save_strategy="no",
                       learning_rate=1e-3, weight_decay=0.25)
model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=256)
trainer = rk.LeaveOneOutTrainer(
    model=rk.attach_lora(model),
    reward_funcs="accuracy",
    args=given,
    train_dataset=rk.load_prompts("arithmetic", num_prompts=16),
    processing_class=tokenizer,
)
trainer.train()
args, parsed = trainer.args, None
by_device = rk.LeaveOneOutConfig("out")
print(trainer.state.global_step, args.learning_rate, args.weight_decay, args.num_generations)
print((args.bf16, args.fp16) == (by_device.bf16, by_device.fp16), args.seed == given.seed)
flags = ["--max_steps", "3", "--rloo_k", "8", "--unsloth_grpo_mini_batch", "2"]
from peft import LoraConfig
from rloo_kit.models.shape import TINY_THINKER
rk.release(trainer)
trainer = rk.LeaveOneOutTrainer(
    model=str(TINY_THINKER),
    reward_funcs="accuracy",
    args=rk.LeaveOneOutConfig("out", max_steps=1, max_completion_length=16, save_strategy="no"),
    train_dataset=rk.load_prompts("arithmetic", num_prompts=16),
    peft_config=LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
trained = trainer.trained_parameters()
print("only an adapter", bool(trained) and all("lora_" in name for name in trained))
(parsed,) = trl.TrlParser(rk.LeaveOneOutConfig).parse_args_and_config(flags)
print(parsed.max_steps, parsed.num_generations, parsed.weight_decay)
"""


@pytest.mark.long
@pytest.mark.skipif(
    find_spec("triton") is None,
    reason="Unsloth's patcher needs triton: make test-gpu-contract runs it",
)
def test_under_unsloths_patched_class_both_work(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", UNDER_UNSLOTH],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    for line in ("1 0.001 0.25 8", "True True", "only an adapter True", "3 8 0.0"):
        assert line in lines, done.stdout
    for name in ("unsloth_num_chunks=2", "unsloth_grpo_mini_batch=2"):
        assert f"FutureWarning: {name} is not needed: the kit sizes micro" in done.stderr


# --- rewards and their tokenizers ----------------------------------------------------------------


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory):
    """A sequence classifier on the embedded model's weights, without a tokenizer."""
    folder = tmp_path_factory.mktemp("rewards") / "my-reward-model"
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(TINY_THINKER, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return folder


@pytest.mark.long
def test_a_hub_name_in_the_cache_is_a_reward_model(reward_folder, tmp_path, monkeypatch):
    """As after a download: the hub's own cache, and the hub not asked."""
    home = tmp_path / "models--some-org--my.reward-1"
    snapshot = home / "snapshots" / "0123"
    shutil.copytree(reward_folder, snapshot)
    AutoTokenizer.from_pretrained(TINY_THINKER).save_pretrained(snapshot)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    one, local = load_rewards(["some-org/my.reward-1:0.5", str(snapshot)])
    rows = {"completions": ["4", "five"], "prompts": ["2 + 2 = ", "1 + 1 = "]}
    assert (one.name, one.weight) == ("reward_model", 0.5)
    assert one.func(**rows) == local.func(**rows)


@pytest.mark.long
@pytest.mark.parametrize("load", [str, AutoModelForSequenceClassification.from_pretrained])
def test_reward_processing_classes_are_used(new_trainer, reward_folder, load):
    calls = []
    tokenizer = AutoTokenizer.from_pretrained(TINY_THINKER)
    kind = type(tokenizer)

    def noted(name):  # in the class, so that a copy of the tokenizer is noted too
        def method(self, *args, **keywords):
            calls.append(name)
            return getattr(kind, name)(self, *args, **keywords)

        return method

    tokenizer.__class__ = type("Noted", (kind,), {n: noted(n) for n in ("encode", "__call__")})
    sides = (tokenizer.padding_side, tokenizer.truncation_side)
    trainer = new_trainer(
        reward_funcs=[load(reward_folder), short], reward_processing_classes=[tokenizer, None]
    )
    trainer.train()
    assert calls
    assert (tokenizer.padding_side, tokenizer.truncation_side) == sides


def test_a_composed_reward_model_refuses_a_tokenizer_of_trl():
    (reward,) = load_rewards([{"name": "reward_model", "model": "org/name", "scaled_by": 2}])
    assert with_tokenizers([reward], [None]) == [reward]
    with pytest.raises(rk.ConfigError, match="which is composed of other rewards: give None there"):
        with_tokenizers([reward], [object()])


# --- datasets ------------------------------------------------------------------------------------

QUESTIONS = Dataset.from_dict({"question": ["1 + 1 ="], "answer": ["2"]})


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (QUESTIONS, "no column 'prompt', only .*'answer', 'question'.*rename_column"),
        (QUESTIONS.to_iterable_dataset(), "no column 'prompt', only .*'answer', 'question'"),
        (Dataset.from_dict({"prompt": []}), "train_dataset has no rows"),
        (Dataset.from_dict({}), "train_dataset has no rows"),
        ("arithmetic", "train_dataset is a str, must be a datasets.Dataset: use load_prompts"),
        (DatasetDict(train=QUESTIONS), "train_dataset is a DatasetDict, .*one split"),
        (QUESTIONS.to_pandas(), "train_dataset is a DataFrame, .*Dataset.from_pandas"),
    ],
)
def test_a_dataset_that_holds_no_prompts_is_one_sentence(new_trainer, dataset, words):
    with pytest.raises(rk.DataError, match=f"^[^\n]*{words}[^\n]*$"):
        new_trainer(train_dataset=dataset)


# --- settings of who samples ---------------------------------------------------------------------


def test_every_field_of_trl_about_the_engine_is_obeyed_or_refused():
    who_samples = re.compile("vllm|.*transformers_|cache_implementation")
    found = {
        field.name for field in dataclasses.fields(RLOOConfig) if who_samples.match(field.name)
    }
    obeyed = found - OBEYED_BY.keys()
    assert obeyed == {
        "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length"
    }, "write down who obeys the new one"  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "engines"),
    [
        ({"vllm_structured_outputs_regex": "[0-9]+"}, ("vllm", "server", "transformers")),
        ({"vllm_adapter_dir": "shared"}, ("vllm", "transformers")),
        ({"vllm_mode": "server"}, ("vllm", "transformers")),
        ({"vllm_max_model_length": 128, "vllm_enable_sleep_mode": True}, ()),
        ({"cache_implementation": "static"}, ("vllm", "server")),
    ],
)
def test_what_an_engine_does_not_obey_is_one_sentence(config, settings, engines):
    args = config(**settings)
    for engine in ("vllm", "server", "transformers"):
        if engine not in engines:
            check_settings(args, engine)
            continue
        with pytest.raises(
            rk.ConfigError, match=r"^trainer\.\w+ is [^\n]*ignores this setting: [^\n]+$"
        ):
            check_settings(args, engine)


@pytest.mark.parametrize(
    ("engine", "kwargs", "words"),
    [
        ("vllm", {"num_beams": 4}, "has 'num_beams', which cannot be used with vLLM"),
        ("vllm", {"seed": 4}, "has 'seed', .* set generation: transformers, or use only .*: all"),
        ("transformers", {"top_q": 0.5}, "has 'top_q', which cannot be passed to generate"),
        ("transformers", {"num_return_sequences": "many"}, "'many'} were refused"),
        ("transformers", {"max_new_tokens": 9}, "reads it from trainer.max_completion_length"),
        ("vllm", {"temperature": 0.6}, "reads it from trainer.temperature: set it there"),
        ("vllm", {"min_tokens": 4}, "has 'min_tokens', which vLLM cannot combine with"),
        ("transformers", {"eos_token_id": [7]}, "has 'eos_token_id', which cannot be passed"),
        ("transformers", {"num_beams": 2}, "selects beam_sample, but completions must be"),
    ],
)
def test_generation_kwargs_that_cannot_be_obeyed_are_one_sentence(config, engine, kwargs, words):
    args = config(generation_kwargs=kwargs, thinking_budget=8)
    with pytest.raises(rk.ConfigError, match=f"^trainer.generation_kwargs [^\n]*{words}[^\n]*$"):
        check_settings(args, engine)


@pytest.mark.parametrize("second", [[], [[]], [[5, 6]]])
def test_continuous_batching_that_failed_is_an_error(new_trainer, config, second):
    sampling = {"generation": "transformers", "use_transformers_continuous_batching": True}
    sampler = new_trainer(config(**sampling)).sampler
    ended = [5, sampler.eos_token_ids[0]]
    sampler.trl_generate = lambda *_: [ended, [5] * 24]
    assert sampler.draw([[7], [7]])[0] == [ended, [5] * 24]
    sampler.trl_generate = lambda *_: [ended, *second]
    with pytest.raises(GenerationError, match="failed before all completions had ended"):
        sampler.draw([[7], [7]])


@pytest.mark.slow
def test_continuous_batching_does_not_cast_the_adapter(new_trainer, config):
    """TRL casts the whole model before it samples this way."""
    sampling = {"generation": "transformers", "use_transformers_continuous_batching": True}
    trainer = new_trainer(config(bf16=True, **sampling))
    trainer.train()
    assert {p.dtype for p in trainer.trained_parameters().values()} == {torch.float32}
