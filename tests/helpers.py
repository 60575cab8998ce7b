"""What "equal" means, tiny random checkpoints, and a way to drive a model by hand. Used by all tests.

Floating-point results change with the shape of a batch, so two ways to compute the same thing agree up to rounding:

- along the reference's own tokens, logits lie within `tol` of the reference's, and the argmax is the same wherever
  the reference's two largest logits are more than 2 `tol` apart (`assert_logits_equal`);
- running freely, tokens are the same up to the first step at which they are not (`assert_tokens_equal`).

Tiny models are initialised with a standard deviation of 0.3: at the usual 0.02 a tied model repeats its last token, and
no test would notice a broken cache.
"""

import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from folovllm.attention.backends.abstract import AttentionConfig
from folovllm.attention.backends.registry import get_backend
from folovllm.attention.backends.torch_cat import GrowingKVCache, TorchCatBackend
from folovllm.layers.attention import Attention
from folovllm.layers.layer_set import LayerSet
from folovllm.models.loader import load_model
from folovllm.models.model_config import head_dim_of
from folovllm.models.registry import PLAIN_LAYERS, build_model
from folovllm.step.forward_batch import ForwardBatch

transformers.utils.logging.disable_progress_bar()
FAMILIES = ("qwen3", "llama", "qwen2", "mistral", "phi3")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)  # every byte, and these; odd, so that no kernel can count on a round number
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# --- what "equal" means ---------------------------------------------------------------------------------------------


def tolerance(reference: torch.Tensor, relative: float = 1e-4) -> float:
    """How far float32 logits may lie from the reference's [n, V]: a share of the largest."""
    return relative * float(reference.abs().max())


def margins(logits: torch.Tensor) -> torch.Tensor:
    """By how much the largest logit of each row leads: [n, V] -> [n]."""
    top = logits.topk(2, dim=-1).values
    return top[:, 0] - top[:, 1]


def assert_logits_equal(actual: torch.Tensor, reference: torch.Tensor, tol: float | None = None) -> None:
    """Both [n, V], computed along the same tokens: close, and of the same argmax wherever that is no close call."""
    actual, reference = actual.float().cpu(), reference.float().cpu()
    assert actual.shape == reference.shape, f"shapes {list(actual.shape)} and {list(reference.shape)}"
    tol = tolerance(reference) if tol is None else tol
    error = (actual - reference).abs().amax(dim=-1)  # [n]
    bad = (~(error <= tol)).nonzero().flatten().tolist()  # written so that NaN is bad
    assert not bad, f"rows {bad[:8]} are off by up to {error.max():.3g}, allowed is {tol:.3g}"
    clear = margins(reference) > 2 * tol
    assert torch.equal(actual.argmax(-1)[clear], reference.argmax(-1)[clear])


def assert_as_accurate(actual: torch.Tensor, rival: torch.Tensor, truth: torch.Tensor, factor: float = 1.5) -> None:
    """For half precision, where errors grow with the model: `actual` lies at most `factor` times as far from `truth`
    (float32) as `rival`, another implementation in the same dtype, does. Distances are root mean squares."""
    ours, theirs = ((x.float().cpu() - truth.cpu()).square().mean().sqrt() for x in (actual, rival))
    assert ours <= factor * theirs, f"off by {ours:.3g} on average, the other implementation by {theirs:.3g}"


def assert_tokens_equal(
    actual: Sequence[int], reference: Sequence[int], reference_logits: torch.Tensor, tol: float | None = None
) -> None:
    """Greedy tokens of two free runs; `reference_logits` [n, V] are those that the reference's tokens came from."""
    tol = tolerance(reference_logits) if tol is None else tol
    close_calls = (margins(reference_logits.float()) <= 2 * tol).nonzero().flatten().tolist()
    compared = min([*close_calls, len(reference)])
    assert len(actual) == len(reference) or compared < len(reference), f"{len(actual)} tokens, not {len(reference)}"
    assert list(actual[:compared]) == list(reference[:compared])


