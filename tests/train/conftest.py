"""A run folder full of synthetic answers: a Markov chain that a tiny draft can learn, with its exact
distributions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from distill.store import write_shard

FIRST, SYMBOLS, TOP_K = 10, 40, 4


def successors(token: int) -> list[int]:
    """The four ids that may follow a token."""
    return [FIRST + (7 * token + 3 + 11 * j) % SYMBOLS for j in range(TOP_K)]


def write_answers(run_dir: Path, *, shards: int = 2, answers: int = 24, seed: int = 0) -> None:
    """Shards of chain answers, a quarter of them in the selection split, in two domains."""
    random = np.random.default_rng(seed)
    probs = np.array([0.7, 0.15, 0.1, 0.05]) * 0.98
    for shard in range(shards):
        records, ids = [], []
        for number in range(answers):
            prompt = [int(t) for t in random.integers(FIRST, FIRST + SYMBOLS, random.integers(3, 9))]
            answer: list[int] = []
            for _ in range(int(random.integers(6, 20))):
                near = successors((prompt + answer)[-1])
                ids.append(near)
                answer.append(near[int(random.choice(TOP_K, p=probs / probs.sum()))])
            records.append(
                {
                    "answer_id": f"{shard}/{number}",
                    "prompt_id": f"p{shard}-{number}",
                    "domain": "code" if number % 3 else "chat",
                    "split": "selection" if number % 4 == 0 else "train",
                    "messages": [{"role": "user", "content": "x"}],
                    "prompt_ids": prompt,
                    "answer_ids": answer,
                    "answer": "",
                    "temperature": 1.0,
                    "finish": "length",
                }
            )
        log_probs = torch.tensor(np.log(probs), dtype=torch.float16).expand(len(ids), TOP_K).contiguous()
        write_shard(run_dir, shard, records, torch.tensor(ids, dtype=torch.int32), log_probs)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder with answers and nothing else."""
    folder = tmp_path / "run"
    write_answers(folder)
    return folder
