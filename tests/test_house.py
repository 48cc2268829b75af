"""The house rules that a reader cannot check at a glance."""

from __future__ import annotations

import ast
import os
import subprocess
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOMS = ("specdec", "distill", "eval", "train")
SHIPPED = {"draftsmith.py", *ROOMS}


def run(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)


def _imports(path: Path) -> set[str]:
    """Top-level names that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_looks_only_down(root: Path, room: str) -> None:
    above = set(ROOMS[ROOMS.index(room) + 1 :]) | {"draftsmith", "tests", "benchmarks"}
    files = list((root / room).rglob("*.py"))
    assert files
    for path in files:
        assert not _imports(path) & above, f"{path} imports a room above it"


def test_nothing_shadows_the_builtin_eval(root: Path) -> None:
    for path in [root / "draftsmith.py", *(p for room in ROOMS for p in (root / room).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                bound = {alias.asname or alias.name.partition(".")[0] for alias in node.names}
                assert "eval" not in bound, f"{path}, line {node.lineno}: import eval"


@pytest.mark.parametrize("room", ROOMS)
def test_init_holds_a_docstring_only(root: Path, room: str) -> None:
    for path in (root / room).rglob("__init__.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert len(body) == 1, path
        assert isinstance(body[0], ast.Expr), path
        assert isinstance(body[0].value, ast.Constant), path
        assert isinstance(body[0].value.value, str), path
    assert (root / room / "py.typed").exists()


def test_tests_are_no_packages(root: Path) -> None:
    assert not list((root / "tests").rglob("__init__.py"))


def test_wheel_holds_the_house_and_nothing_else(root: Path, tmp_path: Path) -> None:
    pyproject = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(wheel["only-include"]) == SHIPPED
    assert (root / "configs").is_dir()
    assert set(wheel["shared-data"]) >= {"configs"}
    builders = pytest.importorskip("hatchling.builders.wheel")
    (built,) = builders.WheelBuilder(str(root)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.startswith("draftsmith-")} == SHIPPED
    assert any(name.endswith("share/draftsmith/configs/quickstart.yaml") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]


def test_help_is_fast_and_loads_no_model_library(root: Path, python: str) -> None:
    code = (
        "import sys, draftsmith\n"
        "try: draftsmith.main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'scipy', 'matplotlib', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    best = float("inf")
    for _ in range(3):  # the machine may be busy: the best of three is the command's own time
        start = time.perf_counter()
        done = run(root, python, "-c", code)
        best = min(best, time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
    for name in ("run", "generate", "train", "eval", "decode"):
        assert f"  {name} " in done.stdout
    assert best < 0.5


def test_unknown_command_is_a_wrong_request(root: Path, python: str) -> None:
    done = run(root, python, "-m", "draftsmith", "evil")
    assert done.returncode == 2
    assert done.stderr.startswith("draftsmith: No such command 'evil'.")
    assert done.stderr.count("\n") == 1
