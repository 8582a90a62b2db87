"""The trainer on the card: Unsloth's patched class, out of memory, resume."""

import contextlib
import warnings

import pytest
from policies import trained

pytestmark = pytest.mark.gpu


def lottery(completions, **_):
    """Scores that differ in every group."""
    import zlib

    return [zlib.crc32(c[-1]["content"].encode()) % 100 / 100 for c in completions]


def test_unsloths_patched_trainer_trains(kit, device, policy, make_trainer, record_property):
    import math

    names = [base.__name__ for base in kit.LeaveOneOutTrainer.__mro__]
    patched = any("Unsloth" in name for name in names)
    record_property("backend", kit.setup().backend)
    record_property("patched", patched)
    assert patched or device == "cpu" or kit.setup().backend == "transformers"
    model, tokenizer = policy(load_in_4bit=False)
    before = trained(model)
    trainer = make_trainer(model, tokenizer, reward=lottery)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    assert len(rows) == 3
    for row in rows:
        assert math.isfinite(row["loss"])
        assert math.isfinite(row["grad_norm"])
        assert row["grad_norm"] > 0
    assert any(not values.equal(before[name]) for name, values in trained(model).items())
    record_property("seconds_a_step", round(rows[-1]["step_time"], 2))
    record_property("peak_gib", round(rows[-1]["memory/peak_gib"], 2))


