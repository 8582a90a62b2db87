"""From prompts to a rollout: passes of the policy, sampling, rewards, dynamic sampling.

Shapes: B completions, T tokens, F reward functions.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from trl.data_utils import apply_chat_template, is_conversational
from trl.trainer import rloo_trainer  # whose names Unsloth replaces
from trl.trainer.utils import use_adapter

from rloo_kit.data.history import PromptHistory
from rloo_kit.rloo.batching import MicroBatch, SharedPrompts, TokenRows
from rloo_kit.rloo.guards import Pieces, check_finite, finite_logits
from rloo_kit.rloo.learner import Learner, Scored
from rloo_kit.rloo.objective import RunningMoments
from rloo_kit.rloo.rollout import Rollout, ScoredBatch
from rloo_kit.sampling.canary import Canary
from rloo_kit.sampling.choice import blame_generation_kwargs, make_sampling, thought_limit
from rloo_kit.sampling.decoding import complete, continues_prompts
from rloo_kit.sampling.engine import Engine, draw_from
from rloo_kit.scoring.contract import AsyncCheckedReward

if TYPE_CHECKING:
    from rloo_kit.training.trainer import LeaveOneOutTrainer

# For a single completion that does not fit into memory
SAMPLING_REMEDY = (
    "lower trainer.max_completion_length, take a smaller model, or set model.load_in_4bit"
)
# Further rows that are looked at for one that the history does not skip; then the last is taken
MOST_TRIES = 100

# A row of the training set, with `prompt`
Row = Mapping[str, Any]


class Policy:
    """Passes over micro-batches, under the policy and under its reference."""

    def __init__(self, trainer: "LeaveOneOutTrainer") -> None:
        self.trainer = trainer

    def forward(self, batch: MicroBatch) -> Scored:
        """Return log-probabilities under the policy, and entropies where gradients are kept."""
        return self.score(batch, entropies=torch.is_grad_enabled())

    def score(self, batch: MicroBatch, *, entropies: bool, model: Any = None) -> Scored:
        """Return ``(N, C)`` log-probabilities of a micro-batch's completions, and entropies."""
        accelerator = self.trainer.accelerator
        model = accelerator.unwrap_model(self.trainer.model if model is None else model)
        with accelerator.autocast():
            # No attention mask: rows are padded on the right alone. (Unsloth's kernels may drop it
            # while they train, and TRL's left-padded prompts would then attend to their padding.)
            after = {} if batch.shared is None else _run_prompts(model, batch.shared, batch.labels)
            output = model(
                input_ids=batch.input_ids, labels=batch.labels, fused_lm_head=True, **after
            )
        before = (batch.places - 1).clamp(min=0)  # TRL's head scores a token one column before it

        def of_completions(values: torch.Tensor) -> torch.Tensor:  # (N, W) -> (N, C)
            return values.gather(1, before).masked_fill(~batch.completion_mask, 0.0)

        log_probs = of_completions(output.log_probs)
        return Scored(log_probs, of_completions(output.entropy.detach()) if entropies else None)

    def may_share(self) -> bool:
        """Return whether a prompt may run once for its group; checkpointing drops its keys."""
        args, model = self.trainer.args, self.trainer.model
        checkpoints = args.gradient_checkpointing or model.is_gradient_checkpointing
        return not (checkpoints and torch.is_grad_enabled()) and continues_prompts(model)

    @contextlib.contextmanager
    def no_grad(self) -> Iterator[None]:
        """Run passes without gradient, and without gradient checkpointing."""
        with torch.no_grad(), without_checkpointing(self.trainer):
            yield

    def reference_log_probs(
        self, learner: Learner, tokens: TokenRows, rows: list[int]
    ) -> torch.Tensor:
        """Return ``(B, T)`` log-probabilities under the reference, 0 in other rows.

        The reference is a model of its own, the adapter's starting copy, or the adapter off.
        """
        ref_model = self.trainer.ref_model

        def forward(batch: MicroBatch) -> Scored:
            return self.score(batch, entropies=False, model=ref_model)

        place = contextlib.nullcontext()
        if ref_model is None:
            model = self.trainer.accelerator.unwrap_model(self.trainer.model)
            place = use_adapter(model, "ref" if "ref" in model.peft_config else None)
        with place:
            learner.tally.reference_rows += len(rows)
            return learner.log_probs(tokens, rows, forward)


