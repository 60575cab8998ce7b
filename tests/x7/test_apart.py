"""Prefill apart from decode: the same text as one engine alone, whatever the peer does, and nothing is held afterwards."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from folovllm.electives.kv_transfer import peers, segment, wire
from folovllm.electives.kv_transfer.blocks import prompt_sequence
from folovllm.electives.kv_transfer.rank_cache import cache_of
from folovllm.electives.rollouts.generation import next_generation
from folovllm.sampling_params import SamplingParams
from tests.x7.pair import GREEDY, PROMPTS, SEEDED, TEXT, Pair, between, pair

pytestmark = [pytest.mark.x7, pytest.mark.anyio]
salts = map(str, itertools.count())  # of prompts that no test has asked before
# In what the peer says, a million bytes: K/V begin at about 300.
PLACES = (0, 30, 100, 180, 250, 400, 50_000, 900_000)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def both(anyio_backend: str) -> AsyncIterator[Pair]:
    async with pair() as both:
        yield both


@pytest.fixture
async def apart(both: Pair) -> AsyncIterator[Pair]:
    """The pair, whose client has forgotten what failed."""
    await both.ask(both.port)
    yield both
    await both.require_idle()


@pytest.fixture(params=["memory", "socket"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How K/V travel."""
    if request.param == "socket":
        monkeypatch.setattr(peers, "open_segment", lambda ref: None)
    return str(request.param)


async def alone(both: Pair, prompt: Any, params: SamplingParams) -> list[int]:
    """The answer of the one engine by itself."""
    both.decode.bring = None
    return (await both.answer(prompt, params, cache_salt=next(salts)))[0]


