"""The dry run: the memory of the longest step is taken, the run is the one it would have been."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

import rloo_kit as rk
from rloo_kit.checkpoints.store import random_states
from rloo_kit.cli import main
from rloo_kit.errors import MemoryRanOutError
from rloo_kit.machine.memory import take_peak
from rloo_kit.models.loading import TINY_THINKER
from rloo_kit.sampling.engine import Generations
from rloo_kit.training.dry_run import (
    ENGINE_TOKENS,
    WorstBatch,
    dry_run,
    dry_run_if_wanted,
    largest_passes,
    longest_prompt,
)

SHORT_RUN = [
    "--set", "trainer.max_steps=2", "--set", "data.held_out=0", "--set", "data.num_prompts=32",
    "--set", "trainer.per_device_train_batch_size=8", "--set", "trainer.save_steps=1",
]  # fmt: skip


def odd_characters(completions, **_):
    return [sum(ord(c) % 2 for c in completion[-1]["content"]) / 9 for completion in completions]


def make_trainer(folder, *, dropout=0.0, max_seq_length=256, **settings):
    model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=max_seq_length)
    model = rk.attach_lora(model, lora_dropout=dropout)
    few = {
        "max_steps": 2,
        "max_completion_length": 24,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "doctor": False,
    }
    return rk.LeaveOneOutTrainer(
        model=model,
        reward_funcs=odd_characters,
        args=rk.LeaveOneOutConfig(str(folder), **{**few, **settings}),
        train_dataset=rk.load_prompts("arithmetic", num_prompts=16),
        processing_class=tokenizer,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_trainer(tmp_path_factory.mktemp("made"))


HOOKS = []


@pytest.fixture
def trainer(made):
    """A trainer shared by the tests: a dry run leaves it as it was."""
    settings, dataset, rewards = dict(vars(made.args)), made.train_dataset, made.reward_funcs
    yield made
    vars(made.args).update(settings)
    made.train_dataset, made.reward_funcs, made.engine = dataset, rewards, None
    made.steps.learner, made.sampler.pieces.size = None, None
    while HOOKS:
        HOOKS.pop().remove()


def hooked(trainer, hook):
    """Call ``hook(ids, kwargs)`` before every forward pass."""

    def call(model, args, kwargs):
        hook(kwargs.get("input_ids", args[0] if args else None), kwargs)

    model = trainer.model.get_base_model()
    HOOKS.append(model.register_forward_pre_hook(call, with_kwargs=True))


def weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def equal_trees(left, right):
    """Whether two trees of tensors, arrays and numbers hold the same."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal_trees(left[n], right[n]) for n in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal_trees, left, right))
    if hasattr(left, "shape"):
        return left.shape == right.shape and bool((left == right).all())
    return left == right


def watched(trainer):
    """A list that gets what every forward pass of the model is: rows, width, and what it keeps."""
    passes = []

    def note(ids, kwargs):
        cache = kwargs.get("past_key_values")
        length = 0 if cache is None else int(cache.get_seq_length())
        kind = "learn" if torch.is_grad_enabled() else "sample" if "labels" not in kwargs else "ref"
        passes.append((kind, *ids.shape, length))

    hooked(trainer, note)
    return passes


class Engine:
    """Stands where vLLM samples: completions of one length; notes what it is asked."""

    name, sync_seconds, adapter_dtype = "an engine", 0.0, torch.float32

    def __init__(self, length=1):
        self.length, self.asked = length, []

    def sync(self, model):
        self.asked.append("sync")

    def generate(self, prompt_ids, sampling, seed):
        self.asked.append((len(prompt_ids), {*map(len, prompt_ids)}, sampling.max_tokens))
        ids = [
            [3 + (row + place) % 90 for place in range(self.length)]
            for row in range(len(prompt_ids))
        ]
        return Generations(ids, [[0.0] * self.length for _ in ids])

    def sleep(self):
        self.asked.append("sleep")

    def close(self):
        self.asked.append("close")


# --- nothing changes -----------------------------------------------------------------------------


