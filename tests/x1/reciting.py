"""A model that says given texts, token by token: what no random model says can be seen through the whole server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from folovllm.engine.spelling import byte_alphabet

END = "<|endoftext|>"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
Piece = str | bytes  # of a text, a token each


def reciter(
    folder: Path, texts: Sequence[Sequence[Piece]], starts: Sequence[str] = ("",), pieces: bool = False
) -> Path:
    """Write a model whose answer to a prompt that ends in `[[i]]` and one of `starts` is text i, if it is greedy.

    What comes next depends on the last token alone, so no two texts share a piece. With `pieces` the vocabulary is
    SentencePiece's: a space is "▁" and a byte "<0x..>"; else it is byte-level.
    """
    letters = {byte: letter for letter, byte in byte_alphabet().items()}

    def name(piece: Piece) -> str:
        if not pieces:
            return "".join(letters[byte] for byte in (piece if isinstance(piece, bytes) else piece.encode()))
        return f"<0x{piece[0]:02X}>" if isinstance(piece, bytes) else piece.replace(" ", "▁")

    said = [[name(piece) for piece in text] for text in texts]
    words = list(chain(*said))
    assert len({*words}) == len(words), "two texts share a piece"
    names = dict.fromkeys([END, *(name(bytes([byte])) for byte in range(256)), *words])
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=pieces))
    if pieces:
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
    tokenizer.add_special_tokens([END])
    heads = {f"[[{i}]]{start}": text[0] for i, text in enumerate(said) for start in starts}
    tokenizer.add_tokens([AddedToken(head, normalized=False) for head in heads])
    follows = heads | {a: b for text in said for a, b in zip(text, [*text[1:], END], strict=True)}
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    written = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(written | {"clean_up_tokenization_spaces": False}))
    ids = {tokenizer.token_to_id(a): tokenizer.token_to_id(b) for a, b in follows.items()}
    _write_model(folder, tokenizer.get_vocab_size(), ids)
    return folder


def _write_model(folder: Path, size: int, follows: dict[int, int]) -> None:
    """A Llama whose layer does nothing: the last token's one-hot embedding picks a row of the head."""
    hidden = -(-size // 64) * 64
    embedding, head = torch.eye(size, hidden), torch.zeros(size, hidden)
    for token in range(size):
        head[follows.get(token, 0), token] = 2.0
    layer = {f"{norm}_layernorm": (hidden,) for norm in ("input", "post_attention")}
    layer |= {f"self_attn.{x}_proj": (32, hidden) for x in "qkv"} | {"self_attn.o_proj": (hidden, 32)}
    layer |= {"mlp.gate_proj": (16, hidden), "mlp.up_proj": (16, hidden), "mlp.down_proj": (hidden, 16)}
    weights = {f"model.layers.0.{name}.weight": torch.zeros(*shape) for name, shape in layer.items()}
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(hidden)}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": size, "hidden_size": hidden,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32,
        "hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "eos_token_id": 0, "bos_token_id": None, "rope_theta": 10000.0, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
