"""Every field of TRL's RLOOConfig acts, is refused, or has no meaning here.

A field that a new version adds is in none of the four lists, and fails the first test: read what
TRL and transformers make of it, and give it the row that is true of the kit's step.

- ``ACTS``: a training with the field set differs from one without in what the list names.
- ``KEPT``: the trainer hands it on to the libraries as it is.
- ``REFUSED``: one sentence, before a model is loaded.
- ``NO_MEANING``: why nothing follows from it, here and in TRL's RLOO.
"""

import contextlib
import dataclasses
import io
import json
import os
import warnings
from unittest.mock import MagicMock

import pytest
import torch
import transformers
import trl
from accelerate import ParallelismConfig
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, TrainerCallback
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import OptimizerNames
from trl.trainer import rloo_trainer

import rloo_kit as rk
from rloo_kit.job import _engine_arguments
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.sampling.choice import check_engine
from rloo_kit.training import step_trainer
from rloo_kit.training.step_choice import choose_step

FIELDS = {field.name: field for field in dataclasses.fields(trl.RLOOConfig) if field.init}
ONLY_IN_SOME_VERSIONS: set[str] = set()
"""Rows of fields that not every version of the range has."""

ACTS = {
    "files": {
        "output_dir": "other", "save_strategy": "no", "save_steps": 1,
        "metric_for_best_model": "eval_fixed", "greater_is_better": False,
    },
    "log": {
        "num_train_epochs": 1, "max_steps": 1, "logging_strategy": "no", "logging_steps": 2,
        "logging_first_step": True, "include_num_input_tokens_seen": "all",
        "eval_strategy": "steps", "eval_steps": 2, "eval_delay": 2, "eval_on_start": True,
    },
    "completions": {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "generation_batch_size": 16, "steps_per_generation": 2, "num_iterations": 2,
        "num_generations": 2, "seed": 7, "max_completion_length": 4, "temperature": 0.2,
        "top_p": 0.1, "top_k": 2, "min_p": 0.5, "repetition_penalty": 5.0,
        "generation_kwargs": {"min_new_tokens": 6}, "chat_template_kwargs": {"mark": "Now. "},
    },
    "prompts": {"shuffle_dataset": False, "ignore_data_skip": True},
    "columns": {"remove_unused_columns": True},
    "weights": {
        "learning_rate": 0.1, "max_grad_norm": 1e-3, "neftune_noise_alpha": 5.0, "beta": 0.5,
        "load_best_model_at_end": True, "epsilon": 0.001, "epsilon_high": 0.001,
        "reward_weights": [1.0, 3.0], "mask_truncated_completions": True,
    },
    "advantages": {"normalize_advantages": True, "reward_clip_range": [-0.1, 0.1]},
    "schedule": {
        "lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"num_cycles": 2},
        "warmup_steps": 1,
    },
    "precision": {"bf16": True, "fp16": True, "tf32": True},
    "hooks": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2},
        "debug": "underflow_overflow",
    },
    "cache": {"torch_empty_cache_steps": 1},
    "passes": {"pad_to_multiple_of": 64},
    "callbacks": {"report_to": "tensorboard", "sync_ref_model": True},
    "printed": {"log_completions": True, "num_completions_to_print": 1},
    "tables": {"log_unique_prompts": True},
    "reference": {"ref_model_mixup_alpha": 0.1, "ref_model_sync_steps": 1},
    "generation": {
        "cache_implementation": "static", "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"max_memory_percent": 0.3},
        "use_transformers_paged": True,
    },
    "error": {
        "trust_remote_code": True, "router_aux_loss_coef": 0.1, "use_vllm": True,
        "vllm_mode": "server", "vllm_server_base_url": "http://127.0.0.1:9/here",
        "vllm_server_host": "localhost", "vllm_server_port": 10, "vllm_max_model_length": 77,
    },
    "warned": {"vllm_server_timeout": 0.1},
    "engine": {"vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": 0.2},
}  # fmt: skip
"""What differs -> fields that it depends on, each with the value to set."""
DIFFERS = {name: what for what, fields in ACTS.items() for name in fields}

