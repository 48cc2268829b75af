"""Decoding side by side: our engine plain and speculative under every policy, transformers' `generate` and assistants.

    python benchmarks/decode.py [CONFIG] [key=value ...]

Takes the best draft of CONFIG's run folder (configs/quickstart.yaml; run it first). At batch 1 every prompt goes
through every contestant, one after the other, in an order that rotates; then the same prompts at batch 8, and answers
for training at batch 32. Greedy, prefill included everywhere. Ratios are of sums over the same prompts in the same run.
Writes benchmarks/results/decode.json (decode-cuda.json on a GPU) with machine, versions, date and command.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import from_command_line, load_bench
from tqdm import tqdm

from distill.generate import Task, answers
from eval.race import Contestant, Tally, drafted, hf_generate, ours, plain, race
from eval.speed import Bench
from eval.suites import Question
from specdec import cost, provenance
from specdec.length import LengthPolicy, make_policy
from specdec.measure import measure
from specdec.pair import LanguageModel
from specdec.settings import load
from train.config import Config

NUM_PROMPTS = 32
FIXED = (1, 2, 3, 4, 5)
POLICIES = ("auto", "entropy", "history", "cost")
HF_FIXED = (2, 3, 4, 5)
HF_LOOKUP = 4
LARGE_BATCH = 8
ANSWERS = 64  # answers for training, made at batch ANSWER_BATCH
ANSWER_BATCH = 32
RESULTS = Path(__file__).parent / "results"


def policies(measured: dict[str, Any]) -> Iterator[tuple[str, LengthPolicy]]:
    """Everything that decides on K, by name; `cost` learns from prompt to prompt, as in a server."""
    threshold = cost.confidence_threshold(measured, cost.ASSUMED_ACCEPTANCE)
    for name in (*FIXED, *POLICIES):
        label = f"K={name}" if isinstance(name, int) else name
        yield label, make_policy(name, threshold=threshold, cost=measured, keep=True)


def by_policy(bench: Bench, measured: dict[str, Any]) -> dict[str, Contestant]:
    """The draft under each policy."""
    return {name: ours(bench, drafted(replace(bench, policy=policy))) for name, policy in policies(measured)}


def batch_1(bench: Bench, measured: dict[str, Any], random: Bench) -> dict[str, Contestant]:
    """Who races at batch 1."""
    fixed = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    return {
        "plain": ours(bench, plain),
        **by_policy(bench, measured),
        "lookup": ours(bench, lambda _: bench.prompt_lookup()),
        "random draft, cost": ours(random, drafted(random)),
        "hf generate": hf_generate(bench),
        **{f"hf assisted K={k}": hf_generate(bench, {**fixed, "num_assistant_tokens": k}) for k in HF_FIXED},
        "hf assisted dynamic": hf_generate(
            bench,
            {"num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant",
             "assistant_confidence_threshold": 0.4},
        ),
        "hf lookup": hf_generate(bench, prompt_lookup_num_tokens=HF_LOOKUP),
    }  # fmt: skip


def random_twin(draft: LanguageModel) -> LanguageModel:
    """The draft with its layers' weights drawn at random: one that is hardly ever right."""
    model = deepcopy(draft.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.base_model.layers:  # type: ignore[union-attr]
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.float().std())
    return replace(draft, model=model)


def training_answers(bench: Bench, questions: Sequence[Question], job: Config) -> dict[str, Any]:
    """Answers for training, captured distributions included, against `generate` alone at the same batch size."""
    chosen = sorted(questions[:ANSWERS], key=lambda q: len(q.prompt_ids))  # as shards are: batches are even
    asked = [list(q.prompt_ids) for q in chosen]
    section = job.generate.model_copy(update={"batch_size": ANSWER_BATCH, "max_new_tokens": bench.max_new_tokens})
    tasks = [
        Task(answer_id=q.prompt.id, prompt=q.prompt, split="train", prompt_ids=q.prompt_ids, temperature=0.0)
        for q in chosen
    ]

    def made(_: Sequence[Sequence[int]]) -> int:
        found = answers(bench.target, tasks, section=section, top_k=job.capture.top_k)
        return sum(len(answer.record["answer_ids"]) for _, answer in found)

    def generated(prompts: Sequence[Sequence[int]]) -> int:
        decode = hf_generate(bench)
        return sum(decode(prompts[i : i + ANSWER_BATCH]) for i in range(0, len(prompts), ANSWER_BATCH))

    tallies = race({"distill.generate": made, "hf generate": generated}, [("", asked)])
    return {
        "batch_size": ANSWER_BATCH,
        "prompts": len(asked),
        **{name: tally.speed() for name, tally in tallies.items()},
        "ratio": tallies["distill.generate"].speed() / tallies["hf generate"].speed(),
    }


