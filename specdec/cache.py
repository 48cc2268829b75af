"""A slot cache: every row owns S slots and a length; rolling back is moving the length, never copying.

Letters: B rows, H key heads, N tokens of this forward, S slots, D head width.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from specdec.architecture import context_length, refuse_unsupported, windows
from specdec.graphs import VIEW_STEP as STATIC_VIEW_STEP
from specdec.graphs import Graphs, Recorder, record
from specdec.kernels import MOST_TOKENS, fast_forward

VIEW_STEP = 64  # attention reads whole multiples of this many slots
PREFILL_CHUNK = 512  # tokens of a prompt read at once: bounds the memory of attention scores
SHORTEST_BEGINNING = 8  # tokens that a batch's prompts must share before they are read once for all of them


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values [B, H, S, D]; writes go to the positions of the current forward."""

    is_compileable = True
    is_sliding = False

    def __init__(self, owner: "SlotCache") -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, width = key_states.shape
        self.keys = key_states.new_zeros(rows, heads, self.owner.num_slots, width)
        self.values = value_states.new_zeros(rows, heads, self.owner.num_slots, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner = self.owner
        assert self.keys is not None and self.values is not None
        if key_states.shape[0] == 1 and not owner.static:  # neighbours in memory: a slice is cheaper than a scatter
            start = owner.start
            self.keys[:, :, start : start + key_states.shape[2]] = key_states
            self.values[:, :, start : start + key_states.shape[2]] = value_states
        else:
            index = owner.positions[:, None, :, None]
            self.keys.scatter_(2, index.expand_as(key_states), key_states)
            self.values.scatter_(2, index.expand_as(value_states), value_states)
        return self.keys[:, :, : owner.view], self.values[:, :, : owner.view]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.view, 0

    def get_seq_length(self, *args: Any) -> int:
        return self.owner.start

    def get_max_length(self) -> int:
        return self.owner.num_slots

    def get_max_cache_shape(self) -> int:
        return self.owner.num_slots


class SlotCache(Cache):
    """Keys and values of B rows of different lengths. `positions` [B, N] says where this forward writes.

    `static`: nothing of a forward but its tensors' contents depends on how far the rows have come, within a view.
    """

    def __init__(self, num_layers: int, num_slots: int, *, static: bool = False) -> None:
        self.num_slots, self.static = num_slots, static
        self.positions = torch.zeros(1, 1, dtype=torch.long)
        self.start = 0
        self.view = num_slots
        self.exact = False
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these, in this order."""
        for layer in self.layers:
            assert isinstance(layer, SlotLayer) and layer.keys is not None and layer.values is not None
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]

    def adopt(self, rows: Tensor, other: "SlotCache") -> None:
        """Overwrite these rows with the rows of another cache, which may have fewer slots; its only row goes to all.

        A cache without slots yet gets them, for these rows.
        """
        for ours, theirs in zip(self.layers, other.layers, strict=True):
            assert isinstance(ours, SlotLayer)
            assert isinstance(theirs, SlotLayer) and theirs.keys is not None and theirs.values is not None
            if not ours.is_initialized:
                size = (len(rows), -1, -1, -1)
                ours.lazy_initialization(theirs.keys.expand(size), theirs.values.expand(size))
            assert ours.keys is not None and ours.values is not None
            ours.keys[rows, :, : other.num_slots] = theirs.keys
            ours.values[rows, :, : other.num_slots] = theirs.values

    def place(self, positions: Tensor, starts: Sequence[int]) -> None:
        """Aim the next forward: token j of row b goes to slot positions[b, j] = starts[b] + j."""
        last = max(starts) + positions.shape[1] - 1
        assert last < self.num_slots, "a forward reaches past the last slot"
        self.positions, self.start = positions, starts[0]
        # One token of one row sees every slot up to its own: a view cut there needs no mask.
        self.exact = positions.numel() == 1 and not self.static
        step = STATIC_VIEW_STEP if self.static else 1 if self.exact else VIEW_STEP
        self.view = min(self.num_slots, -(-(last + 1) // step) * step)


class Runner:
    """A model with its slot cache: `forward` any tokens at any per-row positions, get their hidden states."""

    def __init__(
        self, model: PreTrainedModel, num_slots: int, *, eager: bool = False, recorder: Recorder | None = None
    ) -> None:
        self.model = model
        config = model.config.get_text_config()
        known = inspect.signature(model.base_model.forward).parameters
        refuse_unsupported(config, takes_positions="position_ids" in known)
        self.windows = windows(config)
        self.last_position = context_length(config) - 1
        self.cache_argument = "cache" if "cache" in known else "past_key_values"  # renamed within transformers 5
        if recorder is None and model.device.type == "cuda" and not eager:
            recorder = record
        self.graphs = Graphs(self._eager, recorder) if recorder else None
        self.cache = SlotCache(config.num_hidden_layers, num_slots, static=self.graphs is not None)
        self.fast = None if eager else fast_forward(model, num_slots, self.last_position)
        self.filled: list[int] = []  # slots of each row that were written without a gap; empty before the first forward

    def forward(self, tokens: Tensor, starts: Sequence[int] | Tensor) -> Tensor:  # [B, N], [B] -> hidden [B, N, H]
        """One forward over `tokens`, row b's first at position starts[b]. Slots from there on are overwritten.

        `starts` as the host's numbers wait for no device; a tensor does. A start behind the written slots would
        let the row attend to slots that hold nothing of it: an AssertionError, the alarm for a lagging cache.
        """
        positions = self._place(tokens, starts)
        if self.fast is not None and tokens.numel() <= MOST_TOKENS:
            return self.fast(tokens, positions, self.cache.layers)
        if self.graphs is not None:
            return self.graphs(tokens, positions, self.cache.view)
        return self._eager(tokens, positions)

    def _place(self, tokens: Tensor, starts: Sequence[int] | Tensor) -> Tensor:  # [B, N], [B] -> positions [B, N]
        num_tokens, starts = tokens.shape[1], _on_host(starts)
        for row, (start, filled) in enumerate(zip(starts, self.filled or [0] * len(starts), strict=True)):
            assert start <= filled, f"a hole in the cache: row {row} holds {filled} tokens, a forward starts at {start}"
        self.filled = [start + num_tokens for start in starts]
        first = torch.tensor(starts, device=tokens.device)
        positions = first.unsqueeze(-1) + torch.arange(num_tokens, device=tokens.device)
        self.cache.place(positions, starts)
        return positions

    def _eager(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The unmodified model."""
        self.cache.positions = positions  # a graph's own tensor, while it is captured
        # A row near its context's end rides along with longer drafts: a learned table has no row for those columns.
        output = self.model.base_model(
            input_ids=tokens,
            position_ids=positions.clamp(max=self.last_position),
            attention_mask=self._masks(positions),
            use_cache=True,
            **{self.cache_argument: self.cache},
        )
        return output.last_hidden_state  # type: ignore[no-any-return]

    def prefill(
        self, tokens: Tensor, lengths: Sequence[int] | Tensor, chunk: int | None = None
    ) -> Tensor:  # [B, P] right-padded, [B] -> [B, H]
        """Read prompts in chunks; returns the hidden state of each row's last token. The padding's slots go stale.

        A beginning that all rows share (a chat template's system message) is read once, then copied.
        """
        lengths = _on_host(lengths)
        shared = _shared_tokens(tokens, lengths)
        if shared:
            with self._aside(shared) as aside:
                self.prefill(tokens[:1, :shared], [shared])
            self.cache.adopt(torch.arange(len(lengths), device=tokens.device), aside)
        # The fast path takes as much as fits, so that a row is read by it whoever its batch mates are.
        chunk = chunk or (max(MOST_TOKENS // len(lengths), 1) if self.fast is not None else PREFILL_CHUNK)
        last = torch.tensor(lengths, device=tokens.device) - 1
        self.filled = [shared] * len(lengths)
        result: Tensor | None = None
        for start in range(shared, tokens.shape[1], chunk):
            piece = tokens[:, start : start + chunk]
            hidden = self.forward(piece, [start] * len(lengths))
            here = (last >= start) & (last < start + piece.shape[1])
            index = (last - start).clamp(0, piece.shape[1] - 1)
            ends = hidden[torch.arange(len(lengths), device=hidden.device), index]
            result = ends if result is None else torch.where(here.unsqueeze(-1), ends, result)
        assert result is not None
        self.filled = list(lengths)
        return result

    def refill(self, rows: Sequence[int], tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Give these rows of a running batch new prompts [R, P]; returns the last hidden states [R, H].

        They are read in a cache of their own, so that the other rows are not computed, and then move in.
        """
        with self._aside(tokens.shape[1]) as aside:
            hidden = self.prefill(tokens, lengths)
        self.cache.adopt(torch.tensor(rows, device=tokens.device), aside)
        for row, length in zip(rows, lengths, strict=True):
            self.filled[row] = length
        return hidden

    @contextmanager
    def _aside(self, num_slots: int) -> Iterator[SlotCache]:
        """Forwards inside work on the cache that this yields; the running one waits."""
        running, filled, graphs = self.cache, self.filled, self.graphs
        self.graphs = None  # they write to the running cache
        self.cache = SlotCache(len(running.layers), num_slots)
        try:
            yield self.cache
        finally:
            self.cache, self.filled, self.graphs = running, filled, graphs

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in this order."""
        self.cache.keep(torch.tensor(rows, device=self.cache.positions.device))
        self.filled = [self.filled[row] for row in rows]
        if self.graphs is not None:
            self.graphs.forget()

    def _masks(self, positions: Tensor) -> Any:
        if self.cache.exact and all(w is None or self.cache.view <= w for w in self.windows.values()):
            return None
        masks = {name: self._mask(positions, window) for name, window in self.windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, positions: Tensor, window: int | None) -> Tensor:  # [B, N] -> [B, 1, N, S']
        """A slot is seen when it is not younger than the token that looks, so stale slots behind it are hidden."""
        slots = torch.arange(self.cache.view, device=positions.device)
        seen = slots <= positions.unsqueeze(-1)
        if window is not None:
            seen &= slots > positions.unsqueeze(-1) - window
        dtype = self.model.dtype
        hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=positions.device)
        return torch.where(seen, torch.zeros_like(hidden), hidden).unsqueeze(1)


def _shared_tokens(tokens: Tensor, lengths: Sequence[int]) -> int:  # [B, P], [B]
    """How many tokens at the beginning of all rows are worth reading once; each row keeps one of its own."""
    if len(lengths) == 1:
        return 0
    same = (tokens == tokens[:1]).all(dim=0)[: min(lengths) - 1]
    shared = int(same.cumprod(dim=0).sum())
    return shared if shared >= SHORTEST_BEGINNING else 0


def _on_host(numbers: Sequence[int] | Tensor) -> Sequence[int]:
    return numbers.tolist() if isinstance(numbers, Tensor) else numbers
