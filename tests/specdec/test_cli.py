"""specdec/cli.py: exit codes and one-line endings."""

from __future__ import annotations

import click
import pytest
import torch
from click.testing import CliRunner

from specdec.cli import friendly
from specdec.errors import AnswerIsNo, UserError


def ending(error: BaseException | None, *args: str) -> tuple[int, str]:
    @click.command()
    @friendly
    def command() -> None:
        if error is not None:
            raise error

    result = CliRunner().invoke(command, list(args))
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (None, 0, ""),
        (UserError("train.lr", got=-1, expected="above 0", fix="raise\nit"), 2,
         "draftsmith: train.lr: got -1; expected above 0; fix: raise it\n"),
        (AnswerIsNo("2 of 8 prompts differ"), 1, "draftsmith: 2 of 8 prompts differ\n"),
        (KeyboardInterrupt(), 130, "draftsmith: interrupted\n"),
    ],
)  # fmt: skip
def test_endings(error: BaseException | None, code: int, words: str) -> None:
    assert ending(error) == (code, words)


def test_debug_prints_the_traceback() -> None:
    code, text = ending(UserError("wrong"), "--debug")
    assert code == 2
    assert "Traceback" in text


@pytest.mark.parametrize("error", [MemoryError(), torch.cuda.OutOfMemoryError("CUDA out of memory. 2 GiB")])
def test_out_of_memory_names_the_setting_to_lower(error: BaseException) -> None:
    code, text = ending(error)
    assert code == 1
    assert "eval.batch_size" in text
    assert text.count("\n") == 1


def test_a_fault_of_ours_is_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        CliRunner().invoke(_buggy, [], catch_exceptions=False)


@click.command()
@friendly
def _buggy() -> None:
    raise RuntimeError("a bug")
