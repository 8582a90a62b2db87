"""One whole step with a policy that is a table: no TRL, Unsloth or transformers."""

from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from fresh_python import run_python

from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.guards import StepGuard
from rloo_kit.rloo.learner import Learner, PassOutput
from rloo_kit.rloo.rollout import Completions, ScoredBatch, Shaping
from rloo_kit.rloo.step import Log, Pending, Step

ANSWERS = 3


class Table:
    """A policy of one token per answer: its log-probabilities are a row of numbers per prompt."""

    def __init__(self):
        self.logits = torch.zeros(2, ANSWERS, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.logits], lr=1.0)

    def sample(self, rows):
        prompts = [row["prompt"] for row in rows]
        drawn = torch.multinomial(self.logits.detach()[prompts].softmax(-1), 1)  # (B, 1)
        tokens = TokenRows([[prompt] for prompt in prompts], drawn.tolist())
        return Completions(
            prompts=prompts, completions=drawn.tolist(), tokens=tokens, ended=[True] * len(rows)
        )

    def forward(self, batch):
        prompts = batch.input_ids[:, 0]
        answers = batch.input_ids[:, 1:]
        return PassOutput(self.logits.log_softmax(-1)[prompts].gather(1, answers))


def score(rows, completions, *, in_background=False):
    """Answer 2 is right."""
    found = torch.tensor([float(one == [2]) for one in completions.completions])
    batch = ScoredBatch(**vars(completions), rewards=found[:, None], scores=found)
    return Pending(in_background, lambda: batch)


def rollout_steps(step):
    """The numbers of the steps in which new rollouts were logged."""
    return [call.args[1] for call in step.log.note_rollout.call_args_list]


def tallies(step):
    return [call.args[0] for call in step.log.note_step.call_args_list]


def step_of(table, **others):
    learner = Learner(
        forward=table.forward,
        backward=torch.Tensor.backward,
        no_grad=torch.no_grad,
        parameters=[table.logits],
        budget=100,
        overhead=0,
        pad_token_id=0,
        device=torch.device("cpu"),
        epsilon=(0.2, 0.2),
    )
    given = {
        "sample": table.sample,
        "score": score,
        "reference": None,
        "learner": lambda: learner,
        "guard": StepGuard(3),
        "log": Mock(spec=Log),
        "shaping": Shaping(),
        "num_generations": 4,
    }
    return Step(**{**given, **others})


ROWS = [{"prompt": prompt} for prompt in (0, 1) for _ in range(4)]


def train(table, step, steps, batches=1):
    for number in range(1, steps + 1):
        table.optimizer.zero_grad()
        step.run([ROWS] * batches, number)
        table.optimizer.step()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


def test_a_table_learns_the_right_answer():
    table = Table()
    step = step_of(table)
    train(table, step, 40)
    assert (table.logits.detach().softmax(-1)[:, 2] > 0.9).all()
    assert rollout_steps(step) == [*range(1, 41)]


def test_a_rollout_serves_several_steps_or_a_step_several_rollouts():
    table = Table()
    step = step_of(table, num_slices=2, num_iterations=2)
    train(table, step, 4)  # two slices, twice each
    assert rollout_steps(step) == [1]
    assert [tally.rows for tally in tallies(step)] == [4] * 4
    assert step.waiting == []

    step = step_of(Table())
    step.run([ROWS, ROWS], 1)
    assert rollout_steps(step) == [1, 1]
    assert tallies(step)[0].rows == 16


def test_rows_that_a_step_uses_twice_weigh_twice():
    found = []
    for times in (1, 2):
        torch.manual_seed(1)
        table = Table()
        step = step_of(table, num_slices=times, num_iterations=times)
        step.run([ROWS] * times**2, 1)
        found.append(table.logits.grad)
    assert found[0].any()
    torch.testing.assert_close(*found)


def test_options_enter_at_three_places():
    seen = []
    table = Table()

    def which_prompts(rows):
        seen.append("which prompts")
        return rows

    def after_scoring(batch, complete):
        seen.append("after scoring")
        return complete(ROWS)

    def rows_to_learn(rollout):
        seen.append("rows to learn")
        return replace(rollout, learnable=torch.arange(len(rollout)) == 0)

    step = step_of(
        table,
        which_prompts=which_prompts,
        after_scoring=after_scoring,
        rows_to_learn=rows_to_learn,
    )
    step.run([ROWS], 1)
    assert seen == ["which prompts", "after scoring", "rows to learn"]
    assert tallies(step)[0].trained == 1


def test_the_reference_is_that_of_the_completions_a_hook_puts_in():
    passed = []

    def reference(tokens, rows):
        passed.append(tokens)
        return torch.zeros(len(tokens), 1)

    step = step_of(
        Table(),
        reference=reference,
        shaping=Shaping(beta=0.1),
        score=partial(score, in_background=True),
        after_scoring=lambda batch, complete: complete(ROWS),
    )
    step.run([ROWS], 1)
    assert passed[-1] is step.rollout.sampled.tokens


def test_a_hook_that_drops_prompts_leaves_a_rollout_its_number_of_slices():
    step = step_of(Table(), num_slices=3, which_prompts=lambda rows: rows[:4])
    step.run([ROWS] * 3, 1)
    assert not step.waiting
    assert tallies(step)[0].rows == 4


def test_a_slice_without_rows_trains_nothing():
    table = Table()
    step = step_of(table, num_slices=5, which_prompts=lambda rows: rows[:4])
    train(table, step, 6)
    assert [tally.rows for tally in tallies(step)] == [1, 1, 1, 1, 0, 1]
    assert rollout_steps(step) == [1, 6]


@pytest.mark.parametrize(
    ("num_slices", "done"),
    [(4, 3), (4, 8), (3, 1)],
    ids=["in the middle of a rollout", "at its end", "between slices of unequal size"],
)
def test_a_step_goes_on_where_its_state_was_kept(num_slices, done):
    def begun():
        torch.manual_seed(1)
        table = Table()
        return table, step_of(table, num_slices=num_slices, num_iterations=2)

    whole, step = begun()
    train(whole, step, 10)
    table, step = begun()
    train(table, step, done)
    state = step.state_dict()
    random = torch.get_rng_state()
    other = Table()
    with torch.no_grad():
        other.logits.copy_(table.logits)
    going_on = step_of(other, num_slices=num_slices, num_iterations=2)
    going_on.load_state_dict(state)
    torch.set_rng_state(random)
    train(other, going_on, 10 - done)
    assert other.logits.equal(whole.logits)


@pytest.mark.parametrize(("num_slices", "sizes"), [(2, [4, 2]), (4, [2, 2, 2]), (16, [1] * 6)])
def test_another_number_of_slices_cuts_the_waiting_rows_anew(num_slices, sizes):
    table = Table()
    step = step_of(table, num_slices=4)
    train(table, step, 1)
    state = step.state_dict()
    if num_slices == 4:
        del state["batch"]["sizes"]  # as in a checkpoint of an earlier version
    going_on = step_of(table, num_slices=num_slices)
    going_on.load_state_dict(state)
    assert [*map(len, going_on.waiting)] == sizes


def test_the_step_needs_none_of_the_large_libraries():
    code = (
        "import sys, rloo_kit.rloo.step; print({'trl', 'unsloth', 'transformers'} & {*sys.modules})"
    )
    assert run_python(code).strip() == "set()"
