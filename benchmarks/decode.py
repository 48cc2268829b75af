"""Decoding side by side: our engine plain and speculative under every policy, transformers' `generate` and assistants.

    python benchmarks/decode.py [CONFIG] [key=value ...]

Takes the best draft of CONFIG's run folder (configs/quickstart.yaml; run it first). At batch 1 every prompt goes
through every contestant, one after the other, in an order that rotates; then the same prompts at batch 8, and answers
for training at batch 32. Greedy, prefill included. The policies alone then race again, each prompt several times,
timed behind the first token and held against what the cost model predicts for the very same rounds. Ratios are of
sums over the same prompts in the same run.
Writes benchmarks/results/decode.json (decode-cuda.json on a GPU) with machine, versions, date and command.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import from_command_line, load_bench
from tqdm import tqdm, trange

from distill.generate import Task, answers
from eval.race import Contestant, Tally, drafted, hf_generate, ours, plain, race
from eval.speed import Bench, Prompts
from eval.suites import Question
from specdec import cost, provenance
from specdec.length import LengthPolicy, make_policy
from specdec.measure import measure
from specdec.pair import LanguageModel
from specdec.propose import Proposer
from specdec.sampling import Sampling
from specdec.settings import load
from train.config import Config

NUM_PROMPTS = 32
REPEATS = 3
COST_EVERY = 8  # prompts between two measurements of the cost model
RANDOM = "random draft, cost"
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


def batch_1(bench: Bench, measured: dict[str, Any]) -> dict[str, Contestant]:
    """Who races at batch 1."""
    fixed = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    return {
        "plain": ours(bench, plain),
        **by_policy(bench, measured),
        "lookup": ours(bench, lambda _: bench.prompt_lookup()),
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


@dataclass(frozen=True)
class Run:
    """A prompt under a policy, behind its first token."""

    domain: str
    seconds: float
    drafts: Sequence[int]
    """Tokens drafted, round by round."""


def under_policies(
    bench: Bench, measured: dict[str, Any], random: Bench, asked: Sequence[Question]
) -> tuple[dict[str, list[Run]], dict[str, Any]]:
    """Every prompt REPEATS times plainly, under each policy and with the random draft, all taking turns.

    Returns each one's runs, with the median seconds of the repeats, and the medians of costs that were measured
    throughout: the machine's speed drifts, and a prediction is for the time it was measured at.
    """
    makers: dict[str, Callable[[Prompts], Proposer | None]] = {"plain": plain, RANDOM: drafted(random)}
    makers |= {name: drafted(replace(bench, policy=policy)) for name, policy in policies(measured)}
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in asked] for name in makers}
    drafts: dict[str, list[Sequence[int]]] = {name: [[] for _ in asked] for name in makers}
    names, costs = list(makers), [measured]
    for repeat in trange(REPEATS):
        for n, question in enumerate(asked):
            shift = (n + repeat) % len(names)
            for name in names[shift:] + names[:shift]:
                prompts = [list(question.prompt_ids)]
                traces, times = bench.run(prompts, [0], Sampling(), makers[name](prompts))
                seconds[name][n].append(times.decode_s)
                drafts[name][n] = traces[0].num_drafts
            if n % COST_EVERY == 0:
                costs.append(measure(bench.target, bench.draft, vocab_size=bench.vocab_size))
    runs = {
        name: [
            Run(q.prompt.domain, median(seconds[name][n]), drafts[name][n]) for n, q in enumerate(asked)
        ]
        for name in makers
    }  # fmt: skip
    return runs, median_cost(costs)


def median_cost(costs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Number by number."""
    v = {n: median(cost["v"][n] for cost in costs) for n in costs[0]["v"]}
    return {**costs[0], **{name: median(cost[name] for cost in costs) for name in ("c", "h", "plain_step_ms")}, "v": v}


def policy_claims(runs: dict[str, list[Run]], costs: dict[str, Any]) -> dict[str, Any]:
    """Decode speed over plain by domain, the claims about policies, and measured over predicted speedup."""

    def speed(name: str, domain: str | None = None) -> float:
        pairs = zip(runs["plain"], runs[name], strict=True)
        chosen = [(p.seconds, r.seconds) for p, r in pairs if domain in (None, p.domain)]
        return sum(p for p, _ in chosen) / sum(r for _, r in chosen)

    domains = sorted({run.domain for run in runs["plain"]})
    fixed = ["plain", *(f"K={k}" for k in FIXED)]
    steps = sum(len(run.drafts) for run in runs["plain"])
    return {
        "repeats": REPEATS,
        "over_plain": {name: {"all": speed(name), **{d: speed(name, d) for d in domains}} for name in runs},
        "cost_over_best_fixed_by_domain": {d: speed("cost", d) / max(speed(k, d) for k in fixed) for d in domains},
        "random_draft_over_plain": speed(RANDOM),
        "measured_over_predicted": {
            name: speed(name) / (steps / sum(cost.plain_steps(costs, k) for run in runs[name] for k in run.drafts))
            for name in runs
            if name not in ("plain", RANDOM)
        },
        "cost": costs,
    }


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
    return {
        "plain_over_hf_generate": speeds["plain"] / speeds["hf generate"],
        "speculative_over_hf_assisted": speeds[speculative] / speeds[assisted],
        "best_speculative": speculative,
        "best_hf_assisted": assisted,
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
    one = race(batch_1(bench, measured), tqdm(singles))
    prompts = [prompt for _, [prompt] in singles]
    groups = [("", prompts[i : i + LARGE_BATCH]) for i in range(0, len(prompts) - LARGE_BATCH + 1, LARGE_BATCH)]
    many = race({"plain": ours(bench, plain), **by_policy(bench, at_large)}, tqdm(groups))
    result = {
        "what": "greedy decoding, tokens per second with prefill, the same prompts interleaved",
        "prompts": len(asked),
        "max_new_tokens": bench.max_new_tokens,
        "ratios": ratios(one, many),
        "policies": policy_claims(*under_policies(bench, measured, random, asked)),
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
    claims = ("ratios", "policies", "training_answers")
    print(json.dumps({claim: result[claim] for claim in claims}, indent=1))
    print(out)


if __name__ == "__main__":
    main()
