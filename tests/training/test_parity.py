"""Stock TRL and the kit, side by side in float32: same samples, losses, advantages, adapter."""

import subprocess
import sys
import textwrap
from importlib.util import find_spec

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import RLOOConfig, RLOOTrainer

import rloo_kit as rk
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.training.sampler import Sampler
from rloo_kit.training.trainer import LeaveOneOutTrainer

LONG = pytest.mark.long
KIT = (LeaveOneOutTrainer, rk.LeaveOneOutConfig)


def small_model(adapter_std=0.0):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(TINY_THINKER, dtype=torch.float32)
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=8, target_modules=targets))
    if adapter_std:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=adapter_std)
    return model


def partly(completions, **_):
    """Scores that differ in some groups and are equal in others; None now and then."""
    texts = [completion[-1]["content"] for completion in completions]
    return [None if text.count("7") > 5 else float(sum(map(ord, text)) % 2) for text in texts]


class Gradients(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        wanted = [p for n, p in sorted(model.named_parameters()) if p.requires_grad]
        self.seen.append(torch.cat([p.grad.detach().flatten().clone() for p in wanted]))


def draw_as_trl(sampler, prompt_ids):
    return sampler.trl_generate(prompt_ids, None, {})


@pytest.fixture(autouse=True)
def same_samples(monkeypatch):
    """The kit's own sampler draws other completions than ``generate`` with the same seed."""
    monkeypatch.setattr(Sampler, "generate", draw_as_trl)


def train(trainer_class, config_class, folder, steps, adapter_std=0.0, **settings):
    model = small_model(adapter_std)
    gradients = Gradients()
    common = {
        "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 16,
        "num_generations": 4, "max_completion_length": 14, "learning_rate": 1e-3,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "bf16": False,
        "use_cpu": True, "gradient_checkpointing": False, "disable_tqdm": True,
    }  # fmt: skip
    args = config_class(**{**common, **settings})
    args.mixed_precision = "no"
    trainer = trainer_class(
        model=model,
        reward_funcs=partly,
        args=args,
        train_dataset=rk.load_prompts("arithmetic", num_prompts=64),
        processing_class=AutoTokenizer.from_pretrained(TINY_THINKER),
        callbacks=[gradients],
    )
    trainer.train()
    adapter = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return trainer, gradients.seen, adapter


def logged(trainer, name):
    return [row[name] for row in trainer.state.log_history if "reward" in row]


def relative(one, other):
    """Relative difference of two gradients.

    Where no group has signal only the KL is left, a difference of numbers that nearly cancel: its
    gradient has a norm of 1e-5 here (0.03 is usual), and rounding is no longer small beside it.
    """
    return float((one - other).norm() / one.norm().clamp(min=1e-3))


def assert_the_same_training(one, other, steps):
    trainer, gradients, adapter = one
    found, found_gradients, found_adapter = other
    assert list(trainer._logs["completion"]) == list(found._logs["completion"])
    assert len(gradients) == len(found_gradients) == steps
    assert max(map(relative, gradients, found_gradients)) < 1e-4
    assert max(float(p.abs().max()) for p in adapter.values()) > 1e-3  # it moved
    torch.testing.assert_close(found_adapter, adapter, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("steps", "settings"),
    [
        pytest.param(
            4, {"beta": 0.05, "steps_per_generation": 2, "per_device_train_batch_size": 8},
            id="several-steps-a-batch",
        ),
        pytest.param(
            4, {"beta": 0.05, "num_iterations": 2, "epsilon": 0.002}, id="two-iterations",
            marks=LONG,
        ),
        pytest.param(
            3, {"beta": 0.0, "steps_per_generation": 1, "gradient_accumulation_steps": 2},
            id="several-batches-a-step", marks=LONG,
        ),
        pytest.param(
            3,
            {
                "beta": 0.05, "adapter_std": 0.02, "normalize_advantages": True,
                "reward_clip_range": (0.0, 0.5),
            },
            id="continued-adapter-normalised-and-clipped", marks=LONG,
        ),
        pytest.param(
            2, {"beta": 0.05, "mask_truncated_completions": True, "max_completion_length": 27},
            id="masked", marks=LONG,
        ),
    ],
)  # fmt: skip
def test_the_kit_trains_as_stock_trl_does(tmp_path, steps, settings):
    trainings = [
        train(trainer_class, config_class, tmp_path, steps, **settings)
        for trainer_class, config_class in ((RLOOTrainer, RLOOConfig), KIT)
    ]
    assert_the_same_training(*trainings, steps)
    stock, mine = (training[0] for training in trainings)
    if not settings.get("mask_truncated_completions"):  # TRL counts a constant for masked rows
        for name in ("loss", "reward", "frac_reward_zero_std"):
            assert logged(mine, name) == pytest.approx(logged(stock, name), abs=1e-4), name
    mine_sees = torch.tensor(list(mine._logs["advantages"]))
    stock_sees = torch.tensor(list(stock._logs["advantages"]))
    if settings.get("mask_truncated_completions"):
        stock_sees = stock_sees.where(mine_sees != 0, 0.0)
    torch.testing.assert_close(mine_sees, stock_sees, atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_trls_own_step_and_the_kits_give_the_same(tmp_path):
    how = {"steps": 3, "beta": 0.05, "gradient_accumulation_steps": 2}
    trainings = [train(*KIT, tmp_path, **how, step=step) for step in ("kit", "trl")]
    assert_the_same_training(*trainings, 3)
    kit, trl = (training[0] for training in trainings)
    assert (kit.by_trl, trl.by_trl) == (False, True)
    shared = (
        "reward", "reward_std", "loss", "kl", "kl/sequence", "signal/kl_share", "score/after_kl",
        "signal/groups_without", "completions/truncated", "objective/rlhf_reward", "episode",
        "num_tokens", "grad_norm",
    )  # fmt: skip
    for name in shared:
        assert logged(trl, name) == pytest.approx(logged(kit, name), abs=1e-4), name


@pytest.mark.long
@pytest.mark.skipif(
    find_spec("triton") is None,
    reason="Unsloth's patcher needs triton: make test-gpu-contract runs it",
)
def test_training_under_unsloths_class_is_that_of_stock_trl(tmp_path):
    """The class that a GPU gets, made here by Unsloth's own patcher; it drops arguments."""
    source = f"""
        import importlib.util, inspect, pathlib, sys
        import rloo_kit as rk
        rk.setup()
        from trl import RLOOConfig, RLOOTrainer as Stock
        from unsloth.models.rl import patch_trl_rl_trainers
        patch_trl_rl_trainers()
        import trl
        from rloo_kit.training.trainer import LeaveOneOutTrainer
        spec = importlib.util.spec_from_file_location("parity", {__file__!r})
        parity = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(parity)
        parity.Sampler.generate = parity.draw_as_trl
        names = [c.__name__ for c in LeaveOneOutTrainer.__mro__]
        assert "UnslothRLOOTrainer" in names and "Unsloth" in trl.RLOOTrainer.__name__, names
        kit = [c for c in LeaveOneOutTrainer.__mro__ if c.__module__.startswith("rloo_kit.")]
        own = [n for c in kit for n, v in vars(c).items() if inspect.isfunction(v)]
        for name in set(own) & set(dir(Stock)) - {{"__init__"}}:
            hook = inspect.signature(getattr(trl.RLOOTrainer, name)).parameters
            assert list(hook) == list(inspect.signature(getattr(Stock, name)).parameters), name
        print("dropped to", trl.RLOOConfig(output_dir="x", kl_coef=0.01).beta)
        print("kept", rk.LeaveOneOutConfig("x", kl_coef=0.01).beta)
        try:
            rk.LeaveOneOutConfig("x", kl_koef=0.01)
        except rk.ConfigError as exc:
            print("refused:", exc)
        folder = pathlib.Path("out")
        stock, a, expected = parity.train(Stock, RLOOConfig, folder, 20, beta=0.05)
        mine, b, adapter = parity.train(
            LeaveOneOutTrainer, rk.LeaveOneOutConfig, folder, 20, beta=0.05
        )
        print("gradients", max(parity.relative(x, y) for x, y in zip(a, b, strict=True)) < 1e-4)
        gap = max(float((adapter[name] - expected[name]).abs().max()) for name in expected)
        print("adapter", gap < 1e-4, "moved", any(bool(p.any()) for p in expected.values()))
        pairs = zip(parity.logged(mine, "loss"), parity.logged(stock, "loss"), strict=True)
        print("losses", max(abs(x - y) for x, y in pairs) < 1e-4)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    for line in (
        "dropped to 0.05",
        "kept 0.01",
        "did you mean 'kl_coef'",
        "gradients True",
        "adapter True moved True",
        "losses True",
    ):
        assert line in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
