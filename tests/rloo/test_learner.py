"""The gradient of every path through the learner, against the reference of tests/reference.

The policy is a tiny causal model: a token's probability depends on all tokens before it.
"""

import contextlib
import math
import weakref
from dataclasses import replace

import pytest
import rloo_reference as reference
import torch
from harness import completions_of
from torch.nn.utils.rnn import pad_sequence

from rloo_kit.errors import MemoryRanOutError
from rloo_kit.machine.cleanup import is_out_of_memory
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.learner import Learner, PassOutput
from rloo_kit.rloo.metrics import Tally
from rloo_kit.rloo.rollout import Rollout, ScoredBatch, Shaping

NAN = float("nan")
VOCABULARY = 13
HIDDEN = 6
PAD = 12
SIZE = 4
SCORES = [1.0, 0.0, 0.25, 0.0, 0.5, 0.5, 0.5, 0.5, 2.0, NAN, 0.0, 1.5, NAN, 1.0, NAN, NAN]
PROMPTS = [2] * 4 + [1] * 4 + [5] * 4 + [3] * 4
COMPLETIONS = [3, 1, 6, 2, 4, 4, 1, 3, 9, 2, 7, 8, 1, 2, 3, 4]
# Without a KL: group 1 has equal scores, row 9 has no score, group 3 has a single score
WITH_ADVANTAGE = [0, 1, 2, 3, 8, 10, 11]
COMPARABLE = sorted([*WITH_ADVANTAGE, 4, 5, 6, 7])
EPSILON = (0.1, 0.15)
CAP = 1.3
SHAPINGS = pytest.mark.parametrize(
    "shaping", [{}, {"beta": 0.4}, {"beta": 0.4, "token_level_kl": True}], ids=str
)


class Policy:
    """Embedding, running mean over the tokens so far, one nonlinearity, a linear layer."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def parameter(*shape):
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return values.requires_grad_()

        self.embedding = parameter(VOCABULARY, HIDDEN)
        self.head = parameter(HIDDEN, VOCABULARY)
        self.bias = parameter(VOCABULARY)
        self.parameters = [self.embedding, self.head, self.bias]

    def of_next(self, ids):
        """Log-probabilities of the token after each one: (..., W) to (..., W, vocabulary)."""
        steps = torch.arange(1, ids.shape[-1] + 1).unsqueeze(-1)
        hidden = torch.tanh(2 * self.embedding[ids].cumsum(-2) / steps)
        return (hidden @ self.head + self.bias).log_softmax(-1)

    def by_itself(self, one):
        """Log-probabilities of one completion, without padding, as the reference asks for them."""
        of_next = self.of_next(torch.tensor(one.prompt_ids + one.ids))
        return of_next[range(len(one.prompt_ids) - 1, len(one.prompt_ids + one.ids) - 1), one.ids]

    def of_all(self, sampled):
        return reference.no_grad_pass(self.by_itself, completions_of(sampled))


def make_tokens():
    generator = torch.Generator().manual_seed(5)

    def draw(length):
        return torch.randint(0, VOCABULARY - 1, (length,), generator=generator).tolist()

    return TokenRows([draw(n) for n in PROMPTS], [draw(n) for n in COMPLETIONS])


def make_sample():
    scores = torch.tensor(SCORES)
    texts = [""] * len(SCORES)
    return ScoredBatch(
        prompts=texts, completions=texts, tokens=make_tokens(), ended=[True] * len(SCORES),
        rewards=scores[:, None], scores=scores,
    )  # fmt: skip


def make_rollout(**shaping):
    """A rollout of a sampler that differs from the policy; the reference is another policy."""
    sample = make_sample()
    sampler = Policy()
    move(sampler, by=0.1, seed=4)
    sample = replace(sample, sampler_log_probs=[row.tolist() for row in sampler.of_all(sample)])
    rollout = Rollout.scored(sample, SIZE, Shaping(**shaping))
    of_reference = pad_sequence(Policy(seed=1).of_all(sample), batch_first=True)
    return rollout.with_reference(of_reference.float())


def move(policy, by, seed):
    """An optimizer step of sorts, large enough that some ratios are clipped."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += by * noise
            parameter.grad = None


