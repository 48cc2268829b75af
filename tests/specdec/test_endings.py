"""Where answers end, and what a round records."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specdec.pair import LanguageModel
from specdec.sampling import Sampling
from specdec.trace import Stopwatch, Trace, acceptance

Decode = Callable[..., list[Trace]]
Prompts = list[list[int]]
Drafts = dict[str, LanguageModel | str]
EVERY_DRAFT = ["random", "self", "near", "short", "lookup"]
WARM = Sampling(temperature=0.8)


def tokens(traces: list[Trace]) -> list[list[int]]:
    return [trace.tokens for trace in traces]


# Endings inside accepted drafts


@pytest.mark.parametrize("length", [1, 4, "auto"])
@pytest.mark.parametrize("name", ["self", "near", "lookup"])
def test_eos_inside_drafts(
    target: LanguageModel,
    drafts: Drafts,
    prompts: Prompts,
    plain: list[Trace],
    decode: Decode,
    common_ids: list[int],
    name: str,
    length: int | str,
) -> None:
    ended = decode(target, prompts, eos_ids=common_ids)
    traces = decode(target, prompts, draft=drafts[name], length=length, eos_ids=common_ids)
    assert tokens(traces) == tokens(ended)
    for trace, full in zip(traces, plain, strict=True):
        first = next((i for i, token in enumerate(full.tokens) if token in common_ids), None)
        assert trace.finish == ("length" if first is None else "eos")
        assert trace.tokens == (full.tokens if first is None else full.tokens[: first + 1])
    if name == "self" and length == 4:  # the test is about trimming: it must have happened
        assert (
            sum(trace.num_emitted[-1] < trace.num_accepted[-1] for trace in traces if trace.num_emitted) > 5
        )


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", ["self", "near", "lookup"])
def test_max_new_tokens_is_never_overshot(
    target: LanguageModel,
    drafts: Drafts,
    prompts: Prompts,
    plain: list[Trace],
    decode: Decode,
    name: str,
    limit: int,
) -> None:
    streamed: dict[int, list[int]] = {}

    def stream(index: int, new: list[int], num_accepted: int) -> None:
        assert 0 <= num_accepted <= len(new)
        streamed.setdefault(index, []).extend(new)

    traces = decode(
        target, prompts[:8], draft=drafts[name], length=4, max_new_tokens=limit, streamer=stream
    )
    assert tokens(traces) == [trace.tokens[:limit] for trace in plain[:8]]
    assert tokens(traces) == [streamed[i] for i in range(8)]
    assert all(trace.finish == "length" for trace in traces)
    if name == "self":  # nothing is drafted that could not be emitted, so nothing is trimmed
        assert all(trace.num_emitted == [a + 1 for a in trace.num_accepted] for trace in traces)
        assert all(trace.num_accepted == trace.num_drafts for trace in traces)


def test_the_context_ends_an_answer(
    language_model: Callable[..., LanguageModel],
    target: LanguageModel,
    drafts: Drafts,
    decode: Decode,
) -> None:
    """Rows of different room in one batch: each fills its context exactly, none looks past it."""
    small = language_model(target.model, target.tokenizer, context_length=40)
    rows = [list(range(3, 3 + n)) for n in (39, 30, 36, 5)]
    roomy = decode(target, rows, max_new_tokens=30)
    for draft in (None, drafts["self"], drafts["near"], "lookup"):
        traces = decode(small, rows, draft=draft, max_new_tokens=30)
        assert [len(t.tokens) for t in traces] == [1, 10, 4, 30]
        assert all(t.finish == "length" for t in traces)
        assert tokens(traces) == [t.tokens[: len(s.tokens)] for t, s in zip(roomy, traces, strict=True)]


@pytest.mark.parametrize("draft", [None, "self", "near"])
def test_stop_string_inside_a_draft(
    target: LanguageModel,
    drafts: Drafts,
    prompts: Prompts,
    plain: list[Trace],
    decode: Decode,
    draft: str | None,
) -> None:
    """The token that completes the string is the last; a string may span tokens, and EOS before it wins."""
    full = plain[2].tokens
    spell = target.tokenizer.decode
    stop = spell(full[5:8])
    number = next(n for n in range(1, 21) if stop in spell(full[:n]))
    model = drafts[draft] if draft else None
    (trace,) = decode(target, prompts[2:3], draft=model, stop=("never so", stop), seeds=[2])
    assert (trace.finish, trace.tokens) == ("stop", full[:number])
    trace.check()
    eos = full[2]
    assert eos not in full[:2]
    (trace,) = decode(target, prompts[2:3], draft=model, stop=(stop,), eos_ids=[eos], seeds=[2])
    assert (trace.finish, trace.tokens) == ("eos", full[:3])
    (trace,) = decode(target, prompts[2:3], draft=model, stop=(stop,), max_new_tokens=number, seeds=[2])
    assert (trace.finish, trace.tokens) == ("stop", full[:number])  # the limit does not mask the stop
    (trace,) = decode(target, prompts[2:3], draft=model, stop=(stop,), max_new_tokens=number - 1, seeds=[2])
    assert (trace.finish, trace.tokens) == ("length", full[: number - 1])


def test_a_long_stop_string_is_found(target: LanguageModel, prompts: Prompts, decode: Decode) -> None:
    (full,) = decode(target, prompts[2:3], max_new_tokens=120)
    spell = target.tokenizer.decode
    stop = spell(full.tokens[3:100])
    (trace,) = decode(target, prompts[2:3], max_new_tokens=120, stop=(stop,))
    assert (trace.finish, trace.tokens) == ("stop", full.tokens[:100])


# What a round records


def test_trace_counts_raw_and_trimmed(
    target: LanguageModel,
    drafts: Drafts,
    prompts: Prompts,
    decode: Decode,
    common_ids: list[int],
) -> None:
    traces = decode(target, prompts, draft=drafts["near"], eos_ids=common_ids)
    for trace in traces:
        assert sum(trace.num_emitted) == len(trace.tokens) - 1
        assert len(trace.num_drafts) == len(trace.num_accepted) == len(trace.num_emitted)
        assert all(a <= k for a, k in zip(trace.num_accepted, trace.num_drafts, strict=True))
        full_rounds = list(zip(trace.num_accepted, trace.num_emitted, strict=True))[:-1]
        assert all(emitted == accepted + 1 for accepted, emitted in full_rounds)  # only the last is trimmed
    trimmed = [t for t in traces if t.num_emitted and t.num_emitted[-1] <= t.num_accepted[-1]]
    assert trimmed
    assert 0 < acceptance(traces) < 1
    assert acceptance([]) == 0


@pytest.mark.parametrize(
    "broken",
    [{"num_emitted": [3, 1]}, {"num_accepted": [3, 0]}, {"num_emitted": [4, 0]}, {"num_drafts": [2]}],
)
def test_trace_check_notices(broken: dict[str, list[int]]) -> None:
    good = {"num_drafts": [2, 2], "num_accepted": [2, 0], "num_emitted": [3, 1]}
    Trace(prompt_tokens=1, tokens=[5, 6, 7, 8, 9], **good).check()
    bad = {**good, **broken}
    number = 5 if broken != {"num_emitted": [3, 1]} else 4
    with pytest.raises(AssertionError):
        Trace(prompt_tokens=1, tokens=[5] * number, **bad).check()


def test_a_stopwatch_splits_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.0, 11.0, 13.5, 14.0])
    monkeypatch.setattr("specdec.trace.time.perf_counter", lambda: next(clock))
    watch = Stopwatch(torch.device("cpu"))
    watch.mark()
    watch.mark()
    assert watch.split() == [1.0, 2.5, 0.5]


@pytest.mark.gpu
def test_a_stopwatch_sees_what_a_gpu_does() -> None:
    """Queued work belongs to its own part, not to the one in which the host waits for it."""
    matrix = torch.randn(4096, 4096, device="cuda")
    for _ in range(2):
        watch = Stopwatch(matrix.device)
        for _ in range(50):
            matrix = matrix @ matrix
        watch.mark()
        watch.mark()
        matrix.sum().item()
        work, nothing, rest = watch.split()
    assert work > 10 * max(nothing, rest)
