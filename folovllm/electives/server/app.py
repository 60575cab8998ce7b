"""The HTTP application: which address does what."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, FastAPI
from fastapi.responses import HTMLResponse, PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

import folovllm
from folovllm.apps.inspector.web import FILES, PAGE
from folovllm.electives.server import replies
from folovllm.electives.server.admission import Admission
from folovllm.electives.server.async_engine import AsyncEngine
from folovllm.electives.server.config import ServerConfig
from folovllm.electives.server.errors import ApiError, EngineDead, Unavailable, as_api_error
from folovllm.electives.server.guard import HostGuard
from folovllm.electives.server.http import CLIENT_GONE, error_response, json_response, read_body, require_json
from folovllm.electives.server.metrics import Metrics
from folovllm.electives.server.openapi import Chat, ChatChunk, Completion, json_route, schemas
from folovllm.electives.server.pages import InspectorRoutes, chat_page
from folovllm.electives.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    StreamOptions,
    TokenizeRequest,
    parse,
)
from folovllm.electives.server.requests import TAGS, chat_params, chat_prompt, completion_params, prompts_of, reading_of
from folovllm.electives.server.response_handler import ResponseHandler
from folovllm.electives.server.sse import unless_gone
from folovllm.engine.input_processor import encode_within
from folovllm.engine.inputs import Prompt
from folovllm.models.files import generation_defaults, whole
from folovllm.plugins import SLEEP_ROUTES, require
from folovllm.sampling_params import SamplingParams

Handler = Callable[..., Awaitable[Response]]
R = TypeVar("R", bound=msgspec.Struct)
FIELDS = (*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__)
BODY_SECONDS = 60.0  # that a request may take to arrive
MOST_IDS = 1 << 20  # that are made a text by one request, while other texts wait


def build_app(engine: AsyncEngine, config: ServerConfig) -> FastAPI:
    """The application around an engine that was started."""
    api = Api(engine, config)
    # Where a key is needed any name will do: a page from elsewhere does not have the key.
    names = ["*"] if config.api_key else [config.host, *config.allowed_host, *config.inspector_host]
    middleware = [Middleware(HostGuard, names=names, flag="--allowed-host", origins=config.cors_origin)]
    if config.cors_origin:
        methods = ["GET", "POST"]
        middleware += [
            Middleware(CORSMiddleware, allow_origins=config.cors_origin, allow_methods=methods, allow_headers=["*"])
        ]
    app = FastAPI(
        title="FoloVLLM",
        version=folovllm.__version__,
        description="OpenAI's API, and a little more.",
        docs_url=None,  # these two pages would fetch their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        middleware=middleware,
        exception_handlers=dict.fromkeys((HTTPException, ClientDisconnect, *REFUSALS, Exception), on_error),
    )
    key = [Depends(api.check_key)] if config.api_key else []

    def add(path: str, handler: Handler, needs_key: bool = True, **options: Any) -> None:
        methods = options.pop("methods", ["POST" if "openapi_extra" in options else "GET"])
        options |= {"dependencies": key if needs_key else [], "response_model": None}
        app.add_api_route(path, handler, methods=methods, **options)
        if methods == ["GET"]:
            app.add_api_route(path, handler, methods=["HEAD"], **options | {"include_in_schema": False})

    add("/", api.page, needs_key=False, response_class=HTMLResponse)
    add("/health", api.health, needs_key=False, response_class=Response)
    add("/version", api.version, needs_key=False, **json_route(replies.Version))
    add("/metrics", api.metrics, needs_key=False, response_class=PlainTextResponse)
    add("/v1/models", api.models, **json_route(replies.ModelList))
    add("/v1/models/{name:path}", api.model, **json_route(replies.ModelCard))
    add("/v1/completions", api.completions, **json_route(Completion, CompletionRequest, streams=Completion))
    add("/v1/chat/completions", api.chat, **json_route(Chat, ChatRequest, streams=ChatChunk))
    add("/tokenize", api.tokenize, **json_route(replies.Tokens, TokenizeRequest))
    add("/detokenize", api.detokenize, **json_route(replies.Detokenized, DetokenizeRequest))
    add("/tokenizer_info", api.tokenizer_info, **json_route(replies.TokenizerInfo))
    if config.inspector:
        inspector = InspectorRoutes(engine, bool(config.api_key))
        # The page and its files say nothing of the engine: a browser asks for them without a key.
        add(PAGE, inspector.page, needs_key=False, include_in_schema=False)
        add(FILES, inspector.file, needs_key=False, include_in_schema=False)
        add(f"{PAGE}/events", inspector.events, include_in_schema=False)
    if config.enable_sleep_mode:
        for path, method, function in require(SLEEP_ROUTES, "enable_sleep_mode"):
            add(path, api.calling(function), methods=[method], include_in_schema=False)
    app.openapi().setdefault("components", {})["schemas"] = schemas()
    return app


REFUSALS = (ApiError, ValueError, EngineDead, Unavailable)  # another exception is a bug, and in the log


async def on_error(request: Request, error: Exception) -> Response:
    """The response to an error: FastAPI's own (an unknown address, another method), a refusal, or a bug."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, HTTPException):
        here = [route.path for route in request.app.routes if route.path.startswith("/v1/") and "{" not in route.path]
        not_found = f"not found; this server has {', '.join(dict.fromkeys(here))}"
        wrong = "this address takes another method" if error.status_code == 405 else not_found
        message = f"{request.method} {request.url.path}: {wrong}"
        error = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return error_response(as_api_error(error, FIELDS))


