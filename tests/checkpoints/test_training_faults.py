"""Faults while a model trains: NaN and Inf, out of memory, faulty rewards.

Each is put in where it happens: into a module's output, a gradient, a weight, a reward. What trains
is the embedded model, for a few steps.
"""

import contextlib
import gc
import math
import warnings

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import rloo_kit as rk
from rloo_kit.errors import DivergedError
from rloo_kit.evaluation.evaluator import evaluate
from rloo_kit.rloo.guards import StepGuard, check_finite
from rloo_kit.sampling.decoding import Pieces
from rloo_kit.scoring.specs import load_rewards

pytestmark = pytest.mark.faults  # half a minute of training; make test-faults

ROWS = 8
"""Completions of a generation batch."""


def places(completions, **_):
    """Scores that differ within every group, whatever was sampled."""
    return [float(row % 4) for row in range(len(completions))]


class Training:
    """The embedded model and short trainings of it, into which a test puts its fault."""

    def __init__(self):
        model, self.tokenizer = rk.load_model(
            "tiny-thinker", max_seq_length=256, load_in_4bit=False
        )
        self.model = rk.attach_lora(model.float(), r=4)  # so that only the order of sums differs
        self.data = rk.load_prompts("arithmetic", num_prompts=12)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.start = copies(self.trained)

    @torch.no_grad()
    def begin_anew(self, folder):
        self.folder = folder
        torch._foreach_copy_(self.trained, self.start)

    def trainer(self, reward=places, callbacks=(), **settings):
        few = {
            "max_steps": 3,
            "max_completion_length": 6,
            "per_device_train_batch_size": ROWS,
            "gradient_accumulation_steps": 1,
            "save_strategy": "no",
            "learning_rate": 1e-3,
            "doctor": False,
            "beta": 0.0,
            "bf16": False,
        }
        return rk.LeaveOneOutTrainer(
            model=self.model,
            reward_funcs=reward,
            args=rk.LeaveOneOutConfig(str(self.folder), **{**few, **settings}),
            train_dataset=self.data,
            processing_class=self.tokenizer,
            callbacks=list(callbacks),
        )

    @contextlib.contextmanager
    def spoiling_gradients(self, function):
        """Let ``function`` change the gradient of one trained parameter."""
        handle = self.trained[0].register_hook(function)
        try:
            yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def watching(self, function):
        """Call ``function(rows, output)`` after every forward pass of the model."""

        def after(module, args, keywords, output):
            ids = keywords.get("input_ids", args[0] if args else None)
            return function(len(ids), output)

        handle = self.model.get_base_model().register_forward_hook(after, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


@pytest.fixture(scope="module")
def model_of_all():
    gc.collect()
    gc.freeze()  # every training collects garbage, for a second where all libraries are loaded
    yield Training()
    gc.unfreeze()


@pytest.fixture
def training(model_of_all, tmp_path):
    model_of_all.begin_anew(tmp_path / "out")
    return model_of_all


def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def equal(some, others):
    return all(one.equal(other) for one, other in zip(some, others, strict=True))


class AfterEachStep(TrainerCallback):
    """Keeps the weights and the optimizer's moments as they are after every step."""

    def __init__(self, training):
        self.training = training
        self.weights = [copies(training.trained)]
        self.moments = []

    def on_step_end(self, args, state, control, optimizer, **_):
        self.weights.append(copies(self.training.trained))
        held = [value for kept in optimizer.state.values() for value in kept.values()]
        self.moments.append(copies(held))


# --- NaN and Inf ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_with_a_nan_gradient_moves_nothing(training, value):
    seen = AfterEachStep(training)
    trainer = training.trainer(callbacks=[seen], weight_decay=0.1)

    def spoil(grad):
        return torch.full_like(grad, value) if trainer.state.global_step == 1 else grad

    with (
        training.spoiling_gradients(spoil),
        pytest.warns(RuntimeWarning, match=r"step 2 is skipped because of NaN or Inf .* 1 of"),
    ):
        trainer.train()
    assert trainer.state.global_step == 3
    assert not equal(seen.weights[0], seen.weights[1])
    assert equal(seen.weights[1], seen.weights[2])
    assert equal(seen.moments[0], seen.moments[1]), "neither the moments nor their step count"
    assert not equal(seen.weights[2], seen.weights[3])
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row.get("step/skipped") for row in rows] == [None, 1, 1]
    assert [row["grad_norm"] is None for row in rows] == [False, True, False]
    assert all(math.isfinite(row["loss"]) for row in rows), "the loss itself was a number"


def test_a_nan_loss_is_logged_as_null(training):
    trainer = training.trainer()

    def spoil(rows, output):
        if torch.is_grad_enabled() and trainer.state.global_step == 1:
            output["log_probs"] = output["log_probs"] * math.nan

    with training.watching(spoil), pytest.warns(RuntimeWarning, match="loss nan"):
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[1] is None
    assert losses[0] != 0 != losses[2]
    check_finite(training.trained, 3)


def test_nan_weights_are_not_evaluated(training):
    training.trained[3].data.view(-1)[0] = math.nan
    with pytest.raises(DivergedError, match="hold NaN or Inf"):
        score(training)


def test_nan_logits_of_an_evaluation_are_a_diverged_error(training):
    def spoil(rows, output):
        output["logits"] = output["logits"] * math.nan

    with training.watching(spoil), pytest.raises(DivergedError, match=r"logits .* bf16 or float32"):
        score(training, temperature=1.0)


