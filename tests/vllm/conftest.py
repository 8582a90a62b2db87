"""Everything here runs against the real engine: pytestmark in each file is ``vllm``."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

import rloo_kit as rk
from rloo_kit.data.lengths import prompt_ids
from rloo_kit.sampling.vllm_inprocess import VllmEngine


@pytest.fixture(scope="session")
def adapted_model():
    """Return a loader of the embedded model in 16 bit with an adapter that does something."""

    def load():
        model, tokenizer = rk.load_model("tiny-thinker", load_in_4bit=False, max_seq_length=128)
        model = rk.attach_lora(model, r=16)
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        return model, tokenizer

    return load


@pytest.fixture(scope="session")
def disturb_weights():
    """Return a function that changes the matrices in a model's folder by a share."""

    def disturb(folder, share):
        file = folder / "model.safetensors"
        tensors = load_file(file)
        generator = torch.Generator().manual_seed(1)
        for name, values in tensors.items():
            if values.ndim == 2:
                noise = torch.randn(values.shape, generator=generator)
                tensors[name] = (values.float() * (1 + share * noise)).to(values.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
        return folder

    return disturb


@pytest.fixture
def policy(adapted_model):
    """That model, and 64 prompts."""
    with rk.session():
        model, tokenizer = adapted_model()
        rows = rk.load_prompts("arithmetic", num_prompts=64)
        yield model, tokenizer, [prompt_ids(tokenizer, row["prompt"]) for row in rows]


@pytest.fixture
def ends(policy):
    """The ids of the tokens that end a completion of that model."""
    return tuple(policy[0].generation_config.eos_token_id)


@pytest.fixture
def engine(policy):
    """An engine in this process with that model and its adapter."""
    engine = VllmEngine(policy[0], max_length=128, num_sequences=64)
    engine.sync(policy[0])
    yield engine
    engine.close()


@pytest.fixture
def forget_adapter(monkeypatch):
    """Return a function that lets a method of the engine sample from the base."""

    def forget(name, when=lambda: True):
        method = getattr(VllmEngine, name)

        def by_the_base(engine, *args):
            with monkeypatch.context() as patch:
                if when():
                    patch.setattr(engine, "_request", None)
                return method(engine, *args)

        monkeypatch.setattr(VllmEngine, name, by_the_base)

    return forget


@pytest.fixture
def make_trainer(tmp_path):
    """Return a function that gives a trainer of the quickstart task, which keeps its rollouts."""
    from transformers import TrainerCallback

    def make(model, tokenizer, rewards=("accuracy",), **settings):
        class Seen(TrainerCallback):
            def on_completions(self, args, state, control, rollout, **_):
                trainer.seen.append(rollout)

        quick = {
            "max_steps": 3,
            "per_device_train_batch_size": 32,
            "num_generations": 8,
            "max_completion_length": 48,
            "learning_rate": 1e-3,
            "beta": 0.02,
            "generation": "vllm",
            "save_strategy": "no",
        }
        trainer = rk.LeaveOneOutTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=rk.load_prompts("arithmetic"),
            reward_funcs=list(rewards),
            args=rk.LeaveOneOutConfig(str(tmp_path / "out"), **{**quick, **settings}),
            callbacks=[Seen()],
        )
        trainer.seen = []
        return trainer

    return make


class ServerProcess:
    """A server of vLLM on this machine; its own environment keeps the engine in a child."""

    def __init__(self, words, log, port=None, **environment):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        kept = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        command = [sys.executable, "-m", *words, "--port", str(self.port)]
        command += ["--max-model-len", "128", "--dtype", "bfloat16", "--enforce-eager"]
        with log.open("a") as out:
            self.process = subprocess.Popen(
                command,
                env=kept | {"VLLM_CPU_KVCACHE_SPACE": "1"} | environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self):
        """Return when it answers."""
        deadline = time.monotonic() + 240
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return self
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)

    def end(self, how=signal.SIGTERM):
        if self.process.poll() is None:
            os.killpg(self.process.pid, how)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def start_server(tmp_path_factory):
    """Return a function that starts servers; all of them end with the module."""
    started = []

    def start(*words, **given):
        log = tmp_path_factory.mktemp("server") / "log"
        started.append(ServerProcess(words, log, **given))
        return started[-1]

    yield start
    for server in started:
        server.end()
