"""One function per number. Each gives the (numerator, denominator) of one run; sums are divided once, at the end.

a = accepted drafts of a round, K = drafts of that round, e = tokens kept of it. `num_accepted` is the raw run: a
draft accepted behind the EOS that ended the answer still counts as accepted, as every engine counts it. `num_emitted`
is after trimming at EOS, stop or the limit. The first token comes from the prefill and belongs to no round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from eval.records import Record, Run

Pair = tuple[float, float]


def expected_acceptance(record: Record) -> Pair:
    """alpha = mean_t sum_v min(p_t(v), q_t(v)) = 1 - TV, on the target's own answer (2211.17192, eq. for beta)."""
    expected = record.get("expected")
    return (expected["sum"], expected["n"]) if expected else (0, 0)


def draft_acceptance_rate(run: Run) -> Pair:
    """sum a / sum K, raw run: depends on the draft-length policy, so it is printed beside it."""
    return sum(run["num_accepted"]), sum(run["num_drafts"])


def draft_acceptance_rate_trimmed(run: Run) -> Pair:
    """sum a / sum K with every draft behind the answer's end left out of both."""
    accepted = sum(min(a, e) for a, e in zip(run["num_accepted"], run["num_emitted"], strict=True))
    drafted = sum(k if e == a + 1 else e for k, a, e in rounds(run))
    return accepted, drafted


def acceptance_at_position(run: Run, k: int) -> Pair:
    """sum 1[a >= k] / sum 1[a >= k-1 and K >= k], k from 1: the k-th draft's chance where it was judged at all."""
    tried = sum(a >= k - 1 and drafts >= k for drafts, a, _ in rounds(run))
    return sum(a >= k for _, a, _ in rounds(run)), tried


def mean_accepted_length(run: Run) -> Pair:
    """tau = 1 + sum a / rounds, over the rounds that drafted (K > 0); the 1 is the target's own token."""
    drafted = sum(k > 0 for k in run["num_drafts"])
    return drafted + sum(run["num_accepted"]), drafted


def tokens_per_target_forward(run: Run) -> Pair:
    """sum e / rounds: rounds without drafts included, prefill excluded."""
    return sum(run["num_emitted"]), len(run["num_emitted"])


def mean_draft_length(run: Run) -> Pair:
    """sum K / rounds: what the draft-length policy really did."""
    return sum(run["num_drafts"]), len(run["num_drafts"])


def tokens_per_s_decode(run: Run) -> Pair:
    """sum e / sum decode_s: wall clock after the first token."""
    return sum(run["num_emitted"]), run["decode_s"]


def tokens_per_s_end_to_end(run: Run) -> Pair:
    """len(tokens) / (prefill_s + decode_s): what a user waits for."""
    return len(run["tokens"]), run["prefill_s"] + run["decode_s"]


def seconds_per_round(run: Run, part: str) -> Pair:
    """Seconds of one part (draft_s, verify_s, host_s, decode_s) / rounds."""
    return run[part], len(run["num_emitted"])


def rounds(run: Run) -> list[tuple[int, int, int]]:
    """(K, a, e) of each round."""
    return list(zip(run["num_drafts"], run["num_accepted"], run["num_emitted"], strict=True))


def longest_draft(runs: Sequence[Run]) -> int:
    """The largest K of any round; 0 where nothing was drafted."""
    return max((k for run in runs for k in run["num_drafts"]), default=0)


def accepted_length_histogram(runs: Sequence[Run]) -> list[int]:
    """Rounds that drafted, counted by accepted drafts: entry a of [longest K + 1]."""
    counts = Counter(a for run in runs for k, a, _ in rounds(run) if k > 0)
    return [counts[a] for a in range(longest_draft(runs) + 1)]


def total(pairs: Sequence[Pair]) -> float | None:
    """Sum of numerators / sum of denominators; None where nothing was counted."""
    denominator = sum(d for _, d in pairs)
    return sum(n for n, _ in pairs) / denominator if denominator else None
