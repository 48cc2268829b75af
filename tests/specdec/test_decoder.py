"""The decoder is lossless, refuses what it cannot decode, and a row does not know its batch mates."""

from __future__ import annotations

from collections.abc import Callable

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
Drafts = dict[str, LanguageModel | str]
EVERY_DRAFT = ["random", "self", "near", "short", "lookup"]
WARM = Sampling(temperature=0.8)


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
    drafts: Drafts,
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
    drafts: Drafts,
    prompts: Prompts,
    plain: list[Trace],
    decode: Decode,
    name: str,
    length: int | str,
) -> None:
    traces = decode(target, prompts, draft=drafts[name], length=length)
    assert tokens(traces) == tokens(plain)
    assert sum(sum(trace.num_drafts) for trace in traces) > 100  # it did speculate


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("name", "length"),
    [("random", 1), ("self", 4), ("near", 4), ("near", "auto"), ("short", 4), ("lookup", 4)],
)
def test_lossless_in_small_batches(
    target: LanguageModel,
    drafts: Drafts,
    prompts: Prompts,
    plain: list[Trace],
    decode: Decode,
    batch_size: int,
    name: str,
    length: int | str,
) -> None:
    model = drafts[name]
    traces = decode(target, prompts, draft=model, length=length, batch_size=batch_size, max_new_tokens=12)
    assert tokens(traces) == [trace.tokens[:12] for trace in plain]


def test_the_drafts_cover_the_range_of_acceptance(
    target: LanguageModel, drafts: Drafts, prompts: Prompts, decode: Decode
) -> None:
    """Otherwise the tests above would say little: rejection, acceptance, and both in one batch."""
    rate = {name: acceptance(decode(target, prompts[:20], draft=drafts[name])) for name in EVERY_DRAFT}
    assert rate["random"] < 0.05 < rate["lookup"]
    assert 0.3 < rate["near"] < 0.9
    assert 0.05 < rate["short"] < rate["near"]
    assert rate["self"] == 1.0


def test_no_draft_is_plain_decoding(
    target: LanguageModel,
    drafts: Drafts,
    prompts: Prompts,
    plain: list[Trace],
    decode: Decode,
) -> None:
    traces = decode(target, prompts[:8], draft=drafts["near"], length=0)
    assert tokens(traces) == tokens(plain[:8])
    assert all(trace.num_drafts == [0] * 19 for trace in traces)


# The draft's cache


@pytest.mark.parametrize("sampling", [Sampling(), WARM])
def test_a_draft_that_is_the_target_is_always_accepted(
    target: LanguageModel,
    drafts: Drafts,
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
    drafts: Drafts,
    prompts: Prompts,
    decode: Decode,
    common_ids: list[int],
    draft: str | None,
    length: int | str,
    sampling: Sampling,
) -> None:
    more = {
        "draft": draft and drafts[draft], "length": length, "sampling": sampling,
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
    target: LanguageModel, drafts: Drafts, decode: Decode
) -> None:
    rows = [[5], [6], [9]]
    assert tokens(decode(target, rows, draft=drafts["near"])) == tokens(decode(target, rows))


# Rows that finish and are replaced


@pytest.mark.parametrize("max_rows", [1, 3, 16])
@pytest.mark.parametrize("name", [None, "near", "self", "short", "lookup"])
@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
def test_a_row_does_not_know_whose_place_it_takes(
    target: LanguageModel,
    drafts: Drafts,
    prompts: Prompts,
    decode: Decode,
    common_ids: list[int],
    sampling: Sampling,
    name: str | None,
    max_rows: int,
) -> None:
    """40 requests through a few places; ends differ, so that places are refilled at different times."""
    more = {"draft": name and drafts[name], "sampling": sampling, "eos_ids": common_ids}
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
