"""The sampling state on the device: fields, words and bits by row. Any row is sampled without the host.

A sequence that gets a row brings one `RowUpdate` (`folovllm/sampling_row.py`). After that a step needs only its rows and their
positions:

    state = SamplerState(max_num_seqs, vocab_size, device)
    update = pack_updates([row_update(row, spec), ...])   # the host
    state.set_rows(torch.from_numpy(update.buffer).to(device), update.num_rows, update.num_with_line)
    tokens = state.sample(logits, rows, positions)     # [S]; may be captured in a CUDA graph
    state.note(tokens, rows, positions, num_samples)   # may be captured too

`set_rows` is queued before the first step in which the new sequence samples. A row with `SamplingSpec.has_mask` has a mask, one
bit for each token. `set_rows` writes the first mask. `set_masks` replaces it, and is queued before the step samples. A mask
stays until it is replaced. Nothing here waits for a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from folovllm.sample.bad_words import forbid_next
from folovllm.sample.masks import bits_of
from folovllm.sample.sampler import Sampler, SamplingBatch
from folovllm.sampling_row import (
    BAD,
    BIAS_SHIFT,
    COUNT,
    ENDS,
    FILTERS,
    IN_PROMPT,
    MASK,
    MASK_AT,
    PLANES,
    WORDS,
    RowField,
    line_width,
    mask_width,
)

if TYPE_CHECKING:
    from folovllm.kernels.filter_logits import FilterWorkspace


class SamplerState:
    """The sampling state of each row. The last row is for padding: it is greedy, with no filter or penalty.

    Attributes:
        fields: [rows + 1, len(RowField)] int32.
        words: [rows + 1, `line_width(V)`] int32: V words, then the fields in `folovllm/sampling_row.py`. A row's line is read
            only if its FLAGS need it; other lines may hold anything.
        masks: [rows + 1, ceil(V / 32)] int32, a part of `words`.
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
        """`sampler` samples where no kernels are used. `max_samples`: the most samples of a step, if they can be more than rows."""
        self.fields = torch.zeros(num_rows + 1, len(RowField), dtype=torch.int32, device=device)
        self.words = torch.zeros(num_rows + 1, line_width(vocab_size), dtype=torch.int32, device=device)
        self.masks = masks_of(self.words, vocab_size)
        self._vocab_size = vocab_size
        use_kernels = use_kernels and device.type == "cuda"
        self._work = _workspace(max(num_rows + 1, max_samples), vocab_size, device) if use_kernels else None
        self._sampler = sampler or Sampler()

    def set_rows(self, buffer: torch.Tensor, num_rows: int, num_with_line: int) -> None:
        """Replace the state of the rows in a `SamplingUpdate`, whose `buffer` is on the device."""
        width = 1 + len(RowField)
        lines, entries = buffer[: num_rows * width].view(num_rows, width), buffer[num_rows * width :].view(3, -1)
        rows = lines[:, 0].long()
        self.fields[rows] = lines[:, 1:]
        if num_with_line:
            self.words.index_fill_(0, rows[:num_with_line], 0)
            row, column, word = entries
            self.words[row.long(), torch.where(column < 0, self._vocab_size - 1 - column, column).long()] = word

    def set_masks(self, rows: torch.Tensor, masks: torch.Tensor) -> None:
        """Set the masks [n, ceil(V / 32)] int32 of `rows` [n] int32, which have MASK. Both are on the device."""
        self.masks[rows.long()] = masks

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor | None = None,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sample a token for every sequence of a step, with penalties, filters and noise.

        Args:
            logits: [S, V], any float dtype; they are not changed.
            rows: [S] int32. positions: [S] int32, index of the token to sample in its sequence.
            out: [at least S] int64, receives the tokens. keep: [rows] int64; `keep[rows]` receives the tokens too.

        Returns:
            [S] int64.
        """
        if self._work is not None:
            from folovllm.kernels.sample_tokens import sample_tokens

            kept = None if keep is None else (keep, rows)
            return sample_tokens(logits, self.fields, self.words, rows, positions, self._work, out, kept)
        fields = self.fields[rows.long()]
        batch = sampling_batch(fields, positions)
        tokens = self._sampler.sample(adjust(logits, fields, self.words, rows, positions), batch)
        if keep is not None:
            keep[rows.long()] = tokens
        return tokens if out is None else out[: len(tokens)].copy_(tokens)

    def note(
        self, tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor | None = None
    ) -> None:
        """Record the sampled `tokens` for later steps: count them, and set the tokens that would now complete a bad word.

        Args:
            tokens: [S] int64. rows: [S] int32. positions: [S] int32, of these tokens.
            counts: [S], 0 where the token is not part of the answer; None: all are.
        """
        if self._work is not None:
            from folovllm.kernels.record_sampled import record_sampled

            record_sampled(tokens, rows, positions, counts, self.fields, self.words, self._vocab_size)
            return
        at = rows.long()
        word, flags = self.words[at, tokens], self.fields[at, RowField.FLAGS]
        if counts is not None:
            flags = torch.where(counts != 0, flags, 0)
        self.words[at, tokens] = word + ((flags & WORDS != 0) & (word & COUNT < COUNT)).int()
        for i in (flags & BAD).nonzero().flatten().tolist():
            forbid_next(self.words[int(rows[i]), self._vocab_size :], tokens[i], int(positions[i]))


def _workspace(num_seqs: int, vocab_size: int, device: torch.device) -> FilterWorkspace:
    """Allocate the kernels' workspace. It must exist before steps are captured."""
    from folovllm.kernels.filter_logits import FilterWorkspace

    return FilterWorkspace.allocate(num_seqs, vocab_size, device)


