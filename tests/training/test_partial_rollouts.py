"""Partial rollouts: every prompt that was begun is trained once, with its own tokens."""

import random
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import transformers

import rloo_kit as rk
from rloo_kit.checkpoints.state import read_tree, write_tree
from rloo_kit.errors import ConfigError, MemoryRanOutError
from rloo_kit.rloo.rollout import Completions
from rloo_kit.sampling.decoding import Pieces, complete, grow
from rloo_kit.sampling.engine import Begun, Generations, ThoughtLimit
from rloo_kit.text.thoughts import Mark, ThoughtMarks
from rloo_kit.training.partial_rollouts import InFlight
from rloo_kit.training.sampler import Sampler

G = 2
GROUPS = 3  # of a batch
LONGEST = 40
END = 0


class Dice:
    """A sampler of random lengths: its tokens count up, the last one is ``END``."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.rows = []  # of each call
        self.limit = None  # rows that fit into memory
        self.pieces = Pieces("sampling", "buy memory")

    def has_ended(self, prompt_ids, ids):
        return ids[-1] == END

    def grow(self, begun):
        if self.limit is not None and len(begun.prompt_ids) > self.limit:
            raise torch.OutOfMemoryError("out of memory")
        self.rows.append(len(begun.prompt_ids))
        lengths = [len(ids) for ids in begun.completion_ids]
        drawn = Generations([[] for _ in lengths], [[] for _ in lengths])
        ended = set()
        while len(ended) < len(lengths) and not begun.is_enough(ended):
            for row in {*range(len(lengths))} - ended:
                lengths[row] += 1
                is_last = lengths[row] == LONGEST or self.dice.random() < 0.1
                drawn.completion_ids[row].append(END if is_last else lengths[row])
                drawn.log_probs[row].append(-float(lengths[row]))
                if is_last:
                    ended.add(row)
        return drawn


def completions(rows, tokens, log_probs):
    return Completions(
        prompts=[row["prompt"] for row in rows],
        completions=[""] * len(rows),
        tokens=tokens,
        ended=[True] * len(rows),
        sampler_log_probs=log_probs,
    )


def pool(sampler, batches, in_flight=2 * GROUPS, max_age=3):
    """A pool over 7 prompts, epoch after epoch; a prompt's text is its place in the dataset."""
    return InFlight(
        completer=SimpleNamespace(
            tokenize=lambda rows: [[10_000 + int(row["prompt"])] for row in rows],
            completions=completions,
            log=SimpleNamespace(note_sampled=lambda *_: None),
        ),
        sampler=sampler,
        order=lambda: (number % 7 for number in count()),
        dataset=lambda: [{"prompt": str(place)} for place in range(7)],
        num_generations=G,
        num_groups=in_flight,
        max_age=max_age,
        num_wanted=lambda: batches * GROUPS,
    )


def kept(state, folder):
    """The state after it was written to a checkpoint and read again."""
    folder.mkdir(exist_ok=True)
    write_tree(folder, state)
    return read_tree(folder)


@pytest.mark.parametrize(("in_flight", "max_age"), [(GROUPS, 0), (2 * GROUPS, 1), (12, 4)])
def test_each_prompt_is_trained_once_with_its_own_tokens_through_kills(
    tmp_path, in_flight, max_age
):
    batches = 200
    chance = random.Random(in_flight)
    sampler = Dice(1)
    one = pool(sampler, batches, in_flight, max_age)
    state = kept(one.state_dict(), tmp_path / "state")
    trained = []
    ages = []
    while len(trained) < batches:
        if chance.random() < 0.3:  # killed while it samples, or before the step was saved
            one(GROUPS * G)
            one = pool(sampler, batches, in_flight, max_age)
            one.load_state_dict(state)
        rows, found = one(GROUPS * G)
        state = kept(one.state_dict(), tmp_path / "state")
        trained.append([row["prompt"] for row in rows][::G])
        assert all(len({*map(id, rows[n : n + G])}) == 1 for n in range(0, len(rows), G))
        for row, (prompt, ids) in enumerate(
            zip(found.tokens.prompt_ids, found.tokens.completion_ids, strict=True)
        ):
            assert prompt == [10_000 + int(rows[row]["prompt"])]
            assert ids == [*range(1, len(ids)), END]
            assert found.sampler_log_probs[row] == [-float(n + 1) for n in range(len(ids))]
            assert found.token_ages[row] == sorted(found.token_ages[row], reverse=True)
            ages.append(found.token_ages[row][0])
    assert one.groups == []
    assert max(ages) == max_age
    counts = [sum(batch.count(str(place)) for batch in trained) for place in range(7)]
    assert sum(counts) == batches * GROUPS
    assert max(counts) - min(counts) <= 1


