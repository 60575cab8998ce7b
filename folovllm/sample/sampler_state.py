"""The sampling state on the device: fields, lines and token bitmasks by row. Any row is sampled without the host.

The layout of a row, and what the host writes, are in `folovllm/sample/sampling_row.py`. After that a step needs only its rows and their
positions:

    state = SamplerState(max_num_seqs, vocab_size, device)
    update = pack_rows({row: spec, ...})               # the host
    state.set_rows(torch.from_numpy(update.buffer).to(device), update.num_rows, update.num_with_line)
    tokens = state.sample(logits, rows, positions)     # [S]; may be captured in a CUDA graph
    state.record(tokens, rows, positions, num_samples) # may be captured too

`set_rows` is queued before the first step in which the new sequence samples. `set_masks` is queued before each step in which a
row with a grammar samples. Nothing here waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from folovllm.sample.sampler import Sampler, SamplerOutput, SamplingBatch
from folovllm.sample.sampling_row import (
    ALLOWED,
    BAD_ENDS_AT,
    BAD_TOKENS_AT,
    BAD_WORDS,
    BIAS_SHIFT,
    BITS,
    COMPLETES,
    COUNT,
    COUNTED,
    ENDS,
    FILTERS,
    IN_PROMPT,
    MASK,
    ONLY_ALLOWED,
    RECENT,
    RECENT_AT,
    WORDS,
    WORDS_AT,
    RowField,
    line_width,
    mask_width,
)
from folovllm.step.bitmasks import MASKS, TokenBitmasks
from folovllm.step.schedule import Extras

if TYPE_CHECKING:
    from folovllm.kernels.filter_logits import FilterWorkspace


class SamplerState:
    """The sampling state of each row. The last row is for padding: it is greedy, with no filter or penalty.

    What a row's FLAGS do not name is not read, and may hold anything.

    Attributes:
        fields: [rows + 1, len(RowField)] int32.
        lines: [rows + 1, `line_width(V)`] int32.
        masks: [samples, ceil(V / 32)] int32, the token bitmasks of a step: one for each sample, not for each row.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        sampler: Sampler | None = None,
        max_samples: int = 0,
        use_kernels: bool = True,
    ) -> None:
        """`sampler` samples where no kernels are used (they never are on a CPU). `max_samples`: the most samples of a step, if they can be more than rows."""
        self.fields = torch.zeros(num_rows + 1, len(RowField), dtype=torch.int32, device=device)
        self.lines = torch.zeros(num_rows + 1, line_width(vocab_size), dtype=torch.int32, device=device)
        num_samples = max(num_rows + 1, max_samples)
        self.masks = torch.zeros(num_samples, mask_width(vocab_size), dtype=torch.int32, device=device)
        self._work: FilterWorkspace | None = None  # there before steps are captured
        if use_kernels and device.type != "cpu":
            from folovllm.kernels.filter_logits import FilterWorkspace

            self._work = FilterWorkspace.allocate(num_samples, vocab_size, device)
        self._sampler = sampler or Sampler()

    @property
    def num_bytes(self) -> int:
        """The memory of all tables."""
        return sum(table.nbytes for table in (self.fields, self.lines, self.masks, *(self._work or ())))

    def set_rows(self, buffer: torch.Tensor, num_rows: int, num_with_line: int) -> None:
        """Replace the state of the rows in a `SamplingUpdate`, whose `buffer` is on the device."""
        width = 1 + len(RowField)
        fields, entries = buffer[: num_rows * width].view(num_rows, width), buffer[num_rows * width :].view(3, -1)
        rows = fields[:, 0].long()
        self.fields[rows] = fields[:, 1:]
        if num_with_line:
            self.lines.index_fill_(0, rows[:num_with_line], 0)
            row, column, value = entries
            self.lines[row.long(), column.long()] = value

    def set_masks(self, samples: torch.Tensor, masks: torch.Tensor) -> None:
        """Set the token bitmasks [n, ceil(V / 32)] int32 of some `samples` [n] of the next step. Both are on the device."""
        self.masks[samples.long()] = masks

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor | None = None,
        keep: torch.Tensor | None = None,
        masks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sample a token for every sequence of a step, with penalties, filters and noise.

        Args:
            logits: [S, V], any float dtype; they are not changed.
            rows: [S] int32. positions: [S] int32, index of the token to sample in its sequence.
            out: [at least S] int64, receives the tokens. keep: [rows] int64; `keep[rows]` receives the tokens too.
            masks: [S, ceil(V / 32)] int32, read for rows with MASK; None: what `set_masks` set for the first S samples.

        Returns:
            [S] int64.
        """
        if self._work is not None:
            from folovllm.kernels.penalties import StepRows
            from folovllm.kernels.sample_tokens import sample_tokens

            step = StepRows(self.fields, self.lines, self.masks if masks is None else masks, rows, positions)
            return sample_tokens(logits, step, self._work, out, None if keep is None else (keep, rows))
        tokens = self._sampler.sample(self.adjust(logits, rows, positions, masks), self.batch(rows, positions))
        if keep is not None:
            keep[rows.long()] = tokens
        return tokens if out is None else out[: len(tokens)].copy_(tokens)

    def record(
        self, tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor | None = None
    ) -> None:
        """Record the sampled `tokens` for later steps: count them, and mark the tokens that would now complete a bad word.

        Args:
            tokens: [S] int64. rows: [S] int32. positions: [S] int32, of these tokens.
            counts: [S], 0 where the token is not part of the answer; None: all are.
        """
        if self._work is not None:
            from folovllm.kernels.record_sampled import record_sampled

            record_sampled(tokens, rows, positions, counts, self.fields, self.lines)
            return
        at, column = rows.long(), WORDS_AT + tokens
        word, flags = self.lines[at, column], self.fields[at, RowField.FLAGS]
        if counts is not None:
            flags = torch.where(counts != 0, flags, 0)
        self.lines[at, column] = word + ((flags & COUNTED != 0) & (word & COUNT < COUNT)).int()
        for i in (flags & BAD_WORDS).nonzero().flatten().tolist():
            mark_bad_words(self.lines[int(rows[i])], tokens[i], int(positions[i]))

    def batch(self, rows: torch.Tensor, positions: torch.Tensor) -> SamplingBatch:
        """Return the parameters of a step with these `rows` and `positions` [S]."""
        fields = self.fields[rows.long()]
        floats = fields.view(torch.float32)
        filtered = fields[:, RowField.FLAGS] & FILTERS != 0
        some, temperature = _some(filtered), floats[:, RowField.TEMPERATURE]
        return SamplingBatch(
            temperature=temperature,
            seeds=seeds_of(fields[:, RowField.SEED_LOW], fields[:, RowField.SEED_HIGH]),
            positions=positions.long(),
            all_greedy=not _some(temperature > 0),
            min_p=torch.where(filtered, floats[:, RowField.MIN_P], 0.0) if some else None,
            top_k=torch.where(filtered, fields[:, RowField.TOP_K], 0).long() if some else None,
            top_p=torch.where(filtered, floats[:, RowField.TOP_P], 1.0) if some else None,
        )

    def adjust(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, masks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits [S, V] of `rows` in float32, with biases and penalties, and -inf for what must not be sampled.

        The arguments are those of `sample`. Temperature and filters come later. The order is vLLM's: allowed tokens
        (`allowed_token_ids`, a grammar's mask), `bad_words`, `logit_bias`, penalties, `min_tokens`. What is forbidden is -inf
        whatever is added to it, so all of it is set at once. The repetition penalty divides a positive logit and multiplies a
        negative one, for tokens of prompt and answer (CTRL, Keskar et al. 2019). The presence penalty is subtracted once for a
        token of the answer, the frequency penalty once per occurrence.
        """
        logits, at, vocab_size = logits.float(), rows.long(), logits.shape[1]
        fields = self.fields[at, :, None]  # [S, len(RowField), 1]
        flags, floats = fields[:, RowField.FLAGS], fields.view(torch.float32)
        if _some(flags & MASK):
            numbers = (self.masks[: len(at)] if masks is None else masks)[:, :, None]  # [S, ceil(V / 32), 1]
            bits = numbers >> torch.arange(BITS, device=logits.device, dtype=torch.int32) & 1
            is_allowed = bits.flatten(1)[:, :vocab_size] != 0
            logits = logits.masked_fill((flags & MASK != 0) & ~is_allowed, -torch.inf)
        if not _some(flags & WORDS):
            return logits
        word = torch.where(flags & WORDS != 0, self.lines[at, WORDS_AT : WORDS_AT + vocab_size], 0)  # [S, V]
        biased = logits + (word >> BIAS_SHIFT).short().view(torch.float16)
        count, factor = word & COUNT, floats[:, RowField.REPETITION]
        repeated = torch.where(biased > 0, biased / factor, biased * factor)
        adjusted = torch.where(word & (COUNT | IN_PROMPT) != 0, repeated, biased)
        adjusted = adjusted - (floats[:, RowField.PRESENCE] * (count > 0) + floats[:, RowField.FREQUENCY] * count)
        is_early = positions[:, None] < fields[:, RowField.FREE_FROM]
        forbidden = (word & COMPLETES != 0) | ((word & ENDS != 0) & is_early)
        return adjusted.masked_fill(forbidden | ((flags & ONLY_ALLOWED != 0) & (word & ALLOWED == 0)), -torch.inf)


