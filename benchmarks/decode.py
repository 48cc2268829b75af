"""Decoding side by side: our plain and speculative decoding, and transformers' `generate` alone and assisted.

    python benchmarks/decode.py [CONFIG] [key=value ...]

Takes the best draft of CONFIG's run folder (configs/quickstart.yaml; run it first). Every prompt goes through all
four, one after the other, prefill included; ratios are of sums over the same prompts in the same run. Writes
benchmarks/results/decode.json with machine, versions, date and command.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NUM_PROMPTS = 8
OUT = Path(__file__).parent / "results" / "decode.json"


def main() -> None:
    from eval.score import EvalJob
    from eval.speed import Bench, hf_baseline
    from eval.suites import load_suite
    from specdec import cost, provenance
    from specdec.length import make_policy
    from specdec.measure import measure
    from specdec.pair import check_pair, draft_folder, load_draft, load_model
    from specdec.render import Renderer
    from specdec.settings import load
    from specdec.show import ASSUMED_ACCEPTANCE

    config, *overrides = sys.argv[1:] or ["configs/quickstart.yaml"]
    job = load(EvalJob, Path(config), overrides)
    target = load_model(job.target)
    draft = load_draft(str(draft_folder(job.run, job.eval.draft)), target)
    vocab_size = check_pair(target, draft)
    questions = load_suite(
        job.eval, job.prompts, Renderer(target.tokenizer), context_length=target.context_length, seed=job.run.seed
    )
    measured = measure(target, draft, vocab_size=vocab_size)
    threshold = cost.confidence_threshold(measured, ASSUMED_ACCEPTANCE)
    bench = Bench(
        target=target, draft=draft, vocab_size=vocab_size, max_new_tokens=job.eval.max_new_tokens,
        policy=make_policy(job.eval.draft_length, threshold=threshold),
    )  # fmt: skip
    found = hf_baseline(bench, [q.prompt_ids for q in questions[:NUM_PROMPTS]])
    base = found["plain_tokens_per_s"]
    result = {
        "what": "greedy decoding, batch 1, tokens per second with prefill, the same prompts interleaved",
        **found,
        "ratios_to_our_plain": {
            "transformers": found["tokens_per_s"] / base,
            "transformers_assisted": found["assisted_tokens_per_s"] / base,
            "speculative": found["speculative_tokens_per_s"] / base,
        },
        "cost": measured,
        "environment": provenance.collect(),
    }
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{'transformers generate':28}{found['tokens_per_s']:8.1f} tokens/s  {found['tokens_per_s'] / base:5.2f}x")
    for name, label in (("assisted", "transformers assisted"), ("plain", "draftsmith plain"),
                        ("speculative", "draftsmith speculative")):  # fmt: skip
        speed = found[f"{name}_tokens_per_s"]
        print(f"{label:28}{speed:8.1f} tokens/s  {speed / base:5.2f}x")
    print(OUT)


if __name__ == "__main__":
    main()