async def test_answers_are_those_of_one_engine(apart: Pair, way: str) -> None:
    for prompt, params in zip(PROMPTS * 2, [GREEDY, SEEDED] * len(PROMPTS), strict=True):
        expected = await alone(apart, prompt, params)
        await apart.ask(apart.port)
        tokens, num_cached = await apart.answer(prompt, params, cache_salt=next(salts))
        num_tokens = len(apart.decode.tokenizer.encode(prompt))
        assert (tokens, num_cached) == (expected, (num_tokens - 1) // 16 * 16)


async def test_k_and_v_arrive_as_they_were(apart: Pair, way: str) -> None:
    """Bit by bit, and with logits bit by bit: those of a prefix hit of the same length."""
    salt = next(salts)
    scored = SamplingParams(temperature=0, max_tokens=4, logprobs=5)
    outputs = []
    for engine in (apart.decode, apart.prefill):  # the second has a hit in its own cache by then
        outputs.append([output async for output in engine.generate(TEXT, scored, cache_salt=salt)][-1])
    first, second = outputs
    assert first.num_cached_tokens == second.num_cached_tokens > 0
    assert first.outputs[0].logprobs == second.outputs[0].logprobs
    caches = [
        await engine.call("call_function", f"{__name__}:blocks_of", {"salt": salt})
        for engine in (apart.prefill, apart.decode)
    ]
    assert caches[0] == caches[1] and any(caches[0])


def blocks_of(engine: Any, query: dict[str, Any]) -> bytes:
    """The bytes of all full blocks of TEXT in an engine's cache."""
    ids = torch.tensor(engine.tokenizer.encode(TEXT), dtype=torch.int32).numpy().tobytes()
    found = engine.scheduler.kv.prefix_cache.longest_cached_prefix(
        prompt_sequence(ids[: len(ids) // 64 * 64], query["salt"])
    )
    return cache_of(engine.executor._worker)[:, [block.block_id for block in found]].numpy().tobytes()


async def test_what_is_cached_does_not_travel_again(apart: Pair) -> None:
    salt = next(salts)
    await apart.answer(TEXT[:400], cache_salt=salt)
    async with between(apart.port, "pass", 10**9) as port:
        await apart.ask(port)
        await apart.answer(TEXT[:400], cache_salt=salt)  # all is here: nobody is asked
        before = apart.decode.stats.moved["loaded_peer"]
        assert (await apart.answer(TEXT, cache_salt=salt))[1] == 176
        assert 0 < apart.decode.stats.moved["loaded_peer"] - before < 11


@pytest.mark.parametrize("what", ["cut", "flip", "hang", "wrong"])
async def test_a_peer_that_fails_at_any_moment_changes_no_answer(apart: Pair, way: str, what: str) -> None:
    """It dies, lies, or says nothing more, after so many bytes. Then the prompt is computed here, and the peer is asked again later."""
    expected = await alone(apart, TEXT, GREEDY)
    for after in PLACES if way == "socket" else PLACES[:6]:
        async with between(apart.port, what, after) as port:
            await apart.ask(port, seconds=0.6 if what == "hang" else 20)
            salt = next(salts)
            tokens, num_cached = await apart.answer(TEXT, cache_salt=salt)
            assert tokens == expected
            assert num_cached in (0, 176)
            assert apart.client._num_failures == (num_cached == 0 or what == "wrong"), (after, num_cached)
            assert (await apart.answer(TEXT, cache_salt=salt))[0] == expected, "nothing wrong was cached"
        if what == "wrong":
            break
    await apart.ask(apart.port)
    assert await apart.answer(TEXT, cache_salt=next(salts)) == (expected, 176)


async def test_a_lost_peer_is_left_alone_for_a_while(apart: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "FIRST_PAUSE", 60)
    async with between(apart.port, "cut", 0) as port:
        await apart.ask(port)
        assert (await apart.answer(TEXT, cache_salt=next(salts)))[1] == 0
        apart.client._address = "127.0.0.1", apart.port  # it is there again
        assert (await apart.answer(TEXT, cache_salt=next(salts)))[1] == 0
        apart.client._retry_at = 0.0  # and time has passed
        assert (await apart.answer(TEXT, cache_salt=next(salts)))[1] == 176
        assert apart.client._num_failures == 0


async def test_clients_that_leave_at_any_moment_leave_nothing(apart: Pair, way: str) -> None:
    for delay in (0, 0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3):
        answering = asyncio.create_task(apart.answer(TEXT, cache_salt=next(salts)))
        await asyncio.sleep(delay)
        answering.cancel()
        await asyncio.wait([answering])
    await apart.require_idle()


async def test_many_at_once_under_pressure_in_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of the one that answers holds less than a third of what comes: blocks are evicted, sequences are preempted."""
    monkeypatch.setattr(segment, "MOST_BYTES", 400_000)  # four blocks
    async with pair(num_kv_blocks=36) as both:
        prompts = [TEXT[i : 700 - i] for i in range(12)]
        expected = [await alone(both, prompt, SEEDED) for prompt in prompts]
        await both.ask(both.port)
        chosen = random.Random(0).sample(range(12), 12)
        answers = await asyncio.gather(*(both.answer(prompts[i], SEEDED, cache_salt=next(salts)) for i in chosen))
        assert [tokens for tokens, _ in answers] == [expected[i] for i in chosen]
        assert both.client._num_failures == 0


async def test_strangers_hold_nothing_up(
    apart: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They send nothing, rubbish, a length that is too large, half a message, or ask for what is no prompt. Nor do they fill the log."""
    monkeypatch.setattr(wire, "PATIENCE", 0.5)
    apart.server._logged_at = -peers.QUIET
    hello = wire.MAGIC + b"1" * 16
    rubbish = (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, hello[:-1], hello, hello + bytes(32))
    no_prompts = ((b"123", 0), (bytes(64), 1), (bytes(64), -1), (b"", 0), (b"\xff" * 64, 0), (bytes(64 * 40), 0))
    strangers = []
    for data in rubbish * 4:
        strangers.append(await asyncio.open_connection("127.0.0.1", apart.port))
        strangers[-1][1].write(data)
    assert (await apart.answer(TEXT, cache_salt=next(salts)))[1] == 176
    layout = apart.client._pool.layout
    for token_ids, first in no_prompts:
        reader, writer = await asyncio.open_connection("127.0.0.1", apart.port)
        peer = wire.Connection(reader, writer, b"", is_server=False)
        await peer.handshake()
        await peer.send(wire.PrefillRequest(layout, token_ids, first, None))
        with pytest.raises(wire.WireError, match=r"asks for|token id|context"):
            await peer.receive(wire.Blocks)
        writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", apart.port)
    await (peer := wire.Connection(reader, writer, b"", is_server=False)).handshake()
    writer.write((2**31).to_bytes(4, "little") + bytes(9))
    with pytest.raises(wire.WireError, match="announces 2147483648 bytes"):
        await peer.receive(wire.Blocks)
    writer.close()
    async with asyncio.timeout(10):
        while apart.server._connections:
            await asyncio.sleep(0.05)
    for _, writer in strangers:
        writer.close()
    assert caplog.text.count("a peer is refused") == 1 < apart.server._num_unlogged
    apart.server._logged_at -= peers.QUIET
    _, writer = await asyncio.open_connection("127.0.0.1", apart.port)
    writer.write(rubbish[1])
    async with asyncio.timeout(10):
        while apart.server._num_unlogged:
            await asyncio.sleep(0.05)
    assert "others since the last such line" in caplog.messages[-1] and "(0 others" not in caplog.messages[-1]
    writer.close()


@pytest.mark.parametrize(
    "options", [{"kv_cache_dtype": "fp8"}, {"block_size": 32}, {"dtype": "float16"}, {"model": "stories-moe"}]
)
async def test_another_engine_is_refused(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    async with pair(**options) as both:
        expected = await alone(both, TEXT, GREEDY)
        await both.ask(both.port)
        assert await both.answer(TEXT, cache_salt=next(salts)) == (expected, 0)
        assert "the peer has another" in caplog.text


async def test_another_secret_or_version_of_the_weights_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with pair(secret=b"one", theirs=b"two") as both:
        assert (await both.answer(TEXT))[1] == 0
        assert "another secret" in caplog.text
    async with pair(secret=b"one") as both:
        assert (await both.answer(TEXT))[1] > 0
        await both.prefill.call("call_function", f"{__name__}:change_weights", {})
        assert (await both.answer(TEXT, cache_salt="new"))[1] == 0
        await both.decode.call("call_function", f"{__name__}:change_weights", {})
        both.client._retry_at = 0.0
        assert (await both.answer(TEXT, cache_salt="new"))[1] == 0
        assert caplog.text.count("the weights were updated") == 3  # who refuses, who is refused, who asks nobody


def change_weights(engine: Any, query: dict[str, Any]) -> None:
    """As if they had been updated."""
    next_generation(engine)


async def test_a_prompt_that_needs_scores_is_computed_here(apart: Pair) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    assert (await apart.answer(TEXT, params, cache_salt=next(salts)))[1] == 0
    assert apart.client._num_failures == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"kv_cache_dtype": "fp8"}, {}),
        ({}, {"kv_offload": "16MiB", "num_kv_blocks": 40}),
        ({}, {"speculative_config": {"method": "draft_model", "model": "stories-draft"}}),
        pytest.param({"tensor_parallel_size": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"device": "cuda", "dtype": "float32"}, {}, marks=pytest.mark.gpu),
    ],
)
async def test_with_other_electives(
    first: dict[str, Any], second: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    if "tensor_parallel_size" in first:
        request.getfixturevalue("warm")
    async with pair(common=first, **second) as both:
        prompts = [TEXT[i:] for i in range(4)]
        expected = [await alone(both, prompt, GREEDY) for prompt in prompts]
        await both.ask(both.port)
        for _ in range(2):
            answers = [await both.answer(prompt, cache_salt="x") for prompt in prompts]
            assert [tokens for tokens, _ in answers] == expected
            assert all(num_cached >= 160 for _, num_cached in answers)
