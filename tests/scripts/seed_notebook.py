"""An older notebook's calls, word for word; only its imports and its model's name are changed.

python seed_notebook.py MODEL [MAX_STEPS]
"""

import os
import sys

from dotenv import load_dotenv

load_dotenv()
os.environ["TQDM_NOTEBOOK"] = "false"
os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"

import rloo_kit  # noqa: F401 - first, where the notebook had `import unsloth`
from rloo_kit import LeaveOneOutConfig as RLOOConfig
from rloo_kit import LeaveOneOutTrainer as RLOOTrainer

from unsloth import FastLanguageModel  # isort: skip
from unsloth import is_bfloat16_supported as is_bf16_supported  # isort: skip
from datasets import Dataset  # isort: skip

MODEL = sys.argv[1]
MAX_STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 100

model, tokenizer = FastLanguageModel.from_pretrained(
    MODEL,
    max_seq_length=512,
    load_in_4bit=True,
)

if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.pad_token_id = tokenizer.eos_token_id

model = FastLanguageModel.get_peft_model(
    model,
    r=16,
    lora_alpha=16,
    lora_dropout=0,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    use_gradient_checkpointing="unsloth",
)

dataset = Dataset.from_dict(
    {
        "prompt": [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": f"What is {a} + {a + 111}?"}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for a in range(200, 300)
        ]
    }
)

rloo_config = RLOOConfig(
    output_dir="./rloo_output",
    per_device_train_batch_size=1,
    gradient_accumulation_steps=4,
    max_steps=MAX_STEPS,
    learning_rate=1e-5,
    fp16=not is_bf16_supported(),
    bf16=is_bf16_supported(),
    optim="adamw_8bit",
    num_generations=4,
    max_completion_length=128,
    kl_coef=0.05,
)


def length_reward(completions, prompts=None):
    """Reward based on response quality heuristics."""
    rewards = []
    for completion in completions:
        length = len(completion.split())
        score = 0.0
        # Prefer medium length
        if 10 <= length <= 50:
            score += 1.0
        elif length < 10:
            score -= 0.5
        # Prefer complete sentences
        if completion.strip().endswith("."):
            score += 0.5
        rewards.append(score)
    return rewards


trainer = RLOOTrainer(
    model=model,
    args=rloo_config,
    train_dataset=dataset,
    processing_class=tokenizer,
    reward_model=length_reward,
)
trainer.train()
print(f"length_reward: beta {trainer.beta} {rloo_config.beta} steps {trainer.state.global_step}")


class RewardModel:
    """Replacement of the notebook's trained reward model: the share of odd characters."""

    def get_rewards(self, prompts, completions):
        return [sum(ord(c) % 2 for c in text) / max(1, len(text)) for text in completions]


trained_reward_model = RewardModel()
start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

trainer = RLOOTrainer(
    model=model,
    args=rloo_config,
    train_dataset=dataset,
    processing_class=tokenizer,
    reward_model=trained_reward_model,
)
trainer.train()
moved = sum(not p.equal(start[n].to(p)) for n, p in model.named_parameters() if n in start)
print(f"reward model: beta {trainer.beta} steps {trainer.state.global_step} moved {moved}")
