"""The dry run: the memory of the longest step is taken, the run is the one it would have been."""

import json
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
    REMEMBERED,
    SHORT,
    Memory,
    _facts,
    _is_bounded,
    _largest,
    _Worst,
    _worst_case,
    digest,
    rehearse,
    rehearse_first,
)

pytestmark = pytest.mark.faults  # at the limit of memory; make test-faults

sys.path.append(str(Path(__file__).parents[1] / "faults"))

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
    """A trainer that other tests have had too: a rehearsal leaves it as it was."""
    settings, dataset, rewards = dict(vars(made.args)), made.train_dataset, made.reward_funcs
    yield made
    vars(made.args).update(settings)
    made.train_dataset, made.reward_funcs, made.engine = dataset, rewards, None
    made._learner, made._sampling.size = None, None
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
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dropout-checkpointing", "off-policy"],
)
def test_a_training_after_it_is_the_same_bit_for_bit(tmp_path, settings):
    found = []
    for rehearsed in (False, True):
        torch.manual_seed(5)
        trainer = make_trainer(tmp_path / "out", **settings)
        if rehearsed:
            rehearse(trainer)
        trainer.train()
        found.append((weights(trainer), log_without_times(trainer), random_states()))
    plain, after = found
    assert equal_trees(plain[0], after[0])
    assert repr(plain[1]) == repr(after[1])
    assert equal_trees(plain[2], after[2])
    assert any(bool(values.any()) for name, values in after[0].items() if "lora_B" in name)


def test_a_run_with_it_is_the_same_run_and_a_resumed_one_does_not_repeat_it(
    tmp_path, monkeypatch, capsys
):
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


def test_the_trainer_is_left_as_it_was(trainer):
    heard = Heard()
    trainer.add_callback(heard)
    trainer.model.eval()

    def state():
        return {
            "weights": weights(trainer),
            "random": random_states(),
            "modes": [module.training for module in trainer.model.modules()],
            "step": (trainer._step, trainer.state.global_step, trainer._episodes),
            "metrics": {name: list(values) for name, values in trainer._metrics["train"].items()},
            "logs": {name: len(values) for name, values in trainer._logs.items()},
            "optimizer": [trainer.optimizer is None, trainer._buffered_inputs is None],
        }

    before = state()
    heard.events.clear()
    found = rehearse(trainer)
    assert equal_trees(before, state())
    assert heard.events == []
    assert all(p.grad is None for p in trainer.model.parameters())
    assert found.lowered == ()
    assert trainer._learner.tally.positions == 0
    assert trainer._learner.budget == found.budget


# --- it is the worst case ------------------------------------------------------------------------


def test_it_samples_and_learns_at_the_longest_prompt_and_completion(trainer):
    trainer.args.tokens_per_micro_batch = 150
    passes = watched(trainer)
    found = rehearse(trainer)
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
    assert learned == _largest(_Worst(8, 8, longest, 24), 8, 150)
    reference = [tuple(shape[:2]) for kind, *shape in passes if kind == "ref"]
    assert reference == [(8, width)] * 2  # a group is more than a pass holds: old ones as well
    assert len(learned) == 2


def test_no_pass_without_gradient_is_run_where_a_step_has_none(trainer):
    trainer.args.beta = 0.0
    passes = watched(trainer)
    rehearse(trainer)
    assert {kind for kind, *_ in passes} == {"sample", "learn"}


def test_the_ids_are_no_special_tokens(trainer):
    seen = set()

    def note(ids, kwargs):
        if torch.is_grad_enabled():
            seen.update(ids.flatten().tolist())

    hooked(trainer, note)
    rehearse(trainer)
    assert len(seen) > 100
    assert not seen & set(trainer.processing_class.all_special_ids)


