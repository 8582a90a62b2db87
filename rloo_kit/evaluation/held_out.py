"""Held-out prompts on which several models are sampled and scored in the same way."""

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_kit.config.engine_settings import requested_engine
from rloo_kit.config.run_file import (
    EXAMPLES,
    TASK_REWARDS,
    DataSection,
    RunConfig,
    make_run_config,
    read_overrides,
)
from rloo_kit.config.trainer_settings import known_trainer_fields
from rloo_kit.data.files import local_path
from rloo_kit.data.hub_tasks import hub_task
from rloo_kit.data.images import has_images
from rloo_kit.data.lengths import drop_long_prompts, quantile_of_lengths
from rloo_kit.data.prompts import MAX_HELD_OUT, is_task, load_prompts
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.evaluation.evaluator import settings_of
from rloo_kit.evaluation.trained import LoadedBase, TrainedModel, why_not_by_vllm
from rloo_kit.job import PreparedJob, held_out_judges, system_message
from rloo_kit.machine.cleanup import session
from rloo_kit.output_folder import read_json
from rloo_kit.sampling.choice import check_engine, start_engine
from rloo_kit.sampling.engine import choose
from rloo_kit.scoring.specs import LoadedReward, load_rewards
from rloo_kit.text.redaction import redact_tree
from rloo_kit.types import Say, Tokenizer

if TYPE_CHECKING:
    from rloo_kit.tools.loop import ToolLoop
    from rloo_kit.training.arguments import LeaveOneOutConfig

# Number of tokens (prompts and completions) that a CPU samples at a time. On a GPU, the batch size
# of the run is used instead, because no other size is known to fit.
BATCH_TOKENS = 1 << 16
# Settings of the trainer that an evaluation reads, in addition to the settings of vLLM
OF_EVALUATION = {
    "chat_template_kwargs", "generation", "generation_kwargs", "max_completion_length",
    "max_tool_calling_iterations", "min_p", "on_reward_error", "on_tool_error",
    "per_device_train_batch_size", "repetition_penalty", "temperature", "thinking_budget",
    "tool_timeout_seconds", "top_k", "top_p", "use_vllm",
}  # fmt: skip
# Sections of the run file that --set cannot change in an evaluation
NOT_OF_EVALUATION = {"output_dir", "thinking", "unsloth", "vllm"}
_LENGTH = "max_seq_length"  # the only setting under `model:` that does not change the weights
# Settings of `data:` that determine the prompts of a run: which rows, and with which texts
_OF_PROMPTS = (
    "prompts", "split", "config", "system", "chat", "columns", "skip_empty", "max_prompt_tokens",
    "max_prompt_quantile",
)  # fmt: skip
# Settings in `_OF_PROMPTS` that change the texts of the prompts
OF_TEXTS = {"system", "chat", "columns"}
# Completions that vLLM samples at a time
NUM_SEQUENCES = 256


