"""Every field of TRL's RLOOConfig acts, is refused, or has no meaning here.

A field that a new version adds is in no list, and fails the first test: read what TRL and
transformers make of it, and give it the row that is true of the kit's step.

- ``ACTS``: a training with the field set differs from one without in what the row names.
- ``IN_REFERENCE``: tests/reference/test_covering_arrays.py shows its effect on the gradient.
- ``PASSED_ON``: the kit hands the value on, and transformers alone reads it.
- ``REFUSED``: one sentence, before a model is loaded.
- ``NO_MEANING``: why nothing follows from it, here and in TRL's RLOO.
"""

import contextlib
import dataclasses
import io
import json
import os
import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers
import trl
from accelerate import ParallelismConfig
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, TrainerCallback
from transformers.integrations import TrackioCallback
from transformers.trainer_pt_utils import AcceleratorConfig
from trl.trainer import rloo_trainer

import rloo_kit as rk
from rloo_kit.job import _engine_arguments
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.sampling.choice import check_engine
from rloo_kit.training import step_trainer
from rloo_kit.training.step_choice import choose_step

FIELDS = {field.name: field for field in dataclasses.fields(trl.RLOOConfig) if field.init}


class Acts:
    """One row: the value to set, what then differs, and kind and settings of both trainings.

    ``says``: what the error holds where an error differs.
    """

    def __init__(self, value, differs, kind="lora", says=None, **context):
        self.value = value
        self.differs = differs
        self.kind = kind
        self.says = says
        self.context = context