def enable_checkpointing(trainer: "LeaveOneOutTrainer") -> None:
    """Turn gradient checkpointing on as transformers' loop does."""
    kwargs = dict(trainer.args.gradient_checkpointing_kwargs or {})
    # two arguments of transformers; the others are for torch
    own = {name: kwargs.pop(name) for name in ("every_n_layers", "offload") if name in kwargs}
    # by name: what Unsloth puts into its place for Gemma 3n and 4 takes nothing by position
    trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs or None, **own)


@contextlib.contextmanager
def without_checkpointing(trainer: "LeaveOneOutTrainer") -> Iterator[None]:
    """Turn gradient checkpointing off, and on again where it was."""
    was_enabled = trainer.model.is_gradient_checkpointing
    if was_enabled:
        trainer.model.gradient_checkpointing_disable()
    try:
        yield
    finally:
        if was_enabled:
            enable_checkpointing(trainer)


def _run_prompts(model: Any, shared: SharedPrompts, rows: torch.Tensor) -> dict[str, Any]:
    """Run each prompt once; return the arguments with which ``(N, W)`` rows continue them.

    The cache is part of the graph: the gradient of a prompt is the sum over its rows.
    """
    cache = DynamicCache(config=model.config.get_text_config())
    model.get_decoder()(input_ids=shared.input_ids, past_key_values=cache, use_cache=True)
    cache.batch_select_indices(shared.of_row)
    begin = shared.lengths[shared.of_row].unsqueeze(1)  # (N, 1)
    is_prompt = torch.arange(shared.input_ids.size(1), device=begin.device) < begin  # (N, S)
    return {
        "past_key_values": cache,
        "use_cache": True,
        "attention_mask": torch.cat([is_prompt.long(), torch.ones_like(rows)], 1),  # (N, S + W)
        "position_ids": begin + torch.arange(rows.size(1), device=begin.device),  # (N, W)
    }


@contextlib.contextmanager
def _uncast(args: Any) -> Iterator[None]:
    """Keep TRL's continuous batching from casting the model that trains, its adapter included."""
    given = args.bf16, args.fp16
    args.bf16 = args.fp16 = False
    try:
        yield
    finally:
        args.bf16, args.fp16 = given