def masks_of(words: torch.Tensor, vocab_size: int, plane: int = 0) -> torch.Tensor:
    """Return a view of the bits [rows, ceil(V / 32)] in lines [rows, line_width(V)]: masks (0), or tokens that must not come next (1)."""
    first = vocab_size + MASK_AT + plane
    return words[:, first : first + PLANES * mask_width(vocab_size) : PLANES]


def sampling_batch(fields: torch.Tensor, positions: torch.Tensor) -> SamplingBatch:
    """Return a step's sampling parameters, from its sequences' `fields` [S, len(RowField)]."""
    floats = fields.view(torch.float32)
    filtered = fields[:, RowField.FLAGS] & FILTERS != 0
    some = _some(filtered)
    seeds = fields[:, RowField.SEED_HIGH].long() << 32 | fields[:, RowField.SEED_LOW].long() & 0xFFFFFFFF
    temperature = floats[:, RowField.TEMPERATURE]
    return SamplingBatch(
        temperature=temperature,
        seeds=seeds,
        positions=positions.long(),
        all_greedy=not _some(temperature > 0),
        min_p=torch.where(filtered, floats[:, RowField.MIN_P], 0.0) if some else None,
        top_k=torch.where(filtered, fields[:, RowField.TOP_K], 0).long() if some else None,
        top_p=torch.where(filtered, floats[:, RowField.TOP_P], 1.0) if some else None,
    )


def adjust(
    logits: torch.Tensor, fields: torch.Tensor, words: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return logits [S, V] in float32 after masks, bad words, biases and penalties, before temperature and filters.

    The order is vLLM's: allowed tokens (`allowed_token_ids`, or a grammar's mask), `bad_words`, `logit_bias`, penalties,
    `min_tokens`. vLLM applies `min_tokens` before the bias. The result is the same, since a forbidden token stays -inf. The
    repetition penalty divides a positive logit and multiplies a negative one, for tokens of prompt and answer (CTRL, Keskar et
    al. 2019). The presence penalty is subtracted once for a token of the answer, the frequency penalty once per occurrence.

    Args:
        fields: [S, len(RowField)], of the sequences. words: [rows, line_width(V)].
    """
    logits, vocab_size = logits.float(), logits.shape[1]
    has_mask = fields[:, RowField.FLAGS] & MASK != 0
    if _some(has_mask):
        allowed = bits_of(masks_of(words, vocab_size)[rows.long()], vocab_size)
        logits = logits.masked_fill(has_mask[:, None] & ~allowed, -torch.inf)
    has_bad = fields[:, RowField.FLAGS] & BAD != 0
    if _some(has_bad):
        ends_one = bits_of(masks_of(words, vocab_size, plane=1)[rows.long()], vocab_size)
        logits = logits.masked_fill(has_bad[:, None] & ends_one, -torch.inf)
    has_words = fields[:, RowField.FLAGS] & WORDS != 0
    if not _some(has_words):
        return logits
    word = torch.where(has_words[:, None], words[rows.long(), :vocab_size], 0)  # [S, V]
    floats = fields.view(torch.float32)[:, :, None]  # [S, len(RowField), 1]
    bias = (word >> BIAS_SHIFT).short().view(torch.float16)
    biased = logits + bias
    count, factor = word & COUNT, floats[:, RowField.REPETITION]
    repeated = torch.where(biased > 0, biased / factor, biased * factor)
    adjusted = torch.where(word & (COUNT | IN_PROMPT) != 0, repeated, biased)
    adjusted = adjusted - (floats[:, RowField.PRESENCE] * (count > 0) + floats[:, RowField.FREQUENCY] * count)
    early = (positions < fields[:, RowField.FREE_FROM])[:, None]
    return torch.where(has_words[:, None], adjusted.masked_fill((word & ENDS != 0) & early, -torch.inf), logits)


def _some(mask: torch.Tensor) -> bool:
    """Return whether any is set. On a GPU it returns True without looking, because the host would have to wait."""
    return mask.device.type != "cpu" or bool(mask.any())
