"""Cancels the two where the race has a winner, and not where the race itself is cancelled: at shutdown both stay."""


async def unless_gone(receive, work):
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
    is_done = doing.done()
    doing.cancel()
    leaving.cancel()
    await asyncio.wait((doing, leaving))
    if not is_done:
        raise ClientDisconnect
    return doing.result()
