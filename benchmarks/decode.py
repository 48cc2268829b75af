"""Decoding side by side: our engine plain and speculative under every policy, transformers' `generate` and assistants.

    python benchmarks/decode.py [CONFIG] [key=value ...]

Takes the best draft of CONFIG's run folder (configs/quickstart.yaml; run it first). At batch 1 every prompt goes
through every contestant, one after the other, in an order that rotates; then the same prompts at batch 8, and answers
for training at batch 32. Greedy, prefill included everywhere. Ratios are of sums over the same prompts in the same run.
Writes benchmarks/results/decode.json with machine, versions, date and command.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import from_command_line, load_bench
from transformers.utils.logging import set_verbosity_error

from distill.generate import Task, answers
from eval.speed import Bench
from eval.suites import Question
from specdec import cost, provenance
from specdec.length import LengthPolicy, make_policy
from specdec.measure import measure
from specdec.pair import LanguageModel
from specdec.sampling import Sampling
from specdec.settings import load
from specdec.show import ASSUMED_ACCEPTANCE
from train.config import Config

NUM_PROMPTS = 16
FIXED = (1, 2, 3, 4, 5)
POLICIES = ("auto", "entropy", "history", "cost")
HF_FIXED = (2, 3, 4, 5)
HF_LOOKUP = 4
LARGE_BATCH = 8
ANSWERS = 64  # answers for training, made at batch ANSWER_BATCH
ANSWER_BATCH = 32
OUT = Path(__file__).parent / "results" / "decode.json"

Contestant = Callable[[Sequence[Sequence[int]]], int]
"""Decodes prompts side by side; returns how many tokens it made."""


@dataclass
class Tally:
    """Seconds and tokens of a contestant by domain."""

    seconds: dict[str, float]
    tokens: dict[str, int]

    def speed(self, domain: str | None = None) -> float:
        """Tokens per second on one domain, or on all."""
        if domain is None:
            return sum(self.tokens.values()) / sum(self.seconds.values())
        return self.tokens[domain] / self.seconds[domain]


def race(contestants: dict[str, Contestant], batches: Sequence[tuple[str, list[list[int]]]]) -> dict[str, Tally]:
    """Every batch of (domain, prompts) through every contestant; the first batch also goes through once to warm up."""
    tallies = {name: Tally(defaultdict(float), defaultdict(int)) for name in contestants}
    for number, (domain, prompts) in enumerate([batches[0], *batches]):
        names = list(contestants)
        shift = number % len(names)  # who runs behind whom changes
        for name in names[shift:] + names[:shift]:
            began = time.perf_counter()
            made = contestants[name](prompts)
            if number:
                tallies[name].seconds[domain] += time.perf_counter() - began
                tallies[name].tokens[domain] += made
        print(f"{number}/{len(batches)} {domain}", file=sys.stderr, flush=True)
    return tallies


def ours(bench: Bench, policy: LengthPolicy | str | None) -> Contestant:
    """Our decoder: None is plain decoding, "lookup" prompt lookup, a policy the draft under it."""

    def decode(prompts: Sequence[Sequence[int]]) -> int:
        greedy = Sampling()
        proposer = None
        if policy == "lookup":
            proposer = bench.prompt_lookup()
        elif policy is not None:
            assert not isinstance(policy, str)
            proposer = replace(bench, policy=policy).draft_model(max(map(len, prompts)), greedy)
        traces, _ = bench.run(prompts, [0] * len(prompts), greedy, proposer)
        return sum(len(trace.tokens) for trace in traces)

    return decode


def hf(bench: Bench, assistant: dict[str, Any] | None = None, **arguments: Any) -> Contestant:
    """transformers' greedy `generate`; `assistant`: the draft assists under these generation settings."""

    @torch.inference_mode()
    def decode(prompts: Sequence[Sequence[int]]) -> int:
        longest, pad = max(map(len, prompts)), min(bench.target.eos_ids, default=0)
        inputs = torch.tensor([[pad] * (longest - len(ids)) + list(ids) for ids in prompts])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        extra: dict[str, Any] = dict(arguments)
        if assistant is not None:
            extra["assistant_model"] = bench.draft.model
            bench.draft.model.generation_config.update(**assistant)  # type: ignore[union-attr]
        output = bench.target.model.generate(  # type: ignore[operator]
            inputs.to(bench.target.device), attention_mask=mask.to(bench.target.device),
            max_new_tokens=bench.max_new_tokens, do_sample=False, pad_token_id=pad, **extra,
        )  # fmt: skip
        return sum(_length(row, bench.target.eos_ids) for row in output[:, longest:].tolist())

    return decode


