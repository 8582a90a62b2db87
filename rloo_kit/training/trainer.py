"""The leave-one-out trainer: TRL's RLOO trainer with the same gradient in fewer passes.

This module must be imported after ``setup()``, so that ``trl.RLOOTrainer`` is Unsloth's patched
class if Unsloth is installed. The kit's public names are imported lazily for this reason. The
module overrides the hooks of TRL's and transformers' trainers. docs/explanation/trainer.md explains
which passes are saved, and why the gradient is exact.
"""

import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoProcessor, PrinterCallback, set_seed
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from trl import RLOOConfig, RLOOTrainer  # pyright: ignore[reportPrivateImportUsage]
from trl.trainer.utils import add_fused_lm_head, create_model_from_path

from rloo_kit.checkpoints.resume import Boundary
from rloo_kit.config.run_file import ModelSection, RunConfig
from rloo_kit.config.settings import DEFAULTS, NO_SYNC
from rloo_kit.config.values import suggest
from rloo_kit.data.images import check_images, has_images
from rloo_kit.data.lengths import check_lengths
from rloo_kit.diagnosis.watch import RunWatch
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.live.select import live_progress
from rloo_kit.machine.cleanup import add_to_session, release_model
from rloo_kit.machine.environment import precision_as_asked
from rloo_kit.machine.tensors import check_not_released
from rloo_kit.models.adapters import (
    adapter_values,
    complete_reference,
    drop_old_reference,
    restore_adapter,
    starts_at_base,
    without_engine,
)
from rloo_kit.models.loading import keep_trainable_layout, set_padding
from rloo_kit.models.notes import notes_of
from rloo_kit.sampling.choice import check_engine, check_partial, start_engine
from rloo_kit.sampling.engine import Engine
from rloo_kit.scoring.contract import guarded
from rloo_kit.scoring.specs import LoadedReward, load_rewards, with_tokenizers
from rloo_kit.text.wording import format_value
from rloo_kit.tools.environments import Environments
from rloo_kit.tools.loop import ToolLoop
from rloo_kit.training.arguments import LeaveOneOutConfig, _own_config
from rloo_kit.training.step_choice import (
    TRL_METHODS,
    StepChoice,
    check_tools,
    choose_step,
    let_trl_sample,
    set_router_loss,
)
from rloo_kit.training.step_trainer import StepTrainer
from rloo_kit.training.tools import EnvironmentFactory, make_tool_loop, with_prompts
from rloo_kit.types import Model, Tokenizer

# Older names of the trainer's arguments
RENAMED_PARTS = {
    "reward_model": "reward_funcs",
    "config": "args",
    "policy": "model",
    "tokenizer": "processing_class",
}


