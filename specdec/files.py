"""Files that are whole or absent: atomic writes, JSON lines that survive a kill, checksums."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from specdec.errors import UserError

_DISK_ERRORS = {
    errno.ENOSPC: ("the disk is full", "free some space, or choose another folder"),
    errno.EDQUOT: ("the disk quota is used up", "free some space, or choose another folder"),
    errno.EACCES: ("permission denied", "choose a folder that you may write to"),
    errno.EPERM: ("permission denied", "choose a folder that you may write to"),
    errno.EROFS: ("the file system is read-only", "choose a folder that you may write to"),
    errno.ENOENT: ("no such folder can be made", "choose another path"),
    errno.EEXIST: ("a file of that name is in the way", "choose another path"),
    errno.ENOTDIR: ("a parent of the path is a file, not a folder", "choose another path"),
}


def write_atomic(path: Path | str, data: str | bytes) -> None:
    """Write `data` to `path` so that a reader sees the old file or the whole new one, never a part.

    Args:
        path: the file; missing parent folders are made.
        data: text (written as UTF-8, line breaks as given) or bytes.

    Raises:
        UserError: the disk is full, or the folder cannot be written; nothing is left behind.
    """
    path = Path(path)
    content = data.encode("utf-8") if isinstance(data, str) else data
    temporary: Path | None = None
    try:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
            temporary = Path(name)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(path)
            temporary = None
            _fsync_folder(path.parent)
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_dir(path: Path | str) -> Iterator[Path]:
    """Yield an empty folder beside `path` that takes its name when the block ends well, and goes if it fails.

    An older folder at `path` is replaced. Files get the mode the umask asks for (safetensors writes 0600).

    Raises:
        UserError: the disk is full, or the parent folder cannot be written; nothing is left behind.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
            yield temporary
            _settle(temporary)
            _move_onto(temporary, path)
            temporary = None
            _fsync_folder(path.parent)
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def append_jsonl(path: Path | str, record: Mapping[str, Any]) -> None:
    """Append `record` to `path` as one JSON line, on disk when this returns.

    JSON has no NaN and no infinity: such a number is written as null.

    Raises:
        UserError: the disk is full, or the file cannot be written.
    """
    path = Path(path)
    line = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n"
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(line.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())


def read_jsonl(path: Path | str) -> list[tuple[int, dict[str, Any]]]:
    """Read a file of JSON objects, one a line, as (line number from 1, object).

    A byte-order mark and CRLF line ends are accepted, blank lines are skipped.

    Raises:
        UserError: the file is absent or not UTF-8, or a line is not a JSON object; names file and line.
    """
    path = Path(path)
    records = []
    for number, raw in enumerate(_read_bytes(path).split(b"\n"), start=1):
        line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
        if line.strip():
            records.append((number, _parse_line(path, number, line)))
    return records


def recover_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """Read JSON lines written by `append_jsonl`, and cut a torn last line (a kill mid-write) off the file.

    An absent file is an empty list.

    Raises:
        UserError: a line before the last is broken: that is damage, not a torn write.
    """
    path = Path(path)
    if not path.exists():
        return []
    data = _read_bytes(path)
    whole = data[: data.rfind(b"\n") + 1]
    if whole:
        start = whole[:-1].rfind(b"\n") + 1
        if whole[start:].strip() and not _is_object(whole[start:]):
            whole = whole[:start]
    if len(whole) < len(data):
        with disk_errors(path), path.open("r+b") as file:
            file.truncate(len(whole))
            os.fsync(file.fileno())
    return [record for _, record in read_jsonl(path)]


def sha256_file(path: Path | str) -> str:
    """SHA-256 of the file's bytes, as 64 hex digits.

    Raises:
        UserError: the file is absent or cannot be read.
    """
    path = Path(path)
    with _read_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(obj: Any) -> str:
    """First 16 hex digits of the SHA-256 over `obj` as canonical JSON; a path counts as its text."""
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode("utf-8")), dict)
    except ValueError:
        return False


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}, line {number}",
            got=f"bytes that are not UTF-8 (byte {error.start + 1} of the line)",
            expected="UTF-8 text",
            fix=f"iconv -f LATIN1 -t UTF-8 {path.name} > new.jsonl (with the file's real encoding)",
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}, line {number}",
            got=f"broken JSON ({error})",
            expected="one JSON object a line",
            fix="repair or remove that line; a JSON array is converted with: jq -c '.[]' FILE",
        ) from error
    if not isinstance(value, dict):
        raise UserError(
            f"{path}, line {number}",
            got=f"a JSON {_json_kind(value)}",
            expected="one JSON object a line",
            fix="write one {...} object a line; a JSON array is converted with: jq -c '.[]' FILE",
        )
    return value


def _json_kind(value: Any) -> str:
    kinds = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(value), "null")


def _read_bytes(path: Path) -> bytes:
    with _read_errors(path):
        return path.read_bytes()


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot read {path}", got=error.strerror, expected="a readable file", fix="check the path"
        ) from error


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the disk errors a user can mend into a UserError naming `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else _os_error(error)
        if number not in _DISK_ERRORS:
            raise
        problem, fix = _DISK_ERRORS[number]
        raise UserError(f"cannot write {path}", got=problem, expected="a writable place", fix=fix) from error


def _os_error(error: SafetensorError) -> int | None:
    """safetensors reports the system's errors as text: `... (os error 28)`."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found.group(1)) if found else None


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _settle(folder: Path) -> None:
    """Give every entry its umask mode, and put every file on disk."""
    mask = _umask()
    for entry in [folder, *folder.rglob("*")]:
        if entry.is_symlink():
            continue
        entry.chmod((0o777 if entry.is_dir() else 0o666) & ~mask)
        if entry.is_file():
            with entry.open("rb") as file:
                os.fsync(file.fileno())


def _move_onto(source: Path, target: Path) -> None:
    """Rename `source` to `target`; a folder cannot be renamed onto a full one, so the old one steps aside."""
    if not target.exists():
        source.replace(target)
        return
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".old"))
    target.replace(aside / "old")
    source.replace(target)
    shutil.rmtree(aside, ignore_errors=True)


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
