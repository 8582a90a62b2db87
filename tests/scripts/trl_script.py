"""A training script in TRL's style: TRL's parser, TRL's arguments, and a call like TRL's.

python trl_script.py --model_name_or_path MODEL --dataset_name FILE [any setting of the trainer]
"""

import rloo_kit as rk

rk.setup()

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config


def short(completions, **_):
    return [-len(completion[-1]["content"]) / 100 for completion in completions]


parser = TrlParser((ScriptArguments, rk.LeaveOneOutConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
trainer = rk.LeaveOneOutTrainer(
    model=model_args.model_name_or_path,
    reward_funcs=[short, "accuracy"],
    args=training_args,
    train_dataset=load_dataset("json", data_files=script_args.dataset_name, split="train"),
    peft_config=get_peft_config(model_args),
)
trainer.train()
trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
print("steps", trainer.state.global_step, "only lora", all("lora_" in name for name in trained))
print("moved", any(p.abs().sum() > 0 for name, p in trained.items() if "lora_B" in name))
print(
    *(training_args.normalize_reward, training_args.shaping.normalize_reward),
    *(training_args.doctor, training_args.canary, training_args.num_generations),
    *(training_args.learning_rate, training_args.stop_on, training_args.keep_last),
)