@dataclass(frozen=True)
class HeldOut:
    """The prompts, rewards and sampling settings that every compared model gets."""

    job: PreparedJob  # the run's settings, tokenizer and rewards; its model is not loaded
    prompts: Any  # a ``datasets.Dataset`` of n prompts with their columns
    source: str  # file, task or dataset of the prompts
    batch_size: int | None  # completions at a time; None: a number that is known to fit
    why_not: str | None  # why vLLM cannot sample for all of the models; None if it can

    def rewards(
        self, tokenizer: Tokenizer, specs: Sequence[Any] | None = None
    ) -> list[LoadedReward]:
        """Return the rewards that score the completions of the prompts.

        If a reward fails, the run's setting ``trainer.on_reward_error`` applies.

        Args:
            tokenizer: Tokenizer of the models.
            specs: Rewards, written as in a run file. None uses the rewards with which the run
                scores its held-out prompts.
        """
        job = self.job
        args = job.args
        load = functools.partial(
            load_rewards,
            tokenizer=tokenizer,
            chat_template_kwargs=args.chat_template_kwargs,
            say=job.say,
        )
        if specs is None:
            data = replace(job.config.data, prompts=self.source)
            own = load([*job.config.rewards, *job.of_environments])
            found = held_out_judges(own, self.prompts, load, data)
        else:
            found = load(specs)
        return [job.guarded(reward, args.on_reward_error) for reward in found]

    @contextlib.contextmanager
    def settings(
        self, base: LoadedBase, models: Sequence[TrainedModel]
    ) -> Iterator[dict[str, Any]]:
        """Load the models' adapters and start the sampling engine, for a ``with`` block.

        Yield the keyword arguments, except ``tool_loop``, with which ``evaluate`` samples as the
        run does. The value of ``engine`` is None if transformers samples.

        Raises:
            DataError: The longest prompt and its completion exceed the model's context length.
            GenerationError: vLLM was requested by name but cannot sample here, or does not start.
        """
        job = self.job
        args = job.args
        longest = quantile_of_lengths(self.prompts, base.tokenizer, 1, args.chat_template_kwargs)
        length = longest + args.max_completion_length
        # tools and environments add tokens to a prompt
        if job.tool_loop is not None:
            length = max(length, job.config.model.max_seq_length)
        limit = getattr(base.model.config.get_text_config(), "max_position_embeddings", None)
        if limit and length > limit:
            raise DataError(
                f"a prompt and its completion may have {length} tokens, but the context length of "
                f"the model is {limit}: lower trainer.max_completion_length, or leave out long "
                "prompts with data.max_prompt_tokens"
            )
        for trained in models:
            base.load(trained)
        size = self.batch_size or args.per_device_train_batch_size
        # Without gradients more rows than the run's batch fit in a CPU's memory. The run has only
        # as many environments as its batch has rows.
        is_cpu = base.model.device.type == "cpu"
        if self.batch_size is None and is_cpu and not job.config.environment:
            size = max(size, BATCH_TOKENS // job.config.model.max_seq_length)
        # No training shares the GPU with the engine, so it need not sleep and gets large batches
        args.vllm_max_model_length = length
        args.vllm_enable_sleep_mode = False
        args.generation_batch_size = self.batch_size or NUM_SEQUENCES
        with session():
            engine, choice = start_engine(base.model, args, why_not=self.why_not, trains=False)
            if choice.reason:
                job.say(f"completions by transformers, not vLLM: {choice.reason}")
            yield settings_of(args) | {"batch_size": size, "engine": engine}

    def tool_loop(self, tokenizer: Tokenizer) -> "ToolLoop | None":
        """Return a loop with the run's tools and new environments; None if the run has neither."""
        from rloo_kit.training.tools import make_tool_loop

        job = self.job
        longest = job.config.model.max_seq_length
        return make_tool_loop(*job.tools, tokenizer, job.args, longest)


# --- reading what is held out --------------------------------------------------------------------


def read_held_out(
    models: Sequence[TrainedModel],
    overrides: Sequence[str] = (),
    prompts: str | Path | None = None,
    num_prompts: int | None = None,
    batch_size: int | None = None,
    say: Say = print,
) -> HeldOut:
    """Read the prompts and settings that all of the compared models share.

    The settings are those of the first model that comes from a run. The prompts are the ones that
    this run held out, or ``prompts`` if it is given. If no model comes from a run, the kit's
    default settings, the reward of the prompts' task and the first model's tokenizer are used.
    Prompts that are longer than ``data.max_prompt_tokens`` or ``data.max_prompt_quantile`` allows
    are left out. One tokenizer counts the tokens of the prompts, so that all models get the same
    prompts.

    The arguments, except ``models``, have the same meaning as for ``evaluate_models``.

    Raises:
        ConfigError: An argument is out of range, or an override would change the model or has no
            effect.
        DataError: There are no held-out prompts, the prompts have images, or the run may have
            trained on some of them.
        ModelError: A model does not exist, or its config cannot be read.
    """
    for name, value in (("num-prompts", num_prompts), ("batch-size", batch_size)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, must be at least 1")
    first = next((one for one in models if one.run), models[0])
    given = read_overrides(overrides)
    _check_given(given)
    config = _config_of(first, overrides, prompts)
    source = str(prompts or config.data.prompts)
    of_data = given.get("data") or {}
    # The paths in a run's settings are absolute. The settings may contradict each other if an older
    # version of the kit accepted that, so they are checked only if the user changes some of them
    job = PreparedJob(config, EXAMPLES, say, first.run is not None and not overrides)
    args = job.args  # imports Unsloth, which must come before transformers
    for one in models:  # a wrong name ends the command before other models are sampled
        one.shape()
    args.reward_timeout_seconds = None  # meant for one batch, but here one call scores all rows
    choose_engine(args, given.get("trainer") or {})
    why_not = why_not_by_vllm(models)
    check_engine(args, trains=False)
    choose(requested_engine(args), on_gpu=True, why_not=why_not)
    found = _prompts(job, prompts, num_prompts, of_data)
    if has_images(found):
        raise DataError(
            "the prompts have images, and completions of such prompts are sampled only in "
            "training: name other prompts with --prompts (evaluation.json of a run has the scores "
            "of its held-out prompts)"
        )
    _ = job.tool_loop  # makes the tokens of the tools count as part of the prompts
    if job.prompt_limit is not None:
        settings = args.chat_template_kwargs
        found, _ = drop_long_prompts(found, job.tokenizer, job.prompt_limit, settings)
    # No run trains on a task's held-out prompts. If the user changes the texts, or an environment
    # adds to them, they cannot be compared with the texts that the run recorded
    others = is_task(config.data.prompts) or config.environment or of_data.keys() & OF_TEXTS
    if prompts is None and not others:
        _check_not_trained(models, first, config.data, found)
    return HeldOut(job, found, source, batch_size, why_not)


def _config_of(
    first: TrainedModel, overrides: Sequence[str], prompts: str | Path | None
) -> RunConfig:
    """Return the settings of a model, changed by the user's overrides.

    If the model has no run, and the overrides have no rewards, the reward is the default of the
    prompts' task, or ``accuracy``.
    """
    config = first.config
    own = first.run is None and "rewards" not in read_overrides(overrides)
    content = config.as_dict()
    if own:
        del content["rewards"]
    if overrides:
        config = make_run_config(content, overrides)
    if own:
        task = str(prompts or config.data.prompts).partition(":")[0]
        config = replace(config, rewards=[TASK_REWARDS.get(task, "accuracy")])
    return config


def _check_given(given: Mapping[str, Any]) -> None:
    """Check that the user's settings change the evaluation, and not the trained model.

    Raises:
        ConfigError: A setting would change the model, or has no effect on an evaluation.
    """
    # A section that is not a table is refused by `make_run_config`
    names = {section: [*one] if isinstance(one, Mapping) else [] for section, one in given.items()}
    for section in ("model", "lora"):
        if section in given and (section, names[section]) != ("model", [_LENGTH]):
            raise ConfigError(
                f"--set {section} would change a model that is already trained: leave it out, or "
                "name another model"
            )
    for section in sorted(NOT_OF_EVALUATION & given.keys()):
        raise ConfigError(f"--set {section} has no effect on an evaluation: leave it out")
    for name in ("held_out_every", "held_out_samples"):
        if name in names.get("data", ()):
            raise ConfigError(
                f"data.{name} has no effect on an evaluation: leave it out (--samples sets the "
                "number of completions of each prompt)"
            )
    for name in sorted({*names.get("trainer", ())} & known_trainer_fields() - OF_EVALUATION):
        if not name.startswith("vllm_"):
            raise ConfigError(f"trainer.{name} has no effect on an evaluation: leave it out")


def _check_not_trained(
    models: Sequence[TrainedModel],
    first: TrainedModel,
    data: DataSection,
    found: Any,
) -> None:
    """Refuse prompts that one of the runs may have trained on.

    The prompts are the last rows of the data. Each prompt must be among the held-out samples that
    each checked run has recorded. The run of ``first`` is checked, and every other run that has the
    same data (the settings in ``_OF_PROMPTS``) and no environment. A run without recorded samples
    is not checked.

    Args:
        models: All models that are compared.
        first: The model whose data contains the prompts.
        data: The section ``data:`` of the evaluation.
        found: The prompts, a ``datasets.Dataset``.

    Raises:
        DataError: A run did not hold out some of the prompts, because the rows of its data or its
            ``data.held_out`` were different.
    """
    same = attrgetter(*_OF_PROMPTS)
    for one in models:
        is_alike = same(one.config.data) == same(data) and not one.config.environment
        if one.run is None or not (one is first or is_alike):
            continue
        scores = read_json(one.run / "evaluation.json") or {}
        samples = (scores.get("before") or scores.get("after") or {}).get("samples")
        held_out = {json.dumps(sample["prompt"]) for sample in samples or ()}
        others = [p for p in redact_tree(found["prompt"][:]) if json.dumps(p) not in held_out]
        if samples and others:
            raise DataError(
                f"{len(others)} of {len(found)} prompts were not held out when {one.run} was "
                "trained, so the run may have trained on them: its data or its data.held_out was "
                "different then; name other prompts with --prompts"
            )


def choose_engine(args: "LeaveOneOutConfig", given: Mapping[str, Any]) -> None:
    """Replace a run's settings of the sampling engine and its memory, so that they fit evaluation.

    An engine that the user chose for the evaluation is kept. Otherwise ``generation`` becomes
    ``auto``, unless the run itself requests transformers. vLLM's share of the GPU memory is
    computed for the evaluation, unless the user set it.

    Args:
        args: Settings of the run, changed in place.
        given: Trainer settings that the user gave for the evaluation.
    """
    is_given = {"generation", "use_vllm"} & given.keys()
    if not is_given and (args.use_vllm or args.generation != "transformers"):
        args.generation = "auto"
    args.use_vllm = bool(given.get("use_vllm"))
    if "vllm_gpu_memory_utilization" not in given:  # it was for an engine next to the trainer
        args.memory_share_given = False


def _prompts(
    job: PreparedJob, prompts: str | Path | None, most: int | None, given: Mapping[str, Any]
) -> Any:
    """Return the prompts to evaluate on.

    Args:
        job: The run.
        prompts: A file, task or dataset. None uses the prompts that the run held out.
        most: Maximum number of prompts. None means all of them. For a task, which can generate any
            number of prompts, None means the run's ``data.held_out``, or 256 if that is not set.
        given: Settings under ``data`` that the user gave for the evaluation.
    """
    data = job.config.data
    name = str(prompts or data.prompts)
    is_the_runs = local_path(name).resolve() == local_path(data.prompts).resolve()
    if prompts is None or (is_the_runs and hub_task(name) and not is_task(name)):
        kept_out = job.prompts[1]
        if kept_out is None:
            raise DataError(
                "the run held out no prompts from training (data.held_out: 0): name a file, task "
                "or dataset with --prompts"
            )
        return kept_out.select(range(len(kept_out))[:most])
    how: dict[str, Any] = {"num_prompts": most, "system": system_message(data)}
    keys = ()
    if is_task(name):  # it has a held-out split of its own
        how = {
            "split": "held_out",
            "num_prompts": most or data.held_out or MAX_HELD_OUT,
            "system": data.system,
        }
        keys = ("level", "settings")
    elif not hub_task(name):  # a file or a dataset in the run's own columns
        how |= {"columns": data.columns, "skip_empty": data.skip_empty}
        keys = ("split", "config")
    # The run's values do not fit another task or dataset
    how |= {key: getattr(data, key) for key in keys if is_the_runs or key in given}
    load = functools.partial(load_prompts, name, chat=data.chat, seed=job.config.seed)
    try:
        return load(**how)
    except DataError:
        if is_the_runs or not how.get("columns"):
            raise
        with contextlib.suppress(DataError):  # the file may have the kit's own column names
            return load(**{**how, "columns": None})
        raise