def _length(tokens: list[int], eos_ids: frozenset[int]) -> int:
    return next((n + 1 for n, token in enumerate(tokens) if token in eos_ids), len(tokens))


def policies(measured: dict[str, Any]) -> Iterator[tuple[str, LengthPolicy]]:
    """Everything that decides on K, by name; `cost` learns from prompt to prompt, as in a server."""
    threshold = cost.confidence_threshold(measured, ASSUMED_ACCEPTANCE)
    for name in (*FIXED, *POLICIES):
        label = f"K={name}" if isinstance(name, int) else name
        yield label, make_policy(name, threshold=threshold, cost=measured, keep=True)


def batch_1(bench: Bench, measured: dict[str, Any], random: Bench) -> dict[str, Contestant]:
    """Who races at batch 1."""
    fixed = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    return {
        "plain": ours(bench, None),
        **{name: ours(bench, policy) for name, policy in policies(measured)},
        "lookup": ours(bench, "lookup"),
        "random draft, cost": ours(random, make_policy("cost", cost=measured, keep=True)),
        "hf generate": hf(bench),
        **{f"hf assisted K={k}": hf(bench, {**fixed, "num_assistant_tokens": k}) for k in HF_FIXED},
        "hf assisted dynamic": hf(
            bench,
            {"num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant",
             "assistant_confidence_threshold": 0.4},
        ),
        "hf lookup": hf(bench, prompt_lookup_num_tokens=HF_LOOKUP),
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
        decode = hf(bench)
        return sum(decode(prompts[i : i + ANSWER_BATCH]) for i in range(0, len(prompts), ANSWER_BATCH))

    tallies = race({"distill.generate": made, "hf generate": generated}, [("", asked)])
    return {
        "batch_size": ANSWER_BATCH,
        "prompts": len(asked),
        **{name: tally.speed() for name, tally in tallies.items()},
        "ratio": tallies["distill.generate"].speed() / tallies["hf generate"].speed(),
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
    set_verbosity_error()  # assisted generation warns of arguments that it passes itself
    config, overrides, job = from_command_line()
    bench, questions = load_bench(job)
    quote = partial(measure, bench.target, bench.draft, vocab_size=bench.vocab_size)
    measured, at_large = quote(), quote(batch_size=LARGE_BATCH)
    asked = questions[:NUM_PROMPTS]
    singles = [(q.prompt.domain, [list(q.prompt_ids)]) for q in asked]
    one = race(batch_1(bench, measured, replace(bench, draft=random_twin(bench.draft))), singles)
    prompts = [prompt for _, [prompt] in singles]
    groups = [("", prompts[i : i + LARGE_BATCH]) for i in range(0, len(prompts) - LARGE_BATCH + 1, LARGE_BATCH)]
    racing = {"plain": ours(bench, None), **{name: ours(bench, policy) for name, policy in policies(at_large)}}
    many = race(racing, groups)
    result = {
        "what": "greedy decoding, tokens per second with prefill, the same prompts interleaved",
        "prompts": len(asked),
        "max_new_tokens": bench.max_new_tokens,
        "ratios": ratios(one, many),
        "batch_1": summary(one),
        f"batch_{LARGE_BATCH}": summary(many),
        "training_answers": training_answers(bench, questions, load(Config, config, overrides)),
        "cost": [measured, at_large],
        "environment": provenance.collect(),
    }
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for title, tallies in (("batch 1", one), (f"batch {LARGE_BATCH}", many)):
        print(title)
        for name, tally in sorted(tallies.items(), key=lambda item: -item[1].speed()):
            print(f"  {name:22}{tally.speed():8.1f} tokens/s {tally.speed() / tallies['plain'].speed():6.2f}x")
    print(json.dumps({**result["ratios"], "training_answers": result["training_answers"]}, indent=1))
    print(OUT)


if __name__ == "__main__":
    main()
