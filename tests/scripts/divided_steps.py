"""Two steps of the embedded model in float32, divided among two CPU processes by a launcher.

    python tests/scripts/divided_steps.py [4bit]

The script starts itself with DDP, FSDP2 and, if DeepSpeed is installed, ZeRO-2 and ZeRO-3. It
compares rewards, gradient norms and adapters with those of DDP.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from safetensors.torch import load_file

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "accelerate"
NAMES = ["ddp", "fsdp2", *(["zero2", "zero3"] if find_spec("deepspeed") else [])]
COMPARED = ("reward", "grad_norm", "kl")


def train(folder: str) -> None:
    """Make two steps in this process, and let the first process write their metrics."""
    import rloo_kit as rk

    rk.setup(backend="transformers")
    args = rk.LeaveOneOutConfig(
        output_dir=folder, max_steps=2, per_device_train_batch_size=32, num_generations=8,
        max_completion_length=48, learning_rate=1e-3, beta=0.02, save_strategy="no", bf16=False,
    )  # fmt: skip
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        use_fsdp_on_a_cpu()
    model, tokenizer = rk.load_model(
        "tiny-thinker",
        load_in_4bit=os.environ["BITS"] == "4",
        backend="transformers",
        precision="bf16" if os.environ["BITS"] == "4" else "fp32",
    )
    trainer = rk.LeaveOneOutTrainer(
        model=rk.attach_lora(model),
        reward_funcs="accuracy",
        args=args,
        train_dataset=rk.load_prompts("arithmetic", num_prompts=64),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_adapter(Path(folder) / "adapter", tokenizer)
    if trainer.accelerator.is_main_process:
        kind = type(trainer.model_wrapped).__name__
        rows = [row for row in trainer.state.log_history if "reward" in row]
        kind += f", {sum(map(bytes_here, trainer.model.parameters())) / 2**20:.2f} MiB here"
        Path(folder, "rows.json").write_text(json.dumps([kind, rows]))


def bytes_here(parameter) -> int:
    """Return the bytes of a parameter that this process keeps."""
    part = getattr(parameter, "ds_tensor", parameter)  # ZeRO-3's
    part = part.to_local() if hasattr(part, "to_local") else part  # FSDP2's
    return part.numel() * part.element_size()


def use_fsdp_on_a_cpu() -> None:
    """Let accelerate apply FSDP on a CPU, which torch can do; accelerate allows it only on GPUs."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState().distributed_type = DistributedType.MULTI_GPU


def run(name: str) -> tuple[str, list[dict], dict]:
    """Return how the model was wrapped, the metrics of two steps, and the adapter's tensors."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        text = (CONFIGS / f"{name}.yaml").read_text()
        config.write_text(text.replace("mixed_precision: bf16", 'mixed_precision: "no"'))
        bits = "4" if sys.argv[1:] == ["4bit"] else "32"
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "BITS": bits
        }  # fmt: skip
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
        done = subprocess.run(
            [*launch, __file__, folder], env=environment, capture_output=True, text=True,
            timeout=900, check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
        kind, rows = json.loads(Path(folder, "rows.json").read_text())
        return kind, rows, load_file(Path(folder, "adapter", "adapter_model.safetensors"))


def main() -> None:
    """Run all of them, and compare each with DDP."""
    reference = None
    for name in NAMES:
        kind, rows, adapter = run(name)
        found = [row[key] for row in rows for key in COMPARED]
        reference = reference or (found, adapter)
        numbers, tensors = reference
        apart = max(abs(a - b) for a, b in zip(numbers, found, strict=True))
        moved = max(float((tensors[key] - adapter[key]).abs().max()) for key in tensors)
        print(
            f"{name:6} {kind:45} {' '.join(f'{one:.6f}' for one in found)}  from DDP: metrics "
            f"{apart:.1e}, adapter {moved:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    train(sys.argv[1]) if "RANK" in os.environ else main()
