"""A server's routes for sleep, by vLLM's names. The server calls these functions beside its engine, between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from folovllm.electives.rollouts.sleep import sleep, wake_up
from folovllm.electives.rollouts.weights import ASLEEP

if TYPE_CHECKING:
    from folovllm.engine.llm_engine import LLMEngine

HERE = "folovllm.electives.rollouts.routes"
ROUTES = (
    ("/sleep", "POST", f"{HERE}:post_sleep"),
    ("/wake_up", "POST", f"{HERE}:post_wake_up"),
    ("/is_sleeping", "GET", f"{HERE}:is_sleeping"),
)
Query = dict[str, list[str]]


def post_sleep(engine: LLMEngine, query: Query) -> None:
    """`/sleep?level=1`: free the cache and the weights (`sleep`). Raises ValueError as `sleep`."""
    check_fields(query, "level")
    levels = query.get("level", ["1"])
    if levels not in (["1"], ["2"]):
        raise ValueError(f"level must be 1 or 2, given once, not {' and '.join(map(repr, levels))}")
    sleep(engine, int(levels[0]))


def post_wake_up(engine: LLMEngine, query: Query) -> None:
    """`/wake_up`: allocate all again, or what `?tags=weights` and `?tags=kv_cache` name. Raises ValueError as `wake_up`."""
    check_fields(query, "tags")
    wake_up(engine, tags=query.get("tags"))


def is_sleeping(engine: LLMEngine, query: Query) -> dict[str, bool]:
    """`/is_sleeping`: whether it does."""
    check_fields(query)
    return {"is_sleeping": engine.refusal == ASLEEP}


def check_fields(query: Query, *known: str) -> None:
    """Raise ValueError for a field of the query that is not known."""
    if unknown := sorted(query.keys() - {*known}):
        has = f"this address has {', '.join(known)}" if known else "this address has none"
        raise ValueError(f"unknown field {unknown[0]!r}: {has}")
