"""The `openai` package against a server with a real engine: nothing in the client is changed but its address."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from folovllm.electives.server.config import ServerConfig
from folovllm.llm import LLM
from folovllm.sampling_params import SamplingParams
from tests.x1.background import Background

KEY = "a-key"
MODEL = "little"
STORY = "Once upon a time"
QUESTION: Any = [{"role": "user", "content": "Tell me about Lily."}]


@pytest.fixture
def server(keyed_server: Background) -> Background:
    return keyed_server


@pytest.fixture
def client(server: Background) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What the synchronous engine answers."""
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=2)
    with LLM(max_model_len=512, use_tqdm=False) as llm:
        (story,) = llm.generate(STORY, params, use_tqdm=False)
        (chat,) = llm.chat(QUESTION, params, use_tqdm=False)
    return {"story": story, "chat": chat}


class TestCompletions:
    def test_a_completion(self, client: OpenAI, expected: dict[str, Any]) -> None:
        got = client.completions.create(model=MODEL, prompt=STORY, temperature=0, max_tokens=20, logprobs=2)
        story = expected["story"]
        assert got.choices[0].text == story["text"]
        assert (got.choices[0].finish_reason, got.model, got.object) == ("length", MODEL, "text_completion")
        assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(story.prompt_token_ids), 20)  # type: ignore[union-attr]
        shown = got.choices[0].logprobs
        assert shown and "".join(shown.tokens or []) == story["text"]
        rows = story.outputs[0].logprobs
        chosen = [next(iter(row.values())).logprob for row in rows]
        assert shown.token_logprobs == pytest.approx(chosen, abs=1e-4)
        assert [len(top) for top in shown.top_logprobs or []] == [len(row) for row in rows]
        assert [story["text"][at:].startswith(token) for at, token in zip(shown.text_offset, shown.tokens, strict=True)]  # type: ignore[arg-type]

    def test_echo(self, client: OpenAI, expected: dict[str, Any]) -> None:
        """The prompt, as text or as ids, then the answer; what the model thinks of both, whole, streamed, and of the prompt alone."""
        story, ids = expected["story"], expected["story"].prompt_token_ids
        for prompt in (STORY, ids):
            asked: Any = {"model": MODEL, "prompt": [prompt, prompt], "temperature": 0, "echo": True, "logprobs": 1}
            whole, alone = (client.completions.create(**asked, max_tokens=most) for most in (20, 0))
            for choice, prompt_alone in zip(whole.choices, alone.choices, strict=True):
                shown, scores = choice.logprobs, prompt_alone.logprobs
                assert choice.text == STORY + story["text"] == "".join(shown.tokens)
                assert (shown.token_logprobs[0], shown.top_logprobs[0], shown.text_offset[0]) == (None, None, 0)
                assert (
                    all(isinstance(x, float) for x in shown.token_logprobs[1:]) and len(shown.tokens) == len(ids) + 20
                )
                assert [choice.text[at:].startswith(t) for at, t in zip(shown.text_offset, shown.tokens, strict=True)]
                assert all(len(top) in (1, 2) for top in shown.top_logprobs[1:])
                assert (prompt_alone.text, prompt_alone.finish_reason) == (STORY, "length")
                assert scores.token_logprobs[1:] == pytest.approx(shown.token_logprobs[1 : len(ids)], abs=1e-4)
            assert (alone.usage.prompt_tokens, alone.usage.completion_tokens) == (2 * len(ids), 0)
            texts = ["", ""]
            for chunk in client.completions.create(**asked, max_tokens=20, stream=True):
                texts[chunk.choices[0].index] += chunk.choices[0].text
            assert texts == [choice.text for choice in whole.choices]

    def test_prompt_logprobs(self, server: Background, expected: dict[str, Any]) -> None:
        """As vLLM's servers give them: in a completion by choice, in a chat once."""
        ids = expected["story"].prompt_token_ids
        asked = {"prompt": ids, "prompt_logprobs": 2, "max_tokens": 1}
        status, said = server.ask("/v1/completions", asked | {"n": 2, "echo": True, "logprobs": 0})
        assert status == 200
        for choice in said["choices"]:
            first, *rows = choice["prompt_logprobs"]
            assert first is None and [next(iter(row)) for row in rows] == [str(id_) for id_ in ids[1:]]
            chosen = [next(iter(row.values()))["logprob"] for row in rows]
            assert choice["logprobs"]["token_logprobs"][1 : len(ids)] == pytest.approx(chosen)
            assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:])
            assert {"rank", "decoded_token", "logprob"} == {*rows[0].popitem()[1]}
        status, said = server.ask("/v1/chat/completions", {"messages": QUESTION, "prompt_logprobs": 0, "max_tokens": 1})
        assert status == 200 and len(said["prompt_logprobs"]) == said["usage"]["prompt_tokens"]
        assert "prompt_logprobs" not in said["choices"][0]
        assert server.ask("/v1/completions", asked | {"stream": True})[0] == 400

    def test_a_stream(self, client: OpenAI, expected: dict[str, Any]) -> None:
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        asked: Any = {"model": MODEL, "prompt": STORY, "temperature": 0, "max_tokens": 20}
        *texts, last = client.completions.create(**asked, stream=True, stream_options=options)
        assert "".join(chunk.choices[0].text for chunk in texts) == expected["story"]["text"]
        assert texts[-1].choices[0].finish_reason == "length" and last.choices == []
        counts = [chunk.usage.completion_tokens for chunk in (*texts, last) if chunk.usage]
        assert counts == sorted(counts) and len(counts) == len(texts) + 1 and counts[-1] == 20

    def test_several_prompts_and_answers(self, client: OpenAI, expected: dict[str, Any]) -> None:
        """Answers are numbered through: those to the first prompt come first."""
        ids = expected["story"].prompt_token_ids
        arguments: Any = {"model": MODEL, "prompt": [ids, ids, [5]], "temperature": 0, "max_tokens": 20, "n": 2}
        whole = client.completions.create(**arguments)
        assert [choice.index for choice in whole.choices] == list(range(6))
        assert {choice.text for choice in whole.choices[:4]} == {expected["story"]["text"]}
        streamed = [""] * 6
        for chunk in client.completions.create(**arguments, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert streamed == [choice.text for choice in whole.choices]
        assert whole.usage and whole.usage.completion_tokens == 120

    def test_stop_seed_and_extensions(self, client: OpenAI) -> None:
        extra = {"top_k": 50, "min_tokens": 2, "ignore_eos": True, "priority": 0, "cache_salt": "mine"}
        asked: Any = {"model": MODEL, "prompt": STORY, "seed": 3, "max_tokens": 60, "stop": ["e"], "user": "me"}
        once, again = (client.completions.create(**asked, extra_body=extra) for _ in range(2))
        assert once.choices[0].text == again.choices[0].text and once.choices[0].finish_reason == "stop"
        assert once.choices[0].model_extra == {"stop_reason": "e"}
        assert again.usage and again.usage.prompt_tokens_details is not None


def test_a_chat(client: OpenAI, expected: dict[str, Any]) -> None:
    """Whole, and as a stream of a question in parts."""
    asked: Any = {"model": MODEL, "temperature": 0, "max_completion_tokens": 20}
    got = client.chat.completions.create(**asked, messages=QUESTION, logprobs=True, top_logprobs=2)
    choice, wanted = got.choices[0], expected["chat"].outputs[0]
    assert (choice.message.role, choice.message.content) == ("assistant", wanted.text)
    assert choice.logprobs and choice.logprobs.content
    for shown, row in zip(choice.logprobs.content, wanted.logprobs, strict=True):
        chosen = next(iter(row.values()))
        assert bytes(shown.bytes or []).decode() == shown.token == chosen.decoded_token
        assert len(shown.top_logprobs) == 2 and shown.logprob == pytest.approx(chosen.logprob, abs=1e-4)
        assert shown.top_logprobs[0].logprob >= shown.top_logprobs[1].logprob
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Tell me about Lily."}]}]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, messages=parts, stream=True)]
    assert [chunk.delta.role for chunk in chunks] == ["assistant", *[None] * (len(chunks) - 1)]
    assert chunks[0].delta.content == "", "some clients look for no text beside a role"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == wanted.text
    assert chunks[-1].finish_reason == "length"


class TestErrors:
    def test_what_clients_raise(self, server: Background, client: OpenAI) -> None:
        wrong = OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError, match="wants a key"):
            wrong.models.list()
        assert server.ask("/v1/models", Authorization="bearer another")[0] == 200
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'") as missing:
            client.completions.create(model="gpt", prompt="x")
        assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
        with pytest.raises(openai.BadRequestError, match="top_p must be above 0") as bad:
            client.completions.create(model=MODEL, prompt="x", top_p=5)
        assert (bad.value.param, bad.value.type) == ("top_p", "invalid_request_error")
        with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings: Not Found"):
            client.embeddings.create(model=MODEL, input="x")
        for path, status in (("/v1/nothing", 404), ("/v1/completions", 405)):
            got, said = server.ask(path)
            assert got == status and path in said["error"]["message"]