def test_the_speed_counts_the_tokens_sampled_for_the_batch():
    sampler = Dice(1)
    one = pool(sampler, 20)
    grow = sampler.grow
    sampled, noted = [], []

    def counted(begun):
        found = grow(begun)
        sampled[-1] += sum(map(len, found.completion_ids))
        return found

    sampler.grow = counted
    one.completer.log.note_sampled = lambda *given: noted.append(given[2])
    for _ in range(20):
        sampled.append(0)
        one(GROUPS * G)
    assert noted == sampled


def test_a_completion_that_fills_the_engines_context_has_ended():
    args = SimpleNamespace(max_completion_length=9)
    engine = SimpleNamespace(max_length=8)
    kit = SimpleNamespace(args=args, eos_token_ids=[0], thought=None, engine=engine)
    assert Sampler.has_ended(kit, [5] * 4, [6] * 4)
    assert not Sampler.has_ended(kit, [5] * 4, [6] * 3)


def test_rows_that_do_not_fit_into_memory_are_halved():
    sampler = Dice(3)
    sampler.limit = 5
    one = pool(sampler, 4)
    with pytest.warns(RuntimeWarning, match="12 completions at once: trying 6"):
        rows, _ = one(GROUPS * G)
    assert len(rows) == GROUPS * G
    assert max(sampler.rows) == 3
    sampler.limit = 0
    with pytest.raises(MemoryRanOutError, match="buy memory"):
        one(GROUPS * G)


# --- the model's own sampling ---------------------------------------------------------------------

ENDS = [7, 8, 9, 10, 11]


def random_llama():
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, pad_token_id=0,
        eos_token_id=ENDS, bos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def how(**more):
    return transformers.GenerationConfig(
        max_new_tokens=LONGEST, pad_token_id=0, eos_token_id=ENDS, do_sample=True, top_k=0, **more
    )