def test_the_fp16_scaler_searches_its_scale_uncounted():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    guard = StepGuard(limit=2, scaler=scaler)

    def step(value, loss=0.5):
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * 0).backward()
        parameter.grad.fill_(value)
        stepped = guard.check(loss, [parameter], 1)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([parameter], 1.0)
        scaler.step(optimizer)
        scaler.update()
        return stepped

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not step(math.inf)
        assert not step(math.inf)
    assert scaler.get_scale() == 1.0
    assert (guard.skipped, guard.in_a_row) == (2, 0)
    assert parameter.tolist() == [1.0] * 3
    with pytest.warns(RuntimeWarning, match="is skipped"):
        assert not step(1.0, loss=math.nan), "a loss that is none is no matter of scale"
    assert parameter.tolist() == [1.0] * 3
    with pytest.raises(DivergedError, match="2 optimizer steps in a row"):
        step(math.inf)
    guard = StepGuard(limit=2)
    assert step(1.0)
    assert parameter.tolist() != [1.0] * 3


# --- memory that runs out while sampling ---------------------------------------------------------


def score(training, **settings):
    rewards = load_rewards([places], tokenizer=training.tokenizer)
    settings = {"max_completion_length": 12, "temperature": 0.0, **settings}
    return evaluate(training.model, training.tokenizer, training.data, rewards, **settings)


class Small:
    """Memory for so many rows: more of them run out of it after a few tokens."""

    def __init__(self, most):
        self.most = most
        self.tried = []
        self.calls = 0

    def __call__(self, rows, output):
        if torch.is_grad_enabled():
            return
        if not self.tried or self.tried[-1] != rows:
            self.tried.append(rows)
            self.calls = 0
        self.calls += 1
        if rows > self.most and self.calls > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")


@contextlib.contextmanager
def one_warning(match):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert len(found) == 1
    assert match in found[0]


def test_sampling_out_of_memory_uses_fewer_rows(training):
    small = Small(3)
    lists = []

    def keep(completions, prompts, answer, **_):
        lists.append((prompts, answer))
        return places(completions)

    trainer = training.trainer(keep, max_steps=2, temperature=1.0)
    with (
        training.watching(small),
        one_warning("memory ran out while sampling 8 completions at once: trying 4"),
    ):
        trainer.train()
    # 2 prompts and 8 rows, 1 prompt and 4 rows, then 2 rows in every piece of both batches
    assert small.tried == [2, 8, 1, 4] + 8 * [1, 2]
    assert trainer.sampler.pieces.size == 2
    assert [len(prompts) for prompts, _ in lists] == [8, 8]
    rows = {row["prompt"][-1]["content"]: row["answer"] for row in training.data}
    for prompts, answers in lists:
        assert [rows[prompt[-1]["content"]] for prompt in prompts] == answers


def test_pieces_hold_the_same_completions_in_the_same_order(training):
    trainer = training.trainer()
    ids = [trainer.processing_class(text)["input_ids"] for text in ("1+1", "23 + 4 =", "5", "9-2")]
    trainer.generation_config.do_sample = False
    whole = trainer._generate_single_turn(ids, None, {})
    with training.watching(Small(1)), pytest.warns(RuntimeWarning, match="memory ran out"):
        pieces = trainer._generate_single_turn(ids, None, {})
    assert pieces == whole
    assert trainer.sampler.pieces.size == 1


@pytest.mark.parametrize(
    ("most", "sizes"), [(10, [7, 3]), (3, [7, 3, 3, 3, 1]), (1, [7, 3] + [1] * 10)]
)
def test_pieces_that_are_done_are_not_run_again(most, sizes):
    tried = []

    def call(rows):
        tried.append(len(rows))
        if len(rows) > most:
            raise MemoryError
        return [row * 2 for row in rows]

    pieces = Pieces("trying", "take less")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert pieces.run(call, range(10), at_most=7) == list(range(0, 20, 2))
    assert tried == sizes


# --- memory that runs out while learning ---------------------------------------------------------


def step_gradient(training, disturb):
    """The gradient of one optimizer step, of the same completions every time."""
    torch.manual_seed(5)
    with torch.no_grad():  # away from a model with certain tokens
        for parameter in training.trained:
            parameter.copy_(0.2 * torch.randn(parameter.shape))
    trainer = training.trainer(
        beta=0.05, max_steps=1, learning_rate=1e-9, tokens_per_micro_batch=4096
    )
    grads = []

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            grads.extend(copies(p.grad for p in training.trained))

    trainer.add_callback(Keep())
    with training.watching(disturb):
        trainer.train()
    return grads, trainer


@pytest.mark.parametrize("where", ["training forward", "reference pass", "backward"])
def test_the_gradient_is_the_same_after_out_of_memory(training, where):
    """In a real model: from a module's forward pass, and from within the autograd engine."""
    expected, _ = step_gradient(training, lambda rows, output: None)
    failed = []

    def out_of_memory(*_):
        failed.append(True)
        raise torch.OutOfMemoryError("CUDA out of memory")

    def disturb(rows, output):
        log_probs = output.get("log_probs")
        if log_probs is None or failed:  # sampling, or there is room now
            return
        if where == "backward" and torch.is_grad_enabled():
            log_probs.register_hook(out_of_memory)
        elif torch.is_grad_enabled() == (where == "training forward"):
            out_of_memory()

    with one_warning("tokens_per_micro_batch is"):
        found, trainer = step_gradient(training, disturb)
    assert failed
    assert trainer.learner.budget < 4096
    assert max(grad.abs().max() for grad in expected) > 1e-4
    for grad, other in zip(found, expected, strict=True):
        assert (grad - other).norm() <= 1e-6 * max(1e-3, other.norm())
