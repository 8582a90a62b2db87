"""What the end of an engine gives back, without a card: tensors, engines nobody took, the pool."""

import contextlib
import gc
import inspect
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from fake_driver import build_driver

import rloo_kit as rk
from rloo_kit.errors import GenerationError, MemoryRanOutError
from rloo_kit.machine import engines
from rloo_kit.machine.engines import sleep_pool_bytes
from rloo_kit.machine.tensors import live_tensors
from rloo_kit.runs import child
from rloo_kit.sampling.engine import Sampling

pytestmark = pytest.mark.gpu_contract
PROMPTS = [[1, 2, 3]]
HERE = Path(__file__).parent


@pytest.fixture
def pool(monkeypatch):
    """Return a function that leaves so many bytes in vLLM's sleep allocator of this process."""
    from vllm.device_allocator import cumem

    allocator = object.__new__(cumem.CuMemAllocator)
    allocator.pointer_to_data = {}
    allocator.allocator_and_pools = {}
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)

    def leave(size):
        handle = (0, size, 4096, 0)
        allocator.pointer_to_data[4096] = cumem.AllocationData(handle, "weights")

    return leave


def test_a_tensor_from_before_the_engine_is_found_while_it_is_emptied(
    model, vllm_starts, engine_of
):
    vllm_starts(141)
    early = torch.zeros(7, 11)
    seen = []
    engine = engine_of(model)
    assert gc.get_freeze_count() > 100_000  # by vLLM, with the tensor in it
    assert not any(tensor is early for tensor in live_tensors())

    def note(function):
        seen.extend(tensor is early for tensor in live_tensors())
        return []

    engine._llm.apply_model = note
    engine.close()
    assert any(seen)
    assert any(tensor is early for tensor in live_tensors())


def test_quantisation_states_and_plain_tensors_of_vllm_s_model_go(engine):
    from bitsandbytes.functional import QuantState

    layer = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    layer.weight.bnb_quant_state = {0: QuantState(absmax=torch.ones(64))}
    layer.lora_buffer = torch.zeros(32)
    layer.kv_cache = [torch.zeros(16)]
    absmax = weakref.ref(layer.weight.bnb_quant_state[0].absmax)
    engine.close()
    assert absmax() is None
    assert [layer.weight.numel(), layer.lora_buffer.numel(), layer.kv_cache[0].numel()] == [0] * 3


def test_every_pool_that_vllm_makes_is_emptied(pool, monkeypatch):
    from vllm.device_allocator import cumem

    looked = []

    class Pool:
        def snapshot(self, **settings):
            inspect.signature(torch.cuda.MemPool.snapshot).bind(self, **settings)
            looked.append(self)
            return []

    @contextlib.contextmanager
    def make(*callbacks):
        yield Pool(), None

    monkeypatch.setattr(cumem, "use_memory_pool_with_allocator", make)
    allocator = cumem.CuMemAllocator.instance
    allocator.current_tag = "default"
    allocator.python_malloc_callback = allocator.python_free_callback = None
    for tag in ("weights", "kv_cache"):
        with allocator.use_memory_pool(tag=tag):  # vLLM's own code keeps the pool
            pass
    looked.clear()
    engines._empty_pools(engines._pools_of(allocator))
    assert len(set(map(id, looked))) == 2


