"""Scores of the held-out prompts of a run before, during and after its training."""

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
    """Callback that scores held-out prompts for the record of a run and for its watch.

    Args:
        job: Parts of the run.
        trainer: Trainer of the run.
        recorder: Recorder of the run; None except in the first process.
        before: Scores from before the training, from the record of a resumed run.
    """

    job: PreparedJob
    trainer: "LeaveOneOutTrainer"
    recorder: RunRecorder | None
    before: Evaluation | None
    # step -> mean of the first reward
    _newest: dict[int, float | None] = field(default_factory=dict, init=False)

    def score(self) -> Evaluation | None:
        """Return the scores of the held-out prompts at this moment of the training.

        Every process must call this method, since all of them sample with TRL's step.

        Returns:
            The scores; None without held-out prompts, and in all processes but the first.
        """
        held_out = self.job.splits[1]
        args = self.job.args
        if held_out is None:
            return None
        num_samples = self.job.config.data.held_out_samples
        sample = partial(self.trainer.sample_rows, seed=args.seed) if self.trainer.by_trl else None
        if not is_first():
            assert sample is not None  # several processes train by TRL's step
            sample([row for row in held_out for _ in range(num_samples)])
            return None
        return evaluate(
            *self.job.policy,
            held_out,
            self.job.judges,
            engine=self.job.engine[0],
            num_samples=num_samples,
            sample=sample,
            tool_loop=self.job.tool_loop,
            **settings_of(args),
        )

    def follow(self) -> None:
        """Score before the first step, and then every ``data.held_out_every`` steps."""
        if self.job.splits[1] is None:
            return
        if self.before is not None:
            self._see(0, self.before)
        elif not self.trainer.by_trl:
            self._score_at(0)
        self.trainer.add_callback(self)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Score before the first step if TRL samples, since its loop has prepared the model now."""
        if self.before is None and self.trainer.by_trl:
            self._score_at(0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Score the held-out prompts every ``data.held_out_every`` steps, but not after the last.

        After the last step the function ``train`` scores them.
        """
        step = state.global_step
        every = self.job.config.data.held_out_every
        if every and step % every == 0 and step < state.max_steps:
            found = self._score_at(step)
            self._newest = {step: next(iter(found.rewards.values()), None) if found else None}

    def on_state(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: Any,
        held: dict[str, Any],
    ) -> None:
        """Put the mean of the first reward into the checkpoint of a scored step."""
        if self.job.config.data.held_out_every:
            held["held_out"] = self._newest.get(state.global_step)

    def _score_at(self, step: int) -> Evaluation | None:
        """Score, and record the result; step 0 is before the first step."""
        found = self.score()
        if found is None:
            return None
        if step == 0:
            self.before = found
            self.job.say(f"before: {means(found)}")
        if self.recorder is not None:
            self.recorder.write_evaluation(found, step)
        self._see(step, found)
        return found

    def _see(self, step: int, found: Evaluation) -> None:
        if self.trainer.watch is not None:
            self.trainer.watch.see_held_out(step, found.as_dict())