def over_predicted(bench: Bench, measured: dict[str, Any], asked: Sequence[Question]) -> dict[str, float]:
    """Measured speedup (behind the first token) over what the cost model makes of the very same rounds, by policy."""
    found = {}
    for name, policy in tqdm(list(policies(measured))):
        racing = replace(bench, policy=policy)
        runs = [
            racing.race([q.prompt_ids], [0], temperature=0.0, order=n, lookup=False)[0] for n, q in enumerate(asked)
        ]
        plain_runs, drafted_runs = ([run[who] for run in runs] for who in ("plain", "speculative"))
        speedup = sum(run["decode_s"] for run in plain_runs) / sum(run["decode_s"] for run in drafted_runs)
        steps = sum(len(run["num_emitted"]) for run in plain_runs)
        predicted = sum(cost.plain_steps(measured, k) for run in drafted_runs for k in run["num_drafts"])
        found[name] = speedup / (steps / predicted)
    return found


def summary(tallies: dict[str, Tally]) -> dict[str, Any]:
    """Tokens per second overall and by domain, and the same over plain decoding."""
    plain = tallies["plain"]
    return {
        name: {
            "tokens_per_s": tally.speed(),
            "over_plain": tally.speed() / plain.speed(),
            "over_plain_by_domain": {d: tally.speed(d) / plain.speed(d) for d in sorted(tally.seconds)},
        }
        for name, tally in tallies.items()
    }


def ratios(one: dict[str, Tally], many: dict[str, Tally]) -> dict[str, Any]:
    """The claims, each from this run."""
    speeds = {name: tally.speed() for name, tally in one.items()}
    speculative = max((name for name in speeds if name in POLICIES or name.startswith("K=")), key=speeds.__getitem__)
    assisted = max((name for name in speeds if name.startswith("hf assisted")), key=speeds.__getitem__)
    best_fixed = {
        d: max(one[f"K={k}"].speed(d) for k in FIXED) for d in sorted(one["plain"].seconds)
    }  # in hindsight; K = 0 is plain
    return {
        "plain_over_hf_generate": speeds["plain"] / speeds["hf generate"],
        "speculative_over_hf_assisted": speeds[speculative] / speeds[assisted],
        "best_speculative": speculative,
        "best_hf_assisted": assisted,
        "cost_over_best_fixed_by_domain": {
            d: one["cost"].speed(d) / max(speed, one["plain"].speed(d)) for d, speed in best_fixed.items()
        },
        "random_draft_over_plain": speeds["random draft, cost"] / speeds["plain"],
        f"batch_{LARGE_BATCH}_over_batch_1_speculative": max(t.speed() for t in many.values()) / speeds[speculative],
    }


def main() -> None:
    config, overrides, job = from_command_line()
    bench, questions = load_bench(job)
    quote = partial(measure, bench.target, bench.draft, vocab_size=bench.vocab_size)
    measured, at_large = quote(), quote(batch_size=LARGE_BATCH)
    asked = questions[:NUM_PROMPTS]
    singles = [(q.prompt.domain, [list(q.prompt_ids)]) for q in asked]
    random = replace(bench, draft=random_twin(bench.draft), policy=make_policy("cost", cost=measured, keep=True))
    one = race(batch_1(bench, measured, random), tqdm(singles))
    prompts = [prompt for _, [prompt] in singles]
    groups = [("", prompts[i : i + LARGE_BATCH]) for i in range(0, len(prompts) - LARGE_BATCH + 1, LARGE_BATCH)]
    many = race({"plain": ours(bench, plain), **by_policy(bench, at_large)}, tqdm(groups))
    result = {
        "what": "greedy decoding, tokens per second with prefill, the same prompts interleaved",
        "prompts": len(asked),
        "max_new_tokens": bench.max_new_tokens,
        "ratios": ratios(one, many),
        "measured_over_predicted": over_predicted(bench, measured, asked),
        "batch_1": summary(one),
        f"batch_{LARGE_BATCH}": summary(many),
        "training_answers": training_answers(bench, questions, load(Config, config, overrides)),
        "cost": [measured, at_large],
        "environment": provenance.collect(),
    }
    device = bench.target.device.type
    out = RESULTS / ("decode.json" if device == "cpu" else f"decode-{device}.json")
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for title, tallies in (("batch 1", one), (f"batch {LARGE_BATCH}", many)):
        print(title)
        for name, tally in sorted(tallies.items(), key=lambda item: -item[1].speed()):
            print(f"  {name:22}{tally.speed():8.1f} tokens/s {tally.speed() / tallies['plain'].speed():6.2f}x")
    claims = ("ratios", "measured_over_predicted", "training_answers")
    print(json.dumps({claim: result[claim] for claim in claims}, indent=1))
    print(out)


if __name__ == "__main__":
    main()
