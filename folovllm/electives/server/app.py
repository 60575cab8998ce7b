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
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

import folovllm
from folovllm.apps.inspector.web import FILES, PAGE
from folovllm.electives.server import http, protocol, replies
from folovllm.electives.server.admission import Admission
from folovllm.electives.server.async_engine import AsyncEngine
from folovllm.electives.server.config import ServerConfig
from folovllm.electives.server.errors import ApiError, EngineDead, Unavailable, as_api_error
from folovllm.electives.server.metrics import Metrics
from folovllm.electives.server.openapi import json_route, schemas
from folovllm.electives.server.pages import InspectorRoutes, chat_page
from folovllm.electives.server.requests import TAGS, chat_params, chat_prompt, completion_params, prompts_of, reading_of
from folovllm.electives.server.response_handler import ResponseHandler
from folovllm.electives.server.sse import unless_gone
from folovllm.engine.inputs import Prompt
from folovllm.engine.long_prompts import encode_within
from folovllm.models.files import full_tokenizer
from folovllm.models.generation_defaults import generation_defaults
from folovllm.plugins import SLEEP_ROUTES, load_elective
from folovllm.sampling_params import SamplingParams

Handler = Callable[..., Awaitable[Response]]
R = TypeVar("R", bound=msgspec.Struct)
FIELDS = (*protocol.CompletionRequest.__struct_fields__, *protocol.ChatRequest.__struct_fields__)
REFUSALS = (ApiError, ValueError, EngineDead, Unavailable)  # another exception is a bug, and in the log
BODY_SECONDS = 60.0  # that a request may take to arrive


def build_app(engine: AsyncEngine, config: ServerConfig) -> FastAPI:
    """The application around an engine that was started."""
    api = Api(engine, config)
    app = FastAPI(
        title="FoloVLLM",
        version=folovllm.__version__,
        description="OpenAI's API, and a little more.",
        docs_url=None,  # these two pages would fetch their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=dict.fromkeys((HTTPException, ClientDisconnect, *REFUSALS, Exception), on_error),
    )
    if origins := config.cors_origin:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    # Where a key is needed any name will do: a page from elsewhere does not have the key.
    names = ["*"] if config.api_key else [config.host, *config.allowed_host, *config.inspector_host]
    app.add_middleware(http.HostGuard, names=names, flag="--allowed-host", origins=origins)
    key = [Depends(api.check_key)] if config.api_key else []

    def add(path: str, handler: Handler, needs_key: bool = True, **options: Any) -> None:
        method = options.pop("method", "POST" if "openapi_extra" in options else "GET")
        options |= {"dependencies": key if needs_key else [], "response_model": None}
        app.add_api_route(path, handler, methods=[method], **options)
        if method == "GET":
            app.add_api_route(path, handler, methods=["HEAD"], **options | {"include_in_schema": False})

    chat, completion = replies.ChatResponse, replies.CompletionResponse
    add("/", api.page, needs_key=False, response_class=HTMLResponse)
    add("/health", api.health, needs_key=False, response_class=Response)
    add("/version", api.version, needs_key=False, **json_route(replies.Version))
    add("/metrics", api.metrics, needs_key=False, response_class=PlainTextResponse)
    add("/v1/models", api.models, **json_route(replies.ModelList))
    add("/v1/models/{name:path}", api.model, **json_route(replies.ModelCard))
    add("/v1/completions", api.completions, **json_route(completion, protocol.CompletionRequest, completion))
    add("/v1/chat/completions", api.chat, **json_route(chat, protocol.ChatRequest, replies.ChatChunk))
    add("/tokenize", api.tokenize, **json_route(replies.Tokens, protocol.TokenizeRequest))
    add("/detokenize", api.detokenize, **json_route(replies.Detokenized, protocol.DetokenizeRequest))
    add("/tokenizer_info", api.tokenizer_info, **json_route(dict[str, Any]))
    if config.inspector:
        inspector = InspectorRoutes(engine, bool(config.api_key))
        # The page and its files say nothing of the engine: a browser asks for them without a key.
        add(PAGE, inspector.page, needs_key=False, include_in_schema=False)
        add(FILES, inspector.file, needs_key=False, include_in_schema=False)
        add(f"{PAGE}/events", inspector.events, include_in_schema=False)
    if config.enable_sleep_mode:
        for path, method, function in load_elective(SLEEP_ROUTES, "enable_sleep_mode"):
            add(path, api.calling(function), method=method, include_in_schema=False)
    app.openapi().setdefault("components", {})["schemas"] = schemas()
    return app


