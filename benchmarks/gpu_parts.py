"""The parts of the GPU acceptance suite that measure; gpu_acceptance.py starts each by itself.

    python benchmarks/gpu_parts.py environment --answer answer.json --scratch FOLDER

What is known so far is written to the answer after every number, so a time limit loses no more than
the number in progress. ``--toy`` takes tiny models in the place of all.
"""

import argparse
import contextlib
import functools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_cards
import gpu_models

GIB = 2**30
# Shown beside those of the tested set
PACKAGES = (
    "numpy", "triton", "xformers", "flash-attn", "torchao", "vllm-bnb-plugin", "flashinfer-python",
    "deepspeed", "pytest",
)  # fmt: skip
REWARD = '''"""Scores that differ in every group, of whatever text."""

import zlib


def lottery(completions, **_):
    return [zlib.crc32(str(c).encode()) % 100 / 100 for c in completions]
'''


class Answer:
    """What a part has found, on the disk from the first number on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, object] = {}

    def note(self, **values: object) -> None:
        self.values |= values
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.values, indent=1, default=str))
        partial.replace(self.path)


def device_here() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def in_4bit() -> bool:
    return find_spec("bitsandbytes") is not None


def seconds_of(action, repeats: int) -> float:
    """Return the median seconds of a call on the device, after one that warms up."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times = []
    for _ in range(repeats + 1):
        wait()
        started = time.perf_counter()
        action()
        wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


# --- the machine ---------------------------------------------------------------------------------


def environment(options: argparse.Namespace, answer: Answer) -> None:
    """Versions, card, driver, memory, what torch can do with it, its rates, and the doctor."""
    import psutil
    import torch

    from rloo_kit.machine.hardware import TESTED, installed_version

    answer.note(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}{_under_windows()}",
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cores=os.cpu_count(),
        main_memory=f"{psutil.virtual_memory().total / GIB:.1f} GiB",
        disk_free=f"{shutil.disk_usage(options.scratch).free / GIB:.1f} GiB",
        packages={name: installed_version(name) or "-" for name in (*TESTED, *PACKAGES)},
    )
    if device_here() == "cuda":
        _card(answer)
    answer.note(**_doctor())


def _under_windows() -> str:
    return ", under WSL" if "microsoft" in platform.release().lower() else ""


def _doctor() -> dict[str, object]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rloo_kit", "doctor"],
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": "rloo-kit doctor does not answer within 240 s"}
    text = done.stdout or done.stderr[-2000:]
    return {"doctor_exit_code": done.returncode, "doctor": text}


