"""Answers of the exports of a run, loaded by other libraries, against those of the run itself.

    python benchmarks/round_trip.py runs/quickstart
    python benchmarks/round_trip.py runs/smollm2 --llama-python A --vllm-python B

The prompts are the run's held-out ones. The answers are greedy, and the first held-out reward
scores them. llama.cpp is xllamacpp or llama-cpp-python, in an environment of its own. vLLM is in
the environment that `make setup-vllm` builds. If neither is given, only transformers loads the
exports. The result is benchmarks/results/round_trip_NAME.json.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from shared import parser_of, write_result

import rloo_kit as rk

LLAMA = """
import json, sys
model, file = sys.argv[1:]
asked = json.load(open(file))
texts = []
try:
    import xllamacpp
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = model, asked["room"], 1
    params.warmup = False
    server = xllamacpp.Server(params)
    name = "xllamacpp"
    for ids in asked["ids"]:
        body = {"prompt": ids, "n_predict": asked["most"], "temperature": 0.0,
                "repeat_penalty": 1.0, "cache_prompt": False}
        texts.append(server.handle_completions(body)["choices"][0]["text"])
except ImportError:
    import llama_cpp
    llama = llama_cpp.Llama(model, n_ctx=asked["room"], verbose=False)
    name = "llama-cpp-python"
    for ids in asked["ids"]:
        found = llama(ids, max_tokens=asked["most"], temperature=0.0, repeat_penalty=1.0)
        texts.append(found["choices"][0]["text"])
json.dump({"name": name, "texts": texts}, open(file, "w"))
"""
VLLM = """
import json, sys
from vllm import LLM, SamplingParams
model, file = sys.argv[1:]
asked = json.load(open(file))
llm = LLM(model, max_model_len=asked["room"], enforce_eager=True, dtype="bfloat16")
how = SamplingParams(temperature=0.0, max_tokens=asked["most"], stop_token_ids=asked["ends"])
found = llm.generate([{"prompt_token_ids": ids} for ids in asked["ids"]], how)
json.dump({"name": "vLLM", "texts": [one.outputs[0].text for one in found]}, open(file, "w"))
"""


def main() -> None:
    """Export the run, load and score each export, and write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--llama-python", metavar="PATH")
    parser.add_argument("--vllm-python", metavar="PATH")
    parser.add_argument("--base", help="base model, as in rloo-kit export --base")
    args = parser.parse_args()
    rk.setup()
    from rloo_kit.data.lengths import prompt_ids
    from rloo_kit.evaluation.held_out import read_held_out
    from rloo_kit.evaluation.trained import find_trained, load_base
    from rloo_kit.sampling.completer import as_completions
    from rloo_kit.scoring.contract import call_reward, reward_columns
    from rloo_kit.text.numbers import mean_or_none

    trained = find_trained(args.run)
    exam = read_held_out([trained], num_prompts=args.num_prompts)
    rows = {}
    wanted = []

    def note(name: str, texts: list[str], values: list[float | None]) -> None:
        wanted[:] = wanted or texts
        same = sum(a.strip() == b.strip() for a, b in zip(texts, wanted, strict=True))
        rows[name] = {"score": mean_or_none(values), "same_texts": same, "prompts": len(texts)}
        print(f"{name:<40} {rows[name]['score']:.4f}  {same} of {len(texts)} texts as the run")

    def here(name: str, one: object, of: object) -> None:
        judge = exam.rewards(one.tokenizer)[:1]
        with exam.settings(one, [of]) as settings, one.using(of) as model:
            how = settings | {"temperature": 0.0}
            samples = rk.evaluate(model, one.tokenizer, exam.prompts, judge, **how).samples
        scores = [sample["rewards"][judge[0].name] for sample in samples]
        note(name, [sample["completion"] for sample in samples], scores)

    def elsewhere(name: str, python: str, code: str, model: Path) -> None:
        asked = [prompt_ids(one.tokenizer, row["prompt"]) for row in exam.prompts]
        ends = list(one.model.generation_config.eos_token_id)
        most = exam.job.args.max_completion_length
        with tempfile.NamedTemporaryFile("w+", suffix=".json") as file:
            room = trained.model.max_seq_length
            json.dump({"ids": asked, "most": most, "ends": ends, "room": room}, file)
            file.flush()
            done = subprocess.run(
                [python, "-c", code, str(model), file.name],
                capture_output=True, text=True, check=False,
                env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
            )  # fmt: skip
            if done.returncode:
                raise SystemExit(f"{python} could not load {name}:\n{done.stderr[-2000:]}")
            found = json.loads(Path(file.name).read_text())
        ids = [
            one.tokenizer(text, add_special_tokens=False)["input_ids"] for text in found["texts"]
        ]
        completions = as_completions(exam.prompts["prompt"][:], found["texts"])
        columns = reward_columns(list(exam.prompts), completions, ids)
        scores = call_reward(exam.rewards(one.tokenizer)[0].func, columns)
        note(f"{name}, {found['name']}", found["texts"], scores)

    one = load_base(trained)
    judge = exam.rewards(one.tokenizer)[0].name
    here("the run", one, trained)
    here("its base, untrained", one, trained.without_adapter())
    with tempfile.TemporaryDirectory() as place:
        kinds = ["adapter", "merged", *(["gguf"] if args.llama_python else [])]
        for kind in kinds:
            base = {} if kind == "adapter" or not args.base else {"base": args.base}
            folder = rk.export_model(args.run, kind, output=Path(place) / kind, say=str, **base)
            if kind == "gguf":
                (file,) = folder.glob("*.gguf")
                elsewhere("gguf", args.llama_python, LLAMA, file)
                continue
            other = find_trained(folder)
            how = {"load_in_4bit": False, "max_seq_length": trained.model.max_seq_length}
            if kind == "adapter":
                how["name"] = trained.base
            here(f"{kind}, transformers in 16 bit", load_base(other, **how), other)
            if kind == "merged" and args.vllm_python:
                elsewhere("merged", args.vllm_python, VLLM, folder)
    run = Path(args.run).resolve().name
    name = f"round_trip_{run}" + (f"_on_{Path(args.base).name}" if args.base else "")
    write_result(name, run=run, judge=judge, rows=rows, base=args.base)
    print(f"judge: {judge}; written to {name}.json")


if __name__ == "__main__":
    main()
