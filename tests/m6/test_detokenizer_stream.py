"""The detokenizer of M6 says what M1's says, token by token, and a token costs the same at any length.

Stop strings: `tests/m1/test_detokenizer.py`.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from folovllm import SamplingParams
from folovllm.engine import detokenizer_stream
from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.engine.detokenizer_stream import StreamDetokenizer, make_stream_detokenizer
from folovllm.engine.no_text import NoText
from tests.helpers import tiny_checkpoint, tiny_tokenizer
from tests.workloads import make_engine


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral: a token for each byte, words that bring their space, and a text that loses its first."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁▁", "é", "▁the", "😀"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def words() -> Tokenizer:
    """As BERT: a space joins words, unless a piece says that it continues one."""
    pieces = ["[UNK]", "a", "##b", "c", "##d", ",", ".", "é"]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    return tokenizer


BACKENDS = {"bytes": tiny_tokenizer().backend_tokenizer, "byte fallback": byte_fallback(), "words": words()}
CHARACTERS = [[1 + byte for byte in text.encode()] for text in ("é", "世", "😀")]  # with byte fallback


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Random ids, whole characters in pieces, and special tokens, all more often than chance would give them."""
    size = BACKENDS[name].get_vocab_size()
    anything, late = st.integers(0, size - 1), st.integers(max(0, size - 12), size - 1)
    if name == "bytes":
        whole = st.sampled_from([BACKENDS[name].encode(text).ids for text in ("é", "世", "😀", "a")])
    else:
        whole = st.sampled_from(CHARACTERS if name == "byte fallback" else [[0]])
    one = st.one_of(anything.map(lambda i: [i]), late.map(lambda i: [i]), whole)
    return st.lists(one, max_size=12).map(lambda parts: [i for part in parts for i in part])


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=60)
@given(data=st.data(), skip=st.booleans())
def test_its_text_is_that_of_m1(name: str, data: st.DataObject, skip: bool) -> None:
    backend = BACKENDS[name]

    def decode(ids: list[int]) -> str:
        return str(backend.decode(ids, skip_special_tokens=skip))

    plain, stream = IncrementalDetokenizer(decode), StreamDetokenizer(decode, backend, skip)
    for token in data.draw(ids_of(name)):
        plain.append(token)
        stream.append(token)
        if data.draw(st.integers(0, 4)):  # at times several tokens come at once
            assert stream.advance() == plain.advance()
            assert stream.text == plain.text and stream.num_chars == len(plain.text)
    assert stream.flush() == plain.flush() and stream.text == plain.text
    assert stream.flush() == "" and stream.advance() == ""


NO_TEXT = {"bytes": [255, 188, 256], "byte fallback": [1 + 0xFF, 0], "words": [0]}  # however many of them


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=40)
@given(data=st.data())
def test_bytes_without_end_are_not_held_back(name: str, data: st.DataObject) -> None:
    """The text is M1's in the end, no token waits for long, and none is decoded again and again."""
    backend, widest = BACKENDS[name], 0

    def decode(ids: list[int]) -> str:
        nonlocal widest
        widest = max(widest, len(ids))
        return str(backend.decode(ids))

    plain, stream = IncrementalDetokenizer(backend.decode), StreamDetokenizer(decode, backend, True)
    # With byte fallback how a byte reads depends on all bytes around it: there are words between.
    pieces = [[backend.token_to_id(piece)] for piece in ("▁a", "b", "▁the")]
    some = st.sampled_from(pieces) if name == "byte fallback" else ids_of(name)
    ends = st.sampled_from([[], *([id_] * 40 for id_ in NO_TEXT[name])])
    parts = data.draw(st.lists(st.tuples(some, ends), max_size=6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detokenizer_stream, "MOST_HELD", 8)
        for token in [token for part in parts for ids in part for token in ids]:
            plain.append(token)
            stream.append(token)
            plain.advance()
            stream.advance()
    plain.flush()
    stream.flush()
    assert stream.text == plain.text
    if name == "bytes":  # in others a token may be no text at all
        assert widest <= 3 * 8


@pytest.mark.parametrize("byte", [0xFF, 0xF0, 0xE2, 0x80])
def test_a_byte_that_is_no_character_costs_what_others_cost(byte: int) -> None:
    backend = BACKENDS["byte fallback"]
    decoded: list[int] = []

    def decode(ids: list[int]) -> str:
        decoded.append(len(ids))
        return str(backend.decode(ids))

    stream = StreamDetokenizer(decode, backend, True)
    for count in range(1, 1001):
        stream.append(1 + byte)
        stream.advance()
        assert stream.num_chars >= count - 65
    stream.append(backend.token_to_id("▁the"))
    assert stream.advance().endswith("� the")
    assert stream.text == backend.decode(stream.token_ids) and max(decoded) <= 3 * 64


class TestWhichOne:
    def test_a_tokenizer_with_python_of_its_own(self) -> None:
        class Own(PreTrainedTokenizerFast):
            def _decode(self, *args: Any, **options: Any) -> str:
                return super()._decode(*args, **options).upper()

        own = Own(tokenizer_object=BACKENDS["bytes"])
        assert type(make_stream_detokenizer(own, SamplingParams())) is IncrementalDetokenizer

    def test_in_the_engine(self) -> None:
        for milestone, kind in (("m5", IncrementalDetokenizer), ("m6", StreamDetokenizer)):
            engine = make_engine(tiny_checkpoint(), milestone=milestone, num_kv_blocks=16)
            engine.add_request("r", "Hello", SamplingParams())
            assert type(engine.core.output_processor.requests["r"].seqs[0].detokenizer) is kind
            engine.add_request("s", "Hello", SamplingParams(detokenize=False))
            assert type(engine.core.output_processor.requests["s"].seqs[0].detokenizer) is NoText