class LeaveOneOutTrainer(StepTrainer):
    """TRL's ``RLOOTrainer`` with the same gradient, fewer passes, checked scores and more metrics.

    Args:
        model: The policy, from ``attach_lora`` or in any form that TRL accepts.
        reward_funcs: One reward or a list of rewards. A reward is a built-in name,
            ``file.py:function``, ``package.module:function`` (each of these three may end with
            ``:weight``), a dict as in a run file, a function, an object with
            ``get_rewards(prompts, completions)``, a sequence-classification model, the folder of
            such a model, or its name on the hub (``org/name``).
        args: A ``LeaveOneOutConfig`` or TRL's ``RLOOConfig``. All values of an ``RLOOConfig`` are
            used, even those that are TRL's defaults. There is one exception: a setting whose
            default depends on the device gets the kit's default if its value is TRL's default.
        train_dataset: Rows with a column ``prompt``. Rewards receive the other columns by name.
        processing_class: The tokenizer. TRL pads prompts on the left even if the tokenizer is set
            to pad on the right.
        callbacks: Callbacks in addition to the kit's progress display.
        tools: Functions that the model may call, plain or async, with type hints and docstrings.
        environment_factory: A class, or a dict of classes by name, whose public methods are tools,
            as in TRL's ``GRPOTrainer``. A class needs ``reset(**row)`` and may have
            ``get_reward()``.
        engine: An engine that ``start_engine`` returned for this model. None starts the engine that
            ``args.generation`` names. TRL's step cannot use an engine.
        **others: TRL's other arguments, and some older names of TRL's arguments, which cause a
            warning: ``reward_model``, ``config``, ``policy``, ``tokenizer`` and ``ref_policy`` (a
            separate model as the reference).

    Raises:
        ConfigError: An argument is missing, unknown or given twice. Or ``args.step`` is ``kit``,
            but the kit's step cannot run this training. Or ``engine`` is given, but TRL's step is
            used.
        DataError: The dataset has no rows or no column ``prompt``.
        RewardError: A reward cannot be loaded, or does not return scores.
        GenerationError: An engine was requested by name but cannot sample.
        ModelError: The memory of the model was released.
    """

    # applies the doctor's rules to this training; None if `args.doctor` is off
    watch: RunWatch | None = None
    # True if the caller passed an optimizer; None before the first training
    has_own_optimizer: bool | None = None

    def __init__(  # noqa: PLR0913
        self,
        model: Model | None = None,
        reward_funcs: Any = None,
        args: RLOOConfig | None = None,
        train_dataset: Any = None,
        processing_class: Tokenizer | None = None,
        callbacks: list[Any] | None = None,
        engine: Engine | None = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: EnvironmentFactory | None = None,
        **others: Any,
    ) -> None:
        parts = {
            "model": model,
            "reward_funcs": reward_funcs,
            "args": args,
            "train_dataset": train_dataset,
            "processing_class": processing_class,
        }
        _translate_parts(parts, others, environment_factory is not None)
        asked = _own_config(parts.pop("args"))
        args = copy.copy(asked)  # the caller's object does not change
        parts["train_dataset"] = with_prompts(parts["train_dataset"], environment_factory, args)
        reference = _own_reference(others, parts["model"], args)
        self.step_choice = self._choose_step(args, parts, engine)
        if engine is None and not self.by_trl:
            check_engine(asked)
        check_prompts(parts["train_dataset"], args)
        policy = _prepare_policy(parts, args, others)
        self.tool_loop = self._make_tool_loop(args, parts, others, tools, environment_factory)
        specs = parts.pop("reward_funcs") or []
        rewards = with_tokenizers(
            _load_weighted(specs, self.pool, args, parts["processing_class"]),
            others.get("reward_processing_classes"),
        )
        drop_old_reference(policy)
        adapter = adapter_values(policy)
        callbacks = [Boundary(self), *(callbacks or []), *self._views(args, policy)]
        # with another beta than 0, TRL would load a reference by the policy's name
        args.beta = asked.beta if reference is None else 0.0
        with precision_as_asked(args), without_engine(policy):
            super().__init__(
                reward_funcs=[
                    guarded(reward.func, args.reward_timeout_seconds, args.on_reward_error)
                    for reward in rewards
                ],
                args=args,
                callbacks=callbacks,
                **parts,
                **others,
            )
        args.beta = asked.beta
        restore_adapter(self.model, adapter)
        keep_trainable_layout(self.model)
        self._choose_reference(reference, starts_at_base(adapter))
        for callback in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):  # the kit shows progress
            self.remove_callback(callback)
        self._make_parts(rewards)
        if not self.by_trl:
            self._start_sampler(engine, asked)
        add_to_session(self)

    def _make_tool_loop(
        self,
        args: LeaveOneOutConfig,
        parts: dict[str, Any],
        others: dict[str, Any],
        tools: Any,
        environments: Any,
    ) -> ToolLoop | None:
        """Return the loop that runs the tools, or None if there are no tools.

        Raises:
            ConfigError: There are tools, but TRL's step was chosen, or a setting or an
                ``eval_dataset`` does not work with tools. Or a setting has no effect without tools.
        """
        if tools or environments is not None:
            check_tools(self.step_choice)
            if others.get("eval_dataset") is not None:
                raise ConfigError(
                    "TRL's evaluation of an eval_dataset cannot run tools: remove eval_dataset, "
                    "and score held-out prompts with a run file (data.held_out)"
                )
        model = parts["model"]
        config = _model_config(model, args).get_text_config()
        limits = [args.vllm_max_model_length, getattr(config, "max_position_embeddings", None)]
        if not isinstance(model, str):
            limits.append(notes_of(model).max_seq_length)
        longest = min(filter(None, limits), default=sys.maxsize)
        loop = make_tool_loop(tools, environments, parts["processing_class"], args, longest)
        if loop and loop.environments:
            loop.environments.check_names(parts["train_dataset"])
        return loop

    def _start_sampler(self, engine: Engine | None, asked: LeaveOneOutConfig) -> None:
        """Start the engine that the settings ask for, unless the caller passed an engine."""
        if engine is None:
            engine, choice = start_engine(self.model, asked)
            if choice.reason and not asked.use_cpu:
                warnings.warn(f"vLLM is not used: {choice.reason}", UserWarning, stacklevel=3)
        self.sampler.engine = engine
        if asked.partial_rollouts:
            check_partial(engine, self.model)
        elif engine is None and asked.rollout_correction:
            warnings.warn(
                "trainer.rollout_correction has no effect, because the trained model itself "
                "samples: leave it out, or set trainer.generation to vllm",
                UserWarning,
                stacklevel=3,
            )
        longest = asked.vllm_max_model_length
        if engine and longest and hasattr(self.train_dataset, "__len__"):
            remedy = "raise trainer.vllm_max_model_length to {}"
            check_lengths(self.train_dataset, self.tokenizer, self.args, longest, remedy=remedy)

    def _choose_step(
        self, args: LeaveOneOutConfig, parts: dict[str, Any], engine: Engine | None
    ) -> StepChoice:
        """Choose the kit's training step or TRL's, adapt ``args`` to it, and return the choice.

        Raises:
            ConfigError: TRL's step is chosen, but the caller passed an engine.
            DataError: The training set is not a dataset, or has no column ``prompt``.
        """
        check_columns("train_dataset", parts["train_dataset"])
        images = has_images(parts["train_dataset"])
        if images:
            check_images(parts["train_dataset"], parts["processing_class"])
        if args.ddp_find_unused_parameters is None and not images:
            args.ddp_find_unused_parameters = False  # every pass uses every adapter
        model = parts["model"]
        choice = choose_step(
            args,
            images=images,
            router_loss=set_router_loss(args, model, _model_config(model, args)),
            overridden=[
                name
                for name in TRL_METHODS
                if getattr(type(self), name) is not getattr(LeaveOneOutTrainer, name)
            ],
        )
        if choice.by_trl and engine:
            raise ConfigError(f"{choice}; TRL's step cannot use an engine: leave engine out")
        let_trl_sample(args, choice)
        return choice

    def _choose_reference(self, reference: Any, at_base: bool) -> None:
        """Set the reference of the KL penalty.

        Args:
            reference: The caller's reference model. If it is None, the reference is the base model
                or TRL's frozen copy of the adapter.
            at_base: True if the adapter is new, so that the policy still equals the base model.
        """
        if not self.args.beta or at_base or reference is not None:
            drop_old_reference(self.model)  # the base without adapter is the same, and cheaper
        complete_reference(self.model)
        if reference is not None:  # prepare it like a reference that TRL has loaded
            self.beta = self.args.beta
            add_fused_lm_head(reference, temperature=self.temperature)
            self.ref_model = self.accelerator.prepare_model(reference.eval(), evaluation_mode=True)

    def _views(self, args: LeaveOneOutConfig, model: Model) -> list[Any]:
        """Return the callbacks that show and diagnose the training; only process 0 has any."""
        if args.process_index:
            return []
        if not args.doctor:
            return [live_progress()]
        path = str(getattr(getattr(model, "config", None), "name_or_path", ""))
        longest = 4 * args.max_completion_length
        names = {*DEFAULTS, "steps_per_generation", "max_steps", "num_train_epochs"}
        run = RunConfig(  # as from a run file with the same settings
            model=ModelSection(name=Path(path).name, max_seq_length=longest),
            trainer={name: getattr(args, name) for name in sorted(names)},
        )
        self.watch = RunWatch(
            run,
            tell=lambda findings: self.notify("on_findings", findings=findings),
            stop=self.stop,
            stop_on=args.stop_on or (),
            parameters=lambda: list(self.trained_parameters().values()),
        )
        return [self.watch, live_progress()]

    # --- memory ----------------------------------------------------------------------------------

    def release(self) -> None:
        """Free the memory of models, rewards, engine and optimizer; a second call does nothing."""
        # Weights shared with vLLM must be freed before the engine: see VllmEngine.close.
        parts: list[Any] = [self.model, self.ref_model, *self.reward_funcs]
        for one in parts:
            if hasattr(one, "release"):
                one.release()
            elif hasattr(one, "parameters"):
                release_model(one)
        if self.pool:
            self.pool.release()
        if self.engine:
            self.engine.close()
        if self.optimizer is not None:
            inner = getattr(self.optimizer, "optimizer", self.optimizer)
            inner.state.clear()
            inner.param_groups.clear()
        for holder in (self, self.callback_handler):
            for name in ("model", "optimizer", "lr_scheduler", "model_wrapped", "ref_model"):
                setattr(holder, name, None)
        self.callback_handler.train_dataloader = self.callback_handler.eval_dataloader = None
        if self.by_trl:
            self.release_tables_and_engine()
        else:  # the parts of the kit's step refer to tensors
            self.sampler.canary = self.sampler.engine = self.sampler.model = None
            self.policy.model = self.policy.ref_model = None
            self.rloo.rollout = None
            self.rloo.waiting = []
            self.__dict__.pop("learner", None)
        self.invalidate_snapshot()
        self.accelerator.free_memory()

    # --- hooks: checkpoints ----------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | Path | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train, or resume a training from a checkpoint.

        A new training begins with a dry run if the settings ask for one and this trainer has not
        made one before. A resumed training has no dry run. At the end, also after an error, the
        trainer calls the method ``close`` of every callback that has one.

        Args:
            resume_from_checkpoint: A checkpoint, the folder of a run, or True for the newest
                checkpoint in ``output_dir``. False starts a new training. So does None, unless
                ``args.resume_from_checkpoint`` is set.
            trial: As in transformers.
            ignore_keys_for_eval: As in transformers.

        Raises:
            CheckpointError: The checkpoint is missing, broken or from another run.
            MemoryRanOutError: The largest possible step, which the dry run makes, does not fit into
                memory.
            KeyboardInterrupt: A signal stopped the training. Its last step is saved, unless a
                second signal followed.
            ConfigError: The trainer was released, or another process trains in ``output_dir``.
        """
        if self.model is None:
            raise ConfigError("this trainer was released: load the model again for a new trainer")
        if resume_from_checkpoint is None:
            resume_from_checkpoint = self.args.resume_from_checkpoint
        if self.has_own_optimizer is None:
            self.has_own_optimizer = self.optimizer is not None
        if not self.has_own_optimizer:  # each training makes a new one, with its learning rate
            self.optimizer = None
        elif self.watch is not None:
            self.watch.config.trainer.pop("learning_rate", None)  # it has no effect
        self._restart()
        try:
            if not (resume_from_checkpoint or self.dry_run_done):
                self.dry_run_if_wanted(print)
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        finally:
            for callback in self.callback_handler.callbacks:
                if callable(close := getattr(callback, "close", None)):
                    close()
            if not self.by_trl:  # `load_best_model_at_end` may have changed the weights
                self.sampler.is_synced = False

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the trainer's state, for a checkpoint."""
        if self.by_trl:
            return self.step_log.state_dict()
        passes = {"budget": self.learner.budget, "at_once": self.sampler.pieces.size}
        for part in (self.rloo, self.dynamic_sampling, self.step_log):
            passes |= part.state_dict()
        if self.in_flight:
            passes["in_flight"] = self.in_flight.state_dict()
        return passes

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned."""
        if self.by_trl:
            self.step_log.load_state_dict(state)
            return
        if not self.args.tokens_per_micro_batch:
            self.learner.budget = state["budget"]
        self.sampler.pieces.size = state["at_once"]
        for part in (self.rloo, self.dynamic_sampling, self.step_log):
            part.load_state_dict(state)
        if self.in_flight:
            self.in_flight.load_state_dict(state["in_flight"])


def _load_weighted(
    specs: Any, pool: Environments | None, args: LeaveOneOutConfig, tokenizer: Tokenizer
) -> list[LoadedReward]:
    """Return the loaded rewards, and set ``args.reward_weights`` to their weights if it is None.

    The rewards of environments that have a method ``get_reward`` are added, with weight 1.

    Raises:
        ConfigError: There is no reward, or weights are given both with the rewards and in ``args``.
    """
    listed = [*specs] if isinstance(specs, list | tuple) else [specs]
    if pool:
        # the rewards of a run file are already loaded, and include the rewards of its environments
        names = {one.name for one in listed if isinstance(one, LoadedReward)}
        listed += [one for one in pool.rewards if one.__name__ not in names]
        if args.reward_weights is not None:
            args.reward_weights = [*args.reward_weights, *[1.0] * len(pool.rewards)]
    rewards = load_rewards(
        listed,
        tokenizer=getattr(tokenizer, "tokenizer", tokenizer),  # of a processor
        chat_template_kwargs=args.chat_template_kwargs,
    )
    if not rewards:
        raise ConfigError(
            "there is no reward: give at least one in reward_funcs, or add get_reward to an "
            "environment"
        )
    if args.reward_weights is None:
        args.reward_weights = [reward.weight_at(0.0) for reward in rewards]
    elif any(reward.weight != 1.0 for reward in rewards):
        raise ConfigError(
            "weights are given both in reward_funcs and in reward_weights: keep one of the two"
        )
    return rewards


def check_prompts(dataset: Any, args: LeaveOneOutConfig) -> None:
    """Check that the training set can fill a batch; if it is a stream, check the settings instead.

    Raises:
        DataError: The training set has too few rows. Or it is a stream, but a setting needs random
            access to its rows.
    """
    if not hasattr(dataset, "__len__"):
        for name in ("dynamic_sampling", "partial_rollouts"):
            if getattr(args, name):
                raise DataError(
                    f"train_dataset is a stream, and {name} needs random access: load it without "
                    "streaming"
                )
        return
    if not len(dataset):
        raise DataError("train_dataset has no rows: give at least one prompt")
    num = args.generation_batch_size // args.num_generations
    if len(dataset) < num:  # TRL drops prompts that do not fill a batch
        raise DataError(
            f"there are {len(dataset)} prompts to train on, and one batch needs {num}: give more "
            f"prompts, or lower trainer.per_device_train_batch_size or gradient_accumulation_steps"
        )


def check_columns(name: str, dataset: Any) -> None:
    """Check that the argument ``name`` is a dataset with a column ``prompt``.

    Raises:
        DataError: The argument is not a dataset, or has no column ``prompt``.
    """
    if isinstance(dataset, str | list | Mapping) or hasattr(dataset, "iloc"):
        raise DataError(
            f"{name} is a {type(dataset).__name__}, must be a datasets.Dataset: use load_prompts, "
            "one split of a DatasetDict, Dataset.from_pandas, or Dataset.from_list"
        )
    columns = getattr(dataset, "column_names", None)
    if columns and "prompt" not in columns:
        raise DataError(
            f"{name} has no column 'prompt', only {format_value(sorted(columns))}: rename the "
            f"column of prompts with {name}.rename_column"
        )


def _translate_parts(parts: dict[str, Any], others: dict[str, Any], has_environments: bool) -> None:
    """Rename arguments that are given under older names, with a warning, and check all arguments.

    Args:
        parts: Arguments under their current names; renamed arguments are added.
        others: Other arguments; those under older names are removed.
        has_environments: True if there are environments, which make ``reward_funcs`` and
            ``train_dataset`` optional.

    Raises:
        ConfigError: A required argument is missing, or an argument is unknown or is given under
            both its old and its new name.
        DataError: The ``eval_dataset`` is not a dataset, or has no column ``prompt``.
        ModelError: The memory of the model was released.
    """
    for old, new in RENAMED_PARTS.items():
        value = others.pop(old, None)
        if value is None:
            continue
        if parts[new] is not None:
            raise ConfigError(f"{old} is the old name of {new}, and both are given: keep {new}")
        warnings.warn(f"{old} is now called {new}", FutureWarning, stacklevel=3)
        parts[new] = value
    known = {"ref_policy", *parts}
    for base in RLOOTrainer.__mro__:
        names = inspect.signature(base.__init__).parameters.keys()
        known |= names
        if "kwargs" not in names:  # Unsloth's class passes other arguments on to TRL's
            break
    for name in others.keys() - known:
        raise ConfigError(f"unknown argument {name!r}{suggest(name, known)}")
    needed = ["model"] if has_environments else ["model", "reward_funcs", "train_dataset"]
    missing = [f"`{name}` is required" for name in needed if parts[name] is None]  # TRL's words
    if missing:
        raise ConfigError(f"{', '.join(missing)}: give it to LeaveOneOutTrainer")
    check_not_released(parts["model"])
    if hasattr(parts["processing_class"], "column_names"):
        raise ConfigError(
            "the fifth argument is processing_class, where TRL has eval_dataset: give both by name"
        )
    evaluated = others.get("eval_dataset")
    for one in evaluated.values() if isinstance(evaluated, Mapping) else [evaluated]:
        check_columns("eval_dataset", one)


def _own_reference(
    others: dict[str, Any], model: Model, args: LeaveOneOutConfig
) -> torch.nn.Module | None:
    """Return the caller's reference model; None if the reference is the policy before training.

    Args:
        others: Further arguments of the trainer; ``ref_policy`` is removed.
        model: The policy, or its name.
        args: Settings of the training.

    Raises:
        ConfigError: ``ref_policy`` is not a model or would have no effect, or TRL could not load
            the reference that ``beta`` needs.
    """
    ref_policy = others.pop("ref_policy", None)
    if ref_policy is not None:
        if not isinstance(ref_policy, torch.nn.Module):
            kind = type(ref_policy).__name__
            raise ConfigError(f"ref_policy is a {kind}, must be a loaded model")
        if not args.beta or args.sync_ref_model:
            raise ConfigError(
                "ref_policy works only with beta above 0 and without sync_ref_model: leave it out"
            )
        trained = {id(parameter) for parameter in getattr(model, "parameters", tuple)()}
        if trained.isdisjoint(map(id, ref_policy.parameters())):
            text = "ref_policy needs memory of its own: leave it out if it equals the base model"
            warnings.warn(text, FutureWarning, stacklevel=3)
            return ref_policy
        text = "ref_policy is the policy itself, so the reference is the policy before training"
        warnings.warn(text, FutureWarning, stacklevel=3)
    has_adapter = others.get("peft_config") or hasattr(model, "peft_config")
    is_whole = isinstance(model, torch.nn.Module) and not has_adapter
    if is_whole and args.beta and not getattr(model.config, "_name_or_path", ""):
        raise ConfigError(
            "beta needs a reference, but the model has no name or folder from which TRL could "
            "load it again: train an adapter (attach_lora), give another model as ref_policy, or "
            "set beta to 0"
        )
    return None


def _prepare_policy(parts: dict[str, Any], args: LeaveOneOutConfig, others: dict[str, Any]) -> Any:
    """Return the policy, or its name if TRL will load it; load its tokenizer if none was given.

    TRL's trainer loads a model by its name and attaches the adapter of ``peft_config``. Unsloth's
    version of the trainer does neither, so this function does both if that version is in use.

    Args:
        parts: Main arguments of the trainer; the model and the processing class are changed.
        args: Settings of the training, changed in place.
        others: Further arguments of the trainer; those that were used here are removed.
    """
    model = parts["model"]
    is_name = isinstance(model, str)
    if parts["processing_class"] is None:  # TRL would load it too late for the rewards
        loaded = None if is_name else notes_of(model).processor  # by `load_model`
        if has_images(parts["train_dataset"]) and not hasattr(loaded, "image_processor"):
            loaded = None  # the model was loaded without its processor
        name = model if is_name else model.config.name_or_path
        sides = {"padding_side": "left", "truncation_side": "left"}
        parts["processing_class"] = loaded or AutoProcessor.from_pretrained(
            name, **sides, **_source(args)
        )
    follow_model(args, model, parts["processing_class"], others.get("peft_config"))
    if not RLOOTrainer.__module__.startswith("trl."):
        set_seed(args.seed)  # PEFT initialises an adapter randomly
        if is_name:
            given = cast(Any, args.model_init_kwargs) or {}
            how = {"trust_remote_code": args.trust_remote_code, **given}
            if args.world_size > 1:
                how["device_map"] = None  # as TRL does: "auto" fails
            if quantization := others.pop("quantization_config", None):
                how["quantization_config"] = quantization
            model = create_model_from_path(model, **how)
        if adapter := others.pop("peft_config", None):
            model = get_peft_model(model, adapter)
    parts["model"] = model
    return model


def _source(args: LeaveOneOutConfig) -> dict[str, Any]:
    """Return arguments of ``from_pretrained``: which revision to load, and if its code may run."""
    return {
        "revision": (cast(Any, args.model_init_kwargs) or {}).get("revision"),
        "trust_remote_code": args.trust_remote_code,
    }


def _model_config(model: Any, args: LeaveOneOutConfig) -> Any:
    """Return the policy's config. If ``model`` is a name, load only the config, not the model."""
    if isinstance(model, str):
        return AutoConfig.from_pretrained(model, **_source(args))
    return model.config


