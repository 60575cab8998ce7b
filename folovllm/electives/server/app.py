"""The HTTP application: which address does what."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, FastAPI
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import folovllm
from folovllm.apps.inspector.live import Subscribers
from folovllm.apps.inspector.page import STATIC
from folovllm.apps.inspector.web import FILES, PAGE, SAFE, file_response, page_response
from folovllm.electives.server import http, protocol, replies
from folovllm.electives.server.admission import Admission
from folovllm.electives.server.async_engine import AsyncEngine
from folovllm.electives.server.config import ServerConfig
from folovllm.electives.server.errors import ApiError
from folovllm.electives.server.metrics import metrics_page
from folovllm.electives.server.requests import TAGS, chat_params, chat_prompt, completion_params, prompts_of, reading_of
from folovllm.electives.server.response_handler import ChatHandler, CompletionHandler, ResponseHandler
from folovllm.electives.server.sse import EventStream, unless_gone
from folovllm.engine.inputs import Prompt
from folovllm.engine.long_prompts import encode_within
from folovllm.models.files import full_tokenizer
from folovllm.models.generation_defaults import generation_defaults
from folovllm.plugins import SLEEP_ROUTES, load_elective
from folovllm.request import Sequence
from folovllm.sampling_params import SamplingParams

Handler = Callable[..., Awaitable[Any]]
R = TypeVar("R", bound=msgspec.Struct)
CHAT = Path(__file__).parent / "static" / "chat.html"


def build_app(engine: AsyncEngine, config: ServerConfig) -> FastAPI:
    """The application around an engine that was started."""
    api = Api(engine, config)
    app = FastAPI(
        title="FoloVLLM",
        version=folovllm.__version__,
        docs_url=None,  # these two pages would fetch their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=http.HANDLERS,
    )
    if origins := config.cors_origin:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    # Where a key is needed any name will do: a page from elsewhere does not have the key.
    names = ["*"] if config.api_key else [config.host, *config.allowed_host, *config.inspector_host]
    app.add_middleware(http.HostGuard, names=names, flag="--allowed-host", origins=origins)
    schemas: dict[str, Any] = {}

    def add(path: str, handler: Handler, takes: Any = None, needs_key: bool = True, **options: Any) -> None:
        """A route of GET, or of POST if it `takes` a type of JSON."""
        if takes is not None:
            (schema,), parts = msgspec.json.schema_components([takes], ref_template="#/components/schemas/{name}")
            schemas.update(parts)
            body = {"required": True, "content": {"application/json": {"schema": schema}}}
            options |= {"methods": ["POST"], "openapi_extra": {"requestBody": body}}
        key = [Depends(api.check_key)] if needs_key and config.api_key else []
        app.add_api_route(path, handler, dependencies=key, response_model=None, **options)

    add("/", api.page, needs_key=False)
    add("/health", api.health, needs_key=False)
    add("/version", api.version, needs_key=False)
    add("/metrics", api.metrics, needs_key=False)
    add("/v1/models", api.models)
    add("/v1/models/{name:path}", api.model)
    add("/v1/completions", api.completions, protocol.CompletionRequest)
    add("/v1/chat/completions", api.chat, protocol.ChatRequest)
    add("/tokenize", api.tokenize, protocol.TokenizeRequest)
    add("/detokenize", api.detokenize, protocol.DetokenizeRequest)
    add("/tokenizer_info", api.tokenizer_info)
    if config.inspector:
        engine.on_seen = api.subscribers.publish
        # The page and its files say nothing of the engine: a browser asks for them without a key.
        add(PAGE, api.inspector_page, needs_key=False)
        add(FILES, api.inspector_file, needs_key=False)
        add(f"{PAGE}/events", api.inspector_events)
    if config.enable_sleep_mode:
        for path, method, function in load_elective(SLEEP_ROUTES, "enable_sleep_mode"):
            add(path, api.calling(function), methods=[method])
    app.openapi()["components"]["schemas"] |= schemas
    return app


class Api:
    """The handlers. FastAPI's document shows their docstrings. Errors are raised; `http.on_error` makes responses of them."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self._engine, self._config = engine, config
        self._names = config.served_model_name or [engine.config.model]
        self._defaults = generation_defaults(engine.setup.path)
        self._admission = Admission(engine, config.max_queued_requests, config.max_queued_tokens)
        self._created = int(time.time())
        self.subscribers = Subscribers(engine.watch)
        self._ending: asyncio.Task[None] | None = None
        self._tags_are_special = not set(engine.tokenizer.all_special_tokens).isdisjoint(TAGS)

    async def check_key(
        self, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
    ) -> None:
        """Raise ApiError (401) unless the request brings a key that is known."""
        key = b"" if credentials is None else credentials.credentials.encode()
        # With all keys, so that the time tells nothing.
        if not any([secrets.compare_digest(key, known.encode()) for known in self._config.api_key]):  # noqa: C419
            message = "this server wants a key that it knows: send Authorization: Bearer YOUR_KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def page(self) -> Response:
        """A page to chat in a browser, one file, with a policy that holds the browser to it: its own script and style, and requests to its own server."""
        text, nonce = CHAT.read_text("utf-8"), secrets.token_urlsafe()
        if self._config.inspector:  # each answer can be watched
            text = text.replace("<body>", '<body data-inspector="inspector">')
        for tag in ("style", "script"):
            text = text.replace(f"<{tag}", f'<{tag} nonce="{nonce}"', 1)
        text = text.replace("/* house.css */\n", (STATIC / "house.css").read_text("utf-8"))
        policy = (
            f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
        )
        return Response(text, headers=SAFE | {"Content-Security-Policy": policy}, media_type="text/html")

    async def health(self) -> Response:
        """200 while there is an engine that takes requests, or sleeps; else 503."""
        if not self._engine.is_open:
            raise ApiError(503, "the engine has ended, or the server is shutting down", code="unavailable")
        return Response()

    async def version(self) -> dict[str, Any]:
        """The version of this server."""
        return {"version": folovllm.__version__}

    async def metrics(self) -> Response:
        """Figures for Prometheus."""
        engine, load = self._engine, list[list[int]]()
        if engine.config.extras.get("count_experts") and engine.is_open:
            load = await engine.call("expert_load")
        speculates = "speculative_config" in engine.config.extras
        page = metrics_page(self._names[0], engine.stats, engine.counters, load, speculates)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> dict[str, Any]:
        """The model, by all its names."""
        return {"object": "list", "data": [await self.model(name) for name in self._names]}

    async def model(self, name: str) -> dict[str, Any]:
        """One of its names."""
        self._check_model(name)
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "folovllm"}
        return card | {"max_model_len": self._engine.setup.max_model_len}

    def _check_model(self, name: str) -> None:
        if name not in self._names:
            message = f"there is no model {name!r} here: ask for {self._names[0]}"
            raise ApiError(404, message, "model", "model_not_found")

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        body = await self._read(request, protocol.CompletionRequest)
        make = partial(CompletionHandler, self._engine, body, body.model or self._names[0])
        return await self._generate(request, body, prompts_of(body), completion_params(body, self._defaults), make)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        body, engine = await self._read(request, protocol.ChatRequest), self._engine
        params = chat_params(body, self._defaults)
        self._check_room(1, params)
        prompt = await engine.in_thread(chat_prompt, engine.tokenizer, engine.setup.max_model_len, body)
        params, make_reader = reading_of(
            body, params, str(prompt.get("prompt")), self._config.reasoning_parser, self._tags_are_special
        )
        make = partial(ChatHandler, make_reader, engine, body, body.model or self._names[0])
        return await self._generate(request, body, [prompt], params, make)

    async def _generate(
        self,
        request: Request,
        body: protocol.Sampling,
        prompts: list[Prompt],
        params: SamplingParams,
        make: Callable[[list[list[Sequence]]], ResponseHandler[Any]],
    ) -> Response:
        """Answer all prompts. The engine gets none before all are checked and there is room for all."""
        engine = self._engine
        self._check_room(len(prompts), params)  # before the work of reading them

        async def prepare() -> list[list[Sequence]]:
            prepared = []
            for prompt in prompts:
                prepared.append(
                    await engine.prepare(prompt, params, priority=body.priority, cache_salt=body.cache_salt)
                )
                await asyncio.sleep(0)  # others have their turn between two of many prompts
            self._check_room(len(prepared), params, sum(seqs[0].num_prompt_tokens for seqs in prepared))
            await engine.bring_prefixes(prepared)
            return prepared

        handler = make(await unless_gone(request.receive, prepare()))  # to check a grammar may take long
        return handler.events() if body.stream else await handler.full(request.receive)

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
        if body.prompt is None:
            ids = list((await engine.in_thread(chat_prompt, tokenizer, limit, body))["prompt_token_ids"])
        else:
            encode = partial(encode_within, limit, tokenizer, add_special_tokens=body.add_special_tokens)
            ids = await engine.in_thread(encode, body.prompt)
        texts = {"token_strs": tokenizer.convert_ids_to_tokens(ids)} if body.return_token_strs else {}
        return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids} | texts)

    async def detokenize(self, request: Request) -> Response:
        """The text of ids."""
        body = await self._read(request, protocol.DetokenizeRequest)
        size = self._engine.setup.vocab_size
        if bad := [id_ for id_ in body.tokens if not 0 <= id_ < size]:
            raise ApiError(400, f"token id {bad[0]} is outside the vocabulary: ids go from 0 to {size - 1}", "tokens")
        return JSONResponse({"prompt": await self._engine.in_thread(self._engine.tokenizer.decode, body.tokens)})

    async def tokenizer_info(self) -> Response:
        """How texts become ids."""
        return JSONResponse(replies.tokenizer_info(full_tokenizer(self._engine.tokenizer)))

    async def inspector_page(self) -> Response:
        """The inspector's page."""
        source = {"kind": "live", "events": "inspector/events", "needs_key": bool(self._config.api_key)}
        return page_response(source)

    async def inspector_file(self, name: str) -> Response:
        """One of its files."""
        return file_response(name)

    async def inspector_events(self) -> Response:
        """What the engine does, from now on. The stream ends with the engine, and does not hold up the server's end."""
        self._engine.require_open()
        self._ending = self._ending or asyncio.create_task(self._end_events())
        subscriber = self.subscribers.add()
        return EventStream(self.subscribers.events(subscriber), partial(self.subscribers.remove, subscriber))

    async def _end_events(self) -> None:
        await self._engine.is_over.wait()
        self.subscribers.close()

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
            return Response() if value is None else JSONResponse(value)

        return call

    async def _read(self, request: Request, kind: type[R]) -> R:
        """Parse the request in the body."""
        self._engine.require_open()
        data = await http.read_json(request, self._config.max_body_size)
        body = protocol.parse(data, kind, self._config.ignore_unknown_fields)
        if (name := getattr(body, "model", None)) is not None:
            self._check_model(name)
        return body
