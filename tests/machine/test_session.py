"""A session gives back what its body made; what is left is named."""

import gc
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from rloo_kit.machine.cleanup import (
    MIB,
    MemoryUse,
    Released,
    add_to_session,
    measure,
    release,
    session,
)


def engine(**fails):
    """Something that samples; it notes when it is closed."""
    return made(Mock(spec=["close"], **fails))


def judge():
    """A reward model, which notes when it is released."""
    return made(Mock(spec=["release"]))


def made(thing):
    """Make it, as a loader would."""
    add_to_session(thing)
    return thing


@pytest.fixture(autouse=True)
def small_heap():
    """Whatever was there before is not looked at: a collection then takes no time."""
    gc.freeze()
    yield
    gc.unfreeze()


# --- session -------------------------------------------------------------------------------------


def test_what_the_body_made_is_released_at_the_end():
    with session() as opened:
        model = made(torch.nn.Linear(8, 8))
        samples = engine()
        scores = judge()
        assert opened.released is None
        assert model.weight.numel() == 64
        samples.close.assert_not_called()
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    samples.close.assert_called_once()
    scores.release.assert_called_once()
    assert "left in the process" in str(opened.released)
    assert opened.things == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_the_body_made_is_released_when_it_raises(error):
    with pytest.raises(error), session() as opened:  # noqa: PT012
        samples = engine()
        raise error
    samples.close.assert_called_once()
    assert isinstance(opened.released, Released)


def test_a_thing_belongs_to_the_innermost_session():
    with session() as outer:
        first = engine()
        with session():
            second = engine()
        first.close.assert_not_called()
        second.close.assert_called_once()
        third = engine()
        assert outer.released is None
    for one in (first, second, third):
        one.close.assert_called_once()


def test_what_was_released_by_hand_may_be_released_again():
    with session():
        model = made(torch.nn.Linear(4, 4))
        scores = judge()
        release(model, scores)
    assert scores.release.call_count == 2
    assert model.weight.numel() == 0


def test_what_cannot_be_released_does_not_keep_the_rest():
    with pytest.raises(ConnectionError), session():
        first, _ = engine(), engine(**{"close.side_effect": ConnectionError("away")})
    first.close.assert_called_once()


# --- what is said of it --------------------------------------------------------------------------


def test_a_report_of_a_gpu_says_how_much_of_it_tensors_hold_and_which_children_are_left():
    before = MemoryUse(0, gpu_reserved=9 * 1024 * MIB, gpu_other=MIB)
    after = MemoryUse(0, 8 * MIB, 20 * MIB, MIB, ("7 vllm", "8 vllm"))
    text = str(Released(before, after))
    assert "released 9,196 MiB of GPU memory" in text
    assert "holds 20 MiB (tensors: 8 MiB), and 1 MiB are in use outside of torch" in text
    assert "child processes left: 7 vllm, 8 vllm" in text


# --- what is measured ----------------------------------------------------------------------------


def test_children_are_measured_while_they_live():
    before = set(measure().children)  # what other tests have started
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        (found,) = set(measure().children) - before
        assert found.split()[0] == str(child.pid)
    finally:
        child.kill()
        child.wait()
    assert set(measure().children) == before
