"""The dry run: the memory of the longest step is taken, the run is the one it would have been."""

import re
import warnings

import pytest
import torch
from datasets import Dataset

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.data.lengths import prompt_ids
from rloo_kit.errors import MemoryRanOutError
from rloo_kit.rloo.advantages import BASELINES
from rloo_kit.rloo.token_budget import SMALLEST_BUDGET
from rloo_kit.training.dry_run import WorstCase, largest_passes
from rloo_kit.training.policy import Policy

SHORT_RUN = [
    "quickstart", "--set", "trainer.dry_run=true", "--set", "data.held_out=0", "--set",
    "data.num_prompts=16", "--set", "trainer.per_device_train_batch_size=8", "--set",
    "trainer.max_steps=1",
]  # fmt: skip


def odd_characters(completions, **_):
    return [sum(ord(c) % 2 for c in completion[-1]["content"]) / 9 for completion in completions]


def make_trainer(folder, **settings):
    torch.manual_seed(0)
    model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=256)
    return rk.LeaveOneOutTrainer(
        model=rk.attach_lora(model),
        reward_funcs=odd_characters,
        args=rk.LeaveOneOutConfig(
            str(folder), max_steps=1, max_completion_length=24, save_strategy="no",
            learning_rate=1e-2, doctor=False, **settings,
        ),
        train_dataset=rk.load_prompts("arithmetic", num_prompts=16),
        processing_class=tokenizer,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_trainer(tmp_path_factory.mktemp("made"))


@pytest.fixture
def trainer(made):
    """A trainer shared by the tests: a dry run leaves it as it was."""
    settings = dict(vars(made.args))
    dataset = made.train_dataset
    yield made
    vars(made.args).update(settings)
    made.train_dataset = dataset
    made.__dict__.pop("learner", None)
    made.policy.__dict__.pop("run", None)


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.trained_parameters().items()}


# --- nothing changes -----------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_makes_one_and_resume_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*SHORT_RUN, "--set", "output_dir=run"]) == 0
    assert capsys.readouterr().out.count("dry run: worst case of 8 rows x ") == 1
    assert main(["train", "run", "--resume", "--set", "trainer.max_steps=2"]) == 0
    assert "dry run" not in capsys.readouterr().out


def test_training_in_python_makes_one_and_is_the_same(tmp_path, capsys):
    plain = make_trainer(tmp_path, dry_run=False)
    plain.train()
    trainer = make_trainer(tmp_path, dry_run=True)
    trainer.train()
    assert capsys.readouterr().out.count("dry run: worst case") == 1
    torch.testing.assert_close(weights(trainer), weights(plain), rtol=0, atol=0)
    of_the_machine = re.compile("eps$|.*(time|memory|speed|per_second)")
    rows, others = (
        [
            (name, value)
            for row in one.state.log_history
            for name, value in row.items()
            if not of_the_machine.match(name)
        ]
        for one in (plain, trainer)
    )
    assert str(rows) == str(others)  # NaN is equal too
    trainer.train()
    assert "dry run" not in capsys.readouterr().out


def test_the_training_does_not_use_code_compiled_in_it(trainer):
    compiled = []

    def backend(module, inputs):
        compiled.append(inputs)
        return module.forward

    double = torch.compile(lambda values: 2 * values, backend=backend)
    double(torch.ones(2))
    double(torch.ones(2))
    assert len(compiled) == 1
    trainer.dry_run()
    double(torch.ones(2))
    assert len(compiled) == 2


# --- it is the worst case ------------------------------------------------------------------------


def watched(trainer, refuse=lambda batch: None):
    """A list that gets (gradients are kept, rows, width) of every pass of the policy."""
    passes = []
    run = trainer.policy.run

    def noting(batch, **how):
        refuse(batch)
        passes.append((torch.is_grad_enabled(), *batch.input_ids.shape))
        return run(batch, **how)

    trainer.policy.run = noting
    return passes


def test_it_runs_the_longest_prompt_and_completion(trainer):
    trainer.args.tokens_per_micro_batch = 150
    passes = watched(trainer)
    found = trainer.dry_run()
    width = 24 + max(
        len(prompt_ids(trainer.processing_class, prompt))
        for prompt in trainer.train_dataset["prompt"]
    )
    assert (found.rows, found.tokens, found.budget) == (8, width, 150)
    assert (False, 8, width) in passes
    learned = [tuple(shape) for recorded, *shape in passes if recorded]
    assert learned == largest_passes(8, width, 150)
    assert len(learned) == 2