EVAL = {"eval_strategy": "steps", "eval_steps": 1}
BEST = EVAL | {"save_strategy": "best", "metric_for_best_model": "eval_seen", "keep_last": 9}
SERVER = {
    "generation": "server", "vllm_server_timeout": 0.0, "vllm_server_host": "127.0.0.1",
    "vllm_server_port": 9,
}  # fmt: skip
TRACKIO = {"trackio_space_id": "me/space"}
ACTS = {
    # how long, and on what
    "output_dir": Acts("other", "files"),
    "num_train_epochs": Acts(1, "log", max_steps=-1),
    "max_steps": Acts(1, "log"),
    "per_device_train_batch_size": Acts(4, "completions", num_generations=2),
    "per_device_eval_batch_size": Acts(4, "eval_loader"),
    "gradient_accumulation_steps": Acts(2, "completions"),
    "generation_batch_size": Acts(16, "completions"),
    "steps_per_generation": Acts(2, "completions"),
    "num_iterations": Acts(2, "completions"),
    "num_generations": Acts(2, "completions"),
    "num_generations_eval": Acts(2, "eval_loader"),
    "shuffle_dataset": Acts(False, "prompts"),
    "remove_unused_columns": Acts(True, "columns"),
    "seed": Acts(7, "completions"),
    "full_determinism": Acts(True, "determinism"),
    "dataloader_drop_last": Acts(True, "eval_loader"),
    # optimizer and schedule
    "learning_rate": Acts(0.1, "weights"),
    "lr_scheduler_type": Acts("constant", "schedule"),
    "lr_scheduler_kwargs": Acts({"num_cycles": 2}, "schedule", lr_scheduler_type="cosine"),
    "warmup_steps": Acts(1, "schedule"),
    "max_grad_norm": Acts(1e-3, "weights", optim="sgd"),
    # how it is computed
    "bf16": Acts(True, "precision"),
    "fp16": Acts(True, "precision"),
    "bf16_full_eval": Acts(True, "dtype"),
    "fp16_full_eval": Acts(True, "dtype"),
    "tf32": Acts(True, "precision"),
    "gradient_checkpointing": Acts(True, "hooks"),
    "gradient_checkpointing_kwargs": Acts(
        {"every_n_layers": 2}, "hooks", gradient_checkpointing=True
    ),
    "use_cache": Acts(True, "model"),
    "neftune_noise_alpha": Acts(5.0, "weights"),
    "torch_empty_cache_steps": Acts(1, "cache"),
    "pad_to_multiple_of": Acts(64, "passes"),
    "ddp_find_unused_parameters": Acts(True, "ddp"),
    "debug": Acts("underflow_overflow", "hooks"),
    # the log
    "logging_strategy": Acts("no", "log"),
    "logging_steps": Acts(2, "log"),
    "logging_first_step": Acts(True, "log", logging_steps=2),
    "include_num_input_tokens_seen": Acts("all", "log"),
    "log_level": Acts("error", "verbosity"),
    "report_to": Acts("tensorboard", "callbacks"),
    "run_name": Acts("mine", "trackio"),
    "project": Acts("mine", "trackio"),
    "trackio_space_id": Acts("me/mine", "trackio"),
    "trackio_bucket_id": Acts("me/mine", "trackio"),
    "trackio_static_space_id": Acts("me/mine", "trackio", **TRACKIO),
    "skip_memory_metrics": Acts(False, "metrics"),
    "log_completions": Acts(True, "printed", num_completions_to_print=1),
    "num_completions_to_print": Acts(1, "printed", log_completions=True),
    "log_unique_prompts": Acts(True, "tables", log_completions=True),
    # evaluation
    "eval_strategy": Acts("steps", "log"),
    "eval_steps": Acts(2, "log", **EVAL),
    "eval_delay": Acts(2, "log", **EVAL),
    "eval_on_start": Acts(True, "log", **EVAL),
    # checkpoints and uploads
    "save_strategy": Acts("no", "files"),
    "save_steps": Acts(1, "files"),
    "load_best_model_at_end": Acts(
        True,
        "weights",
        **EVAL,
        save_steps=1,
        metric_for_best_model="eval_seen",
        greater_is_better=False,
    ),
    "metric_for_best_model": Acts("eval_fixed", "files", **BEST),
    "greater_is_better": Acts(False, "files", **BEST),
    "ignore_data_skip": Acts(True, "prompts", kind="resumed"),
    "hub_token": Acts("hf_1", "uploaded"),
    "hub_private_repo": Acts(True, "uploaded"),
    "hub_model_id": Acts("me/mine", "uploaded"),
    "hub_revision": Acts("mine", "uploaded"),
    # models
    "model_init_kwargs": Acts({"dtype": "bfloat16"}, "dtype", kind="path"),
    "trust_remote_code": Acts(True, "error", kind="own code", says="ImportError: it runs"),
    "router_aux_loss_coef": Acts(0.1, "error", says="not a Mixture-of-Experts model"),
    "disable_dropout": Acts(True, "model", kind="dropout"),
    "sync_ref_model": Acts(True, "callbacks", kind="full"),
    "ref_model_mixup_alpha": Acts(
        0.1, "reference", kind="full", sync_ref_model=True, ref_model_sync_steps=1
    ),
    "ref_model_sync_steps": Acts(1, "reference", kind="full", sync_ref_model=True),
    # sampling
    "max_completion_length": Acts(4, "completions"),
    "temperature": Acts(0.2, "completions"),
    "top_p": Acts(0.1, "completions"),
    "top_k": Acts(2, "completions"),
    "min_p": Acts(0.5, "completions"),
    "repetition_penalty": Acts(5.0, "completions"),
    "generation_kwargs": Acts({"min_new_tokens": 6}, "completions"),
    "chat_template_kwargs": Acts({"mark": "Now. "}, "completions"),
    "cache_implementation": Acts("static", "generation"),
    "use_transformers_continuous_batching": Acts(True, "generation"),
    "transformers_continuous_batching_config": Acts(
        {"max_memory_percent": 0.3}, "generation", use_transformers_continuous_batching=True
    ),
    "use_transformers_paged": Acts(True, "generation"),
    "use_vllm": Acts(True, "error", says="generation: vllm cannot be used"),
    "vllm_mode": Acts(
        "server",
        "error",
        says="http://127.0.0.1:9 cannot be reached",
        **SERVER | {"generation": "auto", "use_vllm": True},
    ),
    "vllm_server_base_url": Acts(
        "http://127.0.0.1:9/here", "error", says="http://127.0.0.1:9/here cannot be", **SERVER
    ),
    "vllm_server_host": Acts("localhost", "error", says="http://localhost:9 cannot be", **SERVER),
    "vllm_server_port": Acts(10, "error", says="http://127.0.0.1:10 cannot be", **SERVER),
    "vllm_server_timeout": Acts(0.1, "warned", **SERVER),
    "vllm_max_model_length": Acts(77, "error", says="--max-model-len 77", **SERVER),
    "vllm_enable_sleep_mode": Acts(True, "engine"),
    "vllm_gpu_memory_utilization": Acts(0.2, "engine"),
}
IN_REFERENCE = {
    "beta", "epsilon", "epsilon_high", "reward_weights", "normalize_advantages",
    "reward_clip_range", "mask_truncated_completions",
}  # fmt: skip
PASSED_ON = {
    "dataloader_num_workers": 1,
    "dataloader_persistent_workers": True,
    "dataloader_prefetch_factor": 4,
    "dataloader_multiprocessing_context": "spawn",
    "dataloader_in_order": False,
    "optim": "ademamix",
    "optim_args": "alpha=3",
    "weight_decay": 0.1,
    "adam_beta1": 0.5,
    "adam_beta2": 0.5,
    "adam_epsilon": 0.1,
    "torch_compile": True,
    "torch_compile_backend": "eager",
    "torch_compile_mode": "reduce-overhead",
    "accelerator_config": AcceleratorConfig(even_batches=False),
    "parallelism_config": ParallelismConfig(),
    "ddp_bucket_cap_mb": 3,
    "ddp_broadcast_buffers": False,
    "ddp_static_graph": True,
}
TRAINED = {
    "cache", "columns", "completions", "files", "hooks", "log", "metrics", "passes",
    "printed", "prompts", "reference", "schedule", "tables", "weights",
}  # fmt: skip
"""What only a training shows; a trainer that has not trained shows the rest."""

