"""Greedy identity in float32: every way of drafting against plain decoding, token for token.

    python benchmarks/identity.py [CONFIG] [key=value ...]

Takes the best draft of CONFIG's run folder and the prompts of its suite (eval.suite, eval.max_prompts; one answer of
eval.max_new_tokens each). Every policy and K = 0 to 8, by the draft and by prompt lookup, at batch 1, 4 and 16. Writes
benchmarks/results/identity-SUITE.json as it goes, and ends with exit code 1 where an answer differs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from common import from_command_line, load_bench

from eval.lossless import in_fp32
from eval.race import drafted, plain
from eval.speed import Bench, Prompts
from specdec import provenance
from specdec.length import LengthPolicy, make_policy
from specdec.measure import measure
from specdec.propose import PromptLookup, Proposer
from specdec.sampling import Sampling

LENGTHS: tuple[int | str, ...] = (*range(9), "confidence", "entropy", "history", "cost")
BATCHES = (16, 4, 1)
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


def main() -> None:
    _, _, job = from_command_line()
    loaded, questions = load_bench(job)
    prompts = sorted((list(q.prompt_ids) for q in questions), key=len)  # even batches
    measured = measure(loaded.target, loaded.draft, vocab_size=loaded.vocab_size)
    bench = replace(loaded, target=in_fp32(loaded.target), draft=in_fp32(loaded.draft))
    reference = decode(bench, prompts, 1, "plain", make_policy(0))
    found = []
    out = RESULTS / f"identity-{Path(job.eval.suite).stem}.json"
    for batch_size in BATCHES:
        for length in LENGTHS:
            for proposer in ("draft", "lookup"):
                if proposer == "lookup" and length in ("confidence", "entropy"):
                    continue  # they read the draft's distribution; a copy has none
                began = time.perf_counter()
                answers = decode(bench, prompts, batch_size, proposer, make_policy(length, cost=measured))
                differ = [n for n, (a, b) in enumerate(zip(reference, answers, strict=True)) if a != b]
                found.append(
                    {"batch_size": batch_size, "draft_length": length, "proposer": proposer,
                     "identical": len(reference) - len(differ), "differ": differ}
                )  # fmt: skip
                share = f"{len(reference) - len(differ)}/{len(reference)}"
                took = time.perf_counter() - began
                print(f"{batch_size:3} {proposer:7} {length!s:11} {share} {took:.0f} s", flush=True)
                result = {
                    "what": "greedy answers in float32 that are identical to plain decoding at batch 1",
                    "suite": Path(job.eval.suite).name,
                    "prompts": len(reference),
                    "max_new_tokens": bench.max_new_tokens,
                    "runs": found,
                    "environment": provenance.collect(),
                }
                out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(int(any(run["differ"] for run in found)))


if __name__ == "__main__":
    main()
