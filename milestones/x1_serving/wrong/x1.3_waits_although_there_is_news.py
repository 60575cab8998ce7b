"""Waits before it looks. News that came before the reader did is never told again: a lost wake-up."""


class OutputCollector:
    async def get(self):
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
        fresh, self._fresh = self._fresh, []
        return fresh
