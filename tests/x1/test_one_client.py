"""What one client, or one line of a program, must not do to all others: numbers beyond bounds, floods, waits for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from folovllm.electives.server.async_engine import AsyncEngine
from folovllm.electives.server.config import ServerConfig
from folovllm.electives.server.transport import ThreadEngineClient
from folovllm.sampling_params import SamplingParams
from tests.helpers import tiny_checkpoint
from tests.x1.background import PATIENCE, Background, events_in, served
from tests.x1.scripted import HandTransport, ScriptedEngine

ROOM = 16  # sequences that may wait
CHAT = '{"messages": [{"role": "user", "content": "a"}], "logprobs": true, '
COMPLETION = '{"prompt": "a", '
# (path, the body up to the number, its end, the field that the error names)
NUMBERS = [
    *(("/v1/completions", f'{COMPLETION}"{name}": ', "}", name) for name in (
        "priority", "n", "seed", "top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens",
        "temperature", "presence_penalty", "repetition_penalty",
    )),
    *(("/v1/completions", f'{COMPLETION}"{name}": [', "]}", name) for name in ("stop_token_ids", "allowed_token_ids")),
    ("/v1/completions", f'{COMPLETION}"logit_bias": {{"', '": 1}}', "logit_bias"),
    ("/v1/completions", f'{COMPLETION}"logit_bias": {{"5": ', "}}", "logit_bias"),
    ("/v1/completions", '{"prompt": [5, ', "]}", None),
    ("/v1/completions", '{"prompt": [[5], [', "]]}", None),
    *(("/v1/chat/completions", f'{CHAT}"{name}": ', "}", named) for name, named in (
        ("priority", "priority"), ("n", "n"), ("top_logprobs", "logprobs"), ("max_completion_tokens", "max_tokens"),
    )),
    ("/detokenize", '{"tokens": [', "]}", "tokens"),
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Background]:
    """Its engine is in a thread: what is refused here never reaches it."""
    yield from served(
        ServerConfig(max_queued_requests=ROOM), model=str(tiny_checkpoint()), max_model_len=256, max_num_seqs=2
    )


class TestNumbers:
    @pytest.mark.parametrize(
        "number", [2**63, -(2**63) - 1, 2**64, 10**400, -(10**400)], ids=lambda n: f"{float(str(n)[:30]):.0e}"
    )
    def test_beyond_64_bits(self, server: Background, number: int) -> None:
        """In any field that has numbers: 400, which names the field. No place in the queue is lost."""
        for path, begin, end, field in NUMBERS:
            status, said = server.ask(path, f"{begin}{number}{end}".encode())
            assert status == 400, f"{begin}{end} is the client's fault: {said}"
            assert field is None or said["error"]["param"] == field, f"{begin}{end} is not named: {said}"
        longest = {"prompt": "a", "max_tokens": 1, "priority": 2**63 - 1 if number > 0 else -(2**63)}
        assert server.ask("/v1/completions", longest)[0] == 200, "it fits"
        server.wait_until_idle()


class TestAdmission:
    def test_a_request_that_cannot_be_handed_over_takes_no_place(
        self, server: Background, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second of its prompts cannot be sent: the first one's place is given back, too."""
        transport, sent = server.engine._transport, list[Any]()

        def send(command: Any, send: Any = transport.send) -> None:
            sent.append(command)
            send(command if len(sent) != 2 else 1 // 0)

        with monkeypatch.context() as patch:
            patch.setattr(transport, "send", send)
            status, _ = server.ask("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 60})
        assert status == 500
        server.wait_until_idle()


class TestWaitsForItself:
    def test_a_second_event_loop(self) -> None:
        """It is told at once, whatever it asks for."""
        transport = HandTransport()
        engine = AsyncEngine(str(tiny_checkpoint()), transport=transport)
        asyncio.run(engine.start())

        async def ask() -> None:
            async for _ in engine.generate([1, 2], SamplingParams(max_tokens=1)):
                pass

        async def call() -> None:
            await engine.call("expert_load")

        for asked in (ask, engine.drain, call):
            with pytest.raises(RuntimeError, match="event loop in which it was started"):
                asyncio.run(asyncio.wait_for(asked(), PATIENCE))


class PanicException(BaseException):
    """As a library in Rust raises it: no `Exception`."""


class TestHealth:
    @pytest.mark.parametrize("error", [RuntimeError, PanicException])
    def test_an_engine_that_has_ended(self, error: type[BaseException]) -> None:
        """However it ended, a panic included: those who wait are told, and so is who asks for its health."""

        class Ending(ScriptedEngine):
            def step(self) -> None:
                raise error("the device is gone")

        with Background(
            ServerConfig(), ThreadEngineClient(lambda config: Ending(config)), model=str(tiny_checkpoint())
        ) as server:
            _, said = server.ask("/v1/completions", {"prompt": [5], "stream": True})
            assert "the engine has ended: " in events_in(said)[0]["error"]["message"]
            status, said = server.ask("/v1/completions", {"prompt": [5], "max_tokens": 1})
            assert (status, said["error"]["code"]) == (500, "engine_dead")
            assert server.ask("/health")[0] == 503