def follow_model(
    args: LeaveOneOutConfig,
    model: Any,
    tokenizer: Any,
    peft_config: object = None,
) -> None:
    """Make the settings, the model and the tokenizer consistent with each other.

    This concerns padding and gradient checkpointing. If the user did not give the setting
    ``gradient_checkpointing``, it gets the value that was chosen in ``attach_lora``, if there is
    one. In all other cases, if the setting is False, checkpointing is turned off in the model.

    Args:
        args: Settings of the training, changed in place.
        model: The policy, or its name if TRL will load it.
        tokenizer: The tokenizer or processor.
        peft_config: TRL's argument of this name.

    Raises:
        ConfigError: ``sync_ref_model`` is set for a model with an adapter.
    """
    if args.sync_ref_model and (peft_config or hasattr(model, "peft_config")):
        raise ConfigError(NO_SYNC)
    if isinstance(model, str):  # TRL loads it
        return
    set_padding(model, getattr(tokenizer, "tokenizer", tokenizer))
    choice = notes_of(model).gradient_checkpointing
    of_unsloth = getattr(model, "_unsloth_gradient_checkpointing", None)
    if choice is not None and args.follows_model:
        args.gradient_checkpointing = bool(choice)
    elif not args.gradient_checkpointing and getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()  # transformers only turns it on
    if of_unsloth is not None and bool(of_unsloth) != args.gradient_checkpointing:
        # Unsloth's training follows this attribute and not the setting
        kind = "unsloth" if model.device.type != "cpu" else True
        model._unsloth_gradient_checkpointing = args.gradient_checkpointing and kind
