"""The same held-out prompts, put to several models in the same way."""

import contextlib
import copy
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rloo_kit.config.run_file import EXAMPLES, RunConfig, make_run_config, read_overrides
from rloo_kit.data.prompts import drop_long_prompts, is_task, load_prompts, prompt_ids
from rloo_kit.errors import ConfigError, DataError, GenerationError
from rloo_kit.evaluation.evaluator import REMEDY, Evaluation, evaluate, settings_of
from rloo_kit.evaluation.models import LoadedBase, TrainedModel
from rloo_kit.machine.environment import setup
from rloo_kit.machine.memory import add_to_session, remove_from_session
from rloo_kit.models.adapters import CONFIG
from rloo_kit.rloo.batching import MicroBatch, TokenRows
from rloo_kit.rloo.guards import Pieces
from rloo_kit.sampling.canary import Canary
from rloo_kit.sampling.choice import check_engine, requested_engine, start_engine
from rloo_kit.sampling.engine import (
    Choice,
    Engine,
    Sampling,
    active_adapter,
    choose,
    why_no_hot_swap,
)
from rloo_kit.scoring.loading import LoadedReward, load_rewards
from rloo_kit.text.wording import format_value
from rloo_kit.training.preparation import held_out_judges, make_trainer_args, read_prompts

