"""What a reader gets: no queue, one wake-up, text that only grows, an end that is told once. No engine, no threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from folovllm.config import EngineConfig
from folovllm.electives.server.messages import Delta
from folovllm.electives.server.stream import OutputCollector, Stream
from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.engine.input_processor import InputProcessor
from folovllm.engine.setup import set_up
from folovllm.models.files import load_tokenizer
from folovllm.sampling_params import RequestOutputKind, SamplingParams
from tests.helpers import tiny_checkpoint
from tests.tiny import worked_case

STOPS = ["##", "a€"]
DELTAS = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.DELTA)


@cache
def parts() -> tuple[Any, InputProcessor]:
    setup = set_up(EngineConfig(model=str(tiny_checkpoint())))
    tokenizer = load_tokenizer(setup.path, setup.config)
    return tokenizer, InputProcessor(setup, tokenizer)


def ids_of(text: str) -> list[int]:
    """A token each letter; a token each byte where a character has several."""
    found: list[int] = parts()[0].encode(text)
    return found


def stream_of(params: SamplingParams = DELTAS, collector: OutputCollector | None = None, number: int = 0) -> Stream:
    """A stream whose request came at second 0."""
    _, processor = parts()
    seqs = processor.process("", [1, 2, 3], params, 0, None)
    return Stream(number, str(number), seqs, 0.0, collector or OutputCollector(), lambda stream: None)


def in_a_loop(test: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], None]:
    """A test that runs in an event loop of its own; what would wait for ever fails."""

    @wraps(test)
    def run(self: Any) -> None:
        try:
            asyncio.run(asyncio.wait_for(test(self), 10))
        except TimeoutError:
            says = "the reader was never woken: `put` gives the future that `get` waits on a result, however it comes"
            pytest.fail(says, pytrace=False)

    return run


def woken(waiting: asyncio.Task[Any]) -> bool:
    """Whether a reader goes on; if it failed, this does, too."""
    return waiting.done() and waiting.result() is not None


async def turns(count: int = 5) -> None:
    """Give others their turn in the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


def text_of(stream: Stream) -> str:
    """What is new, of a request with one answer."""
    return "".join(piece.text for piece in stream.take())


def stopped_by(whole: str, cut: int) -> str:
    """The stop string that begins at `cut`; empty if none does."""
    return next((stop for stop in STOPS if whole[cut:].startswith(stop)), "")


