"""How long a connection may take to say what it wants: one that never does would be held for ever."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_SECONDS = 20.0


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's protocol, but a connection is closed whose first request does not begin, or whose headers do not end, in time.

    Bytes that come do not extend the time, so a byte a second keeps no connection open. Answers may take as long as they need.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As `asyncio.Protocol` has it."""
        super().connection_made(transport)
        self._begin()

    def on_message_begin(self) -> None:
        """The first byte of a request is here."""
        self._begin()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """It has said what it wants."""
        self._end()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """As `asyncio.Protocol` has it."""
        self._end()
        super().connection_lost(exc)

    def _begin(self) -> None:
        self._end()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