class Machine:
    """A policy behind the learner's calls; it notes them, and runs out of memory on request."""

    def __init__(self, policy, *, limit=math.inf, no_grad_limit=math.inf, failing=(), late=False):
        self.policy = policy
        self.limit = limit
        self.no_grad_limit = no_grad_limit
        self.failing = failing
        self.late = late
        # (rows, whether gradients are recorded) of every forward pass that fitted
        self.forwards = []
        self.backwards = 0

    def forward(self, batch):
        recorded = torch.is_grad_enabled()
        if batch.num_positions > (self.limit if recorded else self.no_grad_limit):
            raise torch.OutOfMemoryError("no memory for the forward pass: out of memory")
        self.forwards.append((batch.rows.tolist(), recorded))
        ids = batch.input_ids
        of_next = self.policy.of_next(ids)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
        log_probs = of_next.gather(1, (batch.places - 1).clamp(min=0))
        return PassOutput(log_probs.masked_fill(~batch.completion_mask, 0.7))  # of no meaning

    def backward(self, loss):
        self.backwards += 1
        fails = self.backwards in self.failing
        if self.late or not fails:  # late: some layers already have their gradient
            loss.backward()
        if fails:
            raise torch.OutOfMemoryError("no memory for the backward pass: out of memory")

    def rows(self, *, recorded=True):
        return sorted(row for rows, how in self.forwards if how == recorded for row in rows)

    def learner(self, budget, **keywords):
        return Learner(
            forward=self.forward,
            backward=self.backward,
            no_grad=torch.no_grad,
            parameters=self.policy.parameters,
            budget=budget,
            overhead=32,
            pad_token_id=PAD,
            device=torch.device("cpu"),
            epsilon=EPSILON,
            **keywords,
        )


class Expected:
    """What the reference makes of a rollout of the policy as it is now."""

    def __init__(self, rollout, policy, correction=None):
        self.batch = completions_of(rollout.sampled)
        self.settings = reference.Settings(
            SIZE,
            beta=rollout.shaping.beta,
            token_level_kl=rollout.shaping.token_level_kl,
            epsilon=EPSILON[0],
            epsilon_high=EPSILON[1],
            rollout_correction=correction,
            rollout_correction_cap=CAP,
        )
        self.old = policy.of_all(rollout.sampled)
        scores = reference.shaped(self.batch, self.settings, [])
        known = self.batch, scores, self.old, Policy(seed=1).of_all(rollout.sampled), self.settings
        self.advantages = reference.advantages_of(*known)

    def loss(self, policy):
        every_row = EVERY_ROW.tolist()
        return reference.step_loss(
            policy.by_itself, self.batch, every_row, self.old, self.advantages, self.settings
        )


def gradients(policy, loss):
    return torch.autograd.grad(loss, policy.parameters)


def same(policy, expected, tolerance=2e-6):
    found = [parameter.grad for parameter in policy.parameters]
    assert max(grad.abs().max() for grad in expected) > 1e-2, "a gradient is wanted"
    torch.testing.assert_close(found, list(expected), rtol=tolerance, atol=tolerance)


EVERY_ROW = torch.full((16,), 1 / 16)


# --- one step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 12, 30, 60, 10_000])
@pytest.mark.parametrize("correction", [None, "sequence", "token"])
@SHAPINGS
def test_the_gradient_is_that_of_the_full_batch(shaping, correction, budget):
    policy = Policy()
    rollout = make_rollout(**shaping)
    machine = Machine(policy)
    learner = machine.learner(
        budget, correction=correction and (correction, CAP), pad_to_multiple_of=8
    )
    learner.learn(rollout, EVERY_ROW)

    expected = Expected(rollout, policy, correction)
    loss = expected.loss(policy)
    same(policy, gradients(policy, loss))
    assert learner.tally.loss == pytest.approx(loss.item(), abs=1e-5)
    trained = COMPARABLE if shaping else WITH_ADVANTAGE
    assert machine.rows() == trained, "each row that learns, once"
    assert learner.tally.trained == len(trained)
    assert learner.tally.rows == 16
    assert learner.budget == budget
    if correction:
        changes = [
            expected.old[row] - torch.tensor(expected.batch[row].sampler_log_probs)
            for row in trained
        ]
        if correction == "sequence":
            changes = [change.sum(0, keepdim=True) for change in changes]
        ratios = torch.cat(changes).exp()
        metrics = learner.tally.metrics()
        assert 0 < metrics["sampling/correction_capped"] < 1
        assert metrics["sampling/correction_capped"] == pytest.approx(
            (ratios > CAP).mean(dtype=float)
        )
        assert metrics["sampling/correction_mean"] == pytest.approx(
            ratios.clamp(max=CAP).mean().item()
        )


