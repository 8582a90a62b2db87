"""Print the cosine between LoRA gradients of a 4-bit model after ``generate`` and exact ones.

Exact: the same weights dequantised to float32, the same adapter, the same batch. Run by
``test_gradients.py`` in a process of its own, because a process has one backend.

    python lora_gradients.py BACKEND MODEL

The second line has the cosine with bitsandbytes' inference layout, which the kit turns off.
"""

import copy
import sys

import rloo_kit as rk

backend, name = sys.argv[1:]
rk.setup(backend=backend)

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import get_peft_model
from transformers import AutoModelForCausalLM

model, tokenizer = rk.load_model(name, max_seq_length=256, backend=backend)
model = rk.attach_lora(model, seed=1)
generator = torch.Generator().manual_seed(0)
for key, parameter in model.named_parameters():
    if "lora_B" in key:  # it starts at zero, and then nothing flows to lora_A
        parameter.data.normal_(0, 0.02, generator=generator)
layers = {
    key.replace(".base_layer", ""): module
    for key, module in model.base_model.model.named_modules()
    if isinstance(module, bnb.nn.Linear4bit)
}
exact = AutoModelForCausalLM.from_pretrained(model.config._name_or_path, dtype=torch.float32)
with torch.no_grad():
    for key, module in layers.items():
        weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
        exact.get_submodule(key).weight.copy_(weight.float())
exact = get_peft_model(exact, copy.deepcopy(model.peft_config["default"]))
mine = dict(model.named_parameters())
for key, parameter in exact.named_parameters():
    if "lora_" in key:
        parameter.data.copy_(mine[key].data.float())

texts = ["What is 347 + 286? The answer is 633, and here is why.", "Short text."]
batch = tokenizer(texts, return_tensors="pt", padding=True)
labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)


def gradients(policy: torch.nn.Module) -> torch.Tensor:
    """Return the adapter's gradients of a language-model loss, flat."""
    policy.zero_grad()
    policy(**batch, labels=labels).loss.backward()
    return torch.cat(
        [p.grad.float().flatten() for key, p in policy.named_parameters() if "lora_" in key]
    )


right = gradients(exact)
for layout in ("kept", "packed"):
    if layout == "packed":
        for module in layers.values():
            module.support_avx512bf16_for_cpu = True
    model.eval()
    model.generate(**batch, max_new_tokens=4, do_sample=False)
    model.train()
    cosine = torch.nn.functional.cosine_similarity(gradients(model), right, dim=0)
    print(f"{layout} layers {len(layers)} cosine {cosine.item():.4f}", flush=True)
