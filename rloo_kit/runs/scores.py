"""Score the held-out prompts of a run before, during and after training."""

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerState, TrainingArguments

from rloo_kit.evaluation.evaluator import Evaluation, evaluate, settings_of
from rloo_kit.job import PreparedJob
from rloo_kit.machine.processes import is_first
from rloo_kit.runs.recorder import RunRecorder
from rloo_kit.runs.summary import means

if TYPE_CHECKING:
    from rloo_kit.training.trainer import LeaveOneOutTrainer


@dataclass(eq=False)
class HeldOutScores(TrainerCallback):
    """Callback that scores the held-out prompts, for the run's recorder and its ``RunWatch``.

    Args:
        job: The prepared run.
        trainer: Trainer of the run.
        recorder: Recorder of the run. Only the first process has one; it is None in the others.
        before: Scores from before training, which a resumed run reads from its record; None if
            they have not been computed yet.
    """

    job: PreparedJob
    trainer: "LeaveOneOutTrainer"
    recorder: RunRecorder | None
    before: Evaluation | None
    # step -> mean of the reward that chooses checkpoints
    _newest: dict[int, float | None] = field(default_factory=dict, init=False)

    def score(self) -> Evaluation | None:
        """Score the held-out prompts with the current policy.

        Every process must call this method, because TRL's step samples on all processes.

        Returns:
            The scores; None if the run has no held-out prompts, or if this is not the first
            process.
        """
        held_out = self.job.splits[1]
        args = self.job.args
        if held_out is None:
            return None
        num_samples = self.job.config.data.held_out_samples
        sample = partial(self.trainer.sample_rows, seed=args.seed)
        if not is_first():  # with several processes, TRL's step is always used
            sample([row for row in held_out for _ in range(num_samples)])
            return None
        return evaluate(
            *self.job.policy,
            held_out,
            self.job.judges,
            engine=self.job.engine[0],
            num_samples=num_samples,
            sample=sample if self.trainer.by_trl else None,
            tool_loop=self.job.tool_loop,
            **settings_of(args),
        )

    def follow(self) -> None:
        """Score the prompts before the first step, and register this callback for later steps.

        If the scores from before training are known already, they are not computed again. With
        TRL's step, ``on_train_begin`` computes them.
        """
        if self.job.splits[1] is None:
            return
        if self.before is not None:
            self._see(0, self.before)
        elif not self.trainer.by_trl:
            self._score_at(0)
        self.trainer.add_callback(self)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Score before the first step if TRL's step is used.

        TRL cannot sample earlier, because its training loop prepares the model for sampling.
        """
        if self.before is None and self.trainer.by_trl:
            if self.trainer.resumed_from is None:
                self._score_at(0)
            else:  # the model already has the weights of the checkpoint
                self.job.say("before: unknown, because evaluation.json has no score of the start")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Score the held-out prompts after every ``data.held_out_every`` steps.

        After the last step they are not scored here, because the function ``train`` scores them.
        """
        step = state.global_step
        every = self.job.config.data.held_out_every
        if every and step % every == 0 and step < state.max_steps:
            self._score_at(step)

    def on_state(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: Any,
        held: dict[str, Any],
    ) -> None:
        """Store in the checkpoint the score of the held-out prompts (see ``_choosing_score``).

        The score is None if the prompts were not scored after this step. Without
        ``data.held_out_every`` nothing is stored.
        """
        if self.job.config.data.held_out_every:
            held["held_out"] = self._newest.get(state.global_step)

    def _score_at(self, step: int) -> None:
        """Score the held-out prompts after ``step`` optimizer steps, and record the result."""
        found = self.score()
        if found is None:
            return
        if step == 0:
            self.before = found
            self.job.say(f"before: {means(found)}")
        if self.recorder is not None:
            self.recorder.write_evaluation(found, step)
        self._see(step, found)

    def _see(self, step: int, found: Evaluation) -> None:
        """Keep the score that chooses checkpoints; pass all scores to the ``RunWatch``, if any."""
        score = self._choosing_score(found)
        self._newest = {step: score}
        if self.trainer.watch is not None:
            self.trainer.watch.see_held_out(step, found.as_dict(), score)

    def _choosing_score(self, found: Evaluation) -> float | None:
        """Return the mean score of the reward that chooses checkpoints and weights.

        It is the first reward that the run trains on or whose mean was not 0 before training. Other
        rewards are skipped, because their mean may stay at 0 (for example, the mean of ``accuracy``
        for long answers). The result is None if all rewards are skipped.
        """
        own = {reward.name for reward in self.job.rewards}
        before = (self.before or found).rewards
        chosen = next((name for name, mean in before.items() if mean or name in own), "")
        return found.rewards.get(chosen)