GROUP_TOKENS = [
    sum(PROMPTS[row] + COMPLETIONS[row] for row in COMPARABLE if row // SIZE == group)
    for group in range(3)
]


@pytest.mark.parametrize("budget", [1, 16, 20, 30, 10_000])
def test_only_groups_over_budget_get_an_old_pass(budget):
    rollout = make_rollout(beta=0.4)
    machine = Machine(Policy())
    learner = machine.learner(budget)
    rollout = learner.learn(rollout, EVERY_ROW)
    assert GROUP_TOKENS == [20, 16, 39]
    long = [row for row in COMPARABLE if GROUP_TOKENS[row // SIZE] > budget]
    assert machine.rows(recorded=False) == long
    assert learner.tally.old_rows == len(long)
    assert rollout.settled[:3].all()


@pytest.mark.parametrize("budget", [39, 60, 10_000])
def test_whole_groups_run_forward_before_a_backward(budget):
    machine = Machine(Policy())
    tokens = make_tokens()
    seen = set()
    in_hand = []
    multiple = []

    def forward(batch):
        seen.update(batch.rows.tolist())
        in_hand.append(batch.rows.tolist())
        held = sum(tokens.num_tokens(rows) for rows in in_hand)
        assert held <= budget
        multiple.append(len(in_hand) > 1)
        return Machine.forward(machine, batch)

    def backward(loss):
        whole = [{row for row in COMPARABLE if row // SIZE == group} for group in range(3)]
        assert all(group <= seen or not group & seen for group in whole)
        in_hand.pop()
        loss.backward()

    machine.forward = forward
    machine.backward = backward
    machine.learner(budget).learn(make_rollout(beta=0.4), EVERY_ROW)
    assert seen == set(COMPARABLE)
    assert not in_hand
    assert any(multiple), "a bundle of several micro-batches is wanted"


# --- two iterations ------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 30, 10_000])
@pytest.mark.parametrize("correction", [None, "token"])
@SHAPINGS
def test_the_second_iteration_is_clipped_against_the_policy_that_sampled(
    shaping, correction, budget
):
    policy = Policy()
    learner = Machine(policy).learner(budget, correction=correction and (correction, CAP))
    rollout = learner.learn(make_rollout(**shaping), EVERY_ROW)
    expected = Expected(rollout, policy, correction)
    move(policy, by=0.15, seed=5)
    learner.tally = Tally()
    learner.learn(replace(rollout, on_policy=False), EVERY_ROW)

    loss = expected.loss(policy)
    same(policy, gradients(policy, loss), tolerance=1e-5)
    low = torch.zeros(16)
    high = torch.zeros(16)
    now = policy.of_all(rollout.sampled)
    for row, own in enumerate(expected.advantages):
        change = now[row] - expected.old[row]
        ratio = (change.sum() if len(own) == 1 else change).exp()
        low[row] = ((ratio < 1 - EPSILON[0]) & (own < 0)).float().mean()
        high[row] = ((ratio > 1 + EPSILON[1]) & (own > 0)).float().mean()
    metrics = learner.tally.metrics()
    assert learner.tally.loss == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["clip_ratio/low_mean"] == pytest.approx(low.mean().item()) != 0
    assert metrics["clip_ratio/high_mean"] == pytest.approx(high.mean().item()) != 0
    assert metrics["policy/clipfrac_avg"] == pytest.approx((low + high).mean().item())
    assert metrics["clip_ratio/nulled_rows"] == (low + high == 1).sum()
    assert learner.tally.old_rows == 0, "what the first iteration kept is used"


# --- memory runs out -----------------------------------------------------------------------------


@contextlib.contextmanager
def one_warning():
    with pytest.warns(RuntimeWarning, match="tokens_per_micro_batch is") as caught:
        yield
    assert len(caught) == 1


def exact_after_running_out(machine, budget, **shaping):
    """Learn with gradients accumulated before; check them, and return the learner."""
    policy = machine.policy
    rollout = make_rollout(**shaping)
    before = [0.25, 0.25, 0]  # the last parameter has no gradient yet
    for parameter in policy.parameters[:2]:
        parameter.grad = torch.full_like(parameter, 0.25)
    learner = machine.learner(budget)
    with one_warning():
        learner.learn(rollout, EVERY_ROW)
    expected = gradients(policy, Expected(rollout, policy).loss(policy))
    same(policy, [new + old for new, old in zip(expected, before, strict=True)])
    counted = sum(one.size(1) for one in learner.tally.of_rows)
    assert counted == learner.tally.trained, "no row is counted twice"
    return learner


@pytest.mark.parametrize("limit", [20, 30, 45])
@SHAPINGS
def test_a_forward_pass_out_of_memory_is_rerun_smaller(shaping, limit):
    machine = Machine(Policy(), limit=limit)
    learner = exact_after_running_out(machine, 4096, **shaping)
    assert limit // 2 <= learner.budget < 4096, "halved as often as needed"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("failing", [(1,), (2,), (1, 2)], ids=str)
@pytest.mark.parametrize("budget", [64, 80])
@SHAPINGS
def test_a_backward_pass_that_does_not_fit_leaves_no_trace(shaping, budget, failing, late):
    machine = Machine(Policy(), failing=failing, late=late)
    learner = exact_after_running_out(machine, budget, **shaping)
    assert 1 <= learner.budget <= budget // 2 ** len(failing)


@pytest.mark.parametrize(
    ("budget", "limit"), [(1, math.inf), (5, math.inf), (1000, math.inf), (100, 40), (10, 30)]
)
def test_log_probs_are_those_of_single_rows_and_zero_elsewhere(budget, limit):
    sample = make_sample()
    rows = [row for row in range(16) if row != 7]
    machine = Machine(Policy(), no_grad_limit=limit)
    learner = machine.learner(budget)
    with contextlib.nullcontext() if limit == math.inf else one_warning():
        found = learner.log_probs(sample.tokens, rows, machine.forward)
    for row, expected in enumerate(machine.policy.of_all(sample)):
        own = found[row, : len(expected)]
        torch.testing.assert_close(own, (expected if row in rows else 0 * expected).float())
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert machine.rows(recorded=False) == rows
    smallest = budget if limit == math.inf else limit / 8  # halved as often as needed
    assert smallest <= learner.budget <= budget


def test_a_group_over_budget_is_still_exact():
    machine = Machine(Policy(), limit=20, no_grad_limit=20)
    learner = exact_after_running_out(machine, 4096, beta=0.4)
    assert learner.tally.old_rows > 0


@pytest.mark.parametrize("beta", [0.0, 0.4])
def test_a_single_row_out_of_memory_is_an_error(beta):
    machine = Machine(Policy(), limit=max(PROMPTS) + max(COMPLETIONS) - 1)
    with (
        pytest.warns(RuntimeWarning, match="memory ran out"),
        pytest.raises(MemoryRanOutError, match="max_completion_length") as caught,
    ):
        machine.learner(4096).learn(make_rollout(beta=beta), EVERY_ROW)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_another_error_is_not_out_of_memory(where):
    machine = Machine(Policy())
    before = torch.ones_like(machine.policy.bias)
    machine.policy.bias.grad = before

    def broken(*_):
        machine.policy.bias.grad = torch.zeros_like(before)  # as half a backward pass leaves it
        raise RuntimeError("shape mismatch")

    setattr(machine, where, broken)
    learner = machine.learner(30)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        learner.learn(make_rollout(), EVERY_ROW)
    assert machine.policy.bias.grad is before, "what was accumulated is as it was"
    assert learner.tally.loss == 0
    assert learner.budget == 30
    with pytest.raises(RuntimeError, match="shape mismatch"):
        learner.log_probs(make_tokens(), [0, 1], broken)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("out of resource: shared memory, Required: 131072"), False),
        (MemoryRanOutError("it ran out of memory, and says so itself"), False),
        (ValueError("CUDA out of memory"), False),
    ],
    ids=repr,
)
def test_what_libraries_say_of_lacking_memory_is_known(error, expected):
    assert is_out_of_memory(error) == expected


@pytest.mark.parametrize("beta", [0.0, 0.4])
def test_a_failed_attempt_frees_its_graph(beta):
    machine = Machine(Policy(), failing=(1, 3))
    graphs = []
    alive = []
    in_hand = [0]

    def forward(batch):
        if machine.backwards in (1, 3):  # right after one that failed
            alive.append(sum(graph() is not None for graph in graphs[: in_hand[-1]]))
        scored = Machine.forward(machine, batch)
        graphs.append(weakref.ref(scored.log_probs))
        return scored

    def backward(loss):
        in_hand.append(len(graphs))
        Machine.backward(machine, loss)

    machine.forward = forward
    machine.backward = backward
    with one_warning():
        machine.learner(80).learn(make_rollout(beta=beta), EVERY_ROW)
    assert alive[:2] == [0, 0]
    assert machine.backwards > 3