class TestFeed:
    def test_a_worked_case(self) -> None:
        """ "ab", "é" and "##c" in four steps, with "##" as a stop string; the reader looks after each step."""
        stream = stream_of(replace(DELTAS, stop=["##"]))
        e, acute = ids_of("é")
        got = {}
        for name, tokens in (
            ("a b", ids_of("ab")),
            ("half an é", [e]),
            ("the rest of it", [acute]),
            ("# # c", ids_of("##c")),
        ):
            stream.feed(Delta(0, 0, tokens), 1.0)
            if name == "# # c":
                stream.feed(Delta(0, 0, [], "stop"), 1.0)
            got[name] = text_of(stream)
        got["why"] = stream.seqs[0].stop_reason
        got["tokens counted"] = stream.metrics.num_generated_tokens
        says = "one character is held back, as it could begin ##, until the end; half an é waits; c comes after ##: too late"
        expected = ["a", "", "b", "é", "##", 6]
        worked_case("x1.3", got, dict(zip(got, expected, strict=True)), says)

    def test_the_first_tokens_are_timed(self) -> None:
        stream = stream_of()
        assert not stream.has_begun, "no token has come"
        for now in (3.0, 4.0):
            stream.feed(Delta(0, 0, ids_of("a"), num_cached_tokens=2), now)
        metrics = stream.metrics
        assert (metrics.first_token_time, metrics.num_generated_tokens) == (3.0, 2), (
            "the first came at second 3; two came"
        )
        assert stream.seqs[0].num_cached_tokens == 2, "of the prompt 2 tokens were found in the cache"
        assert stream.newest == [4.0], "the newest came at second 4"

    def test_the_first_tokens_of_several_answers(self) -> None:
        """Answer 1 comes first. The prompt was looked up in the cache once more for answer 0, which found all of it."""
        stream = stream_of(replace(DELTAS, n=2))
        stream.feed(Delta(0, 1, ids_of("x"), num_cached_tokens=2), 3.0)
        stream.feed(Delta(0, 0, ids_of("a"), num_cached_tokens=9), 4.0)
        assert stream.metrics.first_token_time == 3.0, "of all answers the first token came at second 3"
        assert stream.seqs[0].num_cached_tokens == 2, "what was found when the first began; the first sequence notes it"
        assert stream.newest == [4.0, 3.0], "each answer has a newest time of its own"

    def test_log_probabilities_of_the_prompt(self) -> None:
        """They come before the first token, in as many steps as the prompt has chunks."""
        stream = stream_of(replace(DELTAS, prompt_logprobs=0))
        for now, token in ((1.0, 2), (2.0, 3)):
            stream.feed(Delta(0, 0, prompt_logprobs=[[(token, -0.5, 1)]]), now)
        assert [list(row) for row in stream.seqs[0].prompt_logprobs] == [[2], [3]], (
            "a row for each token of the prompt that a step scored, in `prompt_logprobs` of the first sequence"
        )
        assert not stream.seqs[0].logprobs, "they are not the answer's"
        assert not stream.has_begun, "no token has come: a chunk of the prompt is not the first token's time"

    def test_log_probabilities_of_the_prompt_by_another_answer(self) -> None:
        """Of two answers the second one brings them: a prompt has one list of them, in the first sequence."""
        stream = stream_of(replace(DELTAS, n=2, prompt_logprobs=0))
        stream.feed(Delta(0, 1, prompt_logprobs=[[(2, -0.5, 1)]]), 1.0)
        rows = [[list(row) for row in seq.prompt_logprobs] for seq in stream.seqs]
        assert rows == [[[2]], []], f"they belong to the first sequence, whichever answer's step brought them: {rows}"

    def test_no_text_is_made_before_the_reader_looks(self) -> None:
        """Counts the calls of the tokenizer's `decode`."""
        stream, calls = stream_of(), list[list[int]]()

        def decode(ids: list[int]) -> str:
            calls.append(ids)
            return str(parts()[0].decode(ids))

        stream.seqs[0].detokenizer = IncrementalDetokenizer(decode)
        for letter in "abcdefgh":
            stream.feed(Delta(0, 0, ids_of(letter)), 1.0)
        assert len(calls) == 0, (
            f"8 tokens were decoded {len(calls)} times, and nobody has looked: a look costs two calls"
        )
        assert text_of(stream) == "abcdefgh" and len(calls) <= 4, "one look, and all text is made at once"

    def test_what_comes_between_two_looks_is_one_piece(self) -> None:
        stream = stream_of()
        for letter in "abcd":
            stream.feed(Delta(0, 0, ids_of(letter)), 1.0)
        assert text_of(stream) == "abcd", "a slow reader misses nothing, and nothing was queued for it"
        assert text_of(stream) == "", "what was taken is taken"

    def test_several_answers_are_kept_apart(self) -> None:
        stream = stream_of(replace(DELTAS, n=2))
        stream.feed(Delta(0, 1, ids_of("x")), 1.0)
        stream.feed(Delta(0, 0, ids_of("a")), 1.0)
        assert {piece.answer: piece.text for piece in stream.take()} == {0: "a", 1: "x"}, "index says which answer"
        stream.feed(Delta(0, 0, [], "length"), 2.0)
        assert not stream.is_finished, "one of two answers is over"
        stream.feed(Delta(0, 1, [], "length"), 2.0)
        assert stream.is_finished, "now both are"

    @in_a_loop
    async def test_the_end_says_why(self) -> None:
        stream = stream_of(replace(DELTAS, stop_token_ids=ids_of("z")))
        stream.feed(Delta(0, 0, ids_of("a")), 1.0)
        stream.feed(Delta(0, 0, ids_of("z")), 2.0)
        stream.feed(Delta(0, 0, [], "stop"), 2.0)
        output = await anext(stream)
        answer = output.outputs[0]
        said = (answer.text, answer.finish_reason, answer.stop_reason)
        assert said == ("a", "stop", ids_of("z")[0]), "the token that stopped it is no text, and is the reason"
        assert output.finished and stream.metrics.finish_time == 2.0, "it ended at second 2"

    def test_the_last_token_and_the_end_in_one_delta(self) -> None:
        """The token first: it is the one that ended the answer."""
        stream = stream_of(replace(DELTAS, stop_token_ids=ids_of("z")))
        stream.feed(Delta(0, 0, ids_of("a")), 1.0)
        stream.feed(Delta(0, 0, ids_of("z"), "stop"), 2.0)
        assert stream.is_finished, "it was said to have ended"
        assert stream.seqs[0].stop_reason == ids_of("z")[0], "z stopped it, and came with the end"

    def test_an_answer_without_a_token_was_stopped_by_none(self) -> None:
        """It was given up: that its prompt ends in a stop token says nothing."""
        stream = stream_of(SamplingParams(stop_token_ids=[1, 2, 3]))
        stream.feed(Delta(0, 0, [], "abort"), 1.0)
        assert stream.is_finished, "to be given up is an end"
        assert stream.seqs[0].stop_reason is None, "it wrote no token, so none of its own stopped it"

    @in_a_loop
    async def test_who_wants_the_whole_is_not_woken_before_the_end(self) -> None:
        collector, seen = OutputCollector(), list[bool]()
        stream = stream_of(replace(DELTAS, output_kind=RequestOutputKind.FINAL_ONLY), collector)
        waiting = asyncio.ensure_future(collector.get())
        for delta in (Delta(0, 0, ids_of("a")), Delta(0, 0, ids_of("b")), Delta(0, 0, [], "length")):
            stream.feed(delta, 1.0)
            await turns()
            seen.append(woken(waiting))
        waiting.cancel()
        assert seen == [False, False, True], "a token is no news for it, only the end is"

    def test_who_wants_the_whole_waits_for_all_answers(self) -> None:
        collector = OutputCollector()
        stream = stream_of(replace(DELTAS, n=2, output_kind=RequestOutputKind.FINAL_ONLY), collector)
        stream.feed(Delta(0, 1, ids_of("x"), "length"), 1.0)
        assert collector._fresh == [], "one of two answers is over: its reader wants both"
        stream.feed(Delta(0, 0, ids_of("a"), "length"), 2.0)
        assert collector._fresh == [stream], "now both are"

    def test_a_stream_is_in_the_mailbox_once(self) -> None:
        collector = OutputCollector()
        stream = stream_of(collector=collector)
        for letter in "abc":
            stream.feed(Delta(0, 0, ids_of(letter)), 1.0)
        assert collector._fresh == [stream], (
            "three tokens came before the reader looked: it is told of them once (`_tell`)"
        )

    def test_logprobs_come_with_their_texts(self) -> None:
        stream = stream_of(replace(DELTAS, logprobs=1))
        (a,) = ids_of("a")
        stream.feed(Delta(0, 0, [a], None, 0, [[(a, -0.5, 1)]]), 1.0)
        pieces = list(stream.take())
        assert len(pieces) == 1, f"a token has come, and the reader finds {len(pieces)} pieces"
        piece = pieces[0]
        assert piece.logprobs is not None, "the request asked for them"
        assert [(t.decoded_token, t.logprob) for t in piece.logprobs[0].values()] == [("a", -0.5)], "a row each token"

    @pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
    def test_a_stop_among_several_that_came_together(self, field: str) -> None:
        stream = stream_of(replace(DELTAS, **{field: ["b"] if field == "stop" else ids_of("b")}))
        stream.feed(Delta(0, 0, ids_of("abc"), "stop"), 1.0)
        assert text_of(stream) == "a", "b ends the answer and is no text, and c was drawn after the end"
        assert stream.metrics.num_generated_tokens == 2, "a and b; what comes after the end is not counted"

    def test_what_was_drawn_behind_the_end_is_in_no_sum(self) -> None:
        stream = stream_of(replace(DELTAS, stop=["b"], logprobs=0))
        rows = [[(token, -(2.0**i), 1)] for i, token in enumerate(ids_of("abc"))]
        stream.feed(Delta(0, 0, ids_of("abc"), None, 0, rows), 1.0)
        stream.feed(Delta(0, 0, [], "stop"), 1.0)
        stream.look()
        (answer,) = stream.output().outputs
        assert (answer.cumulative_logprob, len(answer.logprobs or ())) == (-3.0, 2), "c was drawn behind the end"

    @given(st.text("aé#€", max_size=12), st.data())
    def test_text_only_grows_however_it_comes(self, whole: str, data: st.DataObject) -> None:
        """The pieces together are the text, in whatever steps the tokens come and whenever the reader looks."""
        ids = ids_of(whole)
        stream, got, start = stream_of(replace(DELTAS, max_tokens=100, stop=STOPS)), "", 0
        cut = min((whole.find(stop) for stop in STOPS if stop in whole), default=len(whole))
        end = len(ids_of(whole[:cut] + stopped_by(whole, cut)))  # tokens until the engine stops; a step may have more
        while start < end:
            count = data.draw(st.integers(1, 3))
            stream.feed(Delta(0, 0, ids[start : start + count]), 1.0)
            start += count
            if start < end and data.draw(st.booleans()):
                got += text_of(stream)
                assert whole[:cut].startswith(got), f"{got!r} was sent, and the text is {whole[:cut]!r}"
        stream.feed(Delta(0, 0, [], "stop" if cut < len(whole) else "length"), 1.0)
        assert got + text_of(stream) == whole[:cut], "at the end all of it was sent"


