"""Does not cancel who listens for the client: one task a request stays behind, for as long as the connection lives."""


async def unless_gone(receive, work):
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return doing.result()
    finally:
        doing.cancel()
        await asyncio.wait((doing,))