def assert_varied(outputs: Sequence[Sequence[int]]) -> None:
    """The outputs could expose a mistake: they differ from each other, and none repeats one token."""
    assert len({tuple(o) for o in outputs}) == len(outputs), f"some of these are the same: {outputs}"
    for output in outputs:
        assert len(set(output)) > max(1, len(output) // 4), f"hardly varies: {output}"


# --- tiny checkpoints -----------------------------------------------------------------------------------------------


def tiny_checkpoint(
    family: str = "qwen3", *, num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 32, tied: bool = True,
    max_shard_size: str = "1GB", **overrides: Any,
) -> Path:  # fmt: skip
    """A folder with a random model and a byte-level tokenizer in Hugging Face format, made once per machine.

    `overrides` are fields of the config. The hidden size is not Hq * D, except for Qwen2, which knows no other.
    """
    hidden = num_heads * (head_dim if family == "qwen2" else -(-72 // num_heads))
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": hidden, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "max_position_embeddings": 512,
        "initializer_range": 0.3, "tie_word_embeddings": tied, "bos_token_id": None, "eos_token_id": 256,
    }  # fmt: skip
    if family == "phi3":
        fields["pad_token_id"] = None  # its own is no token of ours
    if family == "gemma3_text":  # two layers with a window, one without; scores with a factor of their own
        fields |= {"sliding_window": 12, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24}
    if family != "qwen2":
        fields["head_dim"] = head_dim
    fields |= overrides
    key = json.dumps([family, fields, max_shard_size, transformers.__version__, 1], sort_keys=True)
    root = Path(tempfile.gettempdir()) / f"folovllm-tests-{os.getuid()}"
    path = root / f"{family}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if not path.is_dir():
        root.mkdir(mode=0o700, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=root))
        _write_checkpoint(scratch, family, fields, max_shard_size)
        try:
            scratch.rename(path)  # whole or not at all; another process may have been first
        except OSError:
            assert path.is_dir()
    return path


def _write_checkpoint(path: Path, family: str, fields: dict[str, Any], max_shard_size: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data.uniform_(0.5, 1.5)  # ones would hide a norm that was not loaded
            elif name.endswith("A_log"):
                parameter.data.uniform_(-6.0, 0.0)  # slow decays: a state that is lost shows for long
            elif name.endswith("bias"):
                parameter.data.normal_(0.0, 0.3)
            elif name.endswith("embed_tokens.weight") and family == "gemma3_text":
                parameter.data *= 0.1  # it is scaled by sqrt(H) in the model: every token would predict itself
    model.save_pretrained(path, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(path)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: id = the byte's rank in the byte-level alphabet; then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[0])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random token ids, one list of each length, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


# --- the reference --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def hf_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


@torch.inference_mode()
def hf_logits(path: Path, token_ids: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The reference's logits after each of `token_ids`: [n, V]."""
    return hf_model(path, dtype)(torch.tensor([list(token_ids)])).logits[0]


@torch.inference_mode()
def hf_greedy(path: Path, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], torch.Tensor]:
    """`max_tokens` greedy tokens that follow `prompt` (no end of text stops them), and their logits [max_tokens, V]."""
    model, new, past = hf_model(path), torch.tensor([list(prompt)]), None
    logits = []
    for _ in range(max_tokens):
        output = model(new, past_key_values=past, use_cache=True)
        past, new = output.past_key_values, output.logits[:, -1:].argmax(-1)
        logits.append(output.logits[0, -1])
    all_logits = torch.stack(logits)
    return all_logits.argmax(-1).tolist(), all_logits


# --- our model, driven by hand --------------------------------------------------------------------------------------


class Driver:
    """Our model with a KV cache and no engine. A sequence is any number below `max_seqs`; its blocks are its own.

    The blocks of a sequence are scattered, and the cache starts as NaN, so that a slot read before it is written shows.
    """

    def __init__(
        self, path: Path, backend: str = "torch_naive", block_size: int = 16, max_seqs: int = 4, max_len: int = 96,
        dtype: torch.dtype = torch.float32, device: str = "cpu", layers: LayerSet = PLAIN_LAYERS,
    ) -> None:  # fmt: skip
        config = AutoConfig.from_pretrained(path)
        self.config = config
        self.model = build_model(config, dtype, device, layers=layers)
        load_model(self.model, path, use_tqdm=False)
        heads, head_dim = config.num_key_value_heads, head_dim_of(config)
        on = torch.device(device)
        attention = AttentionConfig(config.num_attention_heads, heads, head_dim, dtype, on, block_size, max_seqs)
        self.backend = (TorchCatBackend if backend == "torch_cat" else get_backend(backend))(attention)
        blocks = -(-max_len // block_size)
        order = torch.randperm(max_seqs * blocks, generator=torch.Generator().manual_seed(0))
        self.tables = order.view(max_seqs, blocks).int().to(device)  # [max_seqs, max_blocks]
        self.block_size, self.device = block_size, device
        for layer in (module for module in self.model.modules() if hasattr(module, "state_shapes")):
            layer.states = tuple(
                torch.full((max_seqs, *shape), torch.nan, dtype=dtype, device=device)
                for shape, dtype in layer.state_shapes()
            )
        self.cached = [0] * max_seqs  # tokens of each sequence
        layers = [module for module in self.model.modules() if isinstance(module, Attention)]
        shape = (len(layers), 2, max_seqs * blocks, heads, block_size, head_dim)
        self.kv_cache = torch.full(shape, torch.nan, dtype=dtype, device=device).transpose(3, 4)  # [L, 2, N, B, Hkv, D]
        for layer, kv_cache in zip(layers, self.kv_cache, strict=True):
            layer.bind(self.backend)
            layer.kv_cache = GrowingKVCache() if backend == "torch_cat" else kv_cache

    def slots(self, seq: int, start: int, end: int) -> torch.Tensor:
        """The slots of a sequence's tokens from `start` to `end`: [end - start]."""
        position = torch.arange(start, end, device=self.device)
        return self.tables[seq, position // self.block_size].long() * self.block_size + position % self.block_size

    def batch(self, pieces: dict[int, list[int]]) -> ForwardBatch:
        """The ragged batch that goes on with each sequence by its new tokens, in the order given (decodes first)."""
        new = [len(ids) for ids in pieces.values()]
        ends = [self.cached[seq] + n for seq, n in zip(pieces, new, strict=True)]
        spans = [(seq, end - n, end) for seq, n, end in zip(pieces, new, ends, strict=True)]
        tensor = torch.tensor
        fields: dict[str, torch.Tensor] = {
            "input_ids": tensor([token for ids in pieces.values() for token in ids]),
            "positions": torch.cat([torch.arange(start, end) for _, start, end in spans]),
            "slot_mapping": torch.cat([self.slots(*span) for span in spans]),
            "query_start_loc": tensor([0, *new]).cumsum(0).int(),
            "seq_lens": tensor(ends).int(),
            "block_tables": self.tables[list(pieces)],
            "logits_indices": tensor(new).cumsum(0) - 1,
        }
        return ForwardBatch(
            **{name: value.to(self.device) for name, value in fields.items()},
            num_seqs=len(new), num_decodes=new.count(1), max_query_len=max(new), max_seq_len=max(ends),
            query_lens_host=new, seq_lens_host=ends, rows=tensor(list(pieces)).to(self.device),
        )  # fmt: skip

    @torch.inference_mode()
    def step(self, pieces: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Feed each sequence its new tokens; the logits after every one of them, [n, V] per sequence."""
        pieces = dict(sorted(pieces.items(), key=lambda item: len(item[1]) > 1))
        batch = self.batch(pieces)
        self.backend.plan(batch)
        hidden = self.model(batch)
        batch.logits_indices = torch.arange(len(hidden), device=self.device)
        logits = self.model.compute_logits(hidden, batch)
        for seq, end in zip(pieces, batch.seq_lens_host, strict=True):
            self.cached[seq] = end
        return dict(zip(pieces, logits.split(batch.query_lens_host), strict=True))

    def feed(self, ids: list[int], pieces: list[int], seq: int = 0) -> torch.Tensor:
        """Feed a sequence its tokens in pieces of these lengths; the logits after every one of them, [n, V]."""
        return torch.cat([self.step({seq: piece.tolist()})[seq] for piece in torch.tensor(ids).split(pieces)])


# --- the machine ------------------------------------------------------------------------------------------------------


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Here no file of this process grows beyond so many bytes: what a disk does that is full. POSIX only.

    Messages go nowhere meanwhile. pytest captures them in a file, which would be full as well, and a bar of tqdm that cannot
    write keeps the lock of all bars: other threads then wait for it forever.
    """
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
