"""What ran, where, on which versions: provenance.json of a run folder. No environment variables, so no
secrets.
"""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specdec.files import write_atomic

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "pydantic", "numpy", "wandb")
_SECRET = re.compile(r"(?i)((?:token|api_?key|secret|password)=)\S+|hf_[A-Za-z0-9]{8,}")


def collect() -> dict[str, Any]:
    """Command, git commit, versions and hardware as one JSON object."""
    import torch

    return {
        "command": [_SECRET.sub(lambda m: (m.group(1) or "") + "***", part) for part in sys.argv],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **git_state(Path(__file__).parent),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def write(run_dir: Path) -> None:
    """Write provenance.json."""
    write_atomic(run_dir / "provenance.json", json.dumps(collect(), indent=2) + "\n")


def git_state(folder: Path) -> dict[str, Any]:
    """Commit and dirty flag of the source tree; nulls where it is not a git checkout."""
    try:
        sha = _git(folder, "rev-parse", "HEAD")
        return {"git_sha": sha, "git_dirty": bool(_git(folder, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {"git_sha": None, "git_dirty": None}


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's name as the system prints it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
