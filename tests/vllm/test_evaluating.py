"""rloo-kit eval and judge by vLLM: every model answers as itself, whichever answered before."""

import json

import pytest

import rloo_kit as rk

pytestmark = pytest.mark.vllm
PROMPTS = 32
BY_VLLM = ["trainer.generation=vllm", "trainer.max_completion_length=16"]
BY_TRANSFORMERS = ["trainer.generation=transformers", "trainer.max_completion_length=16"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, save_adapter):
    """Two adapters of one base that say something else each; the second has the larger rank."""
    folder = tmp_path_factory.mktemp("adapters")
    return [str(save_adapter(folder / str(r), std=0.3, seed=r, r=r)) for r in (8, 32)]


def asked(models, overrides, **how):
    return rk.evaluate_models(
        models, overrides=overrides, num_prompts=PROMPTS, num_samples=0, say=str, **how
    )


@pytest.fixture(scope="module")
def greedy(adapters):
    """Greedy completions of the base and both adapters: by vLLM, and by transformers."""
    return asked(adapters, BY_VLLM), asked(adapters, BY_TRANSFORMERS)


def texts(row):
    return [sample["completion"] for sample in row.evaluation.samples]


def test_every_model_answers_as_itself(greedy, adapters):
    by_vllm, by_transformers = greedy
    names = [f"base of {adapters[0]}", *adapters]
    assert [row.model for row in by_vllm.rows] == [row.model for row in by_transformers.rows]
    assert [row.model for row in by_vllm.rows] == names
    assert {row.sampler for row in by_vllm.rows} == {"vLLM in this process"}
    assert {row.sampler for row in by_transformers.rows} == {"transformers"}
    for mine in by_vllm.rows:
        same = {
            row.model: sum(map(str.__eq__, texts(mine), texts(row))) for row in by_transformers.rows
        }
        assert same.pop(mine.model) >= 0.75 * PROMPTS, same  # rounding may turn a near tie
        assert max(same.values()) <= 0.5 * PROMPTS, same
    assert "completions by vLLM in this process" in str(by_vllm)
    assert "completions by transformers" in str(by_transformers)


def test_the_two_sides_of_a_judge_answer_as_themselves(adapters, greedy, tmp_path):
    first, second = adapters
    how = {"num_prompts": 8, "output": tmp_path, "say": str}
    found = rk.judge_models(first, against=second, by="length", overrides=BY_VLLM, **how)
    assert found.mode == "greedy, by vLLM in this process"
    rows = [
        json.loads(line) for line in (tmp_path / "judge_samples.jsonl").read_text().splitlines()
    ]
    _, small, large = greedy[0].rows
    for side, row in (("completion", small), ("against", large)):
        assert sum(map(str.__eq__, [one[side] for one in rows], texts(row))) >= 7
