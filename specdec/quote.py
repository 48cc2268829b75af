"""What a pair costs at each batch size and context, and the acceptance from which a draft pays."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from specdec import cost
from specdec.cli import progress
from specdec.errors import UserError
from specdec.measure import ROUNDS, measure
from specdec.pair import LanguageModel, check_pair, draft_folder, load_draft, load_model
from specdec.show import DecodeJob


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where the costs are measured, and for which acceptances they are told."""

    draft: str | None
    """Folder of the draft; None: the best checkpoint of the run."""
    batch_sizes: Sequence[int]
    contexts: Sequence[int]
    """Tokens in the cache of each row."""
    max_draft_length: int
    """Largest K whose round is timed."""
    acceptances: Sequence[float]
    """Expected acceptances between 0 and 1."""


def quote(job: DecodeJob, options: Options) -> list[dict[str, Any]]:
    """Measure the pair; one record for each batch size and context. Raises UserError before a model loads."""
    _check(options)
    folder = draft_folder(job.run, options.draft)
    target = load_model(job.target)
    draft = load_draft(str(folder), target)
    vocab_size = check_pair(target, draft)
    _check_contexts(options, target)
    grid = list(product(options.batch_sizes, options.contexts))
    found = []
    with progress(len(grid), "measure", "setting") as bar:
        for batch_size, context in grid:
            measured = measure(
                target, draft, vocab_size=vocab_size, context=context, batch_size=batch_size,
                max_draft_length=options.max_draft_length,
            )  # fmt: skip
            found.append(told(measured, options.acceptances))
            bar.update(1)
    return found


def told(measured: dict[str, Any], acceptances: Sequence[float]) -> dict[str, Any]:
    """A measured cost model with what follows from it: the break-even, and K and speedup at each acceptance."""
    best = {alpha: cost.best_draft_length(measured, alpha) for alpha in acceptances}
    return {
        **measured,
        "break_even_acceptance": cost.break_even_acceptance(measured),
        "at_acceptance": [
            {
                "acceptance": alpha,
                "best_draft_length": length,
                "predicted_speedup": cost.predicted_speedup(measured, alpha, length),
            }
            for alpha, length in best.items()
        ],
    }


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records for a person: one line a setting."""
    columns = [f"a={entry['acceptance']:g}" for entry in records[0]["at_acceptance"]]
    longest = len(records[0]["v"])
    head = ["batch", "context", "plain ms", "c", f"v({longest})", "h", "breaks even at", *columns]
    rows = [head]
    for record in records:
        even = record["break_even_acceptance"]
        rows.append(
            [
                f"{record['batch_size']}",
                f"{record['context_tokens']}",
                f"{record['plain_step_ms']:.1f}",
                f"{record['c']:.3f}",
                f"{record['v'][str(longest)]:.2f}",
                f"{record['h']:.2f}",
                "never" if even is None else f"{even:.3f}",
                *(f"K={e['best_draft_length']} {e['predicted_speedup']:.2f}x" for e in record["at_acceptance"]),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)


def _check(options: Options) -> None:
    for name, values, low in (
        ("--batch-sizes", options.batch_sizes, 1),
        ("--contexts", options.contexts, 1),
        ("--max-draft-length", [options.max_draft_length], 1),
    ):
        if not values or min(values) < low:
            raise UserError(name, got=",".join(map(str, values)) or "nothing", expected=f"whole numbers from {low} on")
    if not options.acceptances or not all(0 <= alpha <= 1 for alpha in options.acceptances):
        got = ",".join(f"{alpha:g}" for alpha in options.acceptances)
        raise UserError("--acceptance", got=got or "nothing", expected="numbers between 0 and 1")


def _check_contexts(options: Options, target: LanguageModel) -> None:
    room = target.context_length - 2 * (options.max_draft_length + 1) - ROUNDS
    if max(options.contexts) > room:
        raise UserError(
            "--contexts", got=max(options.contexts), expected=f"{room} at most, the rounds have to fit into the context"
        )
