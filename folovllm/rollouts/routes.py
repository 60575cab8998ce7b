"""A server's routes for sleep, by vLLM's names. The server calls these functions beside its engine, between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from folovllm.engine.extension import EngineRoute
from folovllm.rollouts.sleep import sleep, wake_up

if TYPE_CHECKING:
    from folovllm.engine.llm_engine import LLMEngine

HERE = "folovllm.rollouts.routes"
ROUTES = (
    EngineRoute("/sleep", "POST", f"{HERE}:post_sleep"),
    EngineRoute("/wake_up", "POST", f"{HERE}:post_wake_up"),
    EngineRoute("/is_sleeping", "GET", f"{HERE}:is_sleeping"),
)


def post_sleep(engine: LLMEngine, query: dict[str, str]) -> None:
    """`/sleep?level=1`: free the cache and the weights (`sleep`). Raises ValueError as `sleep`."""
    level = query.get("level", "1")
    if level not in ("1", "2"):
        raise ValueError(f"level must be 1 or 2, not {level!r}")
    sleep(engine, int(level))


def post_wake_up(engine: LLMEngine, query: dict[str, str]) -> None:
    """`/wake_up`: allocate all again. Raises ValueError as `wake_up`."""
    wake_up(engine)


def is_sleeping(engine: LLMEngine, query: dict[str, str]) -> dict[str, bool]:
    """`/is_sleeping`: whether it does."""
    return {"is_sleeping": engine.is_sleeping}
