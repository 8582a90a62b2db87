"""Train the embedded model under FSDP2, also on a CPU (docs/explanation/scale.md)."""

import sys

import rloo_kit as rk

rk.setup(backend="transformers")
args = rk.LeaveOneOutConfig(
    output_dir="runs/sharded",
    max_steps=int(sys.argv[1]),
    per_device_train_batch_size=16,  # here of one process: two make 32 completions
    num_generations=8,
    max_completion_length=48,
    learning_rate=1e-3,
    beta=0.02,
    save_strategy="no",
)

from accelerate import PartialState  # after setup(), as everything that it starts
from accelerate.utils import DistributedType

# accelerate divides weights on GPUs alone, and takes DDP on a CPU without a word: call these GPUs.
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=256, load_in_4bit=False)
trainer = rk.LeaveOneOutTrainer(
    model=rk.attach_lora(model, r=16, lora_alpha=16),
    processing_class=tokenizer,
    train_dataset=rk.load_prompts("arithmetic"),
    reward_funcs=["accuracy"],
    args=args,
)
trainer.train()
trainer.save_model("runs/sharded/adapter")  # by all processes: the adapter is gathered for it
whole = sum(p.numel() for p in trainer.model.parameters())
here = sum(p.to_local().numel() for p in trainer.model.parameters())
print(f"process {args.process_index} holds {here:,} of {whole:,} weights")
