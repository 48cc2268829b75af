"""Messages -> token ids, the one way used to generate, to train and to evaluate.

A user's text stays text: control ids (turn markers, end of text) come from the template alone, even where a
message spells one out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from specdec.errors import UserError
from specdec.files import fingerprint

OPEN, CLOSE = "\ue0f0", "\ue0f1"
"""Private-use characters around the number of a control word taken out of a message."""


class Renderer:
    """Renders conversations with a tokenizer's own chat template.

    A tokenizer without a template gets the contents joined by blank lines, behind its usual start token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        # Some tokenizers add runs of spaces as tokens: those are text, not control.
        added = [word for word in tokenizer.get_added_vocab() if word.strip()]
        words = sorted(added, key=lambda word: (-len(word), word))
        self._control = re.compile("|".join(re.escape(word) for word in words)) if words else None

    @property
    def fingerprint(self) -> str:
        """Identity of template and vocabulary."""
        tokenizer = self.tokenizer
        return fingerprint([tokenizer.chat_template, sorted(tokenizer.get_vocab().items())])

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], name: str) -> list[int]:
        """The ids of a conversation, up to where the answer begins.

        Args:
            messages: the conversation so far.
            name: the prompt's id, for errors.

        Raises:
            UserError: the template cannot render a message, or leaves one out; names the prompt's id.
        """
        taken: list[str] = []
        masked = [self._mask(message, taken) for message in messages]
        text = self._render(masked, name)
        for number, message in enumerate(masked):
            _check_rendered(message, number, text, name)
        ids: list[int] = []
        for number, piece in enumerate(re.split(f"{OPEN}(\\d+){CLOSE}", text)):
            if number % 2:
                word = taken[int(piece)]  # cut in two, so that no tokenizer takes it for the control id
                ids += [i for part in (word[:1], word[1:]) for i in self._encode(part, text=True)]
            elif piece:
                ids += self._encode(piece, text=False)
        return self._start() + ids if self.tokenizer.chat_template is None else ids

    def fits(
        self,
        name: str,
        ids: Sequence[int],
        context_length: int,
        max_new_tokens: int,
        too_long: Literal["refuse", "skip"],
    ) -> bool:
        """Whether prompt and answer fit the context; a prompt that does not is refused or skipped by name.

        Raises:
            UserError: it does not fit, and `too_long` is refuse.
        """
        if len(ids) + max_new_tokens <= context_length:
            return True
        message = UserError(
            f"prompt {name!r} is too long",
            got=f"{len(ids)} tokens",
            expected=f"at most {context_length - max_new_tokens} (context {context_length}, "
            f"{max_new_tokens} to answer)",
            fix="shorten it, or skip such prompts by name with too_long=skip",
        )
        if too_long == "refuse":
            raise message
        print(f"skipped: {message}", file=sys.stderr)
        return False

    def _start(self) -> list[int]:
        """The start token, where the tokenizer puts one before a text."""
        first = self.tokenizer.encode("a")[:1]
        return list(first) if first and first[0] == self.tokenizer.bos_token_id else []

    def _mask(self, value: Any, taken: list[str]) -> Any:
        """The message with every control word in its texts replaced by a numbered mark."""
        if isinstance(value, str) and self._control is not None:
            return self._control.sub(partial(_mark, taken), value.replace(OPEN, "").replace(CLOSE, ""))
        if isinstance(value, Mapping):
            return {key: self._mask(inner, taken) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._mask(inner, taken) for inner in value]
        return value

    def _render(self, messages: list[Any], name: str) -> str:
        if self.tokenizer.chat_template is None:
            return "\n\n".join(str(message.get("content", "")) for message in messages)
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise UserError(
                f"prompt {name!r} cannot be rendered",
                got=str(error),
                expected="messages that the target's chat template knows",
                fix="leave the prompt out, or write its tool calls as text",
            ) from error
        assert isinstance(text, str)
        return text

    def _encode(self, piece: str, *, text: bool) -> list[int]:
        ids = self.tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=text)
        return list(ids)


def _mark(taken: list[str], found: re.Match[str]) -> str:
    taken.append(found.group())
    return f"{OPEN}{len(taken) - 1}{CLOSE}"


def _check_rendered(message: Mapping[str, Any], number: int, text: str, name: str) -> None:
    """A template that drops what it does not know would change the question in silence."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else []
    for call in message.get("tool_calls") or []:
        parts.append(str(call.get("function", call).get("name", "")))
    if all(part.strip() in text for part in parts):
        return
    what = "its tool calls" if message.get("tool_calls") else f"its {message['role']} message"
    raise UserError(
        f"prompt {name!r} cannot be rendered",
        got=f"message {number}: the target's chat template leaves out {what}",
        expected="a template that renders every message",
        fix="leave the prompt out, or write it in messages that the template knows",
    )
