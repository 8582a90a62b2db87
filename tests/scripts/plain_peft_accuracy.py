"""Load an adapter with plain PEFT and print its accuracy on sums of three-digit numbers.

    python plain_peft_accuracy.py ADAPTER_FOLDER

The kit is not imported. The base is the one that the adapter's config names, in 4 bit as in the
run. Sampling is as in the run's own evaluation, except for the seed.
"""

import random
import sys
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer, BitsAndBytesConfig

adapter = Path(sys.argv[1])
numbers = random.Random(7)
sums = [(numbers.randint(100, 999), numbers.randint(100, 999)) for _ in range(256)]
tokenizer = AutoTokenizer.from_pretrained(adapter, padding_side="left")
model = AutoPeftModelForCausalLM.from_pretrained(
    str(adapter),
    dtype=torch.bfloat16,
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    ),
).eval()
texts = [
    tokenizer.apply_chat_template(
        [{"role": "user", "content": f"What is {a} + {b}?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    for a, b in sums
]
batch = tokenizer(texts, return_tensors="pt", padding=True)
torch.manual_seed(0)
output = model.generate(**batch, max_new_tokens=48, do_sample=True, temperature=1.0, top_k=0)
answers = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
right = 0
for (a, b), text in zip(sums, answers, strict=True):
    right += text.rpartition("</think>")[2].strip() == str(a + b)
print(f"accuracy {right / len(sums):.4f}")
