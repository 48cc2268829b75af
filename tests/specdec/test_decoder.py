"""The decoder is lossless, stops where it should, and a row does not know its batch mates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.decoder import Decoder, Limits, Request, check_requests
from specdec.errors import UserError
from specdec.pair import LanguageModel
from specdec.sampling import Sampling
from specdec.trace import Trace, acceptance

Decode = Callable[..., list[Trace]]
Prompts = list[list[int]]
EVERY_DRAFT = ["random", "self", "near", "short", "lookup"]
WARM = Sampling(temperature=0.8)


@pytest.fixture(scope="session")
def plain(target: LanguageModel, prompts: Prompts, decode: Decode) -> list[Trace]:
    return decode(target, prompts)


@pytest.fixture(scope="session")
def common_ids(plain: list[Trace]) -> list[int]:
    """Ids that turn up in most answers, but not at once: as EOS they land inside drafts."""
    counts = Counter(token for trace in plain for token in set(trace.tokens[4:]))
    return [token for token, _ in counts.most_common(3)]


def pick(drafts: dict[str, LanguageModel], name: str) -> LanguageModel | str:
    return drafts.get(name, name)


def tokens(traces: list[Trace]) -> list[list[int]]:
    return [trace.tokens for trace in traces]


# Plain decoding, against what it claims to be


def test_plain_decoding_is_greedy_generate(
    target: LanguageModel, prompts: Prompts, plain: list[Trace]
) -> None:
    for prompt, trace in zip(prompts, plain, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            answer = target.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
        assert trace.tokens == answer[0, len(prompt) :].tolist()
        assert trace.finish == "length"


def test_plain_decoding_is_the_argmax_of_fresh_forwards(
    target: LanguageModel, prompts: Prompts, plain: list[Trace]
) -> None:
    for prompt, trace in zip(prompts, plain, strict=True):
        with torch.no_grad():
            logits = target.model(torch.tensor([prompt + trace.tokens[:-1]]), use_cache=False).logits[0]
        assert trace.tokens == logits[len(prompt) - 1 :].argmax(dim=-1).tolist()


@pytest.mark.parametrize("batch_size", [1, 3, 40])
def test_plain_decoding_is_the_same_in_any_batch(
    target: LanguageModel, prompts: Prompts, plain: list[Trace], decode: Decode, batch_size: int
) -> None:
    assert tokens(decode(target, prompts, batch_size=batch_size)) == tokens(plain)


@pytest.mark.parametrize("draft", [None, "near", "self"])
def test_observer_sees_the_logits_of_every_emitted_token(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    prompts: Prompts,
    decode: Decode,
    common_ids: list[int],
    draft: str | None,
) -> None:
    seen: dict[int, list[Tensor]] = {}

    def observe(indices: list[int], logits: Tensor, counts: list[int]) -> None:
        for index, row, count in zip(indices, logits, counts, strict=True):
            seen.setdefault(index, []).extend(row[:count].clone())

    traces = decode(target, prompts[:8], eos_ids=common_ids, observer=observe, draft=draft and drafts[draft])
    for index, trace in enumerate(traces):
        with torch.no_grad():
            fresh = target.model(torch.tensor([prompts[index] + trace.tokens[:-1]]), use_cache=False).logits[
                0
            ]
        got = torch.stack(seen[index][: len(trace.tokens)])  # a finished row rides along until it is dropped
        torch.testing.assert_close(got, fresh[len(prompts[index]) - 1 :], atol=5e-5, rtol=0)


# Lossless


@pytest.mark.parametrize("length", [1, 4, "auto"])
@pytest.mark.parametrize("name", EVERY_DRAFT)
def test_lossless_in_a_batch_of_eight(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    prompts: Prompts,
    plain: list[Trace],
    decode: Decode,
    name: str,
    length: int | str,
) -> None:
    traces = decode(target, prompts, draft=pick(drafts, name), length=length)
    assert tokens(traces) == tokens(plain)
    assert sum(sum(trace.num_drafts) for trace in traces) > 100  # it did speculate


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("name", "length"),
    [("random", 1), ("self", 4), ("near", 4), ("near", "auto"), ("short", 4), ("lookup", 4)],
)
def test_lossless_in_small_batches(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    prompts: Prompts,
    plain: list[Trace],
    decode: Decode,
    batch_size: int,
    name: str,
    length: int | str,
) -> None:
    model = pick(drafts, name)
    traces = decode(target, prompts, draft=model, length=length, batch_size=batch_size, max_new_tokens=12)
    assert tokens(traces) == [trace.tokens[:12] for trace in plain]


def test_the_drafts_cover_the_range_of_acceptance(
    target: LanguageModel, drafts: dict[str, LanguageModel], prompts: Prompts, decode: Decode
) -> None:
    """Otherwise the tests above would say little: rejection, acceptance, and both in one batch."""
    rate = {name: acceptance(decode(target, prompts[:20], draft=pick(drafts, name))) for name in EVERY_DRAFT}
    assert rate["random"] < 0.05 < rate["lookup"]
    assert 0.3 < rate["near"] < 0.9
    assert 0.05 < rate["short"] < rate["near"]
    assert rate["self"] == 1.0


def test_no_draft_is_plain_decoding(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    prompts: Prompts,
    plain: list[Trace],
    decode: Decode,
) -> None:
    traces = decode(target, prompts[:8], draft=drafts["near"], length=0)
    assert tokens(traces) == tokens(plain[:8])
    assert all(trace.num_drafts == [0] * 19 for trace in traces)


# Endings inside accepted drafts


@pytest.mark.parametrize("length", [1, 4, "auto"])
@pytest.mark.parametrize("name", ["self", "near", "lookup"])
def test_eos_inside_drafts(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    prompts: Prompts,
    plain: list[Trace],
    decode: Decode,
    common_ids: list[int],
    name: str,
    length: int | str,
) -> None:
    ended = decode(target, prompts, eos_ids=common_ids)
    traces = decode(target, prompts, draft=pick(drafts, name), length=length, eos_ids=common_ids)
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
    drafts: dict[str, LanguageModel],
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
        target, prompts[:8], draft=pick(drafts, name), length=4, max_new_tokens=limit, streamer=stream
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
    drafts: dict[str, LanguageModel],
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
    drafts: dict[str, LanguageModel],
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
    drafts: dict[str, LanguageModel],
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


# The draft's cache


@pytest.mark.parametrize("sampling", [Sampling(), WARM])
def test_a_draft_that_is_the_target_is_always_accepted(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    prompts: Prompts,
    decode: Decode,
    sampling: Sampling,
) -> None:
    """A hole in the draft's cache leaves the output right and lets acceptance decay with length."""
    for length in (1, 2, 5):
        traces = decode(
            target, prompts[:6], draft=drafts["self"], length=length, max_new_tokens=150, sampling=sampling
        )
        for trace in traces:
            assert trace.num_accepted == trace.num_drafts
            assert set(trace.num_drafts[:-1]) == {length}


