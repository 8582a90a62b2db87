"""Train a case with the kit, and compute every gradient again by the reference."""

import atexit
import functools
import math
import shutil
import tempfile
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

import rloo_reference as reference
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, TrainerCallback

import rloo_kit as rk
from rloo_kit.config.trainer_settings import batch_plan
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.sampling.engine import Begun, Generations

STEPS = 3
LONGEST = 8
EOS = 258
FIXED = {
    "use_cpu": True, "max_steps": STEPS, "max_completion_length": LONGEST,
    "per_device_train_batch_size": 8, "seed": 3, "disable_tqdm": True,
}  # fmt: skip


# --- a training of the kit ------------------------------------------------------------------------


def letters(completions, **_):
    return [sum(map(ord, text_of(one))) % 3 / 2 for one in completions]


def even_length(completion_ids, **_):
    return [None if len(ids) == 3 else float(len(ids) % 2) for ids in completion_ids]


async def slow_letters(completions, **_):
    return letters(completions)


def sometimes_fails(completions, **_):
    if "7" in text_of(completions[0]):
        raise ValueError("a reward that fails")
    return letters(completions)


def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


REWARDS = {
    "two": [letters, even_length],
    "one": [letters],
    "async": [slow_letters, even_length],
    "fails": [sometimes_fails, even_length],
}


