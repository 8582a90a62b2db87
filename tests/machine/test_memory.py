"""Memory comes back, also while variables still point at the model."""

import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

import rloo_kit as rk
from rloo_kit.errors import ConfigError, ModelError
from rloo_kit.machine.cleanup import measure
from rloo_kit.rloo.metrics import Tally
from rloo_kit.training.step_log import StepLog


@pytest.mark.long
def test_a_released_trainer_holds_no_tensor(tmp_path):
    before = psutil.Process().children(recursive=True)  # Python's own resource tracker, for one
    model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=256)
    trainer = rk.LeaveOneOutTrainer(
        model=rk.attach_lora(model),
        reward_funcs=["thinking"],
        args=rk.LeaveOneOutConfig(
            str(tmp_path), max_steps=1, max_completion_length=16, save_strategy="no"
        ),
        train_dataset=rk.load_prompts("arithmetic", num_prompts=8),
        processing_class=tokenizer,
    )
    trainer.train()
    assert psutil.Process().children(recursive=True) == before
    policy = trainer.model
    released = rk.release(trainer)
    assert sum(p.numel() for p in policy.parameters()) == 0
    assert sum(b.numel() for b in policy.buffers()) == 0
    assert trainer.optimizer is None
    assert "left in the process" in str(released)
    assert str(rk.release(policy))  # twice does no harm
    with pytest.raises(ConfigError, match="this trainer was released"):
        trainer.train()
    with pytest.raises(ModelError, match="load it again with load_model"):
        rk.LeaveOneOutTrainer(policy, ["thinking"], trainer.args, trainer.train_dataset)
    with pytest.raises(ModelError, match="load it again with load_model"):
        rk.evaluate(policy, tokenizer, trainer.train_dataset, ["thinking"])


def test_a_released_model_gives_its_memory_back():
    rk.release()  # else the model takes what earlier tests left free in the heap
    before = measure().resident
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 1024) for _ in range(8)])
    size = 8 * 4096 * 1024 * 4
    assert measure().resident - before > 0.8 * size
    released = rk.release(model)
    assert released.freed_resident > 0.8 * size
    assert model is not None


def test_the_peak_of_a_step_is_what_the_driver_counts(monkeypatch):
    """Not torch's count, which holds what vLLM has unmapped while it sleeps."""
    gib = 2**30
    free = [4 * gib, 9 * gib]  # the engine awake after sampling, asleep after learning
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free.pop(0), 12 * gib))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 11 * gib)
    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda token: None)
    log = StepLog([], tokenizer, {}, state=lambda: None, tell=lambda *_: None)
    log.note_used()
    log.note_step(Tally(), 1.0, skipped=0)
    assert log.metrics["memory/peak_gib"] == [8.0]


def test_tensors_that_a_module_keeps_are_released():
    """Unsloth's attention keeps the keys and values of the last generation as plain attributes."""
    layer = torch.nn.Linear(2, 2)
    layer.paged_attention = torch.zeros(64, 2, 8)
    layer.paged_attention_K = layer.paged_attention[:, 0]
    rk.release(layer)
    assert layer.paged_attention.numel() == layer.paged_attention_K.numel() == 0


def test_shutting_down_outside_of_a_notebook_says_so(capsys):
    rk.shutdown_kernel()
    assert "memory returns when the program ends" in capsys.readouterr().out


def test_a_notebooks_last_error_is_forgotten_when_asked():
    sys.last_value = ValueError("its frames hold variables")
    rk.release()
    assert hasattr(sys, "last_value")
    rk.release(clear_notebook=True)
    assert not hasattr(sys, "last_value")