# Streams


@pytest.mark.parametrize("sampling", [WARM, Sampling(temperature=1.0, top_k=9, top_p=0.9, min_p=0.02)])
@pytest.mark.parametrize(
    ("draft", "length"), [(None, 0), ("near", 4), ("near", "auto"), ("short", "auto"), ("lookup", 4)]
)
def test_a_row_does_not_know_its_batch_mates(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    prompts: Prompts,
    decode: Decode,
    common_ids: list[int],
    draft: str | None,
    length: int | str,
    sampling: Sampling,
) -> None:
    more = {
        "draft": draft and pick(drafts, draft), "length": length, "sampling": sampling,
        "eos_ids": common_ids[:1],
    }  # fmt: skip
    rows, seeds = prompts[:5], [7, 7, 2**40 + 1, 0, 12345]
    alone = decode(target, rows, batch_size=1, seeds=seeds, **more)
    together = decode(target, rows, batch_size=5, seeds=seeds, **more)
    order = [3, 0, 4, 2, 1]
    shuffled = decode(target, [rows[i] for i in order], batch_size=5, seeds=[seeds[i] for i in order], **more)
    for i in range(5):
        for other in (together[i], shuffled[order.index(i)]):
            assert other.tokens == alone[i].tokens
            assert other.num_accepted == alone[i].num_accepted
            assert other.num_drafts == alone[i].num_drafts
    assert len({tuple(t.tokens) for t in alone}) == 5


def test_seeds_make_different_answers(target: LanguageModel, prompts: Prompts, decode: Decode) -> None:
    traces = decode(target, [prompts[0]] * 16, batch_size=16, sampling=WARM)
    assert len({tuple(t.tokens) for t in traces}) == 16
    again = decode(target, [prompts[0]] * 16, batch_size=16, sampling=WARM)
    assert tokens(again) == tokens(traces)


# The law of sampling, through everything


@pytest.mark.parametrize(
    ("name", "length"),
    [(None, 0), ("near", 1), ("near", 3), ("near", "auto"), ("random", 3), ("random", "auto"), ("short", 3),
     ("short", "auto"), ("lookup", 3)],
)  # fmt: skip
def test_law_of_the_first_three_tokens(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    decode: Decode,
    g_test: Callable[[Tensor, Tensor], float],
    law: tuple[list[int], Sampling, Tensor],
    name: str | None,
    length: int | str,
) -> None:
    prompt, sampling, joint = law
    num_rows, vocab = 4000, target.vocab_size
    traces = decode(
        target, [prompt] * num_rows, draft=name and pick(drafts, name), length=length, sampling=sampling,
        max_new_tokens=5, batch_size=num_rows,
    )  # fmt: skip
    first, second, third = torch.tensor([t.tokens[:3] for t in traces]).T
    assert g_test((first * vocab + second) * vocab + third, joint) > 1e-3
    if name in ("near", "short"):
        assert 0.05 < acceptance(traces) < 0.95
    if name in ("near", "random") and length == "auto":
        assert len({t.num_drafts[0] for t in traces}) > 1  # ragged


# Refusals


