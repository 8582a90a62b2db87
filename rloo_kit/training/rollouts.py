"""From prompts to a rollout: passes of the policy, sampling, rewards, dynamic sampling.

Shapes: B completions of all processes, b of this one, T tokens, F reward functions.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from trl.data_utils import apply_chat_template, is_conversational
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from rloo_kit.processes import Team
from rloo_kit.rloo.batching import MicroBatch, TokenRows
from rloo_kit.rloo.guards import Pieces, check_finite, finite_logits
from rloo_kit.rloo.learner import Learner, Scored
from rloo_kit.rloo.objective import RunningMoments
from rloo_kit.rloo.rollout import Rollout, ScoredBatch
from rloo_kit.sampling.canary import Canary
from rloo_kit.sampling.choice import blame_generation_kwargs, make_sampling
from rloo_kit.sampling.engine import Engine
from rloo_kit.scoring.contract import AsyncCheckedReward
from rloo_kit.training.metrics import StepLog

# Generation batches that `max_no_signal_fraction` looks back on
NO_SIGNAL_BATCHES = 10
# For a single completion that does not fit into memory
SAMPLING_REMEDY = (
    "lower trainer.max_completion_length, take a smaller model, or set model.load_in_4bit"
)

# A row of the training set, with `prompt`
Row = Mapping[str, Any]


@dataclass(eq=False)
class Policy:
    """Passes over micro-batches, under the policy and under its reference."""

    model: Any
    ref_model: Any
    """A reference of its own, for models without adapter; else None."""
    accelerator: Any
    checkpointing_kwargs: Any

    def forward(self, batch: MicroBatch) -> Scored:
        """Return log-probabilities under the policy, and entropies where gradients are kept."""
        return self.score(batch, entropies=torch.is_grad_enabled())

    def score(self, batch: MicroBatch, *, entropies: bool, model: Any = None) -> Scored:
        """Return ``(N, C)`` log-probabilities of a micro-batch's completions, and entropies.

        No attention mask: rows are padded on the right alone. (Unsloth's kernels may drop the
        mask while they train, and TRL's left-padded prompts would then attend to their padding.)
        """
        # unwrapped: the learner sums gradients, not DDP
        model = self.accelerator.unwrap_model(self.model if model is None else model)
        with self.accelerator.autocast():
            output = model(input_ids=batch.input_ids, labels=batch.labels, fused_lm_head=True)
        before = (batch.places - 1).clamp(min=0)  # TRL's head scores a token one column before it

        def of_completions(values: torch.Tensor) -> torch.Tensor:  # (N, W) -> (N, C)
            return values.gather(1, before).masked_fill(~batch.completion_mask, 0.0)

        log_probs = of_completions(output.log_probs)
        return Scored(log_probs, of_completions(output.entropy.detach()) if entropies else None)

    @contextlib.contextmanager
    def no_grad(self) -> Iterator[None]:
        """Run passes without gradient, and without gradient checkpointing."""
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(self.model, self.checkpointing_kwargs),
        ):
            yield

    def reference_log_probs(
        self, learner: Learner, tokens: TokenRows, rows: list[int]
    ) -> torch.Tensor:
        """Return ``(B, T)`` log-probabilities under the reference, 0 in other rows.

        The reference is a model of its own, the adapter's starting copy, or the adapter off.
        """

        def forward(batch: MicroBatch) -> Scored:
            return self.score(batch, entropies=False, model=self.ref_model)

        place = contextlib.nullcontext()
        if self.ref_model is None:
            model = self.accelerator.unwrap_model(self.model)
            place = use_adapter(model, "ref" if "ref" in model.peft_config else None)
        with place:
            learner.tally.reference_rows += len(rows) * learner.team.is_first
            return learner.log_probs(tokens, rows, forward)


@dataclass(eq=False)
class Sampler:
    """Draws completions: by an engine where there is one, else by the model itself."""

    args: Any
    policy: Policy
    engine: Engine | None
    generate: Callable[[list[list[int]], Any, Any], list[list[int]]]
    """TRL's ``_generate_single_turn``."""
    pad_token_id: int
    eos_token_ids: list[int]
    note: Callable[[str, float], None]
    """Takes a metric's name and value."""
    pieces: Pieces = field(default_factory=lambda: Pieces("sampling", SAMPLING_REMEDY))
    """Completions that the model samples at one time."""
    canary: Canary | None = None
    _synced: tuple[Any, int] = (None, -1)

    def draw(
        self, prompt_ids: list[list[int]], state: Any, images: Any = None, multimodal: Any = None
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Return completion ids, and their log-probabilities where an engine reports them.

        Args:
            prompt_ids: Of this process's rows.
            state: transformers' ``TrainerState``.
            images: Only the model itself samples with them.
            multimodal: TRL's further inputs for images.

        Raises:
            StalePolicyError: The engine sampled from another policy.
            MemoryRanOutError: Not even a single completion fits.
        """
        if self.engine is None:
            return self._draw_here(prompt_ids, images, multimodal), None
        self.sync_engine(self.engine, prompt_ids, state)
        seed = int(torch.randint(2**31, ()))  # of the run's own random state
        sampling = make_sampling(self.args, self.eos_token_ids)
        drawn = self.engine.generate(prompt_ids, sampling, seed)
        self.engine.sleep()  # the canary, the rewards and the learning step need its memory
        if self.canary is not None and self.policy.model.training:
            tokens = TokenRows(prompt_ids, drawn.completion_ids)
            found = self.canary.check(tokens, drawn.log_probs, self.engine.name)
            for name, value in found.items():
                self.note(name, value)
        return drawn.completion_ids, drawn.log_probs

    def _draw_here(
        self, prompt_ids: list[list[int]], images: Any, multimodal: Any
    ) -> list[list[int]]:
        """Let the model sample, fewer rows at a time where memory runs out."""

        def draw(prompts: Any) -> list[list[int]]:
            # TRL turns checkpointing off to sample, and does not turn it on again after an error.
            kwargs = self.policy.checkpointing_kwargs
            off = disable_gradient_checkpointing(self.policy.model, kwargs)
            with blame_generation_kwargs(self.args), finite_logits(), off:
                return self.generate(prompts, images, multimodal or {})

        if images or multimodal or self.args.use_vllm:
            return draw(prompt_ids)  # only TRL knows which image belongs to which row
        return self.pieces.run(draw, prompt_ids, len(prompt_ids))

    def sync_engine(self, engine: Engine, prompt_ids: list[list[int]], state: Any) -> None:
        """Send the adapter where it has changed; before the first step, prove that it arrives."""
        model = self.policy.model
        if self.args.canary and model.training and self.canary is None:
            engine.sync(model)
            canary = self._make_canary()
            canary.prove(engine, prompt_ids, self.args.seed)
            self.canary = canary
        elif self._synced[0] is state and self._synced[1] == state.global_step:
            return
        else:
            engine.sync(model)
        self._synced = (state, state.global_step)
        self.note("sampling/sync_seconds", engine.sync_seconds)
        if self.canary is not None:
            self.canary.sent(engine.adapter_dtype)

    def _make_canary(self) -> Canary:
        model = self.policy.accelerator.unwrap_model(self.policy.model)

        def score(batch: MicroBatch) -> tuple[torch.Tensor, Any]:
            with self.policy.no_grad():
                scored = self.policy.score(batch, entropies=True)
            return scored.log_probs, scored.entropies

        return Canary(
            score=score,
            model=model,
            without_adapter=lambda: use_adapter(model, None),
            pad_token_id=self.pad_token_id,
            dtype=torch.bfloat16 if self.args.bf16 else model.dtype,
            sampling=make_sampling(self.args, self.eos_token_ids),
        )


@dataclass(eq=False)
class RewardCalls:
    """Calls the reward functions on completions, async ones at once and in the background."""

    functions: list[Any]
    tokenizers: list[Any]
    """TRL's ``reward_processing_classes``: of rewards that are torch modules."""
    device: torch.device
    chat_template_kwargs: dict[str, Any]
    loop: asyncio.AbstractEventLoop | None
    """Runs in a thread of its own; None where no reward is async."""

    def start(self, columns: dict[str, Any]) -> dict[int, Future[Any]]:
        """Start every async reward; return, by its place, what its scores will be in.

        Args:
            columns: The keywords of a reward: lists of b values, and TRL's three helpers.
        """
        if self.loop is None:
            return {}
        return {
            place: asyncio.run_coroutine_threadsafe(function(**columns), self.loop)
            for place, function in enumerate(self.functions)
            if isinstance(function, AsyncCheckedReward)
        }

    def finish(self, columns: dict[str, Any], started: dict[int, Future[Any]]) -> torch.Tensor:
        """Return ``(b, F)`` float32 rewards, NaN for None: call the rest, wait for the started."""
        found = torch.zeros(len(columns["prompts"]), len(self.functions), device=self.device)
        for place, function in enumerate(self.functions):
            if place in started:
                scores = started[place].result()
            elif isinstance(function, torch.nn.Module):
                found[:, place] = self._scores_of_model(function, place, columns)
                continue
            else:
                scores = function(**columns)
            values = [torch.nan if score is None else score for score in scores]
            found[:, place] = torch.tensor(values, dtype=torch.float32, device=self.device)
        return found

    def _scores_of_model(self, model: Any, place: int, columns: dict[str, Any]) -> torch.Tensor:
        """Return ``(b,)`` logits of a sequence-classification model, read as TRL reads texts."""
        tokenizer, kwargs = self.tokenizers[place], self.chat_template_kwargs
        pairs = zip(columns["prompts"], columns["completions"], strict=True)
        texts = [prompt + completion for prompt, completion in pairs]
        if is_conversational({"prompt": columns["prompts"][0]}):
            texts = [
                apply_chat_template({"messages": messages}, tokenizer, **kwargs)["text"]
                for messages in texts
            ]
        inputs = tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right",
            add_special_tokens=False,
        )  # fmt: skip
        with torch.inference_mode():
            return model(**inputs.to(self.device)).logits[:, 0]


@dataclass(eq=False)
class RolloutMaker:
    """Makes rollouts: draws completions, scores them, and fills in the reference."""

    args: Any
    team: Team
    policy: Policy
    sampler: Sampler
    rewards: RewardCalls
    weights: torch.Tensor
    """``(F,)`` of the reward functions; a schedule changes them in place."""
    log: StepLog
    dataset: Any
    tokenize: Callable[[list[Any]], tuple[list[list[int]], Any, Any]]
    """TRL's ``_tokenize_prompts``."""
    decode: Callable[..., list[str]]
    helpers: Callable[[], dict[str, Any]]
    """TRL's keywords of a reward: ``trainer_state``, ``log_extra``, ``log_metric``."""
    stop: Callable[[str], None]
    moments: RunningMoments = field(default_factory=RunningMoments)
    """Statistics of ``normalize_reward: moving``."""
    no_signal: deque[float] = field(default_factory=lambda: deque(maxlen=NO_SIGNAL_BATCHES))
    """Shares of groups without signal."""
    prompt_order: deque[int] = field(default_factory=deque)
    """Rows of the training set that dynamic sampling draws next."""

    def make(self, inputs: list[Row], learner: Learner, state: Any, micro_step: int) -> Rollout:
        """Return the scored rollout of all processes' rows.

        Args:
            inputs: The rows of this process; as many in each.
            learner: Makes the reference pass.
            state: transformers' ``TrainerState``.
            micro_step: Seeds the order in which dynamic sampling draws prompts.

        Raises:
            DivergedError: The weights are NaN or Inf.
        """
        args, size = self.args, self.args.num_generations
        check_finite(learner.parameters, state.global_step)
        # Async rewards run while the reference pass computes, unless they decide who gets a pass.
        overlap = bool(args.beta) and not (args.gate_on_score or args.dynamic_sampling)
        batch, reference = self._sample(
            inputs, learner, state, overlap=overlap and self.team.size == 1
        )
        without = (~batch.has_signal(args.shaping, size)).float().mean().item()
        self.log.note("signal/groups_without", without)
        if args.dynamic_sampling:
            batch = self._draw_again(batch, learner, state, micro_step)
        rollout = Rollout.scored(batch, size, args.shaping, self.moments)
        if reference is not None:
            rollout.reference_log_probs = reference
        elif args.beta:
            rollout.reference_log_probs = self.policy.reference_log_probs(
                learner, batch.tokens, rollout.learnable_rows
            )
        self.log.episodes += len(rollout)
        self._watch_signal(without)
        return rollout

    def _sample(
        self, inputs: list[Row], learner: Learner, state: Any, *, overlap: bool
    ) -> tuple[ScoredBatch, torch.Tensor | None]:
        """Generate and score; with ``overlap``, run the reference pass while async rewards run.

        Returns:
            The batch of all processes, and the reference's ``(B, T)`` log-probabilities where they
            were computed.
        """
        started = time.perf_counter()
        prompts = [row["prompt"] for row in inputs]
        prompt_ids, images, multimodal = self.tokenize(prompts)
        completion_ids, log_probs = self.sampler.draw(prompt_ids, state, images, multimodal)
        tokens = TokenRows(prompt_ids, completion_ids)
        last = {*self.sampler.eos_token_ids, self.sampler.pad_token_id}
        ended = [ids[-1] in last for ids in completion_ids]
        completions = self._decoded(prompts, completion_ids)
        generated = time.perf_counter()

        columns = reward_columns(inputs, prompts, completions, completion_ids) | self.helpers()
        waiting = self.rewards.start(columns)
        reference, reference_seconds = None, 0.0
        if waiting and overlap:
            masks = self.args.mask_truncated_completions
            rows = [row for row, end in enumerate(ended) if end or not masks]
            reference = self.policy.reference_log_probs(learner, tokens, rows)
            reference_seconds = time.perf_counter() - generated
        found = self.rewards.finish(columns, waiting)  # (b, F)
        scores = (found * self.weights.to(found.device)).nansum(dim=1)  # (b,)
        scores = scores.masked_fill(found.isnan().all(dim=1), torch.nan)
        batch = ScoredBatch(prompts, completions, tokens, ended, found, scores, log_probs)
        batch = self._of_all_processes(batch)
        self.log.note_drawn(batch, generated - started, state)
        self.log.elsewhere += time.perf_counter() - started - reference_seconds
        return batch, reference

    def _decoded(self, prompts: list[Any], completion_ids: list[list[int]]) -> list[Any]:
        texts = self.decode(completion_ids, skip_special_tokens=True)
        if not is_conversational({"prompt": prompts[0]}):
            return texts
        return [[{"role": "assistant", "content": text}] for text in texts]

    def _of_all_processes(self, batch: ScoredBatch) -> ScoredBatch:
        if self.team.size == 1:
            return batch
        device = batch.scores.device
        parts = self.team.gather(batch.to("cpu"))  # pickled: another rank has no GPU of that number
        return ScoredBatch.joined(parts).to(device)

    def _draw_again(
        self, batch: ScoredBatch, learner: Learner, state: Any, micro_step: int
    ) -> ScoredBatch:
        """Replace groups without signal by groups of further prompts (``dynamic_sampling``).

        Prompts come from a random order of the training set of its own.
        """
        args, size, drawn = self.args, self.args.num_generations, 0
        for _ in range(args.dynamic_sampling_rounds):
            without = (~batch.has_signal(args.shaping, size)).nonzero().flatten().tolist()
            if not without:
                break
            inputs: list[Row] = []
            for _ in without:
                inputs += [self.dataset[self._next_prompt(micro_step)]] * size
            more, _ = self._sample(self._my_part(inputs), learner, state, overlap=False)
            more = more.select(range(len(inputs)))  # less the rows that filled up
            batch = batch.replace_groups(without, more, args.shaping, size)
            drawn += len(without)
        self.log.note("signal/groups_drawn_again", drawn)
        return batch

    def _my_part(self, inputs: list[Row]) -> list[Row]:
        """Return the rows of this process, as many as the others have: the last row fills up."""
        size, rank = self.team.size, self.team.rank
        each = -(-len(inputs) // size)
        filled = inputs + [inputs[-1]] * (each * size - len(inputs))
        return filled[rank * each : (rank + 1) * each]

    def _next_prompt(self, micro_step: int) -> int:
        if not self.prompt_order:
            generator = torch.Generator().manual_seed(self.args.seed + micro_step)
            order = torch.randperm(len(self.dataset), generator=generator)
            self.prompt_order.extend(order.tolist())
        return self.prompt_order.popleft()

    def _watch_signal(self, without: float) -> None:
        """Stop the training where too many of the last batches' groups carry no signal."""
        limit = self.args.max_no_signal_fraction
        self.no_signal.append(without)
        share = sum(self.no_signal) / len(self.no_signal)
        if limit is None or len(self.no_signal) < NO_SIGNAL_BATCHES or share <= limit:
            return
        self.stop(
            f"{share:.0%} of the groups of the last {NO_SIGNAL_BATCHES} batches have equal scores "
            f"(max_no_signal_fraction {limit:g}): choose prompts the model sometimes solves, raise "
            f"trainer.temperature or trainer.num_generations, or look at the reward"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept from batch to batch."""
        return {
            "moments": asdict(self.moments),
            "no_signal": list(self.no_signal),
            "prompt_order": list(self.prompt_order),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.moments = RunningMoments(**state["moments"])
        self.no_signal = deque(state["no_signal"], maxlen=NO_SIGNAL_BATCHES)
        self.prompt_order = deque(state["prompt_order"])


def reward_columns(
    inputs: list[Row], prompts: list[Any], completions: list[Any], completion_ids: list[list[int]]
) -> dict[str, Any]:
    """Return the lists that a reward gets by keyword: TRL's three, and the dataset's columns."""
    own = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    names = set(inputs[0]) - {"prompt", "completion", "completion_ids"}
    return {name: [row[name] for row in inputs] for name in sorted(names)} | own
