"""Greedy identity: every way of drafting against plain decoding, token for token.

    python benchmarks/identity.py [CONFIG] [key=value ...]

Takes the best draft of CONFIG's run folder and 200 prompts: half of them the built-in suite's, half the shortest of
eval.suite where that names a file; one answer of eval.max_new_tokens each.

1. In float32: every policy and K = 0 to 8, by the draft and by prompt lookup, at batch 1, 4 and 16.
2. In the type of target.dtype, bfloat16 as a rule: some lengths by the draft, on the fast path and on its eager twin.
   Answers that differ are listed with the gap between the target's two best logits where they part, beside the
   rounding noise: how far such a gap moves between forwards of one token and of many.

Writes benchmarks/results/identity-SUITE.json as it goes; started again, it goes on with what that lacks. Ends with exit
code 1 where a float32 answer differs, or another one with a gap above the noise.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import from_command_line, load_bench, load_questions

from eval.lossless import divergence, in_fp32
from eval.race import drafted, plain
from eval.score import EvalJob
from eval.speed import Bench, Prompts
from eval.suites import Question
from specdec import provenance
from specdec.cache import Runner
from specdec.head import Head
from specdec.length import LengthPolicy, make_policy
from specdec.measure import measure
from specdec.pair import LanguageModel
from specdec.propose import PromptLookup, Proposer
from specdec.sampling import Sampling

LENGTHS: tuple[int | str, ...] = (*range(9), "confidence", "entropy", "history", "cost")
NUM_PROMPTS = 200
BATCHES = (16, 4, 1)
ROUNDED_LENGTHS = (1, 3, 8)
NOISE_EVERY = 10  # of the prompts, one in so many gives its rounding noise
ROUNDED_BATCHES = (16, 1)
BLOCK = 9  # tokens of a forward that single ones are held against: the widest that K = 8 verifies
RESULTS = Path(__file__).parent / "results"


def decode(
    bench: Bench, prompts: list[list[int]], batch_size: int, proposer: str, policy: LengthPolicy
) -> list[list[int]]:
    """Every prompt's answer, decoded in batches, as `proposer` ("plain", "draft", "lookup") drafts."""
    proposers: dict[str, Callable[[Prompts], Proposer | None]] = {
        "plain": plain,
        "draft": drafted(replace(bench, policy=policy)),
        "lookup": lambda _: PromptLookup(policy=policy, device=bench.target.device),
    }
    found = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        traces, _ = bench.run(batch, [0] * len(batch), Sampling(), proposers[proposer](batch))
        found += [trace.tokens for trace in traces]
    return found


def with_suite(job: EvalJob, suite: str) -> EvalJob:
    """The job with all of this suite's prompts."""
    return job.model_copy(update={"eval": job.eval.model_copy(update={"suite": suite, "max_prompts": None})})


def shortest(questions: Sequence[Question], number: int = NUM_PROMPTS) -> list[list[int]]:
    """The token ids of the shortest prompts: float32 reads long ones slowly, again and again."""
    return sorted((list(q.prompt_ids) for q in questions), key=len)[:number]


@torch.inference_mode()
def rounding_noise(target: LanguageModel, texts: list[list[int]], vocab_size: int) -> float:
    """How far the gap between two best logits moves, at most, between forwards over one token and over BLOCK."""
    worst, head = 0.0, Head(target, vocab_size)
    for ids in texts:
        row = torch.tensor([ids], device=target.device)
        single, many = (Runner(target.model, len(ids) + BLOCK, eager=target.eager) for _ in range(2))
        for start in range(0, len(ids), BLOCK):
            block = row[:, start : start + BLOCK]
            one = torch.cat([head(single.forward(block[:, j : j + 1], [start + j])) for j in range(block.shape[1])], 1)
            best = one.topk(2).indices
            all_at_once = head(many.forward(block, [start]))
            gaps = [logits.float().gather(-1, best).diff(dim=-1) for logits in (one, all_at_once)]
            worst = max(worst, float((gaps[0] - gaps[1]).abs().max()))
    return worst