@functools.cache
def tiny_model_folder():
    """Write a random Llama that ends one completion in four before the limit."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=261, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # one feature is the same everywhere, and the end token likes it
        model.model.embed_tokens.weight[:, 0] = 20.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[EOS, 0] = 2.7
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    return folder


def make_model(case):
    """Return the model of a case, its adapter away from the base."""
    torch.manual_seed(2)
    packed = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_model_folder(),
        dtype=torch.float32,
        quantization_config=packed if case["precision"] == "4bit" else None,
    )
    if case["trained"] == "lora":
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
        model = get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


class RoughEngine:
    """Another engine: it samples from logits that are rounded to bfloat16."""

    name = "a rough engine"
    sync_seconds = 0.0
    max_length = 4096
    adapter_dtype = torch.float32

    def sync(self, model):
        self.model = model

    def generate(self, prompt_ids, sampling, seed):
        return self.grow(Begun(prompt_ids, [[] for _ in prompt_ids]), sampling, seed)

    @torch.no_grad()
    def grow(self, begun, sampling, seed):
        dice = torch.Generator().manual_seed(seed)
        rows = [torch.tensor(ids) for ids in begun.all_ids]
        found = Generations([[] for _ in rows], [[] for _ in rows])
        ended = set()
        while len(ended) < len(rows) and not begun.is_enough(ended):
            going_on = sorted({*range(len(rows))} - ended)
            # the padding is on the right, where no earlier token sees it
            ids = pad_sequence([rows[row] for row in going_on], batch_first=True)
            logits = self.model(input_ids=ids).logits.bfloat16().float()
            for place, row in enumerate(going_on):
                log_probs = logits[place, len(rows[row]) - 1] / sampling.temperature
                log_probs = log_probs.log_softmax(-1)
                token = torch.multinomial(log_probs.exp(), 1, generator=dice)
                rows[row] = torch.cat([rows[row], token])
                new = found.completion_ids[row]
                new.append(int(token))
                found.log_probs[row].append(float(log_probs[token]))
                limit = sampling.thought
                whole = begun.completion_ids[row] + new
                if (
                    new[-1] in sampling.stop_token_ids
                    or len(whole) == sampling.max_tokens
                    or (limit and limit.exceeds(begun.prompt_ids[row], whole))
                ):
                    ended.add(row)
        return found

    def sleep(self):
        pass

    def close(self):
        pass


class Trained(TrainerCallback):
    """A training of the kit: of each optimizer step its weights, gradient and rollouts.

    ``rollouts`` holds (rollout, ``(B,)`` weight of each row's loss) of each step.
    """

    def __init__(self):
        self.before = {}
        self.gradients = {}
        self.rollouts = {}
        self.log = []

    def on_step_begin(self, args, state, control, model=None, **_):
        self.before[state.global_step] = {
            name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad
        }

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradients[state.global_step] = gradients_of(model)

    def follow(self, trainer):
        """Keep what a trainer's steps do from here on."""
        self.model = trainer.model
        self.args = trainer.args
        learner = trainer.learner
        run = trainer.rloo.run
        learn = learner.learn

        def kept_run(batches, number):
            self.rollouts[number - 1] = []
            return run(batches, number)

        def kept_learn(rollout, weights):
            if self.rollouts:  # not of the dry run
                self.rollouts[max(self.rollouts)].append((rollout, weights.clone()))
            return learn(rollout, weights)

        trainer.rloo.run = kept_run
        learner.learn = kept_learn


def gradients_of(model):
    """Return the gradient of each trained weight by its name."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def settings_of(case):
    """Return the trainer's settings of a case."""
    own = {"engine", "precision", "trained", "rewards", "prompts", "resumed", "evaluated"}
    found = {name: value for name, value in case.items() if name not in own}
    found["gradient_checkpointing_kwargs"] = found.pop("checkpointing_kwargs")
    found["bf16"] = case["precision"] == "bf16"
    if case["reward_weights"]:
        found["reward_weights"] = [1.0, 0.5][: len(REWARDS[case["rewards"]])]
    found |= {"save_steps": 1, "keep_last": 9} if case["resumed"] else {"save_strategy": "no"}
    if case["evaluated"]:
        found |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    if case["rows_in_flight"]:
        plan = batch_plan(FIXED | {name: value for name, value in found.items() if value})
        found["rows_in_flight"] = 3 * plan.num_completions
    return {name: value for name, value in found.items() if value is not None}


def make_trainer(case, folder, trained):
    """Return the kit's trainer of a case; raises ConfigError for settings that cannot meet."""
    args = rk.LeaveOneOutConfig(str(folder), **FIXED | settings_of(case))
    prompts = rk.load_prompts("arithmetic", num_prompts=12)
    if case["prompts"] == "text":
        prompts = prompts.map(lambda row: {"prompt": row["prompt"][-1]["content"]})
    return rk.LeaveOneOutTrainer(
        model=make_model(case),
        reward_funcs=REWARDS[case["rewards"]],
        args=args,
        train_dataset=prompts,
        eval_dataset=prompts.select(range(2)) if case["evaluated"] else None,
        processing_class=AutoTokenizer.from_pretrained(TINY_THINKER),
        callbacks=[trained],
        engine=RoughEngine() if case["engine"] == "rough" else None,
    )


def train(case, folder) -> Trained:
    """Train a case; if it is resumed, from the checkpoint after its first step."""
    found = Trained()
    trainer = make_trainer(case, folder, found)
    found.follow(trainer)
    trainer.train()
    if case["resumed"]:
        last = found.gradients[STEPS - 1]
        found.rollouts = {0: found.rollouts[0]}
        trainer = make_trainer(case, folder, found)
        found.follow(trainer)
        trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-1"))
        assert relative(found.gradients[STEPS - 1], last) < 1e-4, "the resumed run differs"
    found.log = [row for row in trainer.state.log_history if "loss" in row]
    return found


# --- the same by the reference --------------------------------------------------------------------


def policy_of(model, temperature):
    """Return the reference's view of a model: one completion at a time, no padding."""

    def policy(completion):
        ids = torch.tensor([completion.prompt_ids + completion.ids])
        logits = model(input_ids=ids).logits[0, len(completion.prompt_ids) - 1 : -1]
        log_probs = (logits.float() / temperature).log_softmax(-1)  # (T, V)
        return log_probs[range(len(completion.ids)), completion.ids]

    return policy


def reference_settings(args):
    """Return the reference's settings, which have the trainer's names."""
    named = {one.name: getattr(args, one.name) for one in fields(reference.Settings)}
    named["missing_eos_penalty"] = args.missing_eos_penalty or 0.0
    named["normalize_reward"] = "batch" if args.normalize_reward is True else args.normalize_reward
    return reference.Settings(**named)


def completions_of(sampled):
    """Return the rollout's completions as the reference takes them."""
    known = sampled.sampler_log_probs
    return [
        reference.Completion(
            prompt_ids=sampled.tokens.prompt_ids[row],
            ids=sampled.tokens.completion_ids[row],
            ended=sampled.ended[row],
            rewards=[None if math.isnan(r) else r for r in sampled.rewards[row].tolist()],
            sampler_log_probs=None if known is None else known[row],
        )
        for row in range(len(sampled.tokens))
    ]


class Expected:
    """Gradients of a training, computed by the reference from its rollouts and weights."""

    def __init__(self, trained: Trained):
        self.trained = trained
        self.model = trained.model.eval()
        self.policy = policy_of(self.model, trained.args.temperature)
        self.passes: dict[Any, Any] = {}  # of a rollout: completions, old and reference log-probs

    def load(self, step):
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in self.trained.before[step]:
                    parameter.copy_(self.trained.before[step][name])

    def passes_of(self, sampled, step):
        """Return a rollout's completions, old and reference log-probabilities."""
        key = repr((sampled.tokens.prompt_ids, sampled.tokens.completion_ids))
        if key not in self.passes:  # before the first step that learns from it
            batch = completions_of(sampled)
            self.load(0)
            start = reference.no_grad_pass(self.policy, batch)
            self.load(step)
            old = reference.no_grad_pass(self.policy, batch) if step else start
            ages = sampled.token_ages
            if ages and not self.trained.args.rollout_correction:
                # a token that an earlier policy sampled has that policy's probability
                known = zip(ages, sampled.sampler_log_probs, old, strict=True)
                old = [
                    torch.where(torch.tensor(age) > 0, torch.tensor(then), now)
                    for age, then, now in known
                ]
            self.passes[key] = batch, old, start
        return self.passes[key]

    def steps(self, settings):
        """Yield the gradient of each optimizer step, and what its line of the log says."""
        seen: list[float] = []  # scores of all batches
        advantages: dict[int, list[torch.Tensor]] = {}
        for step, rollouts in sorted(self.trained.rollouts.items()):
            self.load(step)
            self.model.zero_grad()
            total = torch.zeros(())
            metrics = []
            # the kit says which rows a step learns from, the reference that they weigh 1 in all
            whole = sum(float(weights.sum()) for _, weights in rollouts)
            for rollout, weights in rollouts:
                batch, old, start = self.passes_of(rollout.sampled, step)
                if id(batch) not in advantages:
                    scores = reference.shaped(batch, settings, seen)
                    known = batch, scores, old, start if settings.beta else None, settings
                    advantages[id(batch)] = reference.advantages_of(*known)
                    metrics.append(reference.metrics_of(*known))
                total = total + reference.step_loss(
                    self.policy,
                    batch,
                    (weights / whole).tolist(),
                    old,
                    advantages[id(batch)],
                    settings,
                )
            if total.requires_grad:
                total.backward()
            log = {
                name: fmean(m[name] for m in metrics if name in m) for name in set().union(*metrics)
            }
            yield self.clipped(), log | {"loss": total.item()}

    def clipped(self):
        """Return the gradients after clipping to ``max_grad_norm``; 0: no clipping."""
        parameters = [p for p in self.model.parameters() if p.requires_grad and p.grad is not None]
        if self.trained.args.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(parameters, self.trained.args.max_grad_norm)
        return gradients_of(self.model)


def flat(gradient):
    return torch.cat([value.flatten() for _, value in sorted(gradient.items())])


def relative(one, other):
    """Return the norm of the difference over the norm of the second.

    Norms are about 5 here. Where one is nearly 0, its terms cancel, and rounding is what is left.
    """
    return float((flat(one) - flat(other)).norm() / flat(other).norm().clamp(min=0.05))


def cosine(one, other):
    """Return the cosine of the angle between two gradients; 1 if both are next to 0."""
    a = flat(one)
    b = flat(other)
    if max(a.norm(), b.norm()) < 1e-6:
        return 1.0
    return float(a @ b / (a.norm() * b.norm()).clamp(min=1e-12))
