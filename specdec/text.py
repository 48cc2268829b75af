"""Token ids -> text, piece by piece."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class TextStream:
    """Text as tokens arrive. A character whose bytes are not all there yet is held back, never shown in half."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = ""

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self.ids.append(token)
        text = self._text()
        if text.endswith("\ufffd"):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """What is left when no more tokens come."""
        return self._advance(self._text())

    def _text(self) -> str:
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def _advance(self, text: str) -> str:
        new, self.shown = text[len(self.shown) :], text
        return new


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """One piece of text a token, which together are the text; a split character goes with its last token."""
    stream = TextStream(tokenizer)
    texts = [stream.push(token) for token in tokens]
    if texts:
        texts[-1] += stream.flush()
    return texts
