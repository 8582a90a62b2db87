"""Reference results of transformers and PEFT alone, without Unsloth and without the kit.

    python plain_peft.py ORDER.json ANSWER.safetensors

The order has a base folder, adapter folders (null: no adapter), a device and a dtype. It also has
``rows`` of [prompt ids, completion ids] or ``prompts``. For rows, the answer has log-probabilities
and gradients. For prompts, it has greedy completions, and for each token the gap between its
log-probability and that of the second likeliest token.
"""

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def load(order, adapter):
    model = AutoModelForCausalLM.from_pretrained(
        order["base"], dtype=getattr(torch, order["dtype"])
    ).to(order["device"])
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    return model


def gradients(order):
    """Return log-probabilities of the completion tokens, and the gradient of minus their mean."""
    model = load(order, order["adapters"][0])
    log_probs = []
    for prompt, completion in order["rows"]:
        ids = torch.tensor([[*prompt, *completion]], device=order["device"])
        every = model(input_ids=ids).logits[0].float().log_softmax(-1)
        places = torch.arange(len(prompt) - 1, ids.size(1) - 1)
        log_probs.append(every[places, ids[0, len(prompt) :]])
    found = torch.cat(log_probs)
    (-found.mean()).backward()
    return {
        "log_probs": found.detach().cpu(),
        **{
            name: parameter.grad.float().cpu()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        },
    }


@torch.inference_mode()
def greedy(order):
    """Return the tokens of each row with each adapter, padded at the end, and their gaps."""
    answer = {}
    lengths = {len(prompt) for prompt in order["prompts"]}
    for number, adapter in enumerate(order["adapters"]):
        model = load(order, adapter).eval()
        for length in lengths:  # prompts of one length need no padding and no mask
            rows = [row for row, ids in enumerate(order["prompts"]) if len(ids) == length]
            ids = torch.tensor([order["prompts"][row] for row in rows], device=order["device"])
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=order["length"],
                eos_token_id=order["ends"],
                pad_token_id=order["ends"][0],
                output_scores=True,
                return_dict_in_generate=True,
            )
            tokens = output.sequences[:, length:].cpu()
            best = torch.stack(output.scores, 1).float().log_softmax(-1).topk(2).values.cpu()
            for place, row in enumerate(rows):
                answer[f"tokens.{number}.{row}"] = tokens[place]
                answer[f"gaps.{number}.{row}"] = best[place, :, 0] - best[place, :, 1]
    return answer


def main():
    order = json.loads(Path(sys.argv[1]).read_text())
    answer = gradients(order) if "rows" in order else greedy(order)
    save_file({name: tensor.contiguous() for name, tensor in answer.items()}, sys.argv[2])


if __name__ == "__main__":
    main()