@pytest.mark.parametrize(
    ("prompts", "limit", "words"),
    [
        ([], 5, "nothing to decode"),
        ([[]], 5, "prompt 0"),
        ([[1], [1] * 512], 5, "prompt 1"),
        ([[1]], 0, "max_new"),
    ],
)
def test_what_cannot_be_decoded_is_refused(
    target: LanguageModel, prompts: Prompts, limit: int, words: str
) -> None:
    requests = [Request(prompt_ids=p) for p in prompts]
    limits = Limits(max_new_tokens=limit)
    with pytest.raises(UserError, match=words) as error:
        check_requests(target, requests, limits)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=words):
        Decoder(target, requests, limits=limits, sampling=Sampling())


def test_one_token_prompts_decode(
    target: LanguageModel, drafts: dict[str, LanguageModel], decode: Decode
) -> None:
    rows = [[5], [6], [9]]
    assert tokens(decode(target, rows, draft=drafts["near"])) == tokens(decode(target, rows))


# Rows that finish and are replaced


@pytest.mark.parametrize("max_rows", [1, 3, 16])
@pytest.mark.parametrize("name", [None, "near", "self", "short", "lookup"])
@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
def test_a_row_does_not_know_whose_place_it_takes(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    prompts: Prompts,
    decode: Decode,
    common_ids: list[int],
    sampling: Sampling,
    name: str | None,
    max_rows: int,
) -> None:
    """40 requests through a few places; ends differ, so that places are refilled at different times."""
    more = {"draft": name and pick(drafts, name), "sampling": sampling, "eos_ids": common_ids}
    want = decode(target, prompts, batch_size=40, **more)
    got = decode(target, prompts, batch_size=40, max_rows=max_rows, **more)
    assert tokens(got) == tokens(want)
    assert [t.num_accepted for t in got] == [t.num_accepted for t in want]
    assert len({len(t.tokens) for t in got}) > 3


def test_answers_come_as_they_end(target: LanguageModel, prompts: Prompts, common_ids: list[int]) -> None:
    limits = Limits(max_new_tokens=20, eos_ids=frozenset(common_ids))
    decoder = Decoder(
        target, [Request(prompt_ids=p) for p in prompts], limits=limits, sampling=Sampling(), max_rows=4
    )
    told = [index for index, trace in decoder.finished() if trace.finish]
    assert sorted(told) == list(range(40)) and told != sorted(told)
    assert not torch.is_inference_mode_enabled()
    assert all(r.num_rows <= 4 for r in decoder.times.rounds)
    # A batch that waited for its longest answer would take more rounds.
    waits = sum(max(len(t.num_emitted) for t in decoder.traces[i : i + 4]) for i in range(0, 40, 4))
    assert len(decoder.times.rounds) < 0.9 * waits


def test_a_request_that_ends_at_once_frees_its_place(target: LanguageModel, prompts: Prompts, decode: Decode) -> None:
    rows = prompts[:10]
    assert [len(t.tokens) for t in decode(target, rows, max_new_tokens=1, batch_size=10, max_rows=2)] == [1] * 10


# The other rule, and settings that look at what stands before


@pytest.mark.parametrize("name", ["near", "short", "random", "lookup"])
def test_block_verification_keeps_the_law_and_accepts_no_less(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    decode: Decode,
    g_test: Callable[[Tensor, Tensor], float],
    law: tuple[list[int], Sampling, Tensor],
    name: str,
) -> None:
    prompt, sampling, joint = law
    rate = {}
    for rule in ("token", "block"):
        traces = decode(
            target, [prompt] * 4000, draft=pick(drafts, name), length=3, sampling=sampling, max_new_tokens=5,
            batch_size=4000, rule=rule,
        )  # fmt: skip
        first, second, third = torch.tensor([t.tokens[:3] for t in traces]).T
        vocab = target.vocab_size
        assert g_test((first * vocab + second) * vocab + third, joint) > 1e-3
        rate[rule] = acceptance(traces)
    assert rate["block"] > rate["token"] - 0.01


PENALISED = Sampling(
    repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, banned=(7, 12), min_new_tokens=6
)


@pytest.mark.parametrize("name", ["near", "self", "short", "lookup"])
@pytest.mark.parametrize("warm", [False, True], ids=["greedy", "sampled"])
def test_penalties_look_at_each_positions_own_prefix(
    target: LanguageModel,
    drafts: dict[str, LanguageModel],
    prompts: Prompts,
    plain: list[Trace],
    decode: Decode,
    common_ids: list[int],
    name: str,
    warm: bool,
) -> None:
    """Greedy: the text of plain decoding, which itself differs from the unpenalised one. Self-acceptance stays 1."""
    sampling = replace(PENALISED, temperature=0.8) if warm else PENALISED
    more = {"sampling": sampling, "eos_ids": common_ids}
    want = decode(target, prompts, **more)
    got = decode(target, prompts, draft=pick(drafts, name), **more)
    if not warm:
        assert tokens(got) == tokens(want)
        assert sum(a.tokens != b.tokens[: len(a.tokens)] for a, b in zip(want, plain, strict=True)) > 20
    for trace in [*want, *got]:
        assert not {7, 12} & set(trace.tokens) and len(trace.tokens) >= 6
    if name == "self":
        assert acceptance(got) == 1.0
