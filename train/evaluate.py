"""Expected acceptance on the selection split, from the captured store: the signal that chooses the best
checkpoint.
"""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import reduce

from distill.store import Example
from train.batches import collate, cut, input_length
from train.step import DraftLoss


class Selection:
    """The selection split as fixed batches, each of one domain."""

    def __init__(self, examples: Sequence[Example], batch_tokens: int) -> None:
        self.examples = examples
        self.domains = sorted({e.domain for e in examples})
        lengths = [input_length(e) for e in examples]
        self.batches: list[tuple[int, list[int]]] = []
        for number, domain in enumerate(self.domains):
            mine = sorted((i for i, e in enumerate(examples) if e.domain == domain), key=lambda i: lengths[i])
            self.batches += [(number, rows) for rows in cut(mine, lengths, batch_tokens)]

    def evaluate(self, loss: DraftLoss, accelerator: Accelerator) -> dict[str, float]:
        """`eval/...` numbers over all answers: means over supervised tokens. Batches are shared out among
        processes.
        """
        sums = torch.zeros(len(self.domains), 4, dtype=torch.float64, device=accelerator.device)
        loss.eval()
        with torch.no_grad():
            for number, rows in self.batches[accelerator.process_index :: accelerator.num_processes]:
                sums[number] += loss(collate([self.examples[i] for i in rows], accelerator.device))[1]
        loss.train()
        if accelerator.num_processes > 1:
            sums = reduce(sums, "sum")
        total, tokens = sums.sum(0), float(sums[:, 3].sum())
        record = {
            "eval/loss": float(total[0]) / tokens,
            "eval/expected_acceptance": float(total[1]) / tokens,
            "eval/greedy_agreement": float(total[2]) / tokens,
        }
        for number, domain in enumerate(self.domains):
            record[f"eval/expected_acceptance/{domain}"] = float(sums[number, 1] / sums[number, 3])
        return record
