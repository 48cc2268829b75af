"""Decode records without a decoder: by hand, or drawn at random within the decoder's invariants."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

PAIR = {
    "target": "org/target",
    "draft": "runs/one/best",
    "target_parameters": 134_515_008,
    "draft_parameters": 35_397_504,
    "tokenizer_sha256": "0" * 64,
    "draft_length_policy": "Fixed(max_length=2)",
}
COST = {
    "c": 0.1,
    "v": {"1": 1.0, "2": 1.05, "3": 1.125, "4": 1.25},
    "h": 0.02,
    "draft_length": 2,
    "best_draft_length": 2,
    "break_even_acceptance": 0.225,
    "predicted_speedup": 1.3,
    "plain_step_ms": 12.5,
    "draft_step_ms": 1.25,
}
HF_BASELINE = {"tokens_per_s": 20.0, "assisted_tokens_per_s": 30.0, "prompts": 2, "num_tokens": 200}
LOSSLESS = {
    "dtype": "float32",
    "prompts": 8,
    "identical": 7,
    "divergences": [
        {
            "prompt_id": "code-1",
            "position": 17,
            "plain": 311,
            "speculative": 402,
            "logit_gap": 2.5e-5,
            "class": "numeric tie",
        }
    ],
}
WORDS = ("the", "draft", "proposes", "a", "few", "tokens", "and", "the", "target", "keeps", "some")


class Make:
    """Builds runs, records and reports."""

    pair, cost, hf_baseline, lossless = PAIR, COST, HF_BASELINE, LOSSLESS
    settings: dict[str, Any] = {"draft_length": "auto", "temperatures": [0.0], "batch_size": 1, "seed": 0}
    environment: dict[str, Any] = {"command": ["draftsmith", "eval"], "torch": "2.13.0", "threads": 2}

    @staticmethod
    def run(
        drafts: Sequence[int],
        accepted: Sequence[int],
        emitted: Sequence[int],
        *,
        decode_s: float = 1.0,
        prefill_s: float = 1.0,
        pieces: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """A run of the given rounds; its time is 20 % draft, 70 % verify, 10 % host."""
        num_tokens = 1 + sum(emitted)
        texts = (
            list(pieces) if pieces is not None else [f"{WORDS[i % len(WORDS)]} " for i in range(num_tokens)]
        )
        return {
            "tokens": list(range(num_tokens)),
            "text": "".join(texts),
            "pieces": texts,
            "finish": "length",
            "prefill_s": prefill_s,
            "decode_s": decode_s,
            "draft_s": 0.2 * decode_s,
            "verify_s": 0.7 * decode_s,
            "host_s": 0.1 * decode_s,
            "num_drafts": list(drafts),
            "num_accepted": list(accepted),
            "num_emitted": list(emitted),
        }

    def plain(self, num_tokens: int, *, decode_s: float = 1.0, prefill_s: float = 1.0) -> dict[str, Any]:
        """Plain decoding of `num_tokens` tokens, the prefill's among them."""
        zeros = [0] * (num_tokens - 1)
        return self.run(zeros, zeros, [1] * (num_tokens - 1), decode_s=decode_s, prefill_s=prefill_s)

    def record(
        self, name: str, speculative: dict[str, Any], *, plain_s: float = 1.0, **more: Any
    ) -> dict[str, Any]:
        """A record whose plain run gave the same tokens in `plain_s` seconds."""
        return {
            "prompt_id": name,
            "turn": 0,
            "domain": "code",
            "temperature": 0.0,
            "prompt_tokens": 5,
            "prompt": f"Prompt {name}",
            "draft_length": 2,
            "plain": self.plain(len(speculative["tokens"]), decode_s=plain_s),
            "speculative": speculative,
            "lookup": None,
            "expected": {"sum": 3.0, "n": 6},
            **more,
        }

    def two_prompts(self) -> list[dict[str, Any]]:
        """a, code: three rounds of K = 2, the last trimmed to one token. b, prose: K = 2, then K = 0."""
        a = self.run([2, 2, 2], [2, 0, 2], [3, 1, 1], decode_s=2.5)
        b = self.run([2, 0], [1, 0], [2, 1], decode_s=1.5)
        return [
            self.record("a", a, plain_s=5.0),
            self.record("b", b, plain_s=3.0, domain="prose", expected={"sum": 1.0, "n": 4}),
        ]

    def many(
        self,
        *,
        prompts: int = 12,
        domains: Sequence[str] = ("code", "factual", "prose", "structured"),
        temperatures: Sequence[float] = (0.0,),
        lookup: bool = True,
        seed: int = 0,
    ) -> list[dict[str, Any]]:
        """Random records; domain i drafts better than domain i + 1."""
        rng = random.Random(seed)
        return [
            self._random_record(rng, f"{domains[i % len(domains)]}-{i}", i % len(domains), domains, t, lookup)
            for t in temperatures
            for i in range(prompts)
        ]

    def _random_record(
        self,
        rng: random.Random,
        name: str,
        place: int,
        domains: Sequence[str],
        temperature: float,
        lookup: bool,
    ) -> dict[str, Any]:
        chance = max(0.1, 0.75 - 0.12 * place - 0.1 * temperature)
        spec = self.random_run(rng, num_tokens=rng.randint(24, 60), chance=chance, max_drafts=4)
        num_tokens = len(spec["tokens"])
        plain_s = 0.0125 * (num_tokens - 1) * rng.uniform(0.95, 1.05)
        return self.record(
            name,
            spec,
            domain=domains[place],
            temperature=temperature,
            plain=self.plain(num_tokens, decode_s=plain_s, prefill_s=0.05),
            lookup=self.random_run(rng, num_tokens=num_tokens, chance=0.25, max_drafts=4, draft_ms=0.05)
            if lookup
            else None,
            expected={"sum": round(chance * num_tokens, 3), "n": num_tokens},
        )

    def random_run(
        self, rng: random.Random, *, num_tokens: int, chance: float, max_drafts: int, draft_ms: float = 1.25
    ) -> dict[str, Any]:
        """Rounds of 0 to `max_drafts` drafts, each accepted with `chance`, trimmed to `num_tokens`."""
        drafts: list[int] = []
        accepted: list[int] = []
        emitted: list[int] = []
        while (left := num_tokens - 1 - sum(emitted)) > 0:
            k = rng.randint(0, max_drafts)
            a = next((i for i in range(k) if rng.random() > chance), k)
            drafts, accepted, emitted = [*drafts, k], [*accepted, a], [*emitted, min(a + 1, left)]
        run = self.run(drafts, accepted, emitted, prefill_s=0.05)
        times = {
            "draft_s": sum(drafts) * draft_ms / 1e3 * rng.uniform(0.9, 1.1),
            "verify_s": sum(12.5 + 0.6 * k for k in drafts) / 1e3 * rng.uniform(0.95, 1.05),
            "host_s": len(drafts) * 0.4e-3,
        }
        return {**run, **times, "decode_s": sum(times.values())}

    def report(self, records: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """build_report with everything that is not given filled in."""
        from eval.report import build_report

        given: dict[str, Any] = {
            "pair": self.pair,
            "settings": self.settings,
            "environment": self.environment,
            "cost": self.cost,
            "lossless": None,
            "training": [],
            "hf_baseline": None,
        }
        return build_report(records, **{**given, **more})

    @staticmethod
    def training(steps: int = 400) -> list[dict[str, Any]]:
        """The metrics of a training run that went well."""
        lines: list[dict[str, Any]] = []
        for step in range(10, steps + 1, 10):
            lines.append({"step": step, "loss": 1.2 + 4.0 / (1 + step / 40), "lr": 1e-3})
            if step % 100 == 0:
                lines.append(
                    {"step": step, "eval/expected_acceptance": 0.5 * step / (step + 100), "eval/loss": 2.0}
                )
        return lines


@pytest.fixture(scope="session")
def make() -> Make:
    """Builders of runs, records and reports."""
    return Make()