def test_blocks_that_vllm_freed_behind_torch_cost_no_memory(tmp_path):
    build_driver(tmp_path)
    done = subprocess.run(
        [sys.executable, HERE / "sleep_pool.py", tmp_path], check=True,
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    # without the kit's call vLLM forgets 2,000 MiB
    assert done.stdout.splitlines()[-2:] == ["2020 2020", "0 0"]


def test_an_engine_unmaps_its_pools_before_vllm_drops_them(engine, pool, monkeypatch):
    from vllm.device_allocator import cumem

    calls = engine._llm.llm_engine.model_executor.calls
    pool(5 * 2**20)
    allocator = cumem.CuMemAllocator.instance
    allocator.python_free_callback = allocator._python_free_callback
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    unmapped = []

    def unmap(handle):  # the driver's part
        unmapped.append((handle, [method for method, _ in calls]))

    monkeypatch.setattr(cumem, "unmap_and_release", unmap)
    engine.close()
    ((handle, before),) = unmapped
    assert handle == (0, 5 * 2**20, 4096, 0)
    assert "shutdown" not in before
    assert sleep_pool_bytes() == 0


def test_a_released_model_ends_the_engine_that_no_trainer_took(share):
    model, _ = share(four_bit=True)
    executor = model.vllm_engine.llm_engine.model_executor
    rk.release(model)
    assert [method for method, _ in executor.calls].count("shutdown") == 1
    rk.release(model)  # twice does no harm


def test_what_an_earlier_engine_left_turns_sleep_off_and_says_so(
    model, vllm_starts, engine_of, pool
):
    vllm_starts(141)
    pool(5 * 2**20)
    assert sleep_pool_bytes() == 5 * 2**20
    with pytest.warns(UserWarning, match="holds 5 MiB, so the new engine cannot free") as said:
        engine = engine_of(model)
    assert "in_subprocess=True" in str(said[0].message)
    assert not engine._llm.llm_engine.vllm_config.model_config.enable_sleep_mode
    engine.sleep()
    calls = engine._llm.llm_engine.model_executor.calls
    assert "sleep" not in [method for method, _ in calls]


def test_unsloth_s_engine_does_not_sleep_then_either(card, pool, monkeypatch):
    import unsloth

    class Reached(BaseException):
        pass

    def load(*_, **arguments):
        raise Reached(os.environ["UNSLOTH_VLLM_STANDBY"], arguments["fast_inference"])

    monkeypatch.setattr(unsloth.FastLanguageModel, "from_pretrained", load)
    card(12)
    with pytest.raises(Reached, match=r"'1', True"):
        rk.load_model("tiny-thinker", max_seq_length=256, fast_inference=True)
    pool(5 * 2**20)
    with (
        pytest.raises(Reached, match=r"'0', True"),
        pytest.warns(UserWarning, match="cannot free its memory while the model learns"),
    ):
        rk.load_model("tiny-thinker", max_seq_length=256, fast_inference=True)


def test_memory_that_does_not_come_back_is_one_sentence(engine, pool, monkeypatch):
    pool(300 * 2**20)
    monkeypatch.setattr(engines, "_unmap_pools", lambda: None)
    with pytest.warns(UserWarning, match="still holds 300 MiB of the GPU") as said:
        engine.close()
    assert len(said) == 1


def test_a_training_by_run_file_then_takes_a_process_of_its_own(pool, monkeypatch, tmp_path):
    pool(5 * 2**20)
    settings = ["trainer.max_steps=1", f"output_dir={tmp_path / 'run'}"]
    asked = []
    monkeypatch.setattr(child, "call_in_child", lambda *words, **named: asked.append(words))
    said = []
    rk.train("quickstart", settings, said.append)
    assert asked == [(rk.train, ("quickstart", settings), said.append)]
    assert "uses 5 MiB, so this training runs in a process of its own" in said[0]


def test_an_engine_that_cannot_be_emptied_is_shut_down(engine, monkeypatch):
    executor = engine._llm.llm_engine.model_executor

    def fails(llm):
        raise AttributeError("a library has changed")

    monkeypatch.setattr(engines, "_empty_engine", fails)
    with pytest.warns(UserWarning, match="a library has changed"):
        engine.close()
    assert [method for method, _ in executor.calls][-1] == "shutdown"


def test_no_memory_to_wake_is_one_sentence(model, engine):
    engine.sync(model)
    engine.sleep()

    def wake_up(*_):
        raise RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:139")

    engine._llm.wake_up = wake_up
    with pytest.raises(MemoryRanOutError, match=r"no memory left to wake vLLM: .*_utilization"):
        engine.generate(PROMPTS, Sampling(10, (258,)), seed=0)
    del engine._llm.wake_up


def test_an_engine_that_unsloth_started_too_short_is_refused(share, engine_of, tmp_path):
    from rloo_kit.sampling.choice import start_engine

    model, _ = share(four_bit=True, max_seq_length=64)
    with pytest.raises(GenerationError, match=r"64 tokens, but the run needs 128: .*max_seq"):
        engine_of(model)
    engine, choice = start_engine(model, rk.LeaveOneOutConfig(str(tmp_path)))
    assert engine is None
    assert "64 tokens" in choice.reason
    assert model.vllm_engine.llm_engine.is_sleeping()
    rk.release(model)


def test_pinned_memory_of_unsloth_s_checkpoints_comes_back(card, monkeypatch):
    from unsloth_zoo import gradient_checkpointing

    card(12)
    monkeypatch.setenv("UNSLOTH_DISABLE_PINNED_MEMORY", "1")  # pinning needs a driver
    for name in ("CPU_BUFFERS", "GPU_BUFFERS", "GPU_BUFFERS_B", "GPU_BUFFER_DTYPE"):
        monkeypatch.setattr(gradient_checkpointing, name, None, raising=False)
    gradient_checkpointing.initialize_unsloth_gradient_checkpointing(torch.bfloat16)
    grown = torch.empty(2**22, dtype=torch.bfloat16)
    gradient_checkpointing.CPU_BUFFERS[0] = grown
    held = weakref.ref(grown)
    del grown
    rk.release()
    assert held() is None
    assert gradient_checkpointing.CPU_BUFFERS[0].nbytes < 2**20