# Value -> what the sentence says
REFUSED = {
    "push_to_hub": (True, "export RUN --to hub"),
    "hub_strategy": ("end", "export RUN --to hub"),
    "hub_always_push": (True, "export RUN --to hub"),
    "save_total_limit": (
        3,
        "trainer.keep_last and trainer.keep_best decide which checkpoints stay: set these two",
    ),
    "label_smoothing_factor": (0.1, "no labels to smooth: leave it out"),
    "data_seed": (3, "trainer.seed gives the order of prompts: leave it out"),
    "train_sampling_strategy": ("sequential", "trainer.shuffle_dataset is false"),
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
    listed = [*ACTS, *IN_REFERENCE, *PASSED_ON, *REFUSED, *NO_MEANING]
    assert sorted(set(listed)) == sorted(listed), "a field is in two lists"
    new = FIELDS.keys() - set(listed)
    assert not new, f"{sorted(new)}: see what TRL makes of it, and give it a row in this file"
    gone = set(listed) - FIELDS.keys()
    assert not gone, f"{sorted(gone)}: no field of TRL {trl.__version__}; remove its row"


def check_config(folder, **settings):
    """Check as a run and a trainer do before a model is loaded."""
    config = rk.LeaveOneOutConfig(str(folder), **settings)
    choose_step(config)
    check_engine(config)


@pytest.mark.parametrize("name", REFUSED)
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
        self.evaluations = 0

    def on_completions(self, *_, rollout, **__):
        self.batches.append(rollout.sampled)

    def on_evaluate(self, *_, metrics, **__):
        self.evaluations += 1
        metrics |= {"eval_seen": self.evaluations, "eval_fixed": 0}


class Recorder:
    """Stands for a library at its border: keeps what is called, and answers with itself."""

    def __init__(self, name="", calls=None):
        self.name = name
        self.calls = [] if calls is None else calls
        self.__version__ = "9.9"

    def __getattr__(self, name):
        return Recorder(f"{self.name}.{name}", self.calls)

    def __setitem__(self, *_):
        pass

    def __call__(self, *args, **keywords):
        self.calls.append((self.name, args, keywords))
        return self


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
    if kind in ("path", "full"):  # TRL reads the reference from there
        model.save_pretrained(folder)
        model.config._name_or_path = str(folder)
        return str(folder) if kind == "path" else model
    dropout = 0.3 if kind == "dropout" else 0.0
    lora = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], lora_dropout=dropout)
    return get_peft_model(model, lora)


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


def of_trained(trainer, watcher, calls, resume):
    """What a training shows."""
    if trainer.args.log_completions:
        trainer.args.report_to = ["trackio"]  # whose tables the recorder takes
    output = trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    batches = watcher.batches
    layers = [*trainer.model.modules()]
    return {
        "log": [[row["step"], sorted(row)] for row in history],
        "schedule": [row.get("lr") for row in history],
        "passes": [row.get("passes/real_tokens") for row in history],
        "metrics": sorted(output.metrics),
        "weights": sums(trainer.model),
        "reference": sums(trainer.ref_model),
        "hooks": [
            (getattr(m, "gradient_checkpointing", None), len(m._forward_hooks)) for m in layers
        ],
        "prompts": [one.prompts for one in batches],
        "completions": [[one.tokens.prompt_ids, one.completions] for one in batches],
        "columns": letters.columns,
        "cache": calls.count("cache"),
        "tables": [call for call in calls if isinstance(call, int)],
    }


