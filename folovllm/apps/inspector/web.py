"""The addresses of the inspector: the page, its files, and the stream of a running engine."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from folovllm.apps.inspector.page import STATIC, served_page
from folovllm.electives.server.errors import ApiError

PAGE, FILES = "/inspector", "/inspector/static/{name}"
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_response(source: dict[str, Any]) -> Response:
    """The page."""
    return Response(served_page(source), media_type="text/html", headers=SAFE)


def file_response(name: str) -> Response:
    """One of the page's files. Raises ApiError (404) for anything else."""
    file = STATIC / name
    if name not in {file.name for file in STATIC.iterdir()} or file.suffix not in TYPES:
        raise ApiError(404, f"{name}: not found")
    return Response(file.read_bytes(), media_type=TYPES[file.suffix], headers=SAFE)