PROMPTS = [[30 + n // 4, 31, 32][: 1 + n % 3] for n in range(24)]


def test_sampling_in_parts_equals_sampling_at_once():
    model = random_llama()
    prompts = [[*ids, 20] for ids in PROMPTS]
    thought = ThoughtLimit(4, ThoughtMarks(Mark("", token=20), Mark("", token=21)))
    torch.manual_seed(0)
    whole = complete(model, prompts, 0, ENDS, thought, generation_config=how())
    torch.manual_seed(0)
    fresh = Begun(prompts, [[] for _ in prompts])
    found = grow(model, fresh, 0, thought, generation_config=how())
    assert found.completion_ids == whole
    assert any(len(ids) == 4 for ids in whole)


def test_log_probs_are_those_of_the_policy_that_sampled():
    model = random_llama()
    torch.manual_seed(1)
    begun = Begun(PROMPTS, [[33] * (n % 4) for n in range(len(PROMPTS))], lambda e: len(e) > 11)
    found = grow(model, begun, 0, generation_config=how(temperature=0.7))
    assert len({*map(len, found.completion_ids)}) > 3
    for row, (ids, log_probs) in enumerate(zip(found.completion_ids, found.log_probs, strict=True)):
        before = begun.all_ids[row]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([before + ids])).logits[0, len(before) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1)[range(len(ids)), ids]
        torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.long
def test_lengths_have_the_distribution_of_whole_sampling():
    model = random_llama()
    num = 1000
    torch.manual_seed(2)
    whole = complete(model, [[30, 31]] * num, 0, ENDS, generation_config=how())
    one = pool(Dice(0), num // (GROUPS * G), 4 * GROUPS, 4)
    one.completer.tokenize = lambda rows: [[30, 31]] * len(rows)
    one.sampler.has_ended = lambda _, ids: len(ids) == LONGEST or ids[-1] in ENDS
    one.sampler.grow = lambda begun: grow(model, begun, 0, generation_config=how())
    found = []
    carried = 0
    while len(found) < num - num % (GROUPS * G):
        _, batch = one(GROUPS * G)
        found += map(len, batch.tokens.completion_ids)
        carried += sum(map(any, batch.token_ages))
    assert carried > num / 4
    shares = [
        torch.bincount(torch.tensor(lengths), minlength=LONGEST + 1).cumsum(0) / len(lengths)
        for lengths in (found, [*map(len, whole)])
    ]
    # Kolmogorov-Smirnov: 1% of pairs of equal distributions are further apart than this
    assert (shares[0] - shares[1]).abs().max() < 1.63 * (2 / num) ** 0.5


# --- a training -----------------------------------------------------------------------------------


def new_trainer(folder, model=None, **settings):
    transformers.set_seed(4)
    loaded, tokenizer = rk.load_model("tiny-thinker", max_seq_length=256, load_in_4bit=False)
    fixed = {
        "max_steps": 2, "max_completion_length": 40, "temperature": 1.5, "learning_rate": 1e-3,
        "per_device_train_batch_size": 8, "save_strategy": "no", "partial_rollouts": True,
    }  # fmt: skip
    return rk.LeaveOneOutTrainer(
        model=model or rk.attach_lora(loaded),
        reward_funcs=lambda completion_ids, **_: [sum(ids) % 5 / 4 for ids in completion_ids],
        args=rk.LeaveOneOutConfig(str(folder), **fixed | settings),
        train_dataset=rk.load_prompts("arithmetic", num_prompts=16),
        processing_class=tokenizer,
    )


def test_a_pool_of_one_batch_trains_the_same_adapter_bit_for_bit(tmp_path):
    usual = new_trainer(tmp_path / "usual", partial_rollouts=False)
    usual.train()
    pooled = new_trainer(tmp_path / "pooled", rows_in_flight=8, max_rollout_age=0)
    pooled.train()
    for one, other in zip(
        usual.trained_parameters().values(), pooled.trained_parameters().values(), strict=True
    ):
        assert one.any()
        assert torch.equal(one, other)


@pytest.mark.long
def test_the_log_has_ages_and_the_effective_sample_size(tmp_path):
    trainer = new_trainer(tmp_path, max_steps=4)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert rows[0]["sampling/carried_over"] == 0
    assert max(row["sampling/age_max"] for row in rows) >= 1
    assert max(row["sampling/age_mean"] for row in rows) > 0
    assert min(row["effective_sample_size"] for row in rows) < 1
    assert trainer.in_flight.groups == []


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"rows_in_flight": 10}, "rows_in_flight is 10, must be a multiple"),
        ({"rows_in_flight": 4}, "rows_in_flight is 4, .* at least 8 .the completions"),
        ({"rows_in_flight": 48}, "48, .* at most 40 .*max_rollout_age is 4"),
        # tests/reference has the settings of sampling that cannot meet it
        ({"use_transformers_continuous_batching": True}, "cannot be used with"),
        ({"generation": "server"}, "vLLM's server cannot stop before"),
        ({"step": "trl"}, "partial_rollouts is True, which only the kit's step obeys"),
    ],
)
def test_settings_that_cannot_meet_are_refused(tmp_path, settings, remedy):
    with pytest.raises(ConfigError, match=remedy):
        new_trainer(tmp_path, **settings)


def test_a_model_that_cannot_end_early_is_refused(tmp_path):
    config = transformers.MambaConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0
    )
    with pytest.raises(ConfigError, match="this model's own sampling cannot stop before"):
        new_trainer(tmp_path, transformers.MambaForCausalLM(config), beta=0.0)


def test_a_hook_that_chooses_prompts_is_refused(tmp_path):
    trainer = new_trainer(tmp_path)
    trainer.rloo.which_prompts = lambda rows: rows[::-1]
    with pytest.raises(ConfigError, match="which_prompts has no effect with"):
        trainer.train()
