"""The same held-out prompts, sent to several models in the same way."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_kit.config.engine_settings import requested_engine
from rloo_kit.config.run_file import EXAMPLES, RunConfig, make_run_config, read_overrides
from rloo_kit.data.hub_tasks import hub_task
from rloo_kit.data.lengths import drop_long_prompts, prompt_ids
from rloo_kit.data.prompts import is_task, load_prompts
from rloo_kit.errors import ConfigError, DataError, GenerationError
from rloo_kit.evaluation.evaluator import Evaluation, evaluate, settings_of
from rloo_kit.evaluation.models import LoadedBase, TrainedModel, why_not_by_vllm
from rloo_kit.job import PreparedJob, held_out_judges, read_prompts, system_message
from rloo_kit.machine.memory import add_to_session, remove_from_session
from rloo_kit.sampling.choice import check_engine, start_engine
from rloo_kit.sampling.engine import Choice, Engine, choose
from rloo_kit.scoring.loading import LoadedReward, load_rewards
from rloo_kit.text.wording import format_value
from rloo_kit.types import Tokenizer

if TYPE_CHECKING:
    from rloo_kit.training.config import LeaveOneOutConfig

Say = Callable[[str], None]
# On a CPU, of the prompts and completions that are drawn together; on a GPU the run's batch is
# what is known to fit
BATCH_TOKENS = 1 << 16
# That vLLM completes at one time
NUM_SEQUENCES = 256


@dataclass(frozen=True)
class HeldOut:
    """Prompts, rewards and sampling that are the same for every model."""

    job: PreparedJob  # whose model is not used
    prompts: Any  # a ``datasets.Dataset`` of n prompts with their columns
    source: str  # where they come from
    batch_size: int | None = None  # completions at one time; None: as many as are known to fit
    engine_required: bool = False  # whether an engine that cannot be used is an error
    why_not: str | None = None  # why vLLM cannot sample for all of the models
    fitted: bool = False

    @property
    def args(self) -> "LeaveOneOutConfig":
        """The trainer's settings of the run file."""
        return self.job.args

    def fit(self, tokenizer: Tokenizer) -> "HeldOut":
        """Return it without the prompts that the run leaves out for their length.

        The first tokenizer decides, so that all models get the same prompts.
        """
        limit = self.job.config.data.max_prompt_tokens
        if self.fitted or limit is None:
            return self
        template = self.args.chat_template_kwargs
        short = drop_long_prompts(self.prompts, tokenizer, limit, template)[0]
        return replace(self, prompts=short, fitted=True)

    def rewards(
        self, tokenizer: Tokenizer, specs: Sequence[Any] | None = None
    ) -> list[LoadedReward]:
        """Return what judges held-out prompts; or the rewards of these specs of a run file alone.

        Without a tokenizer, the texts never begin in a thought that the template opened.
        """
        template = self.args.chat_template_kwargs
        load = functools.partial(load_rewards, tokenizer=tokenizer, chat_template_kwargs=template)
        config = self.job.config
        found = load(config.rewards if specs is None else specs)
        if specs is None:
            data = replace(config.data, prompts=self.source)
            found = held_out_judges(found, self.prompts, load, data)
        for reward in found:
            add_to_session(reward.func)
        return found

    @contextlib.contextmanager
    def on(
        self, base: LoadedBase, models: Sequence[TrainedModel], say: Say = print
    ) -> Iterator["Sampler"]:
        """Yield what samples for the models on one base, while its engine runs.

        Raises:
            DataError: A prompt leaves no room for its completion.
            GenerationError: vLLM was requested by name and cannot sample here, or does not start.
        """
        template = self.args.chat_template_kwargs
        ids = [prompt_ids(base.tokenizer, row["prompt"], template) for row in self.prompts]
        length = max(map(len, ids)) + self.args.max_completion_length
        limit = getattr(base.model.config, "max_position_embeddings", None)
        if limit is not None and length > limit:
            raise DataError(
                f"prompt and completion may have {length} tokens, and the model takes {limit}: "
                "lower trainer.max_completion_length, or leave long prompts out"
            )
        base.load(models)
        engine = self._start_engine(base, length, say)
        try:
            yield Sampler(self, base, engine)
        finally:
            if engine is not None:
                engine.close()
                remove_from_session(engine)

    def _start_engine(self, base: LoadedBase, length: int, say: Say) -> Engine | None:
        # nothing trains next to the engine: it never sleeps, and takes as many rows as it can
        args = copy.copy(self.args)
        args.vllm_max_model_length, args.vllm_enable_sleep_mode = length, False
        args.generation_batch_size = self.batch_size or NUM_SEQUENCES
        try:
            engine, choice = start_engine(base.model, args, why_not=self.why_not, trains=False)
        except GenerationError as exc:
            if self.engine_required:
                raise
            engine, choice = None, Choice("transformers", str(exc))
        if choice.reason is not None:
            say(f"completions by transformers: {choice.reason}")
        return engine


