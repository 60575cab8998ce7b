"""Makes the traces on which the course's builders are scored: `python tools/traces.py` writes milestones/traces/.

A request is (arrival in seconds, its prompt as parts, tokens of its answer). A part is a name and a number of tokens;
tokens of parts of one name are the same, and the answer goes on where the prompt's last part ends.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "milestones" / "traces"
Request = tuple[float, list[tuple[str, int]], int]


def length(rng: random.Random, median: float, spread: float, most: int) -> int:
    """A length whose logarithm is normal, as those of prompts and answers about are."""
    return max(4, min(most, round(rng.lognormvariate(0, spread) * median)))


def chat(rng: random.Random) -> list[Request]:
    """240 questions within half a second. A long question has a long answer, within a factor of two or so."""
    requests: list[Request] = []
    for i in range(240):
        prompt = length(rng, 90, 1.0, 700)
        requests.append((round(rng.uniform(0, 0.5), 4), [(f"q{i}", prompt)], length(rng, 12 * prompt**0.5, 0.4, 300)))
    return requests


def documents(rng: random.Random) -> list[Request]:
    """300 long prompts with answers of any length, more than the cache can hold from the first moment to the last."""
    return [
        (round(i / 600, 4), [(f"d{i}", length(rng, 600, 0.7, 1500))], length(rng, 150, 0.6, 500)) for i in range(300)
    ]


def waves(rng: random.Random) -> list[Request]:
    """1,600 questions in four waves, so that a batch has any number of rows up to 256."""
    requests: list[Request] = []
    for i in range(1600):
        arrival = 1.0 * (i % 4) + rng.gauss(0.4, 0.15)
        requests.append(
            (round(max(0.0, arrival), 4), [(f"w{i}", length(rng, 60, 0.8, 400))], length(rng, 90, 0.6, 300))
        )
    return requests


def turns(rng: random.Random) -> list[Request]:
    """60 conversations of one to five turns behind six system prompts; some prompts are seen once and never again."""
    requests: list[Request] = []
    systems = [length(rng, 300, 0.5, 600) for _ in range(6)]
    for i in range(60):
        system, arrival, so_far = min(5, int(rng.expovariate(0.6))), rng.uniform(0, 0.4), 0
        for _ in range(rng.randint(1, 5)):
            so_far += length(rng, 40, 0.8, 200)
            answer = length(rng, 60, 0.6, 150)
            parts = [(f"system{system}", systems[system]), (f"chat{i}", so_far)]
            requests.append((round(arrival, 4), parts, answer))
            so_far += answer
            arrival += rng.uniform(0.1, 0.3)
    for i in range(40):
        requests.append(
            (round(rng.uniform(0, 0.8), 4), [(f"once{i}", length(rng, 400, 0.6, 900))], length(rng, 20, 0.5, 60))
        )
    return requests


def traces() -> dict[str, str]:
    """The files by name: one request a line, by their arrival."""
    found = {}
    for make in (chat, documents, turns, waves):
        requests = sorted(make(random.Random(0)), key=lambda request: request[0])
        found[f"{make.__name__}.json"] = "[\n" + ",\n".join(map(json.dumps, requests)) + "\n]\n"
    return found


if __name__ == "__main__":
    for name, text in traces().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
