"""The chat page at `/`: one file, which asks nobody but the server that it comes from."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import Response

PAGE = Path(__file__).parent / "static" / "chat.html"


@cache
def chat_page() -> Response:
    """The page, with a policy that holds the browser to it: its own script and style, and requests to its own server."""
    text = PAGE.read_text("utf-8")
    style, script = (_hash_of(text, tag) for tag in ("style", "script"))
    policy = (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(text, headers=headers, media_type="text/html")


def _hash_of(page: str, tag: str) -> str:
    """What a policy calls the one element of that name (Content Security Policy Level 3, section 2.3.1)."""
    (inside,) = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