@pytest.mark.parametrize("budget", [500, 3000, 4000, 10_000, 16_384, 50_000])
def test_no_micro_batch_has_notably_more_positions_than_those_that_are_run(budget):
    worst = _Worst(rows=64, step_rows=64, prompt=200, completion=2800)
    most = max(rows * min(worst.width, budget // rows) for rows in range(1, 65))
    tried = _largest(worst, 64, budget)
    assert max(rows * width for rows, width in tried) >= 0.999 * most
    assert tried[0] == (max(1, min(64, budget // worst.width)), worst.width)


def test_a_clip_that_makes_all_scores_equal_leaves_something_to_learn_from(trainer):
    trainer.args.beta, trainer.args.reward_clip_range = 0.0, [5.0, 6.0]
    passes = watched(trainer)
    rehearse(trainer)
    assert "learn" in {kind for kind, *_ in passes}


def test_of_a_stream_the_longest_prompt_is_the_longest_allowed(trainer):
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    assert _worst_case(trainer, None).prompt == 256 - 24
    assert _worst_case(trainer, 50).prompt == 50
    assert _worst_case(trainer, 5000).prompt == 256 - 24


def test_its_peak_is_the_peak_of_a_step_as_long(tmp_path):
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
    found = rehearse(trainer)
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


def test_what_had_to_be_lowered_stays_lowered_and_is_said(trainer):
    without_memory(trainer, above=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = rehearse(trainer)
    assert trainer._learner.budget == found.budget < 4 * found.tokens
    assert trainer._sampling.size == 2
    assert found.lowered == (
        f"memory ran out: tokens_per_micro_batch is {found.budget} from here on",
        "2 completions are sampled at a time from here on",
    )
    assert str(found).endswith("; 2 completions are sampled at a time from here on")


@pytest.mark.parametrize("phase", ["learning", "sampling"])
def test_what_does_not_fit_at_all_is_one_sentence_with_the_remedy(trainer, phase):
    without_memory(trainer, above=0, learning=phase == "learning", sampling=phase == "sampling")
    before = weights(trainer)
    with pytest.raises(MemoryRanOutError, match=r"^the worst case of this run, 8 rows x ") as one:
        rehearse(trainer, remedy=lambda: "trainer.optim: adamw_8bit (saves 0.4 GiB)")
    assert str(one.value).endswith(" GiB of memory: trainer.optim: adamw_8bit (saves 0.4 GiB)")
    assert equal_trees(before, weights(trainer))
    assert all(p.grad is None for p in trainer.model.parameters())


def test_without_a_planner_the_remedy_names_what_is_not_set_yet(trainer):
    without_memory(trainer, above=0)
    with pytest.raises(
        MemoryRanOutError,
        match=r"memory: set trainer\.gradient_checkpointing: true, lower lora\.r, or last lower "
        r"trainer\.max_completion_length$",
    ):
        rehearse(trainer, remedy=lambda: "")


def test_another_error_is_raised_as_it_is(trainer):
    def refuse(ids, kwargs):
        if torch.is_grad_enabled():
            raise ValueError("no such kernel")

    hooked(trainer, refuse)
    with pytest.raises(ValueError, match="no such kernel"):
        rehearse(trainer)


def test_a_cache_of_another_kind_is_said_and_ends_nothing(trainer):
    def refuse(ids, kwargs):
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            raise NotImplementedError("a cache of its own")

    hooked(trainer, refuse)
    with pytest.warns(UserWarning, match="8 completions at full length is not part of it"):
        rehearse(trainer)


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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit is one of Linux")
def test_a_run_without_memory_ends_before_its_first_step_and_leaves_nothing(tmp_path):
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


def test_a_reward_model_reads_a_full_pass_and_forgets_it(trainer, judge, monkeypatch):
    trainer.reward_funcs = [reward.func for reward in judge]
    model = trainer.reward_funcs[0].reward
    read, real = [], type(model)._logits

    def logits(self, loaded, rows):
        read.append(sum(map(len, rows)))
        return real(self, loaded, rows)

    monkeypatch.setattr(type(model), "_logits", logits)
    rehearse(trainer)
    assert not model.is_loaded
    model(completions=["one"], prompts=["two"])
    kept = dict(model._cache)
    rehearse(trainer)
    assert model.is_loaded
    assert dict(model._cache) == kept
    assert min(read[0], read[-1]) >= model.tokens_per_batch


def test_a_reward_that_is_no_model_is_not_called(trainer):
    def never(**_):
        raise AssertionError("called")

    trainer.reward_funcs = [never]
    rehearse(trainer)


def test_an_engine_samples_a_few_tokens_of_the_batch_and_sleeps(trainer):
    trainer.engine = Engine()
    passes = watched(trainer)
    found = rehearse(trainer)
    assert trainer.engine.asked == ["sleep", "sync", (8, {found.tokens - 24}, SHORT), "sleep"]
    assert "sample" not in {kind for kind, *_ in passes}


# --- when it is made -----------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "expected"), [(None, False), (False, False), (True, True)])
def test_on_a_cpu_it_is_made_where_it_is_asked_for(trainer, tmp_path, monkeypatch, asked, expected):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trainer.args.dry_run, said = asked, []
    found = rehearse_first(trainer, said.append)
    assert said == ([str(found)] if expected else [])
    assert (found is not None) == expected
    assert (tmp_path / "cache").exists() == expected


@pytest.mark.parametrize(("asked", "times"), [(None, 0), (False, 0), (True, 1)])
def test_a_training_in_python_rehearses_once(tmp_path, monkeypatch, capsys, asked, times):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trainer = make_trainer(tmp_path / "run", dry_run=asked, max_steps=1, save_strategy="steps")
    trainer.train()
    assert capsys.readouterr().out.count("dry run: worst case") == times
    trainer.train()
    assert "dry run" not in capsys.readouterr().out
    another = make_trainer(tmp_path / "run", dry_run=asked, max_steps=2)
    another.train(resume_from_checkpoint=True)
    assert "dry run" not in capsys.readouterr().out


def test_what_does_not_fit_ends_a_training_in_python_before_its_first_step(tmp_path):
    trainer = make_trainer(tmp_path / "run", dry_run=True)
    without_memory(trainer, above=0)
    try:
        for _ in range(2):  # what did not fit is rehearsed again
            with pytest.raises(MemoryRanOutError, match="the worst case of this run, 8 rows x "):
                trainer.train()
    finally:
        HOOKS.pop().remove()
    assert trainer.state.global_step == 0


def test_a_stream_without_any_limit_is_rehearsed_only_where_that_is_asked_for(made, monkeypatch):
    rows = made.train_dataset.to_iterable_dataset()
    monkeypatch.setattr(made, "train_dataset", rows)
    assert _is_bounded(made, None)
    monkeypatch.setattr(made.model.rloo_kit_notes, "max_seq_length", None)
    assert not _is_bounded(made, None)
    assert _is_bounded(made, 64)


def test_where_trls_own_code_trains_it_is_said_that_none_is_made(trainer, monkeypatch):
    trainer.args.dry_run, said = True, []
    monkeypatch.setattr(trainer, "_use_trl_path", "prompts with images")
    assert rehearse_first(trainer, said.append) is None
    assert said == ["dry run: not made, since TRL's own code trains (prompts with images)"]


def test_what_has_fitted_is_known_by_what_decides_it(trainer):
    def key(**settings):
        vars(trainer.args).update(settings)
        return digest(_facts(trainer, _worst_case(trainer, None)))

    first = key()
    assert first == key(learning_rate=1e-5, max_steps=7, temperature=0.5)
    others = [
        key(max_completion_length=25),
        key(generation_batch_size=16),
        key(optim="sgd"),
        key(gradient_checkpointing=True),
    ]
    assert len({first, *others}) == 5


def test_a_worst_case_is_known_while_as_much_memory_is_free(tmp_path):
    memory = Memory(tmp_path / "a" / "b.json")
    assert not memory.knows("one", 100)
    memory.keep("one", 100)
    again = Memory(memory.file)
    assert again.knows("one", 100)
    assert again.knows("one", 99)
    assert not again.knows("one", 90)
    assert not again.knows("another", 100)
    assert [path.name for path in memory.file.parent.iterdir()] == ["b.json"]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b'{"one": 3}', b'{"one": {"free": "100"}}', b"[" * 10**5]
)
def test_a_damaged_file_knows_nothing_and_is_written_anew(tmp_path, content):
    memory = Memory(tmp_path / "dry_runs.json")
    memory.file.write_bytes(content)
    assert not memory.knows("one", 100)
    memory.keep("one", 100)
    assert memory.knows("one", 100)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    memory = Memory(tmp_path / "file" / "dry_runs.json")
    memory.keep("one", 100)
    assert not memory.knows("one", 100)


def test_the_oldest_make_room(tmp_path):
    memory = Memory(tmp_path / "dry_runs.json")
    memory.file.write_text(json.dumps({str(n): {"free": 1} for n in range(REMEMBERED)}))
    memory.keep("new", 1)
    assert len(json.loads(memory.file.read_text())) == REMEMBERED
    assert not memory.knows("0", 1)
    assert memory.knows("1", 1)
    assert memory.knows("new", 1)


@pytest.mark.parametrize(
    ("named", "place"),
    [("/tmp/x", "/tmp/x/rloo-kit"), ("x", "~/.cache/rloo-kit"), ("", "~/.cache/rloo-kit")],
)
def test_the_file_lies_in_the_users_cache_folder(monkeypatch, named, place):
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert str(Memory().file) == os.path.expanduser(f"{place}/dry_runs.json")