class TestMailbox:
    @in_a_loop
    async def test_one_wake_up_for_many(self) -> None:
        collector = OutputCollector()
        streams = [stream_of(collector=collector, number=i) for i in range(3)]
        waiting = asyncio.ensure_future(collector.get())
        await turns()
        assert not woken(waiting), "nobody has news: it waits"
        assert collector._waiter is not None and not collector._waiter.done(), (
            "it waits on a future, and takes no time; who asks again and again keeps a core busy"
        )
        for stream in streams[:2]:
            stream.feed(Delta(0, 0, ids_of("a")), 1.0)
        await turns()
        assert woken(waiting), "two streams have news, and who waits is woken"
        numbers = [stream.number for stream in waiting.result()]
        assert numbers == [0, 1], "both at once, in the order in which they had news; not the third"

    @in_a_loop
    async def test_news_that_are_there_are_not_waited_for(self) -> None:
        collector = OutputCollector()
        stream_of(collector=collector, number=4).feed(Delta(0, 0, ids_of("a")), 1.0)
        waiting = asyncio.ensure_future(collector.get())
        await turns()
        assert woken(waiting), "the news came before the reader, and nobody will say it again"
        assert [stream.number for stream in waiting.result()] == [4], "the stream that has news"

    @in_a_loop
    async def test_news_are_handed_out_once(self) -> None:
        collector = OutputCollector()
        stream = stream_of(collector=collector)
        stream.feed(Delta(0, 0, ids_of("a")), 1.0)
        await collector.get()
        stream.take()
        waiting = asyncio.ensure_future(collector.get())
        await turns()
        assert not woken(waiting), "there is nothing new: it waits"
        stream.feed(Delta(0, 0, ids_of("b")), 1.0)
        await turns()
        assert woken(waiting), "and the second time it is woken, too"

    @in_a_loop
    async def test_more_news_while_the_reader_is_about_to_wake(self) -> None:
        """A step serves many streams before the event loop turns: only the first of them wakes the reader."""
        collector = OutputCollector()
        waiting = asyncio.ensure_future(collector.get())
        await turns()
        assert not woken(waiting), "there are no news yet"
        for i in range(3):
            collector.put(stream_of(collector=collector, number=i))
        await turns()
        assert len(await waiting) == 3, "all three are there when it looks"

    @in_a_loop
    async def test_a_reader_that_was_cancelled_is_not_woken(self) -> None:
        collector = OutputCollector()
        waiting = asyncio.ensure_future(collector.get())
        await turns()
        assert not woken(waiting), "there are no news yet"
        waiting.cancel()
        await turns()
        collector.put(stream_of(collector=collector, number=9))
        assert [stream.number for stream in await collector.get()] == [9], "the next reader finds what came meanwhile"


class TestReading:
    @in_a_loop
    async def test_an_error_is_raised_once(self) -> None:
        stream = stream_of()
        waiting = asyncio.ensure_future(anext(stream))
        await turns()
        stream.fail(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await waiting
        assert [output async for output in stream] == [], "after its end a stream gives nothing"
