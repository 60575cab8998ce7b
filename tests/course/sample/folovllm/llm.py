"""As much of an engine as `read` traces."""

from dataclasses import dataclass

from folovllm.pool import Pool


@dataclass(frozen=True)
class SamplingParams:
    max_tokens: int
    temperature: float


class LLM:
    def __init__(self, milestone: str) -> None:
        """Choose."""
        self.milestone, self.pool = milestone, Pool(4)

    def generate(self, prompt: str, params: SamplingParams) -> list[int]:
        """Take, and share from m2 on."""
        taken = [self.pool.take() for _ in range(2)]
        return self.pool.share(2)[0] if self.milestone == "m2" else taken
