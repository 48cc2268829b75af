"""Files that are whole or absent: atomic writes, JSON lines that survive a kill, content fingerprints."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdec.errors import UserError

_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


@contextmanager
def disk_errors(path: Path | str) -> Iterator[None]:
    """Turn what a disk refuses into one clear line naming the path."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise UserError(f"cannot write {path}", got=_FULL[error.errno], fix="free some space and run the same command again") from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR):
            raise UserError(f"cannot write {path}", got=os.strerror(error.errno), fix="choose a writable folder (run.dir or eval.out)") from error
        raise


def _umask_mode(base: int) -> int:
    mask = os.umask(0)
    os.umask(mask)
    return base & ~mask


def write_atomic(path: Path | str, data: str | bytes) -> None:
    """Write a whole file or nothing: temporary file beside it, fsync, rename. Mode follows the umask."""
    path = Path(path)
    raw = data.encode() if isinstance(data, str) else data
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, _umask_mode(0o666))
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


@contextmanager
def atomic_dir(path: Path | str) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block succeeds and vanishes when it does not."""
    path = Path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            yield temporary
            for item in [temporary, *temporary.rglob("*")]:
                # safetensors writes 0600 whatever the umask says; others on a cluster have to read these files.
                item.chmod(_umask_mode(0o777 if item.is_dir() else 0o666))
            if path.exists():
                shutil.rmtree(path)
            os.replace(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def append_jsonl(path: Path | str, record: Any) -> None:
    """Append one record as one line and push it to the disk."""
    with disk_errors(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())


def read_jsonl(path: Path | str) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of every non-blank line. UTF-8 with or without BOM, any line ends."""
    path = Path(path)
    if not path.is_file():
        raise UserError("file not found", got=str(path), expected="a JSONL file")
    rows = []
    for number, raw in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            line = raw.decode("utf-8").strip()
        except UnicodeDecodeError:
            raise UserError(f"{path}, line {number}: not UTF-8", fix=f"iconv -f LATIN1 -t UTF-8 {path} > converted.jsonl") from None
        if line:
            rows.append((number, _parse(path, number, line)))
    return rows


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {number}: broken JSON", got=error.msg, expected="one JSON object a line", fix="correct or delete that line") from None
    if not isinstance(record, dict):
        raise UserError(f"{path}, line {number}: not an object", got=type(record).__name__, expected="one JSON object a line")
    return record


def recover_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """Records of a file that a kill may have torn: a broken last line is cut off the file. Absent file: none."""
    path = Path(path)
    if not path.exists():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    return [record for _, record in read_jsonl(path)]


def sha256_file(path: Path | str) -> str:
    """SHA-256 of a file's bytes, hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(obj: Any) -> str:
    """16 hex characters that stand for a JSON-like object's content."""
    return hashlib.sha256(json.dumps(obj, sort_keys=True, default=str).encode()).hexdigest()[:16]