class Api:
    """The handlers. FastAPI's document shows their docstrings. Errors are raised; `on_error` makes responses of them."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self._engine, self._config = engine, config
        self._names = config.served_model_name or [engine.config.model]
        self._keys = [key.encode() for key in config.api_key]
        self._defaults = generation_defaults(engine.setup.path)
        self._admission = Admission(engine, config.max_queued_requests, config.max_queued_tokens)
        self._created = int(time.time())
        self._tags_are_special = not set(engine.tokenizer.all_special_tokens).isdisjoint(TAGS)

    async def check_key(
        self, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
    ) -> None:
        """Raise ApiError (401) unless the request brings a key that is known."""
        given = "" if credentials is None else credentials.credentials
        # With all keys, so that the time tells nothing.
        known = [secrets.compare_digest(given.encode(), key) for key in self._keys]
        if not any(known):
            message = "this server wants a key that it knows: send Authorization: Bearer YOUR_KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def page(self) -> Response:
        """A page to chat in a browser."""
        return chat_page(self._config.inspector)

    async def health(self) -> Response:
        """Whether there is an engine that takes requests, or sleeps: 200, or 503."""
        try:
            self._engine.require_running()
        except EngineDead as error:
            raise ApiError(503, str(error), code="engine_dead") from error
        return Response()

    async def version(self) -> Response:
        """The version of this server."""
        return json_response(replies.Version(folovllm.__version__))

    async def metrics(self) -> Response:
        """Figures for Prometheus."""
        engine, load = self._engine, list[list[int]]()
        if engine.config.extras.get("count_experts") and engine.is_open:
            load = await engine.call("expert_load")
        speculates = "speculative_config" in engine.config.extras
        page = Metrics(self._names[0], engine.stats, engine.counters, load, speculates)
        return Response(page.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> Response:
        """The model, by all its names."""
        return json_response(replies.ModelList("list", [self._card(name) for name in self._names]))

    async def model(self, name: str) -> Response:
        """One of its names."""
        self._check_model(name)
        return json_response(self._card(name))

    def _card(self, name: str) -> replies.ModelCard:
        return replies.ModelCard(name, "model", self._created, "folovllm", self._engine.setup.max_model_len)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            message = f"there is no model {name!r} here: ask for {self._names[0]}"
            raise ApiError(404, message, "model", "model_not_found")

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        asked = await self._read(request, CompletionRequest)
        prompts = prompts_of(asked)
        params = completion_params(asked, self._defaults)
        name, n = asked.model or self._names[0], params.n
        decode = self._engine.tokenizer.decode
        writer = replies.EchoWriter(name, asked, n, decode) if asked.echo else replies.CompletionWriter(name, asked, n)
        return await self._answer(request, asked, prompts, params, writer)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        asked = await self._read(request, ChatRequest)
        params = chat_params(asked, self._defaults)
        self._check_room(1, params)
        engine = self._engine
        prompt = await engine.in_thread(chat_prompt, engine.tokenizer, engine.setup.max_model_len, asked)
        params, make_reader = reading_of(
            asked, params, str(prompt.get("prompt")), self._config.reasoning_parser, self._tags_are_special
        )
        writer = replies.ChatWriter(asked.model or self._names[0], asked, params.n, make_reader)
        return await self._answer(request, asked, [prompt], params, writer)

    async def _answer(
        self,
        request: Request,
        asked: Sampling,
        prompts: list[Prompt],
        params: SamplingParams,
        writer: replies.CompletionWriter,
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
        """The ids of a prompt or a conversation."""
        asked = await self._read(request, TokenizeRequest)
        engine = self._engine
        ids: list[int] = await engine.in_thread(self._ids, asked)
        texts = engine.tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
        return json_response(replies.Tokens(len(ids), engine.setup.max_model_len, ids, texts))

    def _ids(self, asked: TokenizeRequest) -> list[int]:
        tokenizer, limit = self._engine.tokenizer, self._engine.setup.max_model_len
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "give a prompt or messages, one of them", "prompt")
        if asked.prompt is None:
            return list(chat_prompt(tokenizer, limit, asked)["prompt_token_ids"])
        return encode_within(limit, tokenizer, asked.prompt, add_special_tokens=asked.add_special_tokens)

    async def detokenize(self, request: Request) -> Response:
        """The text of ids."""
        asked = await self._read(request, DetokenizeRequest)
        size = self._engine.setup.vocab_size
        if (count := len(asked.tokens)) > MOST_IDS:
            raise ApiError(400, f"tokens has {count} ids: give {MOST_IDS} at most", "tokens")
        if bad := [id_ for id_ in asked.tokens if not 0 <= id_ < size]:
            raise ApiError(400, f"token id {bad[0]} is outside the vocabulary: ids go from 0 to {size - 1}", "tokens")
        text = await self._engine.in_thread(self._engine.tokenizer.decode, asked.tokens)
        return json_response(replies.Detokenized(text))

    async def tokenizer_info(self) -> Response:
        """How texts become ids."""
        return json_response(replies.tokenizer_info(whole(self._engine.tokenizer)))

    def calling(self, function: str) -> Handler:
        """Return the handler of a route beside the engine (`plugins.SLEEP_ROUTES`). It reads its query alone: a body is refused."""

        async def call(request: Request) -> Response:
            if await read_body(request, self._config.max_body_size):
                raise ApiError(400, f"{request.url.path} takes no body: give its fields in the address, as ?name=value")
            query = {name: request.query_params.getlist(name) for name in request.query_params}
            value = await self._engine.call("call_function", function, query)
            return Response() if value is None else json_response(value)

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
