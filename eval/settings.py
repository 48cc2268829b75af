"""The settings of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from specdec.sampling import Sampling
from specdec.settings import Section


class EvalSection(Section):
    """What is decoded, how, and where the report goes."""

    suite: str = "builtin"
    """Prompts: "builtin" (the held-out report split of `prompts`) or a JSONL file."""
    draft: str | None = None
    """Folder of the draft to score; None: the best checkpoint of the run."""
    out: Path | None = None
    """Folder of the report; None: eval/step-N in the run folder."""
    draft_length: Literal["auto", "confidence", "entropy", "history", "cost"] | Annotated[int, Field(ge=0)] = "auto"
    """Tokens drafted per round; "auto" follows the measured costs; 0 is plain decoding."""
    temperatures: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1)] = (0.0,)
    """Sampling temperatures, each scored on every prompt; 0 is greedy."""
    rule: Literal["token", "block"] = "token"
    """How drafts are verified above temperature 0: token by token (2211.17192) or as a block (2403.10444)."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k most likely tokens; 0: from all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set whose mass reaches p."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Leave out tokens below min_p times the largest probability."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Against tokens of prompt and answer (1909.05858), at temperature 0, too."""
    presence_penalty: float = 0.0
    """Against tokens of the answer, once."""
    frequency_penalty: float = 0.0
    """Against tokens of the answer, for each time."""
    max_new_tokens: int = Field(default=96, ge=2)
    """Tokens decoded per prompt and turn, at most."""
    batch_size: int = Field(default=1, ge=1)
    """Prompts decoded side by side."""
    max_prompts: int | None = Field(default=48, ge=1)
    """Prompts scored, at most; None: all of the suite."""
    seed: int = Field(default=0, ge=0)
    """Seed of sampling and of the bootstrap."""
    lossless_prompts: int = Field(default=8, ge=0)
    """Prompts of the float32 greedy identity check; 0 skips it."""
    baseline_prompts: int = Field(default=8, ge=0)
    """Prompts that prompt lookup and transformers' generate are timed on; 0 skips both."""
    too_long: Literal["refuse", "skip"] = "refuse"
    """What happens to a prompt that does not fit the context with its answer."""

    def sampling(self, temperature: float) -> Sampling:
        """The law that target and draft are decoded under, at one of the temperatures."""
        return Sampling(
            temperature=temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p,
            repetition_penalty=self.repetition_penalty, presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )  # fmt: skip
