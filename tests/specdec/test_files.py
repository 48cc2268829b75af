"""specdec/files.py: whole or absent, and honest about what is broken."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from specdec.errors import UserError
from specdec.files import (
    append_jsonl,
    atomic_dir,
    fingerprint,
    read_jsonl,
    recover_jsonl,
    sha256_file,
    write_atomic,
)


@pytest.fixture
def umask_027():
    old = os.umask(0o027)
    yield
    os.umask(old)


def test_write_atomic_replaces_and_follows_the_umask(tmp_path: Path, umask_027: None) -> None:
    path = tmp_path / "new" / "a.txt"
    write_atomic(path, "old")
    write_atomic(path, "é\r\n")
    assert path.read_bytes() == b"\xc3\xa9\r\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(path.parent) == ["a.txt"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_write_atomic_on_a_bad_disk_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = tmp_path / "a.txt"
    write_atomic(path, "old")

    def fail(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=r"cannot write .*a\.txt"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_atomic_dir_appears_whole_with_readable_files(tmp_path: Path, umask_027: None) -> None:
    path = tmp_path / "folder"
    for text in ("one", "two"):  # the second replaces the first
        with atomic_dir(path) as temporary:
            inner = temporary / "sub" / "a"
            inner.parent.mkdir()
            inner.write_text(text)
            inner.chmod(0o600)
            assert not path.exists() or (path / "sub" / "a").read_text() == "one"
    assert (path / "sub" / "a").read_text() == "two"
    assert (path / "sub" / "a").stat().st_mode & 0o777 == 0o640
    assert (path / "sub").stat().st_mode & 0o777 == 0o750
    assert path.stat().st_mode & 0o777 == 0o750
    assert os.listdir(tmp_path) == ["folder"]


def test_atomic_dir_leaves_nothing_after_a_failure(tmp_path: Path) -> None:
    def half() -> None:
        with atomic_dir(tmp_path / "folder") as temporary:
            (temporary / "a").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert os.listdir(tmp_path) == []


def test_jsonl_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append_jsonl(path, {"n": 1, "text": "é\n"})
    append_jsonl(path, {"n": 2, "loss": [float("nan"), 0.5]})
    assert read_jsonl(path) == [(1, {"n": 1, "text": "é\n"}), (2, {"n": 2, "loss": [None, 0.5]})]
    assert path.read_bytes().count(b"\n") == 2


def test_read_jsonl_accepts_bom_crlf_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": "\xe2\x80\xa8"}')
    assert read_jsonl(path) == [(1, {"a": 1}), (3, {"a": "\u2028"})]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"a": ', "broken JSON"),
        (b"[1]", "a JSON array"),
        (b"3", "a JSON number"),
        (b"null", "a JSON null"),
        (b'{"a": "\xe9"}', "not UTF-8"),
    ],
)
def test_read_jsonl_names_file_line_and_repair(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(UserError) as caught:
        read_jsonl(path)
    message = str(caught.value)
    assert f"{path}, line 2" in message
    assert words in message
    assert "fix:" in message
    assert "\n" not in message


def test_read_jsonl_of_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_jsonl(tmp_path / "none.jsonl")


@pytest.mark.parametrize("tail", [b'{"a": 3', b'{"a": 3}', b"\x00\x00\n", b""])
def test_recover_jsonl_cuts_a_torn_last_line(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n' + tail)
    assert recover_jsonl(path) == [{"a": 1}, {"a": 2}]
    append_jsonl(path, {"a": 4})
    assert [record["a"] for _, record in read_jsonl(path)] == [1, 2, 4]


def test_recover_jsonl_refuses_damage_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": \n{"a": 2}\n')
    with pytest.raises(UserError, match="line 1"):
        recover_jsonl(path)
    assert recover_jsonl(tmp_path / "none.jsonl") == []


def test_checksums(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    assert sha256_file(path) == hashlib.sha256(b"abc").hexdigest()
    assert fingerprint({"b": 1, "a": [1, "é"]}) == fingerprint({"a": (1, "é"), "b": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 1.5})
    assert fingerprint({}) == hashlib.sha256(b"{}").hexdigest()[:16]
