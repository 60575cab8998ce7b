"""The chat page at `/`."""

from __future__ import annotations

import secrets
from pathlib import Path

from starlette.responses import Response

from folovllm.apps.inspector.page import STATIC
from folovllm.apps.inspector.web import SAFE

PAGE = Path(__file__).parent / "static" / "chat.html"


def chat_page(has_inspector: bool) -> Response:
    """The chat page, one file, with a policy that holds the browser to it: its own script and style, and requests to its own server.

    With an inspector each answer can be watched.
    """
    text, nonce = PAGE.read_text("utf-8"), secrets.token_urlsafe()
    if has_inspector:
        text = text.replace("<body>", '<body data-inspector="inspector">')
    for tag in ("style", "script"):
        text = text.replace(f"<{tag}", f'<{tag} nonce="{nonce}"', 1)
    text = text.replace("/* house.css */\n", (STATIC / "house.css").read_text("utf-8"))
    policy = (
        f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )
    return Response(text, headers=SAFE | {"Content-Security-Policy": policy}, media_type="text/html")
