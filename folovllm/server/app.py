"""The HTTP application: which address does what."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import folovllm
from folovllm.engine.input_processor import encode_within
from folovllm.inputs import Prompt
from folovllm.inspector.web import FILES, PAGE
from folovllm.models.files import generation_defaults, whole
from folovllm.plugins import SLEEP_ROUTES, require
from folovllm.sampling_params import SamplingParams
from folovllm.server.admission import Admission
from folovllm.server.async_engine import AsyncEngine
from folovllm.server.config import ServerConfig
from folovllm.server.errors import ApiError, as_api_error
from folovllm.server.guard import HostGuard
from folovllm.server.http import CLIENT_GONE, error_response, json_response, read_body, require_json
from folovllm.server.metrics import Metrics
from folovllm.server.openapi import ENDPOINTS, document
from folovllm.server.pages import InspectorRoutes, chat_page
from folovllm.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    StreamOptions,
    TokenizeRequest,
    parse,
)
from folovllm.server.replies import (
    ChatWriter,
    CompletionWriter,
    Detokenized,
    EchoWriter,
    ModelCard,
    ModelList,
    Tokens,
    Version,
    tokenizer_info,
)
from folovllm.server.requests import TAGS, chat_params, chat_prompt, completion_params, prompts_of, reading_of
from folovllm.server.response_handler import ResponseHandler
from folovllm.server.sse import unless_gone

Handler = Callable[[Request], Awaitable[Response]]
R = TypeVar("R", bound=msgspec.Struct)
FIELDS = (*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__)
BODY_SECONDS = 60.0  # that a request may take to arrive
MOST_IDS = 1 << 20  # that are made a text by one request, while other texts wait


def build_app(engine: AsyncEngine, config: ServerConfig) -> Starlette:
    """The application around an engine that was started."""
    api = Api(engine, config)
    routes = [
        Route(
            each.path.replace("{name}", "{name:path}"),
            api.guarded(getattr(api, each.handler), needs_key=not each.is_open),
            methods=["POST" if each.takes else "GET"],
        )
        for each in ENDPOINTS
    ]
    if config.inspector:
        inspector = InspectorRoutes(engine, bool(config.api_key))
        routes += [  # the page and its files say nothing of the engine: a browser asks for them without a key
            Route(PAGE, api.guarded(inspector.page)),
            Route(FILES, api.guarded(inspector.file)),
            Route(f"{PAGE}/events", api.guarded(inspector.events, needs_key=True)),
        ]
    if config.enable_sleep_mode:
        routes += [
            Route(each.path, api.guarded(api.calling(each.place), needs_key=True), methods=[each.method])
            for each in require(SLEEP_ROUTES, "enable_sleep_mode")
        ]
    cors = Middleware(
        CORSMiddleware, allow_origins=config.cors_origin, allow_methods=["GET", "POST"], allow_headers=["*"]
    )
    return Starlette(
        routes=routes,
        middleware=[guard(config), *([cors] if config.cors_origin else [])],
        exception_handlers={HTTPException: api.no_such_address},
    )


def guard(config: ServerConfig) -> Middleware:
    """The check of who asks. Where a key is needed any name will do: a page from elsewhere does not have the key."""
    names = ["*"] if config.api_key else [config.host, *config.allowed_host, *config.inspector_host]
    return Middleware(HostGuard, names=names, flag="--allowed-host", origins=config.cors_origin)


class Api:
    """The handlers of `ENDPOINTS`, which says what each does. Errors are raised; `guarded` makes responses of them."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self._engine, self._config = engine, config
        self._names = config.served_model_name or [engine.config.model]
        self._keys = [key.encode() for key in config.api_key]
        self._defaults = generation_defaults(engine.setup.path)
        self._admission = Admission(engine, config.max_queued_requests, config.max_queued_tokens)
        self._created = int(time.time())
        self._tags_are_special = not set(engine.tokenizer.all_special_tokens).isdisjoint(TAGS)

    def guarded(self, handler: Handler, needs_key: bool = False) -> Handler:
        """Wrap a handler: it checks the key first, if one is needed, and answers every error."""

        async def guard(request: Request) -> Response:
            try:
                if needs_key:
                    self._check_key(request)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)
            except BaseException as error:
                if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
                    raise
                return error_response(as_api_error(error, FIELDS))

        return guard

    def _check_key(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # With all keys, so that the time tells nothing.
        known = [secrets.compare_digest(given.encode(), key) for key in self._keys]
        if self._keys and not (scheme.lower() == "bearer" and any(known)):
            message = "this server wants a key that it knows: send Authorization: Bearer YOUR_KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def no_such_address(self, request: Request, error: Exception) -> Response:
        """Starlette's own refusals: an unknown address, a method that it does not have."""
        assert isinstance(error, HTTPException)
        here = [route.path for route in request.app.routes if route.path.startswith("/v1/") and "{" not in route.path]
        wrong = (
            "this address takes another method"
            if error.status_code == 405
            else f"not found; this server has {', '.join(here)}"
        )
        message = f"{request.method} {request.url.path}: {wrong}"
        return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})))

    async def page(self, request: Request) -> Response:
        return chat_page(self._config.inspector)

    async def health(self, request: Request) -> Response:
        self._engine.require_open()
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        return json_response(Version(folovllm.__version__))

    async def openapi(self, request: Request) -> Response:
        return Response(document(needs_key=bool(self._keys)), media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        engine = self._engine
        await engine.ask_experts()
        speculates = "speculative_config" in engine.config.extras
        page = Metrics(self._names[0], engine.stats, engine.counters, engine.expert_load, speculates)
        return Response(page.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        return json_response(ModelList("list", [self._card(name) for name in self._names]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._check_model(name)
        return json_response(self._card(name))

    def _card(self, name: str) -> ModelCard:
        return ModelCard(name, "model", self._created, "folovllm", self._engine.setup.max_model_len)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            raise ApiError(
                404, f"there is no model {name!r} here: ask for {self._names[0]}", "model", "model_not_found"
            )

    async def completions(self, request: Request) -> Response:
        asked = await self._read(request, CompletionRequest)
        prompts = prompts_of(asked)
        params = completion_params(asked, self._defaults)
        name, n = asked.model or self._names[0], params.n
        decode = self._engine.tokenizer.decode
        writer = EchoWriter(name, asked, n, decode) if asked.echo else CompletionWriter(name, asked, n)
        return await self._answer(request, asked, prompts, params, writer)

    async def chat(self, request: Request) -> Response:
        asked = await self._read(request, ChatRequest)
        params = chat_params(asked, self._defaults)
        self._check_room(1, params)
        engine = self._engine
        prompt = await engine.in_thread(chat_prompt, engine.tokenizer, engine.setup.max_model_len, asked)
        params, make_reader = reading_of(
            asked, params, str(prompt.get("prompt")), self._config.reasoning_parser, self._tags_are_special
        )
        writer = ChatWriter(asked.model or self._names[0], asked, params.n, make_reader)
        return await self._answer(request, asked, [prompt], params, writer)

    async def _answer(
        self,
        request: Request,
        asked: Sampling,
        prompts: list[Prompt],
        params: SamplingParams,
        writer: CompletionWriter,
    ) -> Response:
        """Answer all prompts. The engine hears of none before all are checked and there is room for all."""
        engine = self._engine
        self._check_room(len(prompts), params)  # before the work of reading them
        if params.structured_outputs is not None:  # a check may take long, and ends when the client leaves
            await unless_gone(request.receive, engine.check_structured_outputs(params.structured_outputs))
        prepared = []
        for prompt in prompts:
            salt = asked.cache_salt
            prepared.append(await engine.prepare(prompt, params, priority=asked.priority, cache_salt=salt))
            await asyncio.sleep(0)  # others have their turn between two of many prompts
        self._check_room(len(prepared), params, sum(seqs[0].num_prompt_tokens for seqs in prepared))
        handler = ResponseHandler(engine, prepared, writer, params.n)
        if asked.stream:
            return handler.events(asked.stream_options or StreamOptions())
        return await handler.whole(request.receive)

    def _check_room(self, num_prompts: int, params: SamplingParams, num_tokens: int = 0) -> None:
        """Raise unless the queue has room for `n` sequences of each prompt."""
        self._engine.check_amounts(params)
        self._admission.check(num_prompts * params.n, num_tokens)

    async def tokenize(self, request: Request) -> Response:
        asked = await self._read(request, TokenizeRequest)
        engine = self._engine
        ids: list[int] = await engine.in_thread(self._ids, asked)
        texts = engine.tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
        return json_response(Tokens(len(ids), engine.setup.max_model_len, ids, texts))

    def _ids(self, asked: TokenizeRequest) -> list[int]:
        tokenizer, limit = self._engine.tokenizer, self._engine.setup.max_model_len
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "give a prompt or messages, one of them", "prompt")
        if asked.prompt is None:
            return list(chat_prompt(tokenizer, limit, asked)["prompt_token_ids"])
        return encode_within(limit, tokenizer, asked.prompt, add_special_tokens=asked.add_special_tokens)

    async def detokenize(self, request: Request) -> Response:
        asked = await self._read(request, DetokenizeRequest)
        size = self._engine.setup.vocab_size
        if (count := len(asked.tokens)) > MOST_IDS:
            raise ApiError(400, f"tokens has {count} ids: give {MOST_IDS} at most", "tokens")
        if bad := [id_ for id_ in asked.tokens if not 0 <= id_ < size]:
            raise ApiError(400, f"token id {bad[0]} is outside the vocabulary: ids go from 0 to {size - 1}", "tokens")
        text = await self._engine.in_thread(self._engine.tokenizer.decode, asked.tokens)
        return json_response(Detokenized(text))

    async def tokenizer_info(self, request: Request) -> Response:
        return json_response(tokenizer_info(whole(self._engine.tokenizer)))

    def calling(self, place: str) -> Handler:
        """Return the handler of an `EngineRoute`."""

        async def call(request: Request) -> Response:
            value = await self._engine.call(place, dict(request.query_params))
            return Response(status_code=200) if value is None else json_response(value)

        return call

    async def _read(self, request: Request, kind: type[R]) -> R:
        """Parse the request in the body. It must be JSON: a web page may send other types to any server, unasked."""
        self._engine.require_open()
        require_json(request)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await read_body(request, self._config.max_body_size)
        except TimeoutError as error:
            raise ApiError(408, f"the body did not come within {BODY_SECONDS:.0f} s: send it faster") from error
        asked = parse(body, kind, self._config.ignore_unknown_fields)
        self._check_model(getattr(asked, "model", None))
        return asked
