"""A merged export answers in vLLM as in transformers."""

import pytest

import rloo_kit as rk
from rloo_kit.data.prompts import prompt_ids
from rloo_kit.export.verify import ask

pytestmark = pytest.mark.vllm


def test_merged_weights_answer_in_vllm_as_here(policy, tmp_path):
    from vllm import LLM, SamplingParams

    model, tokenizer, _ = policy
    rk.save_adapter(model, tokenizer, tmp_path / "adapter")
    rk.export_model(tmp_path / "adapter", output=tmp_path / "merged", num_prompts=2)
    rows = [row["prompt"] for row in rk.load_prompts("arithmetic", num_prompts=16)]
    with rk.session():
        here, own = rk.load_model(tmp_path / "merged", load_in_4bit=False, max_seq_length=128)
        before = ask(here.float(), own, rows, max_tokens=24).texts
    engine = LLM(
        str(tmp_path / "merged"), dtype="float32", max_model_len=128, max_num_seqs=16,
        kv_cache_memory_bytes=2**27, generation_config="vllm", disable_log_stats=True,
        enforce_eager=True,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": prompt_ids(tokenizer, row)} for row in rows]
    found = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    texts = [one.outputs[0].text for one in found]
    assert sum(a == b for a, b in zip(texts, before, strict=True)) >= 15  # a tie may fall otherwise
    engine.llm_engine.engine_core.shutdown()