KEPT = [
    {"fp16_full_eval": True},  # not with bf16_full_eval
    {
        "dataloader_num_workers": 1, "dataloader_persistent_workers": True,
        "dataloader_prefetch_factor": 4, "dataloader_multiprocessing_context": "spawn",
        "dataloader_in_order": False, "dataloader_drop_last": True, "per_device_eval_batch_size": 4,
        "num_generations_eval": 2, "full_determinism": True, "optim": OptimizerNames.ADEMAMIX,
        "optim_args": "alpha=3", "weight_decay": 0.1, "adam_beta1": 0.5, "adam_beta2": 0.5,
        "adam_epsilon": 0.1, "torch_compile": True, "torch_compile_backend": "eager",
        "torch_compile_mode": "reduce-overhead", "parallelism_config": ParallelismConfig(),
        "accelerator_config": AcceleratorConfig(even_batches=False), "ddp_static_graph": True,
        "ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 3, "ddp_broadcast_buffers": False,
        "log_level": "error", "run_name": "mine", "project": "mine", "trackio_space_id": "me/mine",
        "trackio_bucket_id": "me/mine", "trackio_static_space_id": "me/mine", "hub_token": "hf_1",
        "hub_private_repo": True, "hub_model_id": "me/mine", "hub_revision": "mine",
        "bf16_full_eval": True, "model_init_kwargs": {"dtype": "bfloat16"}, "use_cache": True,
        "disable_dropout": True, "skip_memory_metrics": False,
    },
]  # fmt: skip
"""What TRL, transformers and accelerate read of ``trainer.args``, in methods that are not the kit's
(test_overrides.py has those that are)."""

EVAL = {"eval_strategy": "steps", "eval_steps": 1}
BEST = EVAL | {"save_strategy": "best", "metric_for_best_model": "eval_seen", "keep_last": 9}
OFF_POLICY = {"num_iterations": 2, "learning_rate": 0.003}
SERVER = {
    "generation": "server", "vllm_server_timeout": 0.0, "vllm_server_host": "127.0.0.1",
    "vllm_server_port": 9,
}  # fmt: skip
WITH = {
    "num_train_epochs": {"max_steps": -1},
    "per_device_train_batch_size": {"num_generations": 2},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine"},
    "max_grad_norm": {"optim": "sgd"},
    "gradient_checkpointing_kwargs": {"gradient_checkpointing": True},
    "logging_first_step": {"logging_steps": 2},
    "log_completions": {"num_completions_to_print": 1},
    "num_completions_to_print": {"log_completions": True},
    "log_unique_prompts": {"log_completions": True},
    "eval_steps": EVAL,
    "eval_delay": EVAL,
    "eval_on_start": EVAL,
    "load_best_model_at_end": EVAL
    | {"save_steps": 1, "metric_for_best_model": "eval_seen", "greater_is_better": False},
    "metric_for_best_model": BEST,
    "greater_is_better": BEST,
    "ref_model_mixup_alpha": {"sync_ref_model": True, "ref_model_sync_steps": 1},
    "ref_model_sync_steps": {"sync_ref_model": True},
    "transformers_continuous_batching_config": {"use_transformers_continuous_batching": True},
    "vllm_mode": SERVER | {"generation": "auto", "use_vllm": True},
    "vllm_server_base_url": SERVER,
    "vllm_server_host": SERVER,
    "vllm_server_port": SERVER,
    "vllm_server_timeout": SERVER,
    "vllm_max_model_length": SERVER,
    "epsilon": OFF_POLICY,
    "epsilon_high": OFF_POLICY,
}
"""Other settings of both trainings."""
KINDS = {
    "ignore_data_skip": "resumed",
    "trust_remote_code": "own code",
    "sync_ref_model": "full",
    "ref_model_mixup_alpha": "full",
    "ref_model_sync_steps": "full",
}
"""The policy of both trainings, if it is not a LoRA."""
BUILT = {"callbacks", "engine", "error", "generation", "precision", "warned"}
"""What a trainer shows that has not trained; only a training shows the rest."""