def log_without_times(trainer):
    timed = ("time", "eps", "speed", "memory", "train_")
    return [
        {name: value for name, value in row.items() if not any(mark in name for mark in timed)}
        for row in trainer.state.log_history
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"dropout": 0.1, "gradient_checkpointing": True},
        pytest.param(
            {"beta": 0.0, "steps_per_generation": 2, "per_device_train_batch_size": 4},
            marks=pytest.mark.long,
        ),
    ],
    ids=["dropout-checkpointing", "off-policy"],
)
def test_training_after_it_is_bit_identical(tmp_path, settings):
    found = []
    for tried in (False, True):
        torch.manual_seed(5)
        trainer = make_trainer(tmp_path / "out", **settings)
        if tried:
            dry_run(trainer)
        trainer.train()
        found.append((weights(trainer), log_without_times(trainer), random_states()))
    plain, after = found
    assert equal_trees(plain[0], after[0])
    assert repr(plain[1]) == repr(after[1])
    assert equal_trees(plain[2], after[2])
    assert any(bool(values.any()) for name, values in after[0].items() if "lora_B" in name)


@pytest.mark.long
def test_run_with_it_is_identical_and_resume_skips_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for place, dry in (("plain", "false"), ("tried", "true")):
        more = ["--set", f"trainer.dry_run={dry}", "--set", f"output_dir={place}"]
        assert main(["quickstart", *SHORT_RUN, *more]) == 0
    printed = capsys.readouterr().out
    assert printed.count("dry run: worst case of 8 rows x ") == 1
    for name in ("adapter/adapter_model.safetensors", "completions.jsonl"):
        assert Path("plain", name).read_bytes() == Path("tried", name).read_bytes()
    assert main(["train", "tried", "--resume", "--set", "trainer.max_steps=3"]) == 0
    assert "dry run" not in capsys.readouterr().out


class Heard(TrainerCallback):
    """Notes every event that it hears."""

    def __init__(self):
        self.events = []

    def on_init_end(self, *_, **__):
        self.events.clear()

    def __getattribute__(self, name):
        if name.startswith("on_") and name != "on_init_end":
            object.__getattribute__(self, "events").append(name)
        return object.__getattribute__(self, name)


def test_trainer_is_left_as_it_was(trainer):
    heard = Heard()
    trainer.add_callback(heard)
    trainer.model.eval()

    def state():
        return {
            "weights": weights(trainer),
            "random": random_states(),
            "modes": [module.training for module in trainer.model.modules()],
            "step": (trainer._step, trainer.state.global_step, trainer.step_log.episodes),
            "metrics": {name: list(values) for name, values in trainer._metrics["train"].items()},
            "logs": {name: len(values) for name, values in trainer._logs.items()},
            "optimizer": [trainer.optimizer is None, trainer._buffered_inputs is None],
        }

    before = state()
    heard.events.clear()
    found = dry_run(trainer)
    assert equal_trees(before, state())
    assert heard.events == []
    assert all(p.grad is None for p in trainer.model.parameters())
    assert found.lowered == ()
    assert trainer.learner.tally.positions == 0
    assert trainer.learner.budget == found.budget


# --- it is the worst case ------------------------------------------------------------------------