async def on_error(request: Request, error: Exception) -> Response:
    """The response to an error: FastAPI's own (an unknown address, another method), a refusal, or a bug."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=http.CLIENT_GONE)
    if isinstance(error, HTTPException):
        here = [route.path for route in request.app.routes if route.path.startswith("/v1/") and "{" not in route.path]
        not_found = f"not found; this server has {', '.join(dict.fromkeys(here))}"
        wrong = "this address takes another method" if error.status_code == 405 else not_found
        message = f"{request.method} {request.url.path}: {wrong}"
        error = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return http.error_response(as_api_error(error, FIELDS))


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
        key = b"" if credentials is None else credentials.credentials.encode()
        # With all keys, so that the time tells nothing.
        if not any([secrets.compare_digest(key, known) for known in self._keys]):  # noqa: C419
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
        return http.json_response(replies.Version(folovllm.__version__))

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
        return http.json_response(replies.ModelList("list", [self._card(name) for name in self._names]))

    async def model(self, name: str) -> Response:
        """One of its names."""
        return http.json_response(self._card(name))

    def _card(self, name: str) -> replies.ModelCard:
        self._check_model(name)
        return replies.ModelCard(name, "model", self._created, "folovllm", self._engine.setup.max_model_len)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            message = f"there is no model {name!r} here: ask for {self._names[0]}"
            raise ApiError(404, message, "model", "model_not_found")

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        body = await self._read(request, protocol.CompletionRequest)
        params = completion_params(body, self._defaults)
        name, n = body.model or self._names[0], params.n
        decode = self._engine.tokenizer.decode
        writer = replies.EchoWriter(name, body, n, decode) if body.echo else replies.CompletionWriter(name, body, n)
        return await self._generate(request, body, prompts_of(body), params, writer)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        body, engine = await self._read(request, protocol.ChatRequest), self._engine
        params = chat_params(body, self._defaults)
        self._check_room(1, params)
        prompt = await engine.in_thread(chat_prompt, engine.tokenizer, engine.setup.max_model_len, body)
        params, make_reader = reading_of(
            body, params, str(prompt.get("prompt")), self._config.reasoning_parser, self._tags_are_special
        )
        writer = replies.ChatWriter(body.model or self._names[0], body, params.n, make_reader)
        return await self._generate(request, body, [prompt], params, writer)

    async def _generate(
        self,
        request: Request,
        body: protocol.Sampling,
        prompts: list[Prompt],
        params: SamplingParams,
        writer: replies.CompletionWriter,
    ) -> Response:
        """Answer all prompts. The engine gets none before all are checked and there is room for all."""
        engine = self._engine
        self._check_room(len(prompts), params)  # before the work of reading them
        if params.structured_outputs is not None:  # a check may take long, and ends when the client leaves
            await unless_gone(request.receive, engine.grammars.check(params.structured_outputs))
        prepared = []
        for prompt in prompts:
            prepared.append(await engine.prepare(prompt, params, priority=body.priority, cache_salt=body.cache_salt))
            await asyncio.sleep(0)  # others have their turn between two of many prompts
        self._check_room(len(prepared), params, sum(seqs[0].num_prompt_tokens for seqs in prepared))
        if engine.bring is not None:
            await unless_gone(request.receive, engine.bring_prefixes(prepared))
        handler = ResponseHandler(engine, prepared, writer, params.n)
        if body.stream:
            return handler.events(body.stream_options or protocol.StreamOptions())
        return await handler.full(request.receive)

    def _check_room(self, num_prompts: int, params: SamplingParams, num_tokens: int = 0) -> None:
        """Raise unless the queue has room for `n` sequences of each prompt."""
        self._engine.processor.check_amounts(params)
        self._admission.check(num_prompts * params.n, num_tokens)

    async def tokenize(self, request: Request) -> Response:
        """The ids of a prompt or a conversation."""
        body, engine = await self._read(request, protocol.TokenizeRequest), self._engine
        tokenizer, limit = engine.tokenizer, engine.setup.max_model_len
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give a prompt or messages, one of them", "prompt")

        def encode() -> list[int]:
            if body.prompt is None:
                return list(chat_prompt(tokenizer, limit, body)["prompt_token_ids"])
            return encode_within(limit, tokenizer, body.prompt, add_special_tokens=body.add_special_tokens)

        ids = await engine.in_thread(encode)
        texts = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return http.json_response(replies.Tokens(len(ids), limit, ids, texts))

    async def detokenize(self, request: Request) -> Response:
        """The text of ids."""
        body = await self._read(request, protocol.DetokenizeRequest)
        size = self._engine.setup.vocab_size
        if bad := [id_ for id_ in body.tokens if not 0 <= id_ < size]:
            raise ApiError(400, f"token id {bad[0]} is outside the vocabulary: ids go from 0 to {size - 1}", "tokens")
        text = await self._engine.in_thread(self._engine.tokenizer.decode, body.tokens)
        return http.json_response(replies.Detokenized(text))

    async def tokenizer_info(self) -> Response:
        """How texts become ids."""
        return http.json_response(replies.tokenizer_info(full_tokenizer(self._engine.tokenizer)))

    def calling(self, function: str) -> Handler:
        """Return the handler of a route beside the engine (`plugins.SLEEP_ROUTES`). It reads its query alone: a body is refused."""

        async def call(request: Request) -> Response:
            if await http.read_body(request, self._config.max_body_size):
                raise ApiError(400, f"{request.url.path} takes no body: give its fields in the address, as ?name=value")
            if request.method == "POST" and self._engine.num_open:  # the same request is right later on
                message = "requests are being answered: wait until they have ended, or close their connections"
                raise ApiError(409, message, code="busy")
            query = {name: request.query_params.getlist(name) for name in request.query_params}
            value = await self._engine.call("call_function", function, query)
            return Response() if value is None else http.json_response(value)

        return call

    async def _read(self, request: Request, kind: type[R]) -> R:
        """Parse the request in the body. It must be JSON: a web page may send other types to any server, unasked."""
        self._engine.require_open()
        http.require_json(request)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                data = await http.read_body(request, self._config.max_body_size)
        except TimeoutError as error:
            raise ApiError(408, f"the body did not come within {BODY_SECONDS:.0f} s: send it faster") from error
        body = protocol.parse(data, kind, self._config.ignore_unknown_fields)
        self._check_model(getattr(body, "model", None))
        return body