# Value -> what the sentence says
REFUSED = {
    "push_to_hub": (True, "export RUN --to hub"),
    "hub_strategy": ("end", "export RUN --to hub"),
    "hub_always_push": (True, "export RUN --to hub"),
    "save_total_limit": (
        3,
        "trainer.keep_last and trainer.keep_best decide which checkpoints stay: set those",
    ),
    "label_smoothing_factor": (0.1, "no labels to smooth: leave it out"),
    "data_seed": (3, "trainer.seed gives the order of prompts: leave it out"),
    "train_sampling_strategy": ("sequential", "trainer.shuffle_dataset: false"),
    "enable_jit_checkpoint": (True, "SIGTERM saves a checkpoint anyway"),
    "save_only_model": (True, "only TRL's step obeys: set trainer.step to trl"),
    "restore_callback_states_from_checkpoint": (True, "only TRL's step obeys"),
    "ds3_gather_for_generation": (False, "only TRL's step obeys"),
    "vllm_group_port": (3, "ignores this setting: leave it out"),
    "vllm_model_impl": ("transformers", "ignores this setting: leave it out"),
    "vllm_tensor_parallel_size": (2, "ignores this setting: leave it out"),
    "vllm_structured_outputs_regex": ("a+", "ignores this setting: leave it out"),
    "fsdp": (True, "needs a launcher: remove this setting"),
    # with the package, transformers patches the model; its kernels want a GPU
    "use_liger_kernel": (True, "needs the package liger-kernel"),
    "deepspeed": ({"zero_optimization": {"stage": 3}}, "deepspeed"),
}

_METRICS = "RLOO takes no compute_metrics"
_SEVERAL = "of several processes, whose TRL's step hands it to torch.distributed"
NO_MEANING = {
    "auto_find_batch_size": "the kit divides passes by memory itself, and torch reports no error",
    "average_tokens_across_devices": "RLOO's loss is a mean of completions, not of tokens",
    "batch_eval_metrics": _METRICS,
    "include_for_metrics": _METRICS,
    "eval_do_concat_batches": _METRICS,
    "eval_use_gather_object": _METRICS,
    "eval_accumulation_steps": _METRICS,
    "prediction_loss_only": _METRICS,
    "label_names": "prompts have no labels",
    "length_column_name": "of a train_sampling_strategy, which is refused",
    "optim_target_modules": "of GaLore and APOLLO, whose packages are not among the kit's",
    "logging_nan_inf_filter": "a step with NaN or Inf is skipped, so that no loss holds one",
    "disable_tqdm": "there is no tqdm bar: RLOO_KIT_LIVE chooses the view",
    "use_cpu": "of a GPU: a machine without one trains on the CPU",
    "dataloader_pin_memory": "of a GPU: a CPU reads no pinned memory",
    "log_multimodal": "the kit's step trains without images; TRL's obeys it",
    "log_on_each_node": "of several machines",
    "log_level_replica": _SEVERAL,
    "save_on_each_node": "of several machines",
    "ddp_backend": _SEVERAL,
    "ddp_timeout": _SEVERAL,
    "fsdp_config": "of fsdp, which is refused",
    "liger_kernel_config": "of use_liger_kernel, which wants a GPU",
    "local_rank": "of torch.distributed.launch; transformers has no use for it",
    "do_train": "for scripts: no trainer reads it",
    "do_eval": "for scripts: no trainer reads it",
    "do_predict": "for scripts: no trainer reads it",
    "resume_from_checkpoint": "for scripts, which give it to train(); a run file refuses it",
}


# --- the lists ------------------------------------------------------------------------------------


def test_every_field_is_in_one_list():
    listed = [name for fields in (*ACTS.values(), *KEPT, REFUSED, NO_MEANING) for name in fields]
    assert sorted(set(listed)) == sorted(listed), "a field is in two lists"
    new = FIELDS.keys() - set(listed)
    assert not new, f"{sorted(new)}: see what TRL makes of it, and give it a row in this file"
    gone = set(listed) - FIELDS.keys() - ONLY_IN_SOME_VERSIONS
    assert not gone, f"{sorted(gone)}: no field of TRL {trl.__version__}; remove its row"
    assert all(NO_MEANING.values())