BATCH_TOKENS = 1 << 16
"""On a CPU, of the prompts and completions that are drawn together; on a GPU the run's batch is
what is known to fit."""
NUM_SEQUENCES = 256
"""That vLLM completes at one time."""
NUM_PROBES, PROBE_TOKENS = 8, 64
"""Prompts that the canary asks first, the shortest ones, and the tokens of each completion."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class HeldOut:
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
    engine_by_name: bool = False
    """Whether an engine that cannot be used is an error."""
    why_not: str | None = None
    """Why vLLM cannot sample for all of the models."""
    fitted: bool = False

    def fitting(self, tokenizer: Any) -> "HeldOut":
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
            add_to_session(reward.func)
        return found

    @contextlib.contextmanager
    def asking(
        self, one: LoadedBase, on_it: Sequence[TrainedModel], say: Say = print
    ) -> Iterator["Asker"]:
        """Yield what puts the prompts to the models on one base, its engine running meanwhile.

        Args:
            one: The base.
            on_it: The models that will be asked; their adapters are loaded.
            say: For lines.

        Raises:
            DataError: A prompt leaves no room for its completion.
            GenerationError: vLLM was asked for by name and cannot sample here, or does not start.
            StalePolicyError: The engine samples from something else than the model it is to be.
        """
        template = self.args.chat_template_kwargs
        ids = [prompt_ids(one.tokenizer, row["prompt"], template) for row in self.asked]
        length = max(map(len, ids)) + self.args.max_completion_length
        self._check_room(one, length)
        one.load(on_it)
        args = copy.copy(self.args)
        args.vllm_max_model_length, args.vllm_enable_sleep_mode = length, False
        args.generation_batch_size = self.batch_size or NUM_SEQUENCES
        try:
            engine, choice = start_engine(one.model, args, why_not=self.why_not, trains=False)
        except GenerationError as exc:
            if self.engine_by_name:
                raise
            engine, choice = None, Choice("transformers", str(exc))
        if choice.reason is not None:
            say(f"completions by transformers: {choice.reason}")
        try:
            asker = Asker(self, one, engine)
            if engine is not None and self.args.canary:
                asker.prove(on_it, sorted(ids, key=len)[:NUM_PROBES])
            yield asker
        finally:
            if engine is not None:
                engine.close()
                remove_from_session(engine)

    def _check_room(self, one: LoadedBase, length: int) -> None:
        limit = getattr(one.model.config, "max_position_embeddings", None)
        completion = self.args.max_completion_length
        if limit is not None and length > limit:
            raise DataError(
                f"a prompt of {length - completion} tokens and a completion of {completion} are "
                f"more than the {limit} of the model: lower trainer.max_completion_length, or "
                f"leave long prompts out"
            )

    def batch_size_on(self, model: Any) -> int:
        """Return how many completions transformers draws at one time."""
        if self.batch_size is not None:
            return self.batch_size
        rows = self.args.per_device_train_batch_size
        if model.device.type != "cpu":
            return rows
        return max(rows, BATCH_TOKENS // self.config.model.max_seq_length)


class Asker:
    """Puts the prompts to the models on one base.

    Args:
        exam: What is asked.
        one: The base, its adapters loaded.
        engine: Samples in the place of transformers.
    """

    def __init__(self, exam: HeldOut, one: LoadedBase, engine: Engine | None) -> None:
        self._exam = exam
        self._one = one
        self._engine = engine
        self.sampler = "transformers" if engine is None else engine.name
        """For people: who draws the completions."""

    def __call__(
        self, trained: TrainedModel, rewards: Sequence[LoadedReward], **how: Any
    ) -> Evaluation:
        """Return the evaluation of one model.

        Args:
            trained: On this base.
            rewards: Of ``HeldOut.rewards``.
            **how: Keywords of ``evaluate``, in the place of the run's.
        """
        exam, tokenizer = self._exam, self._one.tokenizer
        with self._one.using(trained) as model:
            settings = settings_of(exam.args) | {
                "batch_size": exam.batch_size_on(model),
                "engine": self._engine,
            }
            return evaluate(model, tokenizer, exam.asked, rewards, **settings | how)

    def prove(self, on_it: Sequence[TrainedModel], prompt_ids: list[list[int]]) -> None:
        """See that the engine follows each adapter, lets go of it, and samples from nothing else.

        Args:
            on_it: The models on the base.
            prompt_ids: A few short prompts.

        Raises:
            StalePolicyError: It does not.
        """
        args, engine = self._exam.args, self._engine
        for trained in on_it:
            if trained.adapter is None:
                continue
            with self._one.using(trained) as model:
                sampling = Sampling(
                    min(PROBE_TOKENS, args.max_completion_length),
                    tuple(model.generation_config.eos_token_id),
                    args.temperature or 1.0,
                )
                canary = Canary(
                    score=functools.partial(_score, model, sampling.temperature),
                    model=model,
                    without_adapter=model.disable_adapter,
                    pad_token_id=self._one.tokenizer.pad_token_id,
                    dtype=engine.adapter_dtype,
                    sampling=sampling,
                    adapter=_parameters(model, active_adapter(model)),
                )
                engine.sync(model)
                canary.prove(engine, prompt_ids, args.seed, off=True)
                canary.sent(engine.adapter_dtype)
                drawn = engine.generate(prompt_ids, sampling, args.seed)
                tokens = TokenRows(prompt_ids, drawn.completion_ids)
                canary.check(tokens, drawn.log_probs, engine.name)


def _parameters(model: Any, adapter: str) -> dict[str, Any]:
    named = model.named_parameters()
    return {name: values for name, values in named if "lora_" in name and f".{adapter}." in name}


def _score(model: Any, temperature: float, batch: MicroBatch) -> tuple[Any, Any]:
    """Return ``(N, C)`` log-probabilities and entropies of the completion tokens, float32, nats.

    Row by row and of the completion alone, since all logits would not fit beside an engine on a
    small card.
    """
    import torch

    def score(rows: Sequence[int]) -> list[tuple[Any, Any]]:
        found = []
        for row in rows:
            length = int(batch.completion_mask[row].sum())
            ids = batch.input_ids[row, : int(batch.places[row, 0]) + length]
            with torch.no_grad():
                output = model(input_ids=ids.unsqueeze(0), logits_to_keep=length + 1)
            spread = (output.logits[0, :-1].float() / temperature).log_softmax(-1)
            log_probs = spread.gather(-1, ids[-length:].unsqueeze(-1)).squeeze(-1)
            found.append((log_probs, -(spread.exp() * spread).sum(-1)))
        return found

    scored = Pieces("comparing log-probabilities", REMEDY).run(score, range(len(batch.places)), 1)
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return tuple(map(pad, zip(*scored, strict=True)))


def read_held_out(
    found: Sequence[TrainedModel],
    *,
    overrides: Sequence[str] = (),
    prompts: str | Path | None = None,
    num_prompts: int | None = None,
    batch_size: int | None = None,
) -> HeldOut:
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
                f"--set {format_value(override)} cannot change a model that is trained: leave it "
                "out, or name another model"
            )
    config = next((one.config for one in found if one.config is not None), RunConfig())
    if overrides:
        config = make_run_config(config.as_dict(), overrides)
    setup(config.model.backend)
    args = make_trainer_args(config, Path(config.output_dir))
    given = read_overrides(overrides)
    by_name = _choose_engine(args, given.get("trainer") or {})
    why_not = _why_no_engine(found)
    if by_name:
        check_engine(args, trains=False)
        choose(requested_engine(args), on_gpu=True, why_not=why_not)
    return HeldOut(
        config,
        args,
        _prompts(config, prompts, num_prompts, given.get("data") or {}),
        str(prompts or config.data.prompts),
        batch_size,
        engine_by_name=by_name,
        why_not=why_not,
    )


def _choose_engine(args: Any, given: Mapping[str, Any]) -> bool:
    """Let ``args`` ask for the engine that evaluates; return whether it was asked for by name.

    What trained need not be what evaluates, unless that was transformers.
    """
    if {"generation", "use_vllm"} & set(given):
        args.use_vllm = bool(given.get("use_vllm"))
    elif args.use_vllm or requested_engine(args) != "transformers":
        args.generation, args.use_vllm = "auto", False
    if "vllm_gpu_memory_utilization" not in given:  # it was for an engine beside a training
        args.memory_share_given = False
    return requested_engine(args) in ("vllm", "server")


def _why_no_engine(found: Sequence[TrainedModel]) -> str | None:
    """Return why vLLM cannot sample for all of the models, so that none is compared across two."""
    for one in found:
        if not any(other.adapter and other.model == one.model for other in found):
            return f"{one.name} has no adapter, and vLLM is started for a base with one"
        if one.adapter is None:
            continue
        with contextlib.suppress(Exception):  # what cannot be read is told when it is loaded
            config = json.loads((one.adapter / CONFIG).read_bytes())
            model = SimpleNamespace(peft_config={"default": SimpleNamespace(**config)})
            why_not = why_no_hot_swap(model)
            if why_not:
                return why_not
    return None


def _prompts(
    config: RunConfig,
    prompts: str | Path | None,
    num_prompts: int | None,
    given: Mapping[str, Any],
) -> Any:
    data, name = config.data, str(prompts or config.data.prompts)
    if prompts is None or is_task(name):
        if name != data.prompts:  # another task has levels and settings of its own
            own = [key for key in ("level", "settings") if key not in given]
            data = replace(data, prompts=name, columns=None, **dict.fromkeys(own))
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
