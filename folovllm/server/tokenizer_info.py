"""What `/tokenizer_info` tells of a tokenizer."""

from __future__ import annotations

from typing import Any

from folovllm.server.replies import TokenizerInfo

NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def tokenizer_info(tokenizer: Any) -> TokenizerInfo:
    """The names are those of `tokenizer_config.json`. No path of this machine is among them."""
    added = {
        str(id_): {flag: getattr(token, flag) for flag in FLAGS}
        for id_, token in tokenizer.added_tokens_decoder.items()
    }
    named = {name: getattr(tokenizer, name) for name in NAMED}
    extra = [token for token in tokenizer.all_special_tokens if token not in named.values()]
    template = getattr(tokenizer, "chat_template", None)
    return TokenizerInfo(
        tokenizer_class=type(tokenizer).__name__,
        vocab_size=len(tokenizer),
        chat_template=template if isinstance(template, str) else None,
        extra_special_tokens=extra,
        added_tokens_decoder=added,
        **named,
    )
