"""What every command shares: one-line errors with exit codes, and progress bars that stay silent in logs."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import click

from specdec.errors import AnswerIsNo, UserError

if TYPE_CHECKING:
    from tqdm import tqdm

OUT_OF_MEMORY_FIX = (
    "lower eval.batch_size or generate.batch_size when decoding, "
    "train.batch_tokens (or raise train.accumulate) when training, or train.max_length"
)


def friendly(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a click command `--debug`, and end it by the house's exit codes.

    0 done; 1 the answer is no (AnswerIsNo), or the memory ran out; 2 the request is wrong (UserError),
    one line on stderr; 130 interrupted. With `--debug` the traceback comes first. Goes under
    `@click.command()`.
    """

    @click.option("--debug", is_flag=True, help="Print the traceback of an error.")
    @functools.wraps(command)
    def wrapped(*args: Any, debug: bool, **kwargs: Any) -> Any:
        if not sys.stderr.isatty():
            os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' bars too; tqdm reads it when it is imported
        try:
            return command(*args, **kwargs)
        except UserError as error:
            _end(str(error), 2, debug=debug)
        except AnswerIsNo as error:
            _end(str(error), 1, debug=debug)
        except KeyboardInterrupt:
            _end("interrupted", 130, debug=debug)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0].partition(". ")[0]
            message = UserError("out of memory", got=reason or None, fix=OUT_OF_MEMORY_FIX)
            _end(str(message), 1, debug=debug)

    return wrapped


def run_and_exit(invoke: Callable[[], Any]) -> NoReturn:
    """Call a click command (standalone_mode=False) and end the process by the house's exit codes.

    A wrong command line is one line on stderr, without click's usage block.
    """
    try:
        code = invoke()
    except click.ClickException as error:
        _end(error.format_message(), error.exit_code, debug=False)
    except click.Abort:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def progress(total: int | None, desc: str, unit: str) -> tqdm:
    """A bar on stderr for work longer than 3 s, silent when stderr is not a terminal; call `.update(n)`."""
    from tqdm import tqdm

    return tqdm(
        total=total, desc=desc, unit=unit, delay=3, disable=not sys.stderr.isatty(), file=sys.stderr,
        dynamic_ncols=True,
    )  # fmt: skip


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")  # a command that never loaded torch cannot have run out of its memory
    if isinstance(error, MemoryError):
        return True
    return torch is not None and (
        isinstance(error, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)
    )


def _end(message: str, code: int, *, debug: bool) -> NoReturn:
    if debug:
        import traceback

        traceback.print_exc()
    click.echo(f"draftsmith: {' '.join(message.split())}", err=True)
    sys.exit(code)
