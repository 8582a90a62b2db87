"""One of several processes: its own GPU, its own random states, and what all of them decide."""

import signal
import time
from types import SimpleNamespace

import pytest
import torch

from rloo_kit.checkpoints import resume
from rloo_kit.checkpoints.stopping import StopRequest, stop_signals
from rloo_kit.errors import BackendError
from rloo_kit.machine import environment
from rloo_kit.machine.processes import use_own_card, with_seed


@pytest.fixture
def second_of_two_cards(monkeypatch):
    """A process that a launcher started for the second of two cards; what it asks of which card."""
    asked = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    for name, answer in {"is_available": True, "device_count": 2}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "set_device", lambda card: asked.append(("use", card)))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda card: asked.append(("get", card)))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _, card: asked.append(("set", card)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda _: asked.append(("seed", 1)))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: asked.append(("seed", "all")))
    return asked


def test_a_process_uses_its_own_card_before_it_asks_for_memory(second_of_two_cards, monkeypatch):
    monkeypatch.setattr(environment, "_environment", None)
    monkeypatch.setattr(environment, "check_card", lambda: f"asked after {second_of_two_cards}")
    with pytest.raises(BackendError, match=r"asked after \[\('use', 1\)\]"):
        environment.setup()


def test_a_seed_leaves_the_other_cards_alone(second_of_two_cards):
    before = torch.get_rng_state()
    with with_seed(3):
        drawn = torch.rand(1)
    assert torch.equal(drawn, torch.rand(1, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(before, torch.get_rng_state())
    assert second_of_two_cards == [("get", 1), ("seed", 1), ("set", 1)]


@pytest.mark.parametrize(("rank", "used"), [("-1", []), ("0", [("use", 0)]), ("3", [("use", 1)])])
def test_the_local_rank_is_the_card_and_minus_1_is_none(
    second_of_two_cards, monkeypatch, rank, used
):
    monkeypatch.setenv("LOCAL_RANK", rank)
    use_own_card()
    assert second_of_two_cards == used


def training(**attributes):
    """What ``stop_if_asked`` reads and writes, without a trainer."""
    usual = {"args": SimpleNamespace(max_hours=None, save_strategy="steps"), "saved_at": 0}
    usual |= {"_started": time.monotonic(), "_signals": StopRequest(), "stop_reason": None}
    usual |= {"control": SimpleNamespace(should_training_stop=False)}
    return SimpleNamespace(**usual | attributes, state=SimpleNamespace(global_step=1))


def test_the_reason_of_one_process_stops_all(monkeypatch):
    own = training()
    monkeypatch.setattr(resume, "gather_object", lambda rows: [*rows, (None, "max_hours 1")])
    assert resume.ResumableTrainer.stop_if_asked(own)
    assert own.stop_reason == "max_hours 1"
    assert own._signals.received is None


def test_the_own_copy_of_another_process_signal_is_no_second_one(monkeypatch):
    monkeypatch.setattr(resume, "gather_object", lambda rows: [*rows, (signal.SIGTERM, None)])
    with stop_signals() as signals:
        assert resume.ResumableTrainer.stop_if_asked(training(_signals=signals))
        signal.raise_signal(signal.SIGTERM)  # while the checkpoint is written
    assert signals.received == signal.SIGTERM


def test_a_signal_that_comes_after_all_have_decided_waits_for_the_next_decision(monkeypatch):
    own = training()

    def gather(rows):
        own._signals.received = own._signals.received or 15
        return [*rows, (None, None)]

    monkeypatch.setattr(resume, "gather_object", gather)
    assert not resume.ResumableTrainer.stop_if_asked(own)  # the other process continues too
    assert not own.control.should_training_stop
    assert resume.ResumableTrainer.stop_if_asked(own)
    assert (own.control.should_training_stop, own._signals.received) == (True, 15)
