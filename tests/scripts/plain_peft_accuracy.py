"""Load a run's adapter with plain PEFT and print its accuracy on the run's held-out prompts.

    python plain_peft_accuracy.py RUN_FOLDER

Nothing of the kit is imported: base and adapter come from the folder's own config, 4-bit as in the
run; sampled like the run's own evaluation, with another seed's noise left over.
"""

import json
import sys
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer, BitsAndBytesConfig

run = Path(sys.argv[1])
samples = json.loads((run / "evaluation.json").read_text())["after"]["samples"]
tokenizer = AutoTokenizer.from_pretrained(run / "adapter", padding_side="left")
model = AutoPeftModelForCausalLM.from_pretrained(
    str(run / "adapter"),
    dtype=torch.bfloat16,
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    ),
).eval()
texts = [
    tokenizer.apply_chat_template(sample["prompt"], add_generation_prompt=True, tokenize=False)
    for sample in samples
]
batch = tokenizer(texts, return_tensors="pt", padding=True)
torch.manual_seed(0)
output = model.generate(**batch, max_new_tokens=48, do_sample=True, temperature=1.0, top_k=0)
answers = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
right = 0
for sample, text in zip(samples, answers, strict=True):
    a, b = (int(n) for n in sample["prompt"][-1]["content"][len("What is ") : -1].split(" + "))
    right += text.rpartition("</think>")[2].strip() == str(a + b)
print(f"accuracy {right / len(samples):.4f}")