def test_it_runs_the_longest_prompt_and_completion(trainer):
    trainer.args.tokens_per_micro_batch = 150
    passes = watched(trainer)
    found = dry_run(trainer)
    longest = max(
        len(
            trainer.processing_class.apply_chat_template(
                row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        )
        for row in trainer.train_dataset
    )
    width = longest + 24
    assert (found.rows, found.tokens, found.budget) == (8, width, 150)
    sampled = [shape for kind, *shape in passes if kind == "sample"]
    assert [8, longest, 0] in sampled  # the prompts are read
    assert [8, 1, width - 1] in sampled  # the last token of all of them, with all keys and values
    learned = [tuple(shape[:2]) for kind, *shape in passes if kind == "learn"]
    assert learned == largest_passes(WorstBatch(8, 8, longest, 24), 8, 150)
    reference = [tuple(shape[:2]) for kind, *shape in passes if kind == "ref"]
    assert reference == [(8, width)] * 2  # a group is more than a pass holds: old ones as well
    assert len(learned) == 2


def test_random_ids_are_no_special_tokens(trainer):
    seen = set()

    def note(ids, kwargs):
        if torch.is_grad_enabled():
            seen.update(ids.flatten().tolist())

    hooked(trainer, note)
    dry_run(trainer)
    assert len(seen) > 100
    assert not seen & set(trainer.processing_class.all_special_ids)


@pytest.mark.parametrize("budget", [500, 3000, 4000, 10_000, 16_384, 50_000])
def test_no_micro_batch_is_larger_than_those_that_run(budget):
    worst = WorstBatch(rows=64, step_rows=64, prompt=200, completion=2800)
    most = max(rows * min(worst.width, budget // rows) for rows in range(1, 65))
    tried = largest_passes(worst, 64, budget)
    assert max(rows * width for rows, width in tried) >= 0.999 * most
    assert tried[0] == (max(1, min(64, budget // worst.width)), worst.width)


def test_stream_uses_the_longest_prompt_allowed(trainer):
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    assert longest_prompt(trainer, None) == 256 - 24
    assert longest_prompt(trainer, 50) == 50
    assert longest_prompt(trainer, 5000) == 256 - 24


@pytest.mark.long
def test_its_peak_is_that_of_a_step_as_long(tmp_path):
    length = 800
    trainer = make_trainer(
        tmp_path / "out",
        max_seq_length=1024,
        max_steps=1,
        max_completion_length=length,
        tokens_per_micro_batch=3500,
        canary=False,
    )
    trainer.engine = Engine(length)
    take_peak()
    before = take_peak()
    found = dry_run(trainer)
    trainer.train()
    (real,) = (row["memory/peak_gib"] for row in trainer.state.log_history if "reward" in row)
    assert found.phase == "learning"
    assert found.peak_bytes > before + 100 * 2**20
    assert found.peak_bytes == pytest.approx(real * 2**30, rel=0.1)


# --- memory that runs out ------------------------------------------------------------------------


def without_memory(trainer, *, above, learning=True, sampling=True):
    """Let memory run out in every pass of more rows than ``above``."""

    def refuse(ids, kwargs):
        if len(ids) > above and (learning if "labels" in kwargs else sampling):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    hooked(trainer, refuse)


def test_lowered_sizes_stay_and_are_reported(trainer):
    without_memory(trainer, above=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = dry_run(trainer)
    assert trainer.learner.budget == found.budget < 4 * found.tokens
    assert trainer.sampler.pieces.size == 2
    budget, at_once = found.lowered
    assert f"tokens_per_micro_batch is now {found.budget}" in budget
    assert at_once.startswith("2 completions")
    assert str(found).endswith(at_once)


@pytest.mark.parametrize("phase", ["learning", "sampling"])
def test_what_does_not_fit_ends_with_the_remedy(trainer, phase):
    without_memory(trainer, above=0, learning=phase == "learning", sampling=phase == "sampling")
    before = weights(trainer)
    with pytest.raises(MemoryRanOutError, match=r"^the worst case of this run, 8 rows x ") as one:
        dry_run(trainer, remedy=lambda: "trainer.optim: adamw_8bit (saves 0.4 GiB)")
    assert str(one.value).endswith(" GiB of memory: trainer.optim: adamw_8bit (saves 0.4 GiB)")
    assert equal_trees(before, weights(trainer))
    assert all(p.grad is None for p in trainer.model.parameters())


def test_default_remedy_names_what_is_not_set_yet(trainer):
    without_memory(trainer, above=0)
    order = r"gradient_checkpointing: true.* lora\.r.* trainer\.max_completion_length$"
    with pytest.raises(MemoryRanOutError, match=order):
        dry_run(trainer, remedy=lambda: "")


def test_other_errors_pass_through(trainer):
    def refuse(ids, kwargs):
        if torch.is_grad_enabled():
            raise ValueError("no such kernel")

    hooked(trainer, refuse)
    with pytest.raises(ValueError, match="no such kernel"):
        dry_run(trainer)


def test_unknown_kind_of_cache_only_warns(trainer):
    def refuse(ids, kwargs):
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            raise NotImplementedError("a cache of its own")

    hooked(trainer, refuse)
    with pytest.warns(UserWarning, match="8 completions at full length"):
        dry_run(trainer)


LEFT = 48
"""MiB that the limited process may take beyond what it has when its trainer is made."""
LIMITED = f"""
import resource, sys
from pathlib import Path
import torch
from rloo_kit.runs import train as run
from rloo_kit.cli import main

real = run._make_trainer

def make(*args):
    trainer = real(*args)
    status = Path("/proc/self/status").read_text()
    used = int(status.split("VmData:")[1].split()[0]) * 1024
    torch.backends.mkldnn.set_flags(False)  # oneDNN does not say that it was memory
    resource.setrlimit(resource.RLIMIT_DATA, (used + {LEFT} * 2**20, resource.RLIM_INFINITY))
    return trainer

run._make_trainer = make
sys.exit(main(sys.argv[1:]))
"""
"""The command, which runs into a limit of the system; in a process of its own, since what earlier
tests left free in this one would be room."""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit is one of Linux")
def test_run_without_memory_ends_before_step_one(tmp_path):
    settings = {
        "model.backend": "transformers",
        "trainer.dry_run": "true",
        "trainer.max_completion_length": 2000,
        "model.max_seq_length": 2200,
        "data.held_out": 0,
        "data.num_prompts": 16,
        "trainer.per_device_train_batch_size": 8,
        "trainer.tokens_per_micro_batch": 2100,  # a row a pass
        "trainer.beta": 0.0,
        "output_dir": tmp_path / "runs" / "one",
    }
    given = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, "train", "quickstart", *given],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 2, ended.stdout + ended.stderr
    said = ended.stderr.splitlines()[-1]
    assert "the worst case of this run, 8 rows x 2,0" in said, ended.stderr
    assert re.search(r"GiB of memory: .*\b(trainer|model|lora)\.\w+", said), said
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()


# --- the other phases ----------------------------------------------------------------------------


@pytest.fixture
def judge(tmp_path):
    """A reward model with the embedded model's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(TINY_THINKER)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = tmp_path / "judge"
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return rk.load_rewards(
        [{"name": "reward_model", "model": str(folder), "tokens_per_batch": 200}]
    )


def test_reward_model_reads_a_full_pass_and_forgets_it(trainer, judge, monkeypatch):
    trainer.reward_funcs = [reward.func for reward in judge]
    model = trainer.reward_funcs[0].reward
    read, real = [], type(model)._logits

    def logits(self, loaded, rows):
        read.append(sum(map(len, rows)))
        return real(self, loaded, rows)

    monkeypatch.setattr(type(model), "_logits", logits)
    dry_run(trainer)
    assert not model.is_loaded
    model(completions=["one"], prompts=["two"])
    kept = dict(model._cache)
    dry_run(trainer)
    assert model.is_loaded
    assert dict(model._cache) == kept
    assert min(read[0], read[-1]) >= model.tokens_per_batch


def test_engine_samples_a_few_tokens_and_sleeps(trainer):
    trainer.engine = Engine()
    passes = watched(trainer)
    found = dry_run(trainer)
    assert trainer.engine.asked == [
        "sleep",
        "sync",
        (8, {found.tokens - 24}, ENGINE_TOKENS),
        "sleep",
    ]
    assert "sample" not in {kind for kind, *_ in passes}


# --- when it is made -----------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "expected"), [(None, False), (False, False), (True, True)])
def test_on_a_cpu_it_is_made_only_on_request(trainer, asked, expected):
    trainer.args.dry_run, said = asked, []
    found = dry_run_if_wanted(trainer, said.append)
    assert said == ([str(found)] if expected else [])
    assert (found is not None) == expected


@pytest.mark.long
@pytest.mark.parametrize(("asked", "times"), [(None, 0), (True, 1)])
def test_training_in_python_makes_one_dry_run(tmp_path, capsys, asked, times):
    trainer = make_trainer(tmp_path / "run", dry_run=asked, max_steps=1, save_strategy="steps")
    trainer.train()
    assert capsys.readouterr().out.count("dry run: worst case") == times
    trainer.train()
    assert "dry run" not in capsys.readouterr().out
    another = make_trainer(tmp_path / "run", dry_run=asked, max_steps=2)
    another.train(resume_from_checkpoint=True)
    assert "dry run" not in capsys.readouterr().out


def test_a_stream_without_limit_gets_none_by_default_on_a_gpu(made, monkeypatch):
    from types import SimpleNamespace

    from rloo_kit.training import dry_run as module

    monkeypatch.setattr(made, "accelerator", SimpleNamespace(device=torch.device("cuda")))
    monkeypatch.setattr(made, "train_dataset", made.train_dataset.to_iterable_dataset())
    monkeypatch.setattr(made.args, "dry_run", None)
    monkeypatch.setattr(module, "dry_run", lambda *_, **__: "made")
    assert dry_run_if_wanted(made, str) == "made"
    monkeypatch.setattr(module, "notes_of", lambda _: SimpleNamespace(max_seq_length=None))
    assert dry_run_if_wanted(made, str) is None
    assert dry_run_if_wanted(made, str, max_prompt_tokens=64) == "made"


def test_trls_path_makes_none_and_says_so(trainer, monkeypatch):
    trainer.args.dry_run, said = True, []
    monkeypatch.setattr(trainer, "why_trl_path", "prompts with images")
    assert dry_run_if_wanted(trainer, said.append) is None
    assert "prompts with images" in said[0]
