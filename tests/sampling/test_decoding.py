"""Sampling by transformers: the same completions as ``generate``, in less work."""

import collections
import functools
import logging
import random
import types

import pytest
import torch
import transformers
from transformers import GenerationConfig
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rloo_kit.errors import DivergedError
from rloo_kit.sampling.decoding import (
    GrowingLayer,
    complete,
    fast_attention,
    finite_logits,
    sample_rows,
)
from rloo_kit.sampling.engine import Generations, Sampling, ThoughtLimit, draw_from
from rloo_kit.text.thoughts import Mark, ThoughtMarks

VOCABULARY = 96
# Many tokens end a completion, so that lengths differ
ENDS = list(range(7, 17))
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
    "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": ENDS, "bos_token_id": 1,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6, "sliding_window_pattern": 2},
    "phi3": {},
    "olmo2": {},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    # State-space layers, whose rows cannot be selected
    "mamba": {"state_size": 4},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4},
}
PROMPTS = [[20, 21, 22]] * 4 + [[30, 31, 32, 33, 34]] * 4 + [[n] for n in range(40, 50)]


def make(family):
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(family, **SMALL | FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.eval()


def settings(**more):
    return GenerationConfig(
        **{"max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": ENDS, "do_sample": False} | more
    )


def drawn(model, prompts=PROMPTS, limit=None, **more):
    """The kit's completions, greedy unless ``more`` says otherwise."""
    return complete(model, prompts, 0, ENDS, limit, generation_config=settings(**more))


def by_generate(model, prompts=PROMPTS):
    """What ``generate`` gives to each prompt alone, without padding."""

    @functools.cache
    def alone(*ids):
        row = model.generate(torch.tensor([ids]), generation_config=settings())[0]
        return row[len(ids) :].tolist()

    return [alone(*ids) for ids in prompts]


QUICK = {"llama", "qwen3", "mistral", "mamba"}


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=() if one in QUICK else pytest.mark.long) for one in FAMILIES],
)
def test_greedy_completions_equal_generates(family):
    model = make(family)
    found = drawn(model)
    assert found == by_generate(model)
    assert len({*map(len, found)}) > 1


@pytest.mark.parametrize("num_prompts", [3, 4, 18])
def test_a_vision_model_with_three_positions_for_a_token_samples_text(num_prompts):
    torch.manual_seed(1)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {
        "depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 32,
        "out_hidden_size": 32, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config=SMALL | {"rope_parameters": rope}, vision_config=vision
    )
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    prompts = PROMPTS[-num_prompts:]
    assert drawn(model, prompts) == by_generate(model, prompts)


@pytest.mark.parametrize("do_sample", [True, False])
def test_logits_with_nan_are_an_error(do_sample):
    model = make("llama")
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    with pytest.raises(DivergedError, match="logits hold NaN or Inf"), finite_logits():
        drawn(model, do_sample=do_sample)


def test_a_prompt_runs_once_and_ended_rows_leave():
    model = make("qwen3")
    sizes = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    torch.manual_seed(0)
    found = drawn(model, do_sample=True, top_k=0)
    assert sizes[0] == (12, 5)
    rows = [num for num, _ in sizes[1:]]
    assert rows[0] >= len(PROMPTS) - 1
    assert rows == sorted(rows, reverse=True)
    assert len(rows) == max(map(len, found)) - 1
    assert sum(rows) < 1.2 * sum(map(len, found))


def test_samples_do_not_depend_on_when_ended_rows_leave(monkeypatch):
    model = make("qwen3")
    found = []
    for share in (0, 9):  # at once, and never
        monkeypatch.setattr("rloo_kit.sampling.decoding.LEAVING_SHARE", share)
        torch.manual_seed(0)
        found.append(drawn(model, do_sample=True, top_k=0))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.7, "top_p": 0.9},
        pytest.param({}, marks=pytest.mark.long),
    ],
)
def test_sampled_completions_have_generates_distribution(more):
    model = make("llama")
    prompts = [[20, 21]] * 10_000
    more = {"do_sample": True, "top_k": 0, "max_new_tokens": 2} | more
    torch.manual_seed(1)
    found = drawn(model, prompts, **more)
    torch.manual_seed(2)
    rows = model.generate(torch.tensor(prompts), generation_config=settings(**more))
    theirs = [tuple(row[2 : 3 if row[2] in ENDS else 4].tolist()) for row in rows]
    ours = collections.Counter(map(tuple, found))
    others = collections.Counter(theirs)
    common = [key for key in ours | others if ours[key] + others[key] >= 40]
    assert len(common) > 5
    # Difference of two counts over its deviation; 4.5 is exceeded once in 100,000
    assert max(abs(ours[k] - others[k]) / (ours[k] + others[k]) ** 0.5 for k in common) < 4.5