def _card(answer: Answer) -> None:
    import torch

    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    card = torch.cuda.get_device_properties(0)
    answer.note(
        card=card.name,
        devices=torch.cuda.device_count(),
        capability=f"{card.major}.{card.minor}",
        multiprocessors=card.multi_processor_count,
        card_memory=f"{total / GIB:.2f} GiB",
        used_with_a_bare_context=f"{(total - free - torch.cuda.memory_reserved()) / GIB:.2f} GiB",
        bf16=torch.cuda.is_bf16_supported(including_emulation=False),
        cudnn=torch.backends.cudnn.version(),
        allocator=os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "default"),
        **_driver(),
    )
    size = 8192 if total > 12 * GIB else 4096
    one, other = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = seconds_of(lambda: one @ other, 10)
    answer.note(bf16_matmul=f"{2 * size**3 / seconds / 1e12:.0f} TFLOP/s ({size} x {size}, random)")
    source = torch.empty(GIB // 2, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), 10)
    answer.note(memory_copy=f"{2 * source.numel() / seconds / 1e9:.0f} GB/s (read and written)")


def _driver() -> dict[str, str]:
    query = "driver_version,power.limit,clocks.max.sm,memory.used,pcie.link.gen.max"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {"driver": "nvidia-smi does not answer"}
    values = done.stdout.strip().split(", ")
    return dict(
        zip(("driver", "power_limit", "sm_clock", "used_before", "pcie"), values, strict=False)
    )


# --- the planner ---------------------------------------------------------------------------------


class Peaks:
    """The most that torch's allocator held, across resets of its peak."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0

    def read(self) -> None:
        import torch

        self.allocated = max(self.allocated, torch.cuda.max_memory_allocated())
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())

    @contextlib.contextmanager
    def watched(self):
        import torch

        begin_anew = torch.cuda.reset_peak_memory_stats

        def reading(*arguments):
            self.read()
            begin_anew(*arguments)

        begin_anew()
        torch.cuda.reset_peak_memory_stats = reading
        try:
            yield self
        finally:
            self.read()
            torch.cuda.reset_peak_memory_stats = begin_anew


def make_smaller(card: int) -> int:
    """Let this process see and use a card of so many bytes; return what is not torch's of it.

    What torch's allocator may take is the card less the context and what other programs hold. Only
    its allocations are limited; what the kit asks the card for its size is answered likewise.
    """
    import torch

    torch.zeros(1, device="cuda")
    ask = torch.cuda.mem_get_info
    free, total = ask()
    others = total - free - torch.cuda.memory_reserved()
    if total > card:
        torch.cuda.set_per_process_memory_fraction((card - others) / total)

        def smaller(device=None):
            free, total = ask(device)
            return max(0, card - (total - free)), card

        torch.cuda.mem_get_info = smaller
    return others


def run_file(options: argparse.Namespace, folder: Path, model: Path) -> Path:
    """Write a run whose completions are all of full length."""
    import yaml

    rows, prompt, length = (8, 64, 32) if options.toy else (16, 256, 512)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards_here.py").write_text(REWARD)
    texts = [f"{number} " + "why " * (prompt // 4) for number in range(64)]
    lines = [json.dumps({"prompt": text[: prompt - 32]}) for text in texts]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    content = {
        "model": {
            "name": str(model),
            "max_seq_length": prompt + length,
            "load_in_4bit": in_4bit(),
        },
        "lora": {"r": 16, "lora_alpha": 16},
        "data": {"prompts": "prompts.jsonl", "held_out": 0},
        "rewards": ["rewards_here.py:lottery"],
        "trainer": {
            "max_steps": 2,
            "num_iterations": 2,  # two steps of one generation batch
            "per_device_train_batch_size": rows,
            "num_generations": 4,
            "max_completion_length": length,
            "generation_kwargs": {"min_new_tokens": length},
            "generation": "transformers",
            "beta": 0.02,
            "learning_rate": 1e-5,
            "optim": "adamw_8bit" if device_here() == "cuda" and in_4bit() else "adamw_torch",
            "doctor": False,
        },
        "output_dir": str(folder / "run"),
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def planner(options: argparse.Namespace, answer: Answer) -> None:
    """The plan of a run, and the peak of that run on a card that was made smaller."""
    import rloo_kit as rk

    rk.setup()
    on_gpu = device_here() == "cuda"
    name = "toy" if options.toy else options.geometry
    model = gpu_models.model_folder(
        options.scratch, name, load_in_4bit=in_4bit(), device=device_here()
    )
    path = run_file(options, options.answer.parent / "planner", model)
    answer.note(model=model.name, card=options.card)
    _predict(path, options, answer)
    peaks, others, lines = Peaks(), 0, []
    if on_gpu:
        import torch

        torch.cuda.empty_cache()
        others = make_smaller(options.card * GIB)
    started = time.perf_counter()
    try:
        with peaks.watched() if on_gpu else contextlib.nullcontext():
            result = rk.train(path, (), lines.append)
    except rk.KitError as exc:
        planned = answer.values.get("fits")
        answer.note(ran_out=str(exc))
        if planned is not False:
            answer.note(failed=f"{'planned to fit, and' if planned else ''} {exc}".strip())
        return
    finally:
        answer.note(seconds=time.perf_counter() - started, said=lines)
    _measured(result.folder, peaks, others, answer)


def _predict(path: Path, options: argparse.Namespace, answer: Answer) -> None:
    import rloo_kit as rk

    if "plan" not in rk.__all__:
        answer.note(reason="rk.plan is not part of this rloo-kit: nothing is predicted")
        return
    gpu = f"{options.card}GB" if device_here() == "cuda" else None
    plan = rk.plan(path, gpu=gpu)
    answer.note(predicted=int(plan.peak_bytes), fits=bool(plan.fits), plan=str(plan))


def _measured(folder: Path, peaks: Peaks, others: int, answer: Answer) -> None:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if device_here() == "cuda":
        measured = peaks.reserved + others
        answer.note(allocated=peaks.allocated, reserved=peaks.reserved, context=others)
    else:
        measured = int(max(row.get("memory/peak_gib", 0) for row in rows) * GIB)
    answer.note(measured=measured, **_run_settings(folder))
    if answer.values.get("predicted"):
        answer.note(ratio=answer.values["predicted"] / measured)
    for what in ("learning", "generation"):
        name = f"speed/{what}_tokens_per_second"
        speeds = [row[name] for row in rows if name in row]
        if speeds:
            answer.note(**{f"{what}_tokens_per_second": round(speeds[-1])})


def _run_settings(folder: Path) -> dict[str, int]:
    import yaml

    trainer = yaml.safe_load((folder / "run.yaml").read_text())["trainer"]
    return {
        "rows": trainer["per_device_train_batch_size"],
        "length": trainer["max_completion_length"],
    }


# --- speed ---------------------------------------------------------------------------------------


def speed(options: argparse.Namespace, answer: Answer) -> None:
    """Tokens a second of the learning step and of sampling, at the geometry of Qwen3-4B."""
    import rloo_kit as rk

    rk.setup()
    import torch

    name = "toy" if options.toy else "qwen3-4b"
    cells = [(8, 32), (8, 64)] if options.toy else [(8, 512), (8, 2048)]
    model, tokenizer = _policy(options, answer, name, max(length for _, length in cells) + 64)
    for rows, length in cells:
        trainer = _recorded_trainer(options, model, tokenizer, rows, length)
        peaks = Peaks()
        with peaks.watched() if torch.cuda.is_available() else contextlib.nullcontext():
            trainer.train()
        seconds = statistics.median(trainer.seconds[1:])
        cell = {
            "rows": rows,
            "length": length,
            "seconds": seconds,
            "tokens_per_second": trainer.tokens / seconds,
            "peak": peaks.allocated,
        }
        answer.note(training=[*answer.values.get("training", []), cell])
        del trainer
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    getattr(model, "for_inference", model.eval)()  # Unsloth's fast decoding, where it has one
    answer.note(sampling=_sampling_speed(model, tokenizer, 16, 16 if options.toy else 64))


def _policy(options: argparse.Namespace, answer: Answer, name: str, longest: int, **loading):
    """Load a geometry with a fresh adapter; note what was loaded and how."""
    import rloo_kit as rk

    folder = gpu_models.model_folder(
        options.scratch, name, load_in_4bit=in_4bit(), device=device_here()
    )
    started = time.perf_counter()
    model, tokenizer = rk.load_model(
        folder, max_seq_length=longest, load_in_4bit=in_4bit(), **loading
    )
    answer.note(
        model=name,
        weights="4-bit" if in_4bit() else "bf16",
        backend=model.rloo_kit_notes.backend,
        load_seconds=round(time.perf_counter() - started, 1),
    )
    return rk.attach_lora(model, r=16, lora_alpha=16), tokenizer


def _recorded_trainer(options: argparse.Namespace, model, tokenizer, rows: int, length: int):
    """Return a trainer whose completions are random tokens that are there already."""
    import torch
    from datasets import Dataset

    import rloo_kit as rk

    vocabulary = model.config.vocab_size
    completions = torch.randint(300, vocabulary, (rows, length)).tolist()

    class Recorded(rk.LeaveOneOutTrainer):
        def training_step(self, *arguments, **others):
            step = functools.partial(super().training_step, *arguments, **others)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            started = time.perf_counter()
            loss = step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - started)
            return loss

    def lottery(completions, **_):
        return [float(number % 4) for number in range(len(completions))]

    trainer = Recorded(
        model=model,
        reward_funcs=lottery,
        args=rk.LeaveOneOutConfig(
            tempfile.mkdtemp(dir=options.scratch),
            max_steps=3,
            per_device_train_batch_size=rows,
            num_generations=4,
            max_completion_length=length,
            beta=0.02,
            learning_rate=1e-6,
            optim="adamw_8bit" if device_here() == "cuda" and in_4bit() else "adamw_torch",
            generation="transformers",
            save_strategy="no",
            doctor=False,
            dry_run=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["12 + 34 = "] * 64}),
        processing_class=tokenizer,
    )
    trainer.seconds, trainer.tokens = [], 0

    def recorded(prompt_ids, *_):
        trainer.tokens = sum(map(len, prompt_ids)) + rows * length
        return [list(ids) for ids in completions]

    trainer.sampler.generate = recorded
    return trainer


def _sampling_speed(model, tokenizer, rows: int, length: int) -> dict[str, object]:
    import torch

    ids = tokenizer(["12 + 34 = "] * rows, return_tensors="pt").to(model.device)

    @torch.inference_mode()
    def sample():
        return model.generate(
            **ids, do_sample=True, min_new_tokens=length, max_new_tokens=length, use_cache=True,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip

    seconds = seconds_of(sample, 1)
    return {
        "rows": rows,
        "length": length,
        "seconds": seconds,
        "tokens_per_second": rows * length / seconds,
    }


def vllm_speed(options: argparse.Namespace, answer: Answer) -> None:
    """Tokens a second that vLLM samples at the geometry of Qwen3-4B, and what an adapter costs."""
    import rloo_kit as rk

    rk.setup()
    from rloo_kit.sampling.engine import Sampling
    from rloo_kit.sampling.vllm_inprocess import VllmEngine

    name, rows, length = ("toy", 8, 16) if options.toy else ("qwen3-4b", 64, 256)
    model, tokenizer = _policy(
        options, answer, name, length + 64, fast_inference=True, num_sequences=rows
    )
    started = time.perf_counter()
    engine = VllmEngine(model, max_length=length + 64, num_sequences=rows)
    answer.note(engine=engine.name, start_seconds=round(time.perf_counter() - started, 1))
    prompts = [tokenizer("12 + 34 = ")["input_ids"]] * rows
    sampling = Sampling(length, (), others={"ignore_eos": True})
    engine.sync(model)
    engine.sync(model)
    answer.note(sync_seconds=round(engine.sync_seconds, 3), completions=rows, tokens=length)
    seconds = seconds_of(lambda: engine.generate(prompts, sampling, 0), 2)
    answer.note(seconds=seconds, tokens_per_second=round(rows * length / seconds))
    engine.close()


# --- the other benchmarks ------------------------------------------------------------------------


def learn_step(options: argparse.Namespace, answer: Answer) -> None:
    """The learning step against TRL's own, or against the class that Unsloth makes of it."""
    import rloo_kit as rk

    found = rk.setup(options.backend)
    if found.backend == "unsloth" and device_here() == "cpu":
        from unsloth.models.rl import patch_trl_rl_trainers

        patch_trl_rl_trainers()  # on a GPU it does that by itself
    import learn_step as benchmark

    answer.note(against=f"TRL's {benchmark.RLOOTrainer.__name__}", backend=found.backend)
    words = ["--cells", "skewed/half/0.05/1", "skewed/half/0/1", "--name", "found"]
    if options.toy or not in_4bit():  # float32: else Unsloth's class turns fp16 or bf16 on
        os.environ["UNSLOTH_MIXED_PRECISION"] = "bfloat16"  # its word for: leave both off
    if options.toy:
        words += ["--longest", "48", "--pairs", "1"]
    else:
        words += [
            "--longest",
            "2048",
            "--pairs",
            "2",
            "--geometry",
            "qwen3-0.6b",
            "--checkpointing",
        ]
        words += ["--load-in-4bit"] if in_4bit() else []
    _span_whole_trainings(benchmark)
    _run_benchmark(benchmark, words, options, answer)


def _span_whole_trainings(benchmark) -> None:
    """Let the benchmark's peaks include those of each step, where the kit resets the peak."""
    from rloo_kit.training import trainer

    read, of_steps = trainer.take_peak, []

    def of_step() -> int:
        of_steps.append(read())
        return of_steps[-1]

    def of_all() -> int:
        peak = max(read(), *of_steps, 0)
        of_steps.clear()
        return peak

    trainer.take_peak, benchmark.take_peak = of_step, of_all


def generation(options: argparse.Namespace, answer: Answer) -> None:
    """Sampling by transformers and by vLLM."""
    import rloo_kit as rk

    rk.setup()
    import generate as benchmark

    name = "toy" if options.toy else "qwen3-0.6b"
    folder = gpu_models.model_folder(
        options.scratch, name, load_in_4bit=in_4bit(), device=device_here()
    )
    words = ["--model", str(folder), "--pairs", "1", "--name", "found"]
    words += ["--completions", "8", "--longest", "24"] if options.toy else []
    words += [] if options.toy else ["--completions", "32", "--longest", "256"]
    words += ["--load-in-4bit"] if in_4bit() else []
    answer.note(model=folder.name)
    _run_benchmark(benchmark, words, options, answer)


def _run_benchmark(
    benchmark, words: list[str], options: argparse.Namespace, answer: Answer
) -> None:
    """Run another benchmark's command in this process, its files in the scratch folder."""
    tempfile.tempdir = str(options.scratch)
    benchmark.RESULTS = options.answer.parent / "benchmark"
    sys.argv = [benchmark.__file__, *words]
    try:
        benchmark.main()
    finally:
        path = benchmark.RESULTS / "found.json"
        if path.exists():
            content = json.loads(path.read_text())
            kept = ("rows", "pairs", "longest", "completions", "sync_seconds")
            answer.note(**{name: content[name] for name in kept if name in content})


PARTS = {
    "environment": environment,
    "planner": planner,
    "card": gpu_cards.card,
    "speed": speed,
    "vllm-speed": vllm_speed,
    "learn-step": learn_step,
    "generation": generation,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--answer", type=Path, required=True, help="the JSON that is written")
    parser.add_argument("--scratch", type=Path, required=True, help="for models")
    parser.add_argument("--toy", action="store_true", help="tiny models")
    parser.add_argument("--geometry", choices=[*gpu_models.PUBLISHED, "toy"], default="qwen3-0.6b")
    parser.add_argument(
        "--card", type=int, default=8, help="GB of the card that is made of this one"
    )
    parser.add_argument("--backend", default="auto", help="of rk.setup")
    parser.add_argument("--bits", type=int, choices=(4, 16), default=4, help="of the base")
    parser.add_argument("--set", nargs="*", default=[], help="section.key=value of the run file")
    options = parser.parse_args()
    answer = Answer(options.answer)
    answer.note()
    try:
        PARTS[options.part](options, answer)
    except Exception as exc:
        answer.note(failed=f"{type(exc).__name__}: {exc}")
        raise
    return 1 if "failed" in answer.values else 0


if __name__ == "__main__":
    sys.exit(main())
