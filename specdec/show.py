"""One prompt, decoded while someone watches."""

from collections.abc import Callable
from dataclasses import dataclass

from specdec import cost
from specdec.decoder import Decoder, Limits, Request
from specdec.errors import UserError
from specdec.length import LengthPolicy, make_policy
from specdec.measure import measure
from specdec.pair import LanguageModel, TargetSection, check_pair, draft_folder, load_draft, load_model
from specdec.propose import DraftModel
from specdec.render import Renderer
from specdec.sampling import Sampling
from specdec.settings import RunSection, Section
from specdec.text import TextStream
from specdec.trace import Times, Trace

Writer = Callable[[str, bool], None]
"""Called with a piece of text and whether it was an accepted draft."""


class DecodeJob(Section):
    """The settings a decode reads from a config."""

    run: RunSection = RunSection()
    """Where the run lives."""
    target: TargetSection
    """The model that answers."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is asked, and how it is decoded."""

    question: str
    """The user's text."""
    system: str | None
    """A system message before it."""
    draft: str | None
    """Folder of the draft; None: the best checkpoint of the run."""
    sampling: Sampling
    """How tokens are drawn."""
    rule: str
    """How drafts are verified above temperature 0."""
    max_new_tokens: int
    """Tokens at most."""
    draft_length: str
    """auto, or a whole number."""
    seed: int
    """Seed of sampling."""
    compare: bool
    """Decode plainly too, for the speedup."""


def show(job: DecodeJob, options: Options, write: Writer) -> str:
    """Decode the question, writing pieces as they come; returns one line of numbers. Raises UserError."""
    if not options.question.strip():
        raise UserError("the prompt is empty", fix="pass --prompt TEXT, or text on stdin")
    sampling = options.sampling
    length = _draft_length(options.draft_length)
    if length != "cost":
        make_policy(length)  # a wrong length shows before models load
    folder = draft_folder(job.run, options.draft)
    target = load_model(job.target)
    draft = load_draft(str(folder), target)
    vocab_size = check_pair(target, draft)
    messages = [{"role": "user", "content": options.question}]
    if options.system:
        messages.insert(0, {"role": "system", "content": options.system})
    renderer = Renderer(target.tokenizer)
    ids = renderer.prompt_ids(messages, "prompt")
    renderer.fits("prompt", ids, target.context_length, options.max_new_tokens, "refuse")
    policy = _policy(length, target, draft, vocab_size)
    limits = Limits(max_new_tokens=options.max_new_tokens, eos_ids=target.eos_ids)
    request = [Request(prompt_ids=ids, seed=options.seed)]
    slots = len(ids) + options.max_new_tokens + policy.max_length + 2
    proposer = DraftModel(draft, vocab_size=vocab_size, num_slots=slots, policy=policy, sampling=sampling)
    stream = TextStream(target.tokenizer)

    def watch(index: int, tokens: list[int], num_accepted: int) -> None:
        for place, token in enumerate(tokens):
            write(stream.push(token), place < num_accepted)

    speculative = Decoder(
        target, request, limits=limits, sampling=sampling, vocab_size=vocab_size,
        proposer=proposer, rule=options.rule, streamer=watch,
    )  # fmt: skip
    trace = speculative.run()[0]
    write(stream.flush(), False)
    if not options.compare:
        return summary(trace, speculative.times, None)
    plain = Decoder(target, request, limits=limits, sampling=sampling, vocab_size=vocab_size)
    return summary(trace, speculative.times, (plain.run()[0], plain.times))


def summary(trace: Trace, times: Times, plain: tuple[Trace, Times] | None) -> str:
    """Tokens, tokens/s of the decode, drafts accepted, tokens per target forward, speedup over plain."""
    emitted, drafted = sum(trace.num_emitted), sum(trace.num_drafts)
    accepted = sum(trace.num_accepted)
    parts = [f"{len(trace.tokens)} tokens ({trace.finish})"]
    if emitted:
        speed = emitted / times.decode_s
        parts.append(f"{speed:.1f} tokens/s")
        parts.append(f"{accepted} of {drafted} drafts accepted")
        parts.append(f"{emitted / len(trace.num_emitted):.2f} tokens per target forward")
        made = sum(plain[0].num_emitted) if plain is not None else 0
        if plain is not None and made:
            base = made / plain[1].decode_s
            parts.append(f"{speed / base:.2f}x plain decoding ({base:.1f} tokens/s)")
    return " | ".join(parts)


def _draft_length(text: str) -> int | str:
    return int(text) if text.lstrip("+-").isdigit() else text


def _policy(length: int | str, target: LanguageModel, draft: LanguageModel, vocab_size: int) -> LengthPolicy:
    """`auto`, `confidence` and `cost` follow the costs measured here and now."""
    if length not in ("auto", "confidence", "cost"):
        return make_policy(length)
    measured = measure(target, draft, vocab_size=vocab_size)
    threshold = cost.confidence_threshold(measured, cost.ASSUMED_ACCEPTANCE)
    return make_policy(length, threshold=threshold, cost=measured)
