"""vLLM in this process on the card: it follows the adapter, sleeps, and the canary watches it."""

import pytest
from policies import disturb, make_policy, need, prompts_of

pytestmark = pytest.mark.gpu
# Nats between the two likeliest tokens; below it bf16 rounding may choose either
NEAR_TIE = 0.05
LENGTH = 32
# Bytes of the embedded model's keys and values: 4 layers of one head, 64 rows of 128 tokens
FULL_CACHE = 2 * 2 * 4 * 64 * 64 * 128


@pytest.fixture(scope="module", params=["bf16", "4-bit", "shared", "merged"])
def sampler(request, kit, vllm, device):
    """(kind, model, tokenizer, engine): a base of vLLM's own, or Unsloth's, in 16 or 4 bit.

    ``shared`` is Unsloth's in 4 bit, ``merged`` in 16 bit: there it merges the adapter to sample.
    """
    kind = request.param
    in_4bit = kind in ("4-bit", "shared")
    by_unsloth = kind in ("shared", "merged")
    if in_4bit:
        need("bitsandbytes")
    if by_unsloth and (device == "cpu" or kit.setup().backend != "unsloth"):
        pytest.skip("Unsloth shares its weights with vLLM on a GPU only, and is not in force here")
    from rloo_kit.sampling.vllm_inprocess import VllmEngine

    with kit.session():
        model, tokenizer = make_policy(
            kit, load_in_4bit=in_4bit, fast_inference=by_unsloth, num_sequences=64
        )
        engine = VllmEngine(model, max_length=128, num_sequences=64, sleeps=True)
        yield kind, model, tokenizer, engine
        engine.close()


def greedy(engine, model, prompts):
    from rloo_kit.sampling.engine import Sampling

    sampling = Sampling(LENGTH, tuple(model.generation_config.eos_token_id), temperature=0)
    return engine.generate(prompts, sampling, seed=0).completion_ids


def agreement(drawn, answer, number):
    """Share of tokens up to the first near-tie that are plain PEFT's."""
    same = total = 0
    for row, ids in enumerate(drawn):
        pairs = zip(
            ids,
            answer[f"tokens.{number}.{row}"].tolist(),
            answer[f"gaps.{number}.{row}"].tolist(),
            strict=False,
        )
        for token, other, gap in pairs:
            if gap < NEAR_TIE:
                break
            total += 1
            same += token == other
            if token != other:
                break
    assert total > 300
    return same / total


def test_greedy_output_is_plain_pefts_after_every_sync(
    kit, device, sampler, plain_peft, tmp_path, record_property
):
    import torch

    from rloo_kit.models.adapters import without_engine
    from rloo_kit.models.shape import TINY_THINKER
    from rloo_kit.sampling.vllm_inprocess import write_dequantised

    kind, model, tokenizer, engine = sampler
    prompts = prompts_of(kit, tokenizer)
    drawn = []
    adapters = []
    seconds = []
    for number in range(2):
        disturb(model, torch.Generator().manual_seed(number + 1), 0.02)
        engine.sync(model)
        drawn.append(greedy(engine, model, prompts))
        adapters.append(tmp_path / f"adapter-{number}")
        kit.save_adapter(model, tokenizer, adapters[-1])
        seconds.append(engine.sync_seconds)
    in_4bit = kind in ("4-bit", "shared")
    base = TINY_THINKER
    if in_4bit:
        with without_engine(model):  # an engine cannot be copied
            base = write_dequantised(model, torch.bfloat16, tmp_path / "base")
    answer = plain_peft(
        base=base,
        adapters=[*adapters, None],
        prompts=prompts,
        length=LENGTH,
        ends=model.generation_config.eos_token_id,
        device=device,
        dtype="bfloat16",
    )
    shares = [agreement(ids, answer, number) for number, ids in enumerate(drawn)]
    record_property("engine", engine.name)
    record_property("agreement", " ".join(f"{share:.4f}" for share in shares))
    record_property("sync_seconds", " ".join(f"{value:.3f}" for value in seconds))
    assert min(shares) >= 0.99
    assert agreement(drawn[1], answer, 2) < 0.99  # the base says something else


def test_it_trains_and_the_canary_finds_the_policy_that_trains(
    sampler, make_trainer, record_property
):
    _kind, model, tokenizer, engine = sampler
    trainer = make_trainer(model, tokenizer, engine=engine, rollout_correction="token")
    trainer.train()
    rows = [row for row in trainer.state.log_history if "sampling/sync_seconds" in row]
    assert len(rows) == 3
    for name in ("logp_difference_mean", "rounding_noise", "adapter_reached", "sync_seconds"):
        values = [row[f"sampling/{name}"] for row in rows if f"sampling/{name}" in row]
        record_property(name, " ".join(f"{value:.4f}" for value in values))
    assert all(row["sampling/adapter_reached"] > 0.8 for row in rows)
    assert sum(row["sampling/logp_difference_mean"] for row in rows) / 3 < 0.05


def test_the_canary_stops_a_sampler_that_is_left_behind(
    kit, sampler, make_trainer, monkeypatch, record_property
):
    _kind, model, tokenizer, engine = sampler
    trainer = make_trainer(model, tokenizer, engine=engine, max_steps=12)
    sync = type(engine).sync

    def only_before_the_first_step(self, model):
        if trainer.state.global_step == 0:
            sync(self, model)

    monkeypatch.setattr(type(engine), "sync", only_before_the_first_step)
    with pytest.raises(kit.StalePolicyError, match="restart the engine") as caught:
        trainer.train()
    record_property("noticed_after_steps", trainer.state.global_step)
    record_property("said", str(caught.value))
    assert trainer.state.global_step <= 3


def test_it_sleeps_wakes_and_says_the_same(kit, device, sampler, record_property):
    import torch

    _kind, model, tokenizer, engine = sampler
    prompts = prompts_of(kit, tokenizer)
    engine.sync(model)
    before = greedy(engine, model, prompts)
    if device == "cuda":
        torch.cuda.empty_cache()
        awake, _ = torch.cuda.mem_get_info()
    engine.sleep()
    if device == "cuda":
        torch.cuda.empty_cache()
        given = torch.cuda.mem_get_info()[0] - awake
        record_property("given_back_mib", round(given / 2**20))
        assert given > FULL_CACHE / 2
    after = greedy(engine, model, prompts)
    equal = sum(one == other for one, other in zip(before, after, strict=True)) / len(before)
    record_property("same_completions", f"{equal:.3f}")
    assert equal > 0.9