def of_built(trainer, calls, wanted):
    """What a trainer shows that has not trained."""
    accelerator = trainer.accelerator
    model = trainer.model
    if wanted == "dtype":
        trainer.evaluate()
    elif wanted == "uploaded":
        trainer.push_to_hub()
    elif wanted == "trackio":
        callback = TrackioCallback()
        callback._trackio = Recorder("trackio", calls)
        callback.setup(trainer.args, trainer.state, model)
        callback._space_id = trainer.args.trackio_space_id
        callback.on_train_end(trainer.args, trainer.state, trainer.control, model=model)
    loader = trainer.get_eval_dataloader()
    return {
        "callbacks": [type(one).__name__ for one in trainer.callback_handler.callbacks],
        "ddp": str(accelerator.ddp_handler),
        "mixed_precision": accelerator.mixed_precision,
        "determinism": torch.are_deterministic_algorithms_enabled(),
        "dtype": str(model.dtype),
        "engine": _engine_arguments(trainer.args),
        "eval_loader": [loader.total_batch_size, len(loader), loader.drop_last],
        "generation": [str(trainer.generation_config), str(trainer.continuous_batching_config)],
        "model": [
            model.config.use_cache, [m.p for m in model.modules() if hasattr(m, "p")],
        ],
        "trackio": [str(call) for call in calls if call[0].endswith((".init", ".freeze"))],
        "uploaded": [str(call[2]) for call in calls if call[0].startswith("hub")],
        "verbosity": transformers.logging.get_verbosity(),
    }  # fmt: skip


def observe(root, row, settings):
    """Return what is seen of a trainer with these settings, as far as the row asks for it."""
    root.mkdir()
    printed = io.StringIO()
    calls = []
    seen = {"error": None}
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(record=True) as warned,
        contextlib.redirect_stdout(printed),
    ):
        warnings.simplefilter("always")
        patch.setattr(
            step_trainer, "clear_device_cache", lambda: calls.append("cache"), raising=False
        )
        patch.setattr(transformers.trainer, "hf_api", Recorder("hub", calls))
        table = SimpleNamespace(log=lambda row: calls.append(len(row["completions"])))
        table.Table = lambda dataframe: dataframe
        patch.setattr(rloo_trainer, "trackio", table, raising=False)
        try:
            if resume := row.kind == "resumed":
                trainer_of(root, "lora", {"save_steps": 1, "max_steps": 1})[0].train()
            trainer, watcher = trainer_of(root, row.kind, settings)
            if row.differs in TRAINED:
                seen |= of_trained(trainer, watcher, calls, resume)
            else:
                seen |= of_built(trainer, calls, row.differs)
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

    def get(row):
        alone = row.differs in ("dtype", "trackio", "uploaded") and row.differs
        what = alone or row.differs in TRAINED
        key = (row.kind, str(row.context), what)
        if key not in kept:
            kept[key] = observe(tmp_path_factory.mktemp("usual") / "run", row, row.context)
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
def test_equal_settings_give_equal_trainings(usual, tmp_path):
    row = Acts(None, "weights")
    assert observe(tmp_path / "run", row, {}) == usual(row)


@pytest.mark.long
@pytest.mark.parametrize("name", ACTS)
def test_a_field_acts(name, usual, tmp_path):
    row = ACTS[name]
    before = usual(row)
    after = observe(tmp_path / "run", row, row.context | {name: row.value})
    errors = before["error"], after["error"]
    assert before.get(row.differs) != after.get(row.differs), errors
    if row.differs == "error":
        assert row.says in errors[1]
    else:
        assert errors[0] == errors[1]


def test_what_transformers_reads_is_passed_on(tmp_path):
    config = rk.LeaveOneOutConfig(str(tmp_path), **PASSED_ON)
    assert {name: getattr(config, name) for name in PASSED_ON} == PASSED_ON
    for method in (
        "create_optimizer",
        "get_train_dataloader",
        "create_accelerator_and_postprocess",
    ):
        kits = getattr(rk.LeaveOneOutTrainer, method)
        assert kits is getattr(trl.RLOOTrainer, method), method
