"""Gives the work a tenth of a second to give back what it holds. On a busy machine it takes longer, and then it still holds it."""


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
        leaving.cancel()
        await asyncio.wait((doing, leaving), timeout=0.1)