@dataclass(frozen=True)
class Sampler:
    """Completes and scores held-out prompts with the models on one base."""

    held_out: HeldOut
    base: LoadedBase  # its adapters are loaded
    engine: Engine | None  # samples instead of transformers

    @property
    def name(self) -> str:
        """For people: who draws the completions."""
        return "transformers" if self.engine is None else self.engine.name

    def __call__(
        self, trained: TrainedModel, rewards: Sequence[LoadedReward], **how: Any
    ) -> Evaluation:
        """Return the evaluation of one model; ``how`` replaces keywords of ``evaluate``."""
        held_out, args = self.held_out, self.held_out.args
        with self.base.using(trained) as model:
            size = held_out.batch_size or args.per_device_train_batch_size
            # without gradients a CPU holds more rows than the run's batch
            if held_out.batch_size is None and model.device.type == "cpu":
                size = max(size, BATCH_TOKENS // held_out.job.config.model.max_seq_length)
            settings = settings_of(args) | {"batch_size": size, "engine": self.engine} | how
            return evaluate(model, self.base.tokenizer, held_out.prompts, rewards, **settings)


# --- reading what is held out --------------------------------------------------------------------


def read_held_out(
    models: Sequence[TrainedModel],
    overrides: Sequence[str] = (),
    prompts: str | Path | None = None,
    num_prompts: int | None = None,
    batch_size: int | None = None,
) -> HeldOut:
    """Return the prompts for some models, by the run file of the first that is a run.

    Where none is a run, the kit's defaults are used. Arguments are those of ``evaluate_models``.
    """
    for name, value in (("num-prompts", num_prompts), ("batch-size", batch_size)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, must be at least 1")
    for override in overrides:
        if override.lstrip().startswith(("model.", "lora.", "model=", "lora=")):
            raise ConfigError(
                f"--set {format_value(override)} cannot change a model that is trained: leave it "
                "out, or name another model"
            )
    config = next((one.config for one in models if one.config is not None), RunConfig())
    if overrides:
        config = make_run_config(config.as_dict(), overrides)
    job = PreparedJob(config, EXAMPLES)  # the paths of a run are whole
    args = job.args
    given = read_overrides(overrides)
    required = choose_engine(args, given.get("trainer") or {})
    why_not = why_not_by_vllm(models)
    if required:
        check_engine(args, trains=False)
        choose(requested_engine(args), on_gpu=True, why_not=why_not)
    found = _prompts(config, prompts, num_prompts, given.get("data") or {})
    source = str(prompts or config.data.prompts)
    return HeldOut(job, found, source, batch_size, required, why_not)


def choose_engine(args: "LeaveOneOutConfig", given: Mapping[str, Any]) -> bool:
    """Set the engine that evaluates in ``args``; return whether ``given`` names it.

    It need not be the engine that trained, unless that was transformers.
    """
    if {"generation", "use_vllm"} & set(given):
        args.use_vllm = bool(given.get("use_vllm"))
    elif args.use_vllm or requested_engine(args) != "transformers":
        args.generation, args.use_vllm = "auto", False
    if "vllm_gpu_memory_utilization" not in given:  # it was for an engine next to a training
        args.memory_share_given = False
    return requested_engine(args) == "vllm"


def _prompts(
    config: RunConfig, prompts: str | Path | None, most: int | None, given: Mapping[str, Any]
) -> Any:
    data, name = config.data, str(prompts or config.data.prompts)
    is_known = hub_task(name) is not None
    has_own_split = is_task(name)
    if prompts is not None and not has_own_split and not (is_known and name == data.prompts):
        asked = load_prompts(
            name,
            split="train" if is_known else data.split,
            num_prompts=most,
            system=system_message(data),
            chat=data.chat,
            seed=config.seed,
            columns=None if is_known else data.columns,
        )
    else:
        if name != data.prompts:  # another task has levels and settings of its own
            own = [key for key in ("level", "settings") if key not in given]
            data = replace(data, prompts=name, split="train", columns=None, **dict.fromkeys(own))
        if prompts is not None and has_own_split:
            data = replace(data, held_out=most or data.held_out or None)
        _, asked = read_prompts(replace(config, data=data), EXAMPLES)
    if asked is None:
        raise DataError(
            "the run kept no prompts out of training (data.held_out: 0): name some with --prompts"
        )
    return asked if most is None else asked.select(range(min(most, len(asked))))