def check_config(folder, **settings):
    """Check as a run and a trainer do before a model is loaded."""
    config = rk.LeaveOneOutConfig(str(folder), **settings)
    choose_step(config)
    check_engine(config)


@pytest.mark.parametrize("name", [name for name in REFUSED if name in FIELDS])
def test_a_field_without_effect_is_refused_before_a_model_is_loaded(name, tmp_path):
    value, sentence = REFUSED[name]
    with pytest.raises(rk.ConfigError) as caught:
        check_config(tmp_path, **{name: value})
    assert sentence in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    check_config(tmp_path, **{name: FIELDS[name].default})


OF_TRLS_STEP = [name for name, (_, text) in REFUSED.items() if "only TRL's step" in text]


@pytest.mark.parametrize("name", OF_TRLS_STEP)
def test_trls_own_step_takes_what_only_it_obeys(name, tmp_path):
    config = rk.LeaveOneOutConfig(str(tmp_path), step="trl", **{name: REFUSED[name][0]})
    assert choose_step(config).by_trl


# --- what acts ------------------------------------------------------------------------------------


def letters(completions, **columns):
    letters.columns = sorted(columns)
    return [sum(map(ord, one[-1]["content"])) % 3 / 2 for one in completions]


def kinds(completion_ids, **_):
    return [len({*ids}) % 3 / 2 for ids in completion_ids]


class Watcher(TrainerCallback):
    """Keeps the batches of a training; its evaluations count up."""

    def __init__(self):
        self.batches = []
        self.advantages = []
        self.evaluations = 0

    def on_completions(self, *_, rollout, **__):
        self.batches.append(rollout.sampled)
        self.advantages.append(rollout.advantages.tolist())

    def on_evaluate(self, *_, metrics, **__):
        self.evaluations += 1
        metrics |= {"eval_seen": self.evaluations, "eval_fixed": 0}


def policy_of(kind, folder):
    if kind == "own code":
        folder.mkdir()
        own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
        (folder / "config.json").write_text(json.dumps(own))
        (folder / "mine.py").write_text("raise ImportError('it runs')")
        return str(folder)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=261, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.5, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    if kind == "full":  # TRL reads the reference from there
        model.save_pretrained(folder)
        model.config._name_or_path = str(folder)
        return model
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))


def trainer_of(root, kind, settings):
    usual = {
        "bf16": False, "use_cpu": True, "max_steps": 2, "learning_rate": 0.01,
        "max_completion_length": 6, "gradient_checkpointing": False,
    }  # fmt: skip
    settings = usual | settings
    output = root / settings.pop("output_dir", "out")
    tokenizer = AutoTokenizer.from_pretrained(TINY_THINKER)
    tokenizer.chat_template = "{{ mark or '' }}{{ messages[0]['content'] }}"
    prompts = [[{"role": "user", "content": text}] for text in "abcd"]
    rows = Dataset.from_dict({"prompt": prompts, "answer": ["1", "2", "3", "4"]})
    watcher = Watcher()
    trainer = rk.LeaveOneOutTrainer(
        model=policy_of(kind, root / "policy"),
        reward_funcs=[letters, kinds],
        args=rk.LeaveOneOutConfig(str(output), **settings),
        train_dataset=rows,
        eval_dataset=rows.select([0, 1, 2]),
        processing_class=tokenizer,
        callbacks=[watcher],
    )
    return trainer, watcher


def sums(model):
    return model and [p.detach().double().sum().item() for p in model.parameters()]