def rounded(bench: Bench, prompts: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Divergences in the target's own type: by the fast path and by its eager twin, one record each."""
    for eager in (False, True):
        racing = replace(bench, target=replace(bench.target, eager=eager), draft=replace(bench.draft, eager=eager))
        reference = decode(racing, prompts, 1, "plain", make_policy(0))
        texts = [[*ids, *answer] for ids, answer in zip(prompts, reference, strict=True)][::NOISE_EVERY]
        noise = rounding_noise(racing.target, texts, bench.vocab_size)
        found = []
        for batch_size in ROUNDED_BATCHES:
            for length in ROUNDED_LENGTHS:
                answers = decode(racing, prompts, batch_size, "draft", make_policy(length))
                for n, (want, got) in enumerate(zip(reference, answers, strict=True)):
                    if want != got:
                        where = divergence(racing.target, prompts[n], want, got)
                        del where["class"]  # judges float32
                        found.append({"prompt": n, "batch_size": batch_size, "draft_length": length, **where})
        runs = len(ROUNDED_BATCHES) * len(ROUNDED_LENGTHS) * len(prompts)
        above = sum(d["logit_gap"] > noise for d in found)
        print(f"eager={eager}: {runs - len(found)}/{runs} identical, noise {noise:.4f}, {above} gaps above", flush=True)
        yield {
            "eager": eager, "dtype": str(racing.target.model.dtype), "answers": runs, "rounding_noise": noise,
            "above_noise": above, "divergences": found,
        }  # fmt: skip


def exact(
    bench: Bench, prompts: list[list[int]], measured: dict[str, Any], done: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Float32: one record for each batch size, length and proposer that is not `done`."""
    racing = replace(bench, target=in_fp32(bench.target), draft=in_fp32(bench.draft))
    reference = decode(racing, prompts, 1, "plain", make_policy(0))
    for batch_size, length, proposer in product(BATCHES, LENGTHS, ("draft", "lookup")):
        if proposer == "lookup" and length in ("confidence", "entropy"):
            continue  # they read the draft's distribution; a copy has none
        what = {"batch_size": batch_size, "draft_length": length, "proposer": proposer}
        if any(what.items() <= record.items() for record in done):
            continue
        began = time.perf_counter()
        answers = decode(racing, prompts, batch_size, proposer, make_policy(length, cost=measured))
        differ = [n for n, (a, b) in enumerate(zip(reference, answers, strict=True)) if a != b]
        identical = len(reference) - len(differ)
        took = time.perf_counter() - began
        print(f"{batch_size:3} {proposer:7} {length!s:11} {identical}/{len(reference)} {took:.0f} s", flush=True)
        yield {**what, "identical": identical, "differ": differ}


def main() -> None:
    _, _, job = from_command_line()
    bench, questions = load_bench(with_suite(job, job.eval.suite))
    prompts = shortest(questions)
    if job.eval.suite != "builtin":
        builtin = load_questions(with_suite(job, "builtin"), bench.target)
        prompts = shortest(questions, NUM_PROMPTS // 2) + shortest(builtin, NUM_PROMPTS // 2)
    prompts.sort(key=len)  # even batches
    result: dict[str, Any] = {
        "what": "greedy answers that are identical to plain decoding at batch 1; runs are in float32",
        "suite": Path(job.eval.suite).name,
        "prompts": len(prompts),
        "max_new_tokens": bench.max_new_tokens,
        "draft": bench.draft.fingerprint,
    }
    out = RESULTS / f"identity-{Path(job.eval.suite).stem}.json"
    before = json.loads(out.read_text()) if out.is_file() else {}
    same = result.items() <= before.items()  # then what a killed run has found stands
    result |= {"runs": before["runs"] if same else [], "rounded": [], "environment": provenance.collect()}

    def write() -> None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    measured = measure(bench.target, bench.draft, vocab_size=bench.vocab_size)
    for record in exact(bench, prompts, measured, list(result["runs"])):
        result["runs"].append(record)
        write()
    for record in rounded(bench, prompts):
        result["rounded"].append(record)
        write()
    differ = any(run["differ"] for run in result["runs"])
    sys.exit(int(differ or any(run["above_noise"] for run in result["rounded"])))


if __name__ == "__main__":
    main()
