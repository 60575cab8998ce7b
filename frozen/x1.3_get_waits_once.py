"""After one wake-up it returns what there is, also nothing. Input: a waiter that is woken without news."""

class OutputCollector:
    async def get(self):
        if not self._fresh:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        found = list(self._fresh)
        self._fresh.clear()
        return found
