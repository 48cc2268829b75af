"""What a draft is scored on: prompts, rendered and measured before any model is loaded."""

from dataclasses import dataclass

from distill.prompts import Prompt, PromptsSection, interleaved, load_prompts, read_suite
from eval.settings import EvalSection
from specdec.errors import UserError
from specdec.render import Renderer


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt with its rendered first turn."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]


def load_suite(
    section: EvalSection, prompts: PromptsSection, renderer: Renderer, *, context_length: int, seed: int
) -> list[Question]:
    """The questions of an evaluation: at most `max_prompts`, one of each domain in turn.

    Raises:
        UserError: the suite is missing, empty or broken, or a prompt does not fit the context.
    """
    if section.suite == "builtin":
        found = load_prompts(prompts, seed=seed).report
    else:
        found = tuple(interleaved(read_suite(section.suite), section.seed))
    questions = []
    for prompt in found:
        ids = renderer.prompt_ids(prompt.messages, prompt.id)
        if renderer.fits(prompt.id, ids, context_length, section.max_new_tokens, section.too_long):
            questions.append(Question(prompt=prompt, prompt_ids=tuple(ids)))
    if not questions:
        raise UserError(f"suite {section.suite} has no prompt that fits", got=0, expected="at least one")
    return questions[: section.max_prompts]
