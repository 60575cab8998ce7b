"""Waits for the work first and looks at it then: work that answers its cancellation with a result seems to have won."""


async def unless_gone(receive, work):
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.wait((doing, leaving))
    if doing.cancelled():
        raise ClientDisconnect
    return doing.result()
