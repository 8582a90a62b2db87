"""A process whose memory is looked at from outside.

    python held_memory.py bare            # libraries and, on a GPU, their context
    python held_memory.py transformers    # loads, trains two steps, releases
    python held_memory.py vllm            # the same, sampled by vLLM in this process

It prints a line of JSON when it is done and waits for the end of its input.
"""

import json
import sys
import tempfile

import rloo_kit as rk

rk.setup()

import torch


def reward(completions, **_):
    return [float(len(str(completion)) % 5) for completion in completions]


def train(generation):
    with rk.session() as session:
        model, tokenizer = rk.load_model("tiny-thinker", load_in_4bit=False, max_seq_length=128)
        trainer = rk.LeaveOneOutTrainer(
            model=rk.attach_lora(model, r=16),
            processing_class=tokenizer,
            train_dataset=rk.load_prompts("arithmetic", num_prompts=64),
            reward_funcs=reward,
            args=rk.LeaveOneOutConfig(
                tempfile.mkdtemp(),
                max_steps=2,
                per_device_train_batch_size=16,
                max_completion_length=32,
                generation=generation,
                save_strategy="no",
            ),
        )
        trainer.train()
        steps = trainer.state.global_step
        del trainer, model
    return {"steps": steps, "released": str(session.released)}


what = sys.argv[1]
answer = {}
if what == "bare":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.ones(256, 256, device=device)
    answer["sum"] = float((matrix @ matrix).sum())  # with cuBLAS, as every process has it
    if "vllm" in sys.argv[2:]:
        import vllm

        answer["vllm"] = vllm.__version__
    del matrix
    rk.release()
else:
    answer = train(what)
print(json.dumps(answer), flush=True)
sys.stdin.read()