def sample_adjusted(
    state: SamplerState,
    sampler: Sampler,
    batch: SamplingBatch,
    logits: torch.Tensor,
    rows: Sequence[int],
    positions: Sequence[int],
    counts: Sequence[int] | None,
    extras: Extras | None,
) -> SamplerOutput:
    """Sample on the host for rows of which some have penalties, forbidden tokens or a bitmask: see `SamplingRows.sample`."""
    device = logits.device
    if extras is not None and MASKS in extras:
        allowed = TokenBitmasks.from_index(extras[MASKS], rows)
        state.set_masks(torch.from_numpy(allowed.places(rows)).to(device), torch.from_numpy(allowed.bits).to(device))
    row_ids, at = (torch.tensor(list(values), dtype=torch.int32, device=device) for values in (rows, positions))
    sampled = sampler(logits, batch, state.adjust(logits, row_ids, at))
    counted = None if counts is None else torch.tensor(list(counts), device=device)
    state.record(torch.tensor(sampled.token_ids, device=device), row_ids, at, counted)
    return sampled


def seeds_of(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the seeds [S] int64 whose words are `low` and `high` [S] int32."""
    return high.long() << 32 | low.long() & 0xFFFFFFFF


def mark_bad_words(line: torch.Tensor, token: torch.Tensor, position: int) -> None:
    """Record a sampled `token` [] at `position` in a row's `line`, and mark exactly the tokens that would complete a bad word now."""
    line[RECENT_AT + position % RECENT] = token + 1
    ends = line[BAD_ENDS_AT:BAD_TOKENS_AT]
    ends = ends[ends > 0].long()  # [words]
    word = torch.arange(len(ends), device=line.device).repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))
    at = torch.arange(len(word), device=line.device)  # of each token of the bad words
    distance = ends[word] - 1 - at  # from the next token
    recent = line[RECENT_AT + (position + 1 - distance) % RECENT]
    differs = (distance > 0) & (recent != line[BAD_TOKENS_AT + at] + 1)
    completes = torch.zeros_like(ends).index_add_(0, word, differs.long()) == 0
    last = WORDS_AT + line[BAD_TOKENS_AT + ends - 1].long()
    line[last] &= ~COMPLETES
    line[last[completes]] |= COMPLETES


def _some(mask: torch.Tensor) -> bool:
    """Return whether any is set. On a GPU it returns True without looking, because the host would have to wait."""
    return mask.device.type != "cpu" or bool(mask.any())