def test_a_models_own_maximum_length_is_not_a_second_limit(caplog, monkeypatch):
    from transformers.generation import utils

    model = make("llama")
    model.generation_config.max_length = 128  # as Unsloth sets it
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(utils.logger, "disabled", False)
    with caplog.at_level(logging.WARNING, "transformers"):
        drawn(model)
    assert "max_length" not in caplog.text
    assert model.generation_config.max_length == 128


def test_a_models_own_sampling_settings_are_not_used():
    model = make("llama")
    expected = drawn(model)
    model.generation_config.no_repeat_ngram_size = 1
    assert drawn(model) == expected
    assert model.generation_config.no_repeat_ngram_size == 1


def test_keys_are_not_copied_for_each_head_on_a_cpu(monkeypatch):
    model = make("qwen3")
    asked = sdpa_attention.use_gqa_in_sdpa
    expected = drawn(model)
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda *_: pytest.fail("copied"))
    assert drawn(model) == expected
    assert sdpa_attention.use_gqa_in_sdpa is asked


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    ("length", "passed"),
    [
        (1, (torch.bfloat16, (2, 2, 3, 8))),  # the 3 heads of a group as tokens
        (6, (torch.float32, (2, 6, 6, 8))),
    ],
)
def test_attention_on_a_cpu_is_that_of_transformers(length, passed, masked, monkeypatch):
    """Also with a mask by keyword, as some models call it, and in a block within a block."""
    torch.manual_seed(0)
    kernel = torch.nn.functional.scaled_dot_product_attention
    queries = []

    def noting(query, *rest, **how):
        queries.append((query.dtype, tuple(query.shape)))
        return kernel(query, *rest, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    query = torch.randn(2, 6, length, 8, dtype=torch.bfloat16)
    key, value = torch.randn(2, 2, 2, 6, 8, dtype=torch.bfloat16)
    mask = torch.zeros(2, 1, length, 6, dtype=torch.bfloat16) if masked else None
    if masked:
        mask[1, :, :, :2] = torch.finfo(torch.bfloat16).min
    module = types.SimpleNamespace(num_key_value_groups=3, is_causal=True)
    expected, _ = sdpa_attention.sdpa_attention_forward(module, query, key, value, mask)
    with fast_attention(query.device), fast_attention(query.device):
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        found, _ = attend(module, query, key, value, attention_mask=mask, scaling=None)
    assert queries[1:] == [passed]
    assert found.dtype is torch.bfloat16
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention.sdpa_attention_forward


def test_the_output_layer_gets_no_views_of_longer_tensors(monkeypatch):
    model = make("llama")
    forward = model.lm_head.forward
    seen = []

    def recorded(hidden):
        seen.append(hidden.is_contiguous())
        return forward(hidden)

    monkeypatch.setattr(model.lm_head, "forward", recorded)
    drawn(model, max_new_tokens=2)
    assert seen == [True, True]
    assert not model.lm_head._forward_pre_hooks


def test_processors_see_the_rows_that_are_left():
    model = make("qwen3")
    more = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    found = drawn(model, **more)
    padded = torch.tensor([[0] * (5 - len(ids)) + ids for ids in PROMPTS])
    mask = (padded != 0).long()
    rows = model.generate(padded, attention_mask=mask, generation_config=settings(**more))[:, 5:]
    assert found == [row[: len(ids)].tolist() for row, ids in zip(rows, found, strict=True)]


def test_a_growing_layer_holds_what_a_dynamic_one_does():
    growing = GrowingLayer()
    plain = transformers.cache_utils.DynamicLayer()
    torch.manual_seed(0)
    rows = 4
    for length in (5, 1, 1, 70, 1):
        new = torch.randn(rows, 2, length, 3), torch.randn(rows, 2, length, 3)
        assert all(map(torch.equal, growing.update(*new), plain.update(*new)))
        if rows == 4:
            rows = 2
            for layer in (growing, plain):
                layer.batch_select_indices(torch.tensor([3, 1]))
            assert not growing._spare  # else the old rows of all layers stay in memory


def test_guidance_takes_generates_own_loop():
    model = make("qwen3")
    config = settings(guidance_scale=1.5, max_new_tokens=5)
    padded = torch.tensor([[20, 21, 22], [30, 31, 32]])
    theirs = model.generate(padded, generation_config=config)
    assert torch.equal(
        model.generate(padded, generation_config=config, custom_generate=sample_rows), theirs
    )


# --- the limit of a thought ----------------------------------------------------------------------


def limited(ids, prompt, limit):
    """By hand: cut where the last of the two tokens, up to the limit, is the one that opens."""
    tokens = limit.tokens
    start = limit.marks.start.token
    end = limit.marks.end.token
    seen = [one for one in prompt + ids[:tokens] if one in (start, end)]
    return ids[:tokens] if len(ids) >= tokens and seen and seen[-1] == start else ids


def limits():
    """Limits by which some completions of PROMPTS are cut, and some are not."""
    return [
        ThoughtLimit(tokens, ThoughtMarks(Mark("", token=start), Mark("", token=end)))
        for tokens, start, end in ((5, 20, 61), (9, 32, 33), (3, 22, 62))
    ]


@pytest.mark.parametrize("family", ["qwen3", pytest.param("mamba", marks=pytest.mark.long)])
def test_a_long_thought_ends_a_completion(family):
    model = make(family)
    whole = by_generate(model)
    cut = 0
    for limit in limits():
        found = drawn(model, limit=limit)
        expected = [limited(ids, one, limit) for ids, one in zip(whole, PROMPTS, strict=True)]
        assert found == expected
        cut += sum(ids != other for ids, other in zip(expected, whole, strict=True))
    assert cut


class Sequences:
    """An engine whose next token follows from what is there, so that it can continue anything."""

    def __init__(self, max_length=64):
        self.max_length = max_length
        self.calls = []

    def generate(self, prompt_ids, sampling, seed):
        assert max(map(len, prompt_ids)) < self.max_length  # vLLM refuses others
        self.calls.append((len(prompt_ids), sampling.max_tokens, seed))
        rows = [self.row(ids, sampling) for ids in prompt_ids]
        return Generations(rows, [[-float(token) for token in row] for row in rows])

    def row(self, ids, sampling):
        made = []
        while len(made) < sampling.max_tokens:
            made.append(random.Random(str(ids + made)).randrange(17, VOCABULARY))
            if made[-1] in sampling.stop_token_ids:
                break
        return made


@pytest.mark.parametrize("limit", limits())
def test_an_engine_draws_up_to_the_limit_and_then_the_rest(limit):
    plain = Sampling(40, (17, 18))
    engine = Sequences()
    whole = draw_from(engine, PROMPTS, plain, 3)
    found = draw_from(engine, PROMPTS, Sampling(40, (17, 18), thought=limit), 3)
    expected = [
        limited(ids, prompt, limit)
        for ids, prompt in zip(whole.completion_ids, PROMPTS, strict=True)
    ]
    assert found.completion_ids == expected
    assert found.log_probs == [[-float(token) for token in row] for row in expected]
    sizes = [size for size, *_ in engine.calls]
    assert sizes[:2] == [len(PROMPTS)] * 2
    assert 0 < sizes[2] < len(PROMPTS)
    assert engine.calls[1][1:] == (limit.tokens, 3)
    assert engine.calls[2][1:] == (40 - limit.tokens, 3 + len(PROMPTS))
    assert "thought" not in plain.as_vllm()


def test_a_completion_that_fills_the_context_at_the_limit_is_not_continued():
    limit = ThoughtLimit(5, ThoughtMarks(Mark("", token=-1), Mark("", token=-2)))  # no thought
    found = draw_from(Sequences(9), [[20], [20] * 3, [20] * 4], Sampling(40, (), thought=limit), 3)
    assert list(map(len, found.completion_ids)) == [40, 40, 5]
    assert list(map(len, found.log_probs)) == [40, 40, 5]