def test_it_learns_with_a_baseline_that_finds_no_advantage_in_its_scores(trainer, monkeypatch):
    monkeypatch.setitem(BASELINES, "none", torch.zeros_like)
    vars(trainer.args).update(beta=0.0, baseline="none")
    passes = watched(trainer)
    trainer.dry_run()
    assert passes


@pytest.mark.parametrize("budget", [500, 10_000, 16_384])
def test_no_micro_batch_is_larger_than_those_that_run(budget):
    width = 3000
    most = max(rows * min(width, budget // rows) for rows in range(1, 65))
    tried = largest_passes(64, width, budget)
    assert max(rows * wide for rows, wide in tried) >= 0.999 * most
    assert tried[0] == (max(1, min(64, budget // width)), width)


def test_stream_uses_the_longest_prompt_allowed(trainer):
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    assert trainer.dry_run(max_prompt_tokens=50).tokens == 50 + 24
    assert trainer.dry_run().tokens == 256


# --- memory that runs out ------------------------------------------------------------------------


def without_memory(trainer, *, above):
    """Let memory run out in every pass of more rows than ``above``."""

    def refuse(batch):
        if len(batch.rows) > above:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    watched(trainer, refuse)


def test_a_lowered_budget_stays_and_is_reported(trainer):
    without_memory(trainer, above=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = trainer.dry_run()
    assert found.lowered
    assert trainer.learner.budget == found.budget < 4 * found.tokens
    assert f"tokens_per_micro_batch is now {found.budget}" in str(found)


def test_what_does_not_fit_ends_with_the_remedy(trainer):
    without_memory(trainer, above=0)
    before = weights(trainer)
    with pytest.raises(MemoryRanOutError, match=r"^the worst case of this run, 8 rows x ") as one:
        trainer.dry_run(remedy=lambda: "trainer.optim: adamw_8bit (saves 0.4 GiB)")
    assert str(one.value).endswith(" GiB of memory: trainer.optim: adamw_8bit (saves 0.4 GiB)")
    torch.testing.assert_close(weights(trainer), before, rtol=0, atol=0)
    assert all(p.grad is None for p in trainer.model.parameters())
    with pytest.raises(MemoryRanOutError, match=r"lora\.r.*trainer\.max_completion_length$"):
        trainer.dry_run()


@pytest.mark.long
def test_run_without_memory_ends_before_step_one(tmp_path, monkeypatch, capsys):
    def run_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Policy, "run", run_out)
    assert main(SHORT_RUN) == 2
    said = capsys.readouterr().err
    last = said.splitlines()[-1]
    assert last.startswith("rloo-kit: the worst case of this run, 8 rows x ")
    assert re.search(r"GiB of memory: .*\b(trainer|model|lora)\.\w+", last)
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists()


def worst_case(trainer):
    return WorstCase(trainer, trainer.policy, trainer.learner)


# --- when it is made -----------------------------------------------------------------------------


def test_on_a_cpu_it_is_made_only_on_request(trainer):
    for asked in (None, False, True):
        trainer.args.dry_run = asked
        assert worst_case(trainer).is_wanted() is (asked is True)


@pytest.fixture
def on_a_gpu(trainer, monkeypatch):
    monkeypatch.setattr(trainer.learner, "device", torch.device("cuda"))
    return trainer


@pytest.mark.parametrize(
    ("more", "settings", "expected"),
    [
        (0, {}, False),  # the batch needs half of a pass: a quarter of the memory
        (-1, {}, True),
        (0, {"max_completion_length": 25}, True),
        (0, {"tokens_per_micro_batch": 16_384}, True),  # not estimated from memory
        (0, {"dry_run": True}, True),
    ],
)
def test_on_a_gpu_small_batches_have_none(on_a_gpu, more, settings, expected):
    case = worst_case(on_a_gpu)
    width = len(case._longest_prompt()) + 24
    on_a_gpu.learner.budget = 2 * width * on_a_gpu.args.generation_batch_size + more
    vars(on_a_gpu.args).update(settings)
    assert case.is_wanted() == expected


def test_the_smallest_budget_says_nothing_about_memory(on_a_gpu):
    on_a_gpu.train_dataset = Dataset.from_dict({"prompt": ["1 + 1"] * 16})
    on_a_gpu.args.max_completion_length = 1
    for budget, expected in ((SMALLEST_BUDGET, True), (SMALLEST_BUDGET + 1, False)):
        on_a_gpu.learner.budget = budget
        assert worst_case(on_a_gpu).is_wanted() == expected