class Sampler:
    """Draws completions: by an engine where there is one, else by the model itself.

    Args:
        trainer: Whose policy samples.
        trl_generate: TRL's ``_generate_single_turn``, for continuous batching.
    """

    def __init__(
        self,
        trainer: "LeaveOneOutTrainer",
        trl_generate: Callable[[list[list[int]], Any, Any], list[list[int]]],
    ) -> None:
        self.trainer = trainer
        self.trl_generate = trl_generate
        self.pieces = Pieces("sampling", SAMPLING_REMEDY)
        self.thought = thought_limit(trainer._tokenizer, trainer.args.thinking_budget)
        self.canary: Canary | None = None
        self._synced: tuple[Any, int] = (None, -1)

    def draw(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]] | None]:
        """Return completion ids, and their log-probabilities where an engine reports them.

        Raises:
            StalePolicyError: The engine sampled from another policy.
            MemoryRanOutError: Not even a single completion fits.
        """
        trainer, engine = self.trainer, self.trainer.engine
        if engine is None:
            return self._draw_here(prompt_ids), None
        self._sync_engine(engine, prompt_ids)
        seed = int(torch.randint(2**31, ()))  # of the run's own random state
        sampling = make_sampling(trainer.args, trainer.eos_token_ids, self.thought)
        drawn = draw_from(engine, prompt_ids, sampling, seed)
        trainer.step_log.note_used()
        engine.sleep()  # the canary, the rewards and the learning step need its memory
        if self.canary is not None and trainer.model.training:
            tokens = TokenRows(prompt_ids, drawn.completion_ids)
            trainer.step_log.note_all(self.canary.check(tokens, drawn.log_probs, engine.name))
        return drawn.completion_ids, drawn.log_probs

    def _draw_here(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Let the model sample, fewer rows at a time where memory runs out."""
        trainer = self.trainer

        def draw(prompts: Any) -> list[list[int]]:
            # TRL turns checkpointing off to sample, and does not turn it on again after an error.
            off = without_checkpointing(trainer)
            training = trainer.model.training
            with blame_generation_kwargs(trainer.args), finite_logits(), off:
                try:
                    return self.generate(prompts)
                finally:  # Unsloth always ends in training mode, or after an error out of it
                    trainer.model.train(training)

        return self.pieces.run(draw, prompt_ids, len(prompt_ids))

    def generate(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Return the model's own completions."""
        trainer = self.trainer
        if trainer.use_transformers_continuous_batching:
            with _uncast(trainer.args):
                drawn = self.trl_generate(prompt_ids, None, {})
            cut = self.thought.cut if self.thought else lambda _, ids: ids
            return [cut(*pair) for pair in zip(prompt_ids, drawn, strict=True)]
        # Unsloth puts its own there, which pyright cannot know
        unwrapped = rloo_trainer.unwrap_model_for_generation(  # pyright: ignore[reportPrivateImportUsage]
            trainer.model_wrapped, trainer.accelerator, generation_kwargs=trainer.generation_kwargs
        )
        with unwrapped as model, torch.no_grad():
            return complete(
                model,
                prompt_ids,
                trainer._tokenizer.pad_token_id,
                trainer.eos_token_ids,
                self.thought,
                generation_config=trainer.generation_config,
            )

    def _sync_engine(self, engine: Engine, prompt_ids: list[list[int]]) -> None:
        """Send the adapter where it has changed; before the first step, prove that it arrives."""
        trainer, state = self.trainer, self.trainer.state
        prove = trainer.args.canary and trainer.model.training and self.canary is None
        if not prove and self._synced[0] is state and self._synced[1] == state.global_step:
            return
        engine.sync(trainer.model)
        if prove:
            canary = self._make_canary()
            canary.prove(engine, prompt_ids, trainer.args.seed)
            self.canary = canary
        self._synced = (state, state.global_step)
        trainer.step_log.note("sampling/sync_seconds", engine.sync_seconds)
        if self.canary is not None:
            self.canary.sent(engine.adapter_dtype)

    def _make_canary(self) -> Canary:
        trainer = self.trainer
        model = trainer.accelerator.unwrap_model(trainer.model)

        def score(batch: MicroBatch) -> torch.Tensor:
            with trainer.policy.no_grad():
                return trainer.policy.score(batch, entropies=False).log_probs

        return Canary(
            score=score,
            model=model,
            without_adapter=lambda: use_adapter(model, None),
            pad_token_id=trainer._tokenizer.pad_token_id,
            dtype=torch.bfloat16 if trainer.args.bf16 else model.dtype,
            sampling=make_sampling(trainer.args, trainer.eos_token_ids),
        )


class RolloutMaker:
    """Makes rollouts: draws completions, scores them, and fills in the reference."""

    def __init__(self, trainer: "LeaveOneOutTrainer") -> None:
        self.trainer = trainer
        # Statistics of `normalize_reward: moving`
        self.moments = RunningMoments()
        # Rows of the training set that dynamic and prompt selection draw next
        self.prompt_order: deque[int] = deque()
        args = trainer.args
        self.history = PromptHistory(args.prompt_retire_at) if args.prompt_selection else None

    def make(self, inputs: list[Row], learner: Learner) -> Rollout:
        """Return the scored rollout of some rows; the learner makes the reference pass.

        Raises:
            DivergedError: The weights are NaN or Inf.
        """
        trainer, args, size = self.trainer, self.trainer.args, self.trainer.num_generations
        check_finite(learner.parameters, trainer.state.global_step)
        # Async rewards run while the reference pass computes, unless they decide who gets a pass.
        overlap = bool(args.beta) and not args.dynamic_sampling
        batch, reference = self._sample(self._select(inputs), learner, overlap=overlap)
        without = (~batch.has_signal(args.shaping, size)).float().mean().item()
        trainer.step_log.note("signal/groups_without", without)
        if args.dynamic_sampling:
            batch = self._draw_again(batch, learner)
        if self.history is not None:
            trainer.step_log.note_all(self.history.metrics())
        rollout = Rollout.scored(batch, size, args.shaping, self.moments)
        if args.beta and reference is None:
            reference = trainer.policy.reference_log_probs(
                learner, batch.tokens, rollout.learnable_rows
            )
        if reference is not None:
            rollout.reference_log_probs = reference
        if args.learn_from is not None:
            with_gradient = len(rollout.learnable_rows)
            start = float(torch.rand(()))  # of the run's own random state
            rollout.draw(args.learn_from * len(rollout) // size, start)
            share = len(rollout.learnable_rows) / max(1, with_gradient)
            trainer.step_log.note("signal/drawn", share)
        trainer.step_log.episodes += len(rollout)
        return rollout

    def _sample(
        self, inputs: list[Row], learner: Learner, *, overlap: bool
    ) -> tuple[ScoredBatch, torch.Tensor | None]:
        """Generate and score; with ``overlap``, run the reference pass while async rewards run.

        Returns:
            The batch, and the reference's ``(B, T)`` log-probabilities where they were computed.
        """
        trainer, started = self.trainer, time.perf_counter()
        prompts = [row["prompt"] for row in inputs]
        prompt_ids, *_ = trainer._tokenize_prompts(prompts)
        completion_ids, log_probs = trainer.sampler.draw(prompt_ids)
        tokens = TokenRows(prompt_ids, completion_ids)
        last = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        ended = [ids[-1] in last for ids in completion_ids]
        completions = trainer.processing_class.batch_decode(
            completion_ids, skip_special_tokens=True
        )
        if is_conversational({"prompt": prompts[0]}):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        generated = time.perf_counter()

        names = set(inputs[0]) - {"prompt", "completion", "completion_ids"}
        columns = {
            **{name: [row[name] for row in inputs] for name in sorted(names)},
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            "trainer_state": trainer.state,
            "log_extra": trainer._log_completion_extra,  # of TRL, as the two others
            "log_metric": trainer._log_metric,
        }
        waiting = self._start_rewards(columns)
        reference, reference_seconds = None, 0.0
        if waiting and overlap:
            masks = trainer.args.mask_truncated_completions
            rows = [row for row, end in enumerate(ended) if end or not masks]
            reference = trainer.policy.reference_log_probs(learner, tokens, rows)
            reference_seconds = time.perf_counter() - generated
        found = self.finish_rewards(columns, waiting)  # (B, F)
        weights = trainer.reward_weights.to(found.device)
        scores = (found * weights).nansum(dim=1)  # (B,)
        scores = scores.masked_fill(found.isnan().all(dim=1), torch.nan)
        batch = ScoredBatch(
            prompts, completions, tokens, ended, found, scores, log_probs, weights.clone()
        )
        self._remember(batch)
        trainer.step_log.note_drawn(batch, generated - started, trainer.state)
        trainer.step_log.elsewhere += time.perf_counter() - started - reference_seconds
        return batch, reference

    # --- rewards ---------------------------------------------------------------------------------

    def _start_rewards(self, columns: dict[str, Any]) -> dict[int, Future[Any]]:
        """Start every async reward; return, by its place, what its scores will be in."""
        # TRL's loop runs in a thread of its own, and exists only where a reward is async
        loop = getattr(self.trainer, "async_loop", None)
        if loop is None:
            return {}
        return {
            place: asyncio.run_coroutine_threadsafe(function(**columns), loop)
            for place, function in enumerate(self.trainer.reward_funcs)
            if isinstance(function, AsyncCheckedReward)
        }

    def finish_rewards(
        self, columns: dict[str, Any], started: dict[int, Future[Any]]
    ) -> torch.Tensor:
        """Return ``(B, F)`` float32 rewards, NaN for None: call the rest, wait for the started."""
        functions, device = self.trainer.reward_funcs, self.trainer.accelerator.device
        found = torch.zeros(len(columns["prompts"]), len(functions), device=device)
        for place, function in enumerate(functions):
            if isinstance(function, torch.nn.Module):
                found[:, place] = self._scores_of_model(function, place, columns)
                continue
            scores = started[place].result() if place in started else function(**columns)
            values = [torch.nan if score is None else score for score in scores]
            found[:, place] = torch.tensor(values, dtype=torch.float32, device=device)
        return found

    def _scores_of_model(self, model: Any, place: int, columns: dict[str, Any]) -> torch.Tensor:
        """Return ``(B,)`` logits of a sequence-classification model, read as TRL reads texts."""
        tokenizer = self.trainer.reward_processing_classes[place]
        pairs = zip(columns["prompts"], columns["completions"], strict=True)
        texts = [prompt + completion for prompt, completion in pairs]
        if is_conversational({"prompt": columns["prompts"][0]}):
            kwargs = self.trainer.chat_template_kwargs
            texts = [
                apply_chat_template({"messages": messages}, tokenizer, **kwargs)["text"]
                for messages in texts
            ]
        inputs = tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right",
            add_special_tokens=False,
        )  # fmt: skip
        with torch.inference_mode():
            return model(**inputs.to(self.trainer.accelerator.device)).logits[:, 0]

    # --- which prompts ---------------------------------------------------------------------------

    def _select(self, inputs: list[Row]) -> list[Row]:
        """Replace prompts that the history skips by further prompts (``prompt_selection``)."""
        if self.history is None:
            return inputs
        size, keeps = self.trainer.num_generations, self.history.keeps
        rows = [row if keeps(row["prompt"]) else self._next_row() for row in inputs[::size]]
        return [row for row in rows for _ in range(size)]

    def _draw_again(self, batch: ScoredBatch, learner: Learner) -> ScoredBatch:
        """Replace groups without signal by groups of further prompts (``dynamic_sampling``)."""
        args, size, drawn = self.trainer.args, self.trainer.num_generations, 0
        for _ in range(args.dynamic_sampling_rounds):
            without = (~batch.has_signal(args.shaping, size)).nonzero().flatten().tolist()
            if not without:
                break
            inputs: list[Row] = []
            for _ in without:
                inputs += [self._next_row()] * size
            more, _ = self._sample(inputs, learner, overlap=False)
            batch = batch.replace_groups(without, more, args.shaping, size)
            drawn += len(without)
        self.trainer.step_log.note("signal/groups_drawn_again", drawn)
        return batch

    def _remember(self, batch: ScoredBatch) -> None:
        """Note in the history how the groups of a batch have scored."""
        if self.history is not None:
            size = self.trainer.num_generations
            means = batch.scores.view(-1, size).nanmean(dim=1).tolist()
            signal = batch.has_signal(self.trainer.args.shaping, size).tolist()
            self.history.note(batch.prompts[::size], means, signal)

    def _next_row(self) -> Row:
        """Return the next row that the history does not skip."""
        row = self._any_row()
        for _ in range(MOST_TRIES):
            if self.history is None or self.history.keeps(row["prompt"]):
                break
            row = self._any_row()
        return row

    def _any_row(self) -> Row:
        """Return the next row of a random order of the training set, apart from the run's own."""
        trainer = self.trainer
        if not self.prompt_order:
            generator = torch.Generator().manual_seed(trainer.args.seed + trainer._step)
            order = torch.randperm(len(trainer.train_dataset), generator=generator)
            self.prompt_order.extend(order.tolist())
        return trainer.train_dataset[self.prompt_order.popleft()]

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept from batch to batch."""
        return {
            "moments": asdict(self.moments),
            "prompt_order": list(self.prompt_order),
            "history": self.history and self.history.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.moments = RunningMoments(**state["moments"])
        self.prompt_order = deque(state["prompt_order"])
        if self.history is not None:
            self.history.load_state_dict(state["history"])