class Cap:
    """Measures what a learning step takes, and afterwards allows it only a share of that."""

    def __init__(self, device, share):
        self.on_gpu = device == "cuda"
        self.share = share
        self.taken = 0
        self.largest = 0

    @contextlib.contextmanager
    def measured(self, trainer):
        """On a GPU the bytes above those held before; on a CPU the positions of a pass."""
        if not self.on_gpu:
            run = trainer.policy.run

            def noting(batch, **others):
                self.largest = max(self.largest, batch.num_positions)
                return run(batch, **others)

            trainer.policy.run = noting
            yield
            return
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_reserved()
        yield
        self.taken = max(self.taken, torch.cuda.max_memory_reserved() - held)

    @contextlib.contextmanager
    def in_force(self, trainer):
        import torch

        if not self.on_gpu:
            run = trainer.policy.run

            def refusing(batch, **others):
                if batch.num_positions > self.share * self.largest:
                    raise torch.OutOfMemoryError("as a card would")
                return run(batch, **others)

            trainer.policy.run = refusing
            yield
            return
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info()
        allowed = torch.cuda.memory_reserved() + self.share * self.taken
        torch.cuda.set_per_process_memory_fraction(allowed / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


def learnt_gradient(trainer, place):
    """Train one step, its learning inside ``place``; return the gradient and the warnings."""
    import torch

    learn = trainer.learner.learn
    found = []
    start = {p: p.detach().clone() for p in trainer.model.parameters() if p.requires_grad}

    def inside(*arguments, **keywords):
        with place(trainer):
            return learn(*arguments, **keywords)

    def note(model):
        wanted = [p for _, p in sorted(model.named_parameters()) if p.requires_grad]
        found.append(torch.cat([p.grad.float().flatten().cpu() for p in wanted]))

    trainer.learner.learn = inside
    trainer._clip_grad_norm = note
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    for parameter, values in start.items():  # else the next one draws other completions
        parameter.data.copy_(values)
    return found[0], [str(w.message) for w in caught if "memory ran out" in str(w.message)]


def test_memory_that_really_runs_out_lowers_the_budget_and_changes_nothing_else(
    device, policy, make_trainer, record_property
):
    settings = {
        "max_steps": 1,
        "reward": lottery,
        "tokens_per_micro_batch": 16_384,
        "per_device_train_batch_size": 256 if device == "cuda" else 64,
        "learning_rate": 1e-9,
        "beta": 0.0,
    }
    model, tokenizer = policy(load_in_4bit=False, use_gradient_checkpointing=False)
    cap = Cap(device, share=0.6)
    # cuBLAS, Triton and Unsloth allocate once, in the first step
    learnt_gradient(make_trainer(model, tokenizer, **settings), lambda _: contextlib.nullcontext())
    free = make_trainer(model, tokenizer, **settings)
    expected, none = learnt_gradient(free, cap.measured)
    assert not none
    tight = make_trainer(model, tokenizer, **settings)
    found, warned = learnt_gradient(tight, cap.in_force)
    record_property("step_mib", round(cap.taken / 2**20))
    record_property("budget", tight.learner.budget)
    assert len(warned) == 1
    assert tight.learner.budget < free.learner.budget == 16_384
    difference = float((found - expected).norm() / expected.norm())
    record_property("gradient_difference", f"{difference:.1e}")
    assert difference < 0.05  # bf16, in passes of other shapes


def test_several_micro_batches_give_the_gradient_of_one(device, kit, make_trainer, tmp_path,
                                                        record_property):  # fmt: skip
    """Unsloth's offloading checkpoints, with several graphs waiting for their backward passes."""
    from runs_here import model_folder

    folder = model_folder("qwen3-0.6b", load_in_4bit=True, fallback=tmp_path)
    gradients = {}
    with kit.session():
        model, tokenizer = kit.load_model(folder, max_seq_length=512)
        model = kit.attach_lora(model, r=16, use_gradient_checkpointing="unsloth")
        for budget in (65_536, 128):
            trainer = make_trainer(
                model, tokenizer, reward=lottery, max_steps=1, beta=0.01, learning_rate=1e-9,
                per_device_train_batch_size=16, tokens_per_micro_batch=budget,
                folder=f"out-{budget}", seed=3,
            )  # fmt: skip
            gradients[budget], _ = learnt_gradient(trainer, lambda _: contextlib.nullcontext())
    one, several = gradients.values()
    difference = float((one - several).norm() / one.norm())
    record_property("gradient_difference", f"{difference:.1e}")
    assert difference < 0.05


def test_a_resumed_training_is_the_one_that_was_never_stopped(
    four_bit, policy, make_trainer, tmp_path, record_property
):
    import torch

    settings = {
        "max_steps": 4,
        "reward": lottery,
        "save_strategy": "steps",
        "save_steps": 2,
        "keep_last": 9,
        "per_device_train_batch_size": 16,
    }
    model, tokenizer = policy(load_in_4bit=True)
    whole = make_trainer(model, tokenizer, folder="whole", **settings)
    whole.train()
    expected = trained(model)
    model, tokenizer = policy(load_in_4bit=True)
    second = make_trainer(model, tokenizer, folder="second", **settings)
    torch.manual_seed(1)
    second.train(resume_from_checkpoint=tmp_path / "whole" / "checkpoint-2")
    found = trained(model)
    assert second.resumed_from.step == 2
    same = all(found[name].equal(values) for name, values in expected.items())
    moved = max(float((found[n] - v).abs().max()) for n, v in expected.items())
    record_property("bit_for_bit", same)
    record_property("largest_difference", f"{moved:.1e}")
    assert moved < 4e-3  # a few of Adam's steps: kernels that add in any order end elsewhere


def test_a_run_that_asks_for_eight_bit_adam_gets_it(
    device, four_bit, policy, make_trainer, record_property
):
    model, tokenizer = policy(load_in_4bit=True, r=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a CPU has none, and the kit says so
        trainer = make_trainer(model, tokenizer, max_steps=1, optim="adamw_8bit")
    states = []
    clip = trainer._clip_grad_norm
    trainer._clip_grad_norm = lambda model: states.append(trainer.optimizer) or clip(model)
    trainer.train()
    inner = getattr(states[0], "optimizer", states[0])
    kinds = {
        str(value.dtype)
        for state in inner.state.values()
        for value in state.values()
        if hasattr(value, "dtype") and value.numel() > 4096
    }
    record_property("states", " ".join(sorted(kinds)))
    assert "torch.uint8" in kinds or device == "cpu"
