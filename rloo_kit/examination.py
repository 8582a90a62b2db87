"""The same held-out prompts, put to several models in the same way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rloo_kit.config import EXAMPLES, RunConfig, make_run_config
from rloo_kit.data import drop_long_prompts, is_task, load_prompts, prompt_ids
from rloo_kit.environment import setup
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.evaluation import Evaluation, evaluate, settings_of
from rloo_kit.memory import belongs_to_session
from rloo_kit.preparation import held_out_judges, make_trainer_args, read_prompts
from rloo_kit.reward_loading import LoadedReward, load_rewards
from rloo_kit.trained_models import OneBase, TrainedModel
from rloo_kit.wording import shown

BATCH_TOKENS = 1 << 16
"""On a CPU, of the prompts and completions that are drawn together; on a GPU the run's batch is
what is known to fit."""


@dataclass(frozen=True)
class Examination:
    """Prompts, rewards and sampling that are the same for every model."""

    config: RunConfig
    args: Any
    """``LeaveOneOutConfig`` of that run file."""
    asked: Any
    """Prompts with their columns, n rows."""
    source: str
    """Where they come from."""
    batch_size: int | None = None
    """Completions at one time; None: as many as are known to fit."""
    fitted: bool = False

    def fitting(self, tokenizer: Any) -> "Examination":
        """Return it without the prompts that the run leaves out for their length.

        The first tokenizer decides, so that all models are asked the same.
        """
        limit = self.config.data.max_prompt_tokens
        if self.fitted or limit is None:
            return self
        template = self.args.chat_template_kwargs
        return replace(
            self, asked=drop_long_prompts(self.asked, tokenizer, limit, template)[0], fitted=True
        )

    def rewards(self, tokenizer: Any, specs: Sequence[Any] | None = None) -> list[LoadedReward]:
        """Return what judges held-out prompts; or the rewards of these specs alone.

        Args:
            tokenizer: Of the model whose completions they score; None: of texts that no model of
                a template with an opened thought wrote.
            specs: As in a run file.
        """

        def load(specs: Sequence[Any]) -> list[LoadedReward]:
            return load_rewards(
                specs,
                tokenizer=tokenizer,
                chat_template_kwargs=self.args.chat_template_kwargs,
            )

        found = load(self.config.rewards if specs is None else specs)
        if specs is None:
            found = held_out_judges(found, self.asked, load, self.config.data.held_out_rewards)
        for reward in found:
            belongs_to_session(reward.func)
        return found

    def asker(self, one: OneBase, rewards: Sequence[LoadedReward]) -> Callable[..., Evaluation]:
        """Return what puts the prompts to a model on that base, with keywords of ``evaluate``.

        Raises:
            DataError: A prompt leaves no room for its completion.
        """
        self._check_room(one)
        settings = settings_of(self.args) | {"batch_size": self._batch_size(one.model)}
        return lambda model, **how: evaluate(
            model, one.tokenizer, self.asked, rewards, **settings | how
        )

    def _check_room(self, one: OneBase) -> None:
        limit = getattr(one.model.config, "max_position_embeddings", None)
        template = self.args.chat_template_kwargs
        rows = (prompt_ids(one.tokenizer, row["prompt"], template) for row in self.asked)
        longest, completion = max(map(len, rows)), self.args.max_completion_length
        if limit is not None and longest + completion > limit:
            raise DataError(
                f"a prompt of {longest} tokens and a completion of {completion} are more than the "
                f"{limit} of the model: lower trainer.max_completion_length, or leave long prompts "
                f"out"
            )

    def _batch_size(self, model: Any) -> int:
        if self.batch_size is not None:
            return self.batch_size
        rows = self.args.per_device_train_batch_size
        if model.device.type != "cpu":
            return rows
        return max(rows, BATCH_TOKENS // self.config.model.max_seq_length)


def examine_models(
    found: Sequence[TrainedModel],
    *,
    overrides: Sequence[str] = (),
    prompts: str | Path | None = None,
    num_prompts: int | None = None,
    batch_size: int | None = None,
) -> Examination:
    """Return what the models are asked, by the run file of the first that is a run.

    Args:
        found: The models; where none is a run, the kit's defaults say the rest.
        overrides: ``section.key=value``.
        prompts: A file, task or dataset in the place of the run's held-out prompts.
        num_prompts: At most so many.
        batch_size: Completions at one time.

    Raises:
        ConfigError, DataError, BackendError: With the remedy.
    """
    for name, value in (("num-prompts", num_prompts), ("batch-size", batch_size)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, must be at least 1")
    for override in overrides:
        if override.lstrip().startswith(("model.", "lora.", "model=", "lora=")):
            raise ConfigError(
                f"--set {shown(override)} cannot change a model that is trained: leave it out, or "
                f"name another model"
            )
    config = next((one.config for one in found if one.config is not None), RunConfig())
    if overrides:
        config = make_run_config(config.as_dict(), overrides)
    setup(config.model.backend)
    args = make_trainer_args(config, Path(config.output_dir))
    asked = _prompts(config, prompts, num_prompts, overrides)
    return Examination(config, args, asked, str(prompts or config.data.prompts), batch_size)


def _prompts(
    config: RunConfig,
    prompts: str | Path | None,
    num_prompts: int | None,
    overrides: Sequence[str],
) -> Any:
    data, name = config.data, str(prompts or config.data.prompts)
    if prompts is None or is_task(name):
        if name != data.prompts:  # another task has levels and settings of its own
            own = {key: None for key in ("level", "settings") if not _is_set(key, overrides)}
            data = replace(data, prompts=name, columns=None, **own)
        if prompts is not None:
            data = replace(data, held_out=num_prompts or data.held_out or None)
        _, asked = read_prompts(replace(config, data=data), EXAMPLES)
        if asked is None:
            raise DataError(
                "the run kept no prompts out of training (data.held_out: 0): name some with "
                "--prompts"
            )
    else:
        asked = load_prompts(
            name,
            split=data.split,
            num_prompts=num_prompts,
            system=data.system,
            chat=data.chat,
            seed=config.seed,
            columns=data.columns,
        )
    return asked if num_prompts is None else asked.select(range(min(num_prompts, len(asked))))


def _is_set(key: str, overrides: Sequence[str]) -> bool:
    return any(override.partition("=")[0].strip() == f"data.{key}" for override in overrides)