def of_trained(trainer, watcher, library, resume):
    """What a training shows."""
    if trainer.args.log_completions:
        trainer.args.report_to = ["trackio"]  # whose tables the library takes
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    batches = watcher.batches
    layers = [*trainer.model.modules()]
    return {
        "log": [[row["step"], sorted(row)] for row in history],
        "schedule": [row.get("lr") for row in history],
        "passes": [row.get("passes/real_tokens") for row in history],
        "weights": sums(trainer.model),
        "reference": sums(trainer.ref_model),
        "hooks": [
            (getattr(m, "gradient_checkpointing", None), len(m._forward_hooks)) for m in layers
        ],
        "prompts": [one.prompts for one in batches],
        "completions": [[one.tokens.prompt_ids, one.completions] for one in batches],
        "advantages": watcher.advantages,
        "columns": letters.columns,
        "cache": library.clear_device_cache.call_count,
        "tables": [len(call[1]["dataframe"]) for call in library.Table.call_args_list],
    }


def of_built(trainer):
    """What a trainer shows that has not trained."""
    return {
        "callbacks": [type(one).__name__ for one in trainer.callback_handler.callbacks],
        "mixed_precision": trainer.accelerator.mixed_precision,
        "engine": _engine_arguments(trainer.args),
        "generation": [str(trainer.generation_config), str(trainer.continuous_batching_config)],
    }


def observe(root, differs, kind, settings):
    """Return what is seen of a trainer with these settings, as far as what differs asks for it."""
    root.mkdir()
    printed = io.StringIO()
    library = MagicMock()
    seen = {"error": None}
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(record=True) as warned,
        contextlib.redirect_stdout(printed),
    ):
        warnings.simplefilter("always")
        patch.setattr(step_trainer, "clear_device_cache", library.clear_device_cache)
        patch.setattr(rloo_trainer, "trackio", library, raising=False)
        try:
            if resume := kind == "resumed":
                trainer_of(root, "lora", {"save_steps": 1, "max_steps": 1})[0].train()
            trainer, watcher = trainer_of(root, kind, settings)
            if differs in BUILT:
                seen |= of_built(trainer)
            else:
                seen |= of_trained(trainer, watcher, library, resume)
        except Exception as exc:
            seen["error"] = f"{type(exc).__name__}: {exc}".replace(str(root), "")
    seen["warned"] = sorted({str(one.message) for one in warned})
    slow = [text for text in seen["warned"] if "=True is slow" in text]  # on most CPUs
    seen["precision"] = [seen.get("mixed_precision"), *slow]
    seen["printed"] = printed.getvalue().count("Completion")
    seen["files"] = sorted(str(path.relative_to(root)) for path in root.glob("o*/checkpoint-*"))
    return seen


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """Returns what is seen with the settings of a row alone; each training is made once."""
    kept = {}

    def get(differs, kind, settings):
        key = (kind, str(settings), differs in BUILT)
        if key not in kept:
            kept[key] = observe(tmp_path_factory.mktemp("usual") / "run", differs, kind, settings)
        return kept[key]

    return get


@pytest.fixture(autouse=True)
def _as_it_was():
    verbosity = transformers.logging.get_verbosity()
    variables = dict(os.environ)
    yield
    transformers.logging.set_verbosity(verbosity)
    torch.use_deterministic_algorithms(False)
    for name in os.environ.keys() - variables:
        del os.environ[name]


@pytest.mark.long
@pytest.mark.parametrize("kept", KEPT)
def test_what_the_libraries_read_is_handed_on(kept, tmp_path):
    wanted = {name: value for name, value in kept.items() if name in FIELDS}
    trainer, _ = trainer_of(tmp_path, "lora", wanted)
    assert {name: str(getattr(trainer.args, name)) for name in wanted} == {
        name: str(value) for name, value in wanted.items()
    }


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in DIFFERS if name in FIELDS])
def test_a_field_acts(name, usual, tmp_path):
    differs = DIFFERS[name]
    kind = KINDS.get(name, "lora")
    settings = WITH.get(name, {})
    before = usual(differs, kind, settings)
    after = observe(tmp_path / "run", differs, kind, settings | {name: ACTS[differs][name]})
    errors = before["error"], after["error"]
    assert before.get(differs) != after.get(differs), errors
    assert differs == "error" or errors[0] == errors[1]