class TestOtherAddresses:
    def test_models(self, client: OpenAI) -> None:
        assert [model.id for model in client.models.list()] == [MODEL, "stories"]
        assert client.models.retrieve("stories").model_extra == {"max_model_len": 512}

    def test_tokenize_and_back(self, server: Background) -> None:
        _, said = server.ask("/tokenize", {"prompt": STORY, "return_token_strs": True})
        assert said["count"] == len(said["tokens"]) == len(said["token_strs"]) and said["max_model_len"] == 512
        assert server.ask("/detokenize", {"tokens": said["tokens"]}) == (200, {"prompt": STORY})
        _, chat = server.ask("/tokenize", {"messages": QUESTION})
        assert chat["count"] > 4

    def test_metrics(self, server: Background, client: OpenAI) -> None:
        """Under vLLM's names; what a request adds is what it was."""

        def read() -> dict[str, float]:
            lines = server.ask("/metrics")[1].splitlines()
            pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
            labels = '{engine="0",model_name="little"}'
            return {name.removesuffix(labels): float(value) for name, value in pairs}

        server.wait_until_idle()
        before = read()
        usage = client.completions.create(model=MODEL, prompt=STORY, max_tokens=5).usage
        after = read()
        changes = {name: after[name] - before[name] for name in after}
        assert usage and changes["vllm:generation_tokens_total"] == usage.completion_tokens
        assert changes["vllm:prompt_tokens_total"] == usage.prompt_tokens
        assert changes["vllm:time_to_first_token_seconds_count"] == 1
        assert changes["vllm:inter_token_latency_seconds_count"] == usage.completion_tokens - 1
        assert (
            changes["vllm:request_queue_time_seconds_count"] == changes["vllm:e2e_request_latency_seconds_count"] == 1
        )
        assert changes["vllm:prefix_cache_queries_total"] == usage.prompt_tokens
        assert after["vllm:num_requests_running"] == 0 and not math.isnan(after["vllm:kv_cache_usage_perc"])


class TestLimits:
    def test_a_full_queue(self) -> None:
        """One prompt may wait. The next is answered 429 while it does; what was accepted is answered."""
        config = ServerConfig(max_queued_requests=1)
        with Background(config, max_num_seqs=1, max_model_len=8192) as server:
            client = OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
            arguments: Any = {"model": "stories-5m", "prompt": STORY, "extra_body": {"ignore_eos": True}}
            running = client.completions.create(**arguments, max_tokens=8000, stream=True)  # closed below
            next(running)
            waiting = client.completions.with_raw_response.create
            answers: list[str] = []

            async def main() -> None:
                async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as other:
                    accepted = asyncio.ensure_future(other.completions.create(**arguments, max_tokens=3))
                    while not server.engine.num_queued:
                        await asyncio.sleep(0.001)
                    with pytest.raises(openai.RateLimitError, match="queue is full") as told:
                        await asyncio.to_thread(waiting, **arguments)
                    assert told.value.response.headers["Retry-After"] == "1"
                    running.close()
                    answers.append((await accepted).choices[0].text)

            asyncio.run(main())
            assert answers[0]
            server.wait_until_idle()
