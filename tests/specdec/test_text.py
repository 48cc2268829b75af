"""Streamed text: whole characters only, and nothing lost."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from specdec.text import TextStream, pieces


@pytest.mark.parametrize("text", ["plain words", "emoji 👩‍👩‍👧‍👦 and 🏳️‍🌈", "東京は日本の首都です。", "ترجم é"])
def test_pieces_are_whole_characters_and_join_to_the_text(
    tiny_tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    ids = tiny_tokenizer.encode(text, add_special_tokens=False)
    parts = pieces(tiny_tokenizer, ids)
    assert len(parts) == len(ids) and "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_a_stream_cut_inside_a_character_shows_what_is_left(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tiny_tokenizer.encode("a👩", add_special_tokens=False)[:-1]
    stream = TextStream(tiny_tokenizer)
    assert "".join(stream.push(i) for i in ids) == "a"
    assert stream.flush() == "\ufffd"
    assert pieces(tiny_tokenizer, []) == []
