"""Reinforcement learning on a laptop: GRPO teaches the embedded model to name its kite's colour.

The loop in `train` is all there is to it. To carry it to a trainer of yours, replace `Policy` by your model, and keep the two
calls of the engine: `generate` with `logprobs=0`, and `update_weights`.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

import torch

from folovllm.distributed.cores import num_cores
from folovllm.electives.rollouts.demo_options import COLOURS, Options
from folovllm.electives.rollouts.grpo import group_advantages, importance_ratio, policy_loss
from folovllm.electives.rollouts.trainer import Policy
from folovllm.llm import LLM
from folovllm.models.registry import PLAIN_LAYERS
from folovllm.models.written_files import write_whole
from folovllm.outputs import CompletionOutput
from folovllm.sampling_params import SamplingParams

BEST_COUNT, BEST_WORDS, WORTH_NOTHING = 3, 70, 40  # the last: so many words too many or too few
EPS = 0.1  # a group of nearly equal answers says little: its small differences must not count as large ones
BARS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class Iteration:
    """What one iteration gave, and what it took."""

    reward: float  # mean, of 2 at most: the sum of the next two
    colour: float  # of 1 at most
    length: float  # of 1 at most
    words: float  # mean length
    off_policy: float  # largest distance of a token's importance ratio from 1
    rollout_tokens: int
    rollout_seconds: float
    train_seconds: float
    update_seconds: float


@dataclass(slots=True)
class Run:
    """What a run of the demo leaves: the curve, and a story before and after."""

    options: Options
    curve: list[Iteration] = field(default_factory=list)
    before: str = ""
    after: str = ""

    def save(self, path: Path) -> None:
        """Write it as JSON. Raises ValueError where that is not possible."""
        write_whole(path, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")


def prompt_of(llm: LLM, colour: str) -> list[int]:
    """The token ids of the question for a story."""
    return llm.render_chat([{"role": "user", "content": f"Tell me a story about a {colour} kite."}])


def count_of(colour: str, story: str) -> int:
    """How often a story names the colour, as a whole word."""
    return len(re.findall(rf"\b{colour}\b", story.lower()))


def reward_of(colour: str, story: str) -> tuple[float, float]:
    """Return two rewards: up to 1 for naming the colour `BEST_COUNT` times, up to 1 for a length of `BEST_WORDS` words.

    The model's own stories, of about 100 words, must earn some of each: what earns all of them nothing teaches nothing.
    """
    length = 1 - abs(len(story.split()) - BEST_WORDS) / WORTH_NOTHING
    return min(count_of(colour, story), BEST_COUNT) / BEST_COUNT, max(0.0, length)


def train(llm: LLM, options: Options) -> Iterator[Iteration]:
    """Roll out, compare, learn, give the weights back: an iteration at a time, for ever."""
    policy = Policy(llm, None if options.batch_invariant else PLAIN_LAYERS)
    optimizer = torch.optim.AdamW(policy.model.parameters(), options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    dice = random.Random(options.seed)
    while True:
        start = time.monotonic()
        colours = dice.sample(COLOURS, options.groups)
        prompts = [prompt_of(llm, colour) for colour in colours]
        params = [  # with one seed for all, each group would have the same stories in another colour
            SamplingParams(n=options.answers, max_tokens=options.max_tokens, logprobs=0, seed=dice.getrandbits(31))
            for _ in prompts
        ]
        groups = [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]
        rolled_out = time.monotonic()

        rewards = torch.tensor(  # [groups, answers, 2]
            [[reward_of(colour, a.text) for a in group] for colour, group in zip(colours, groups, strict=True)]
        )
        advantages = group_advantages(rewards.sum(-1), EPS).flatten()
        answers = [(prompt, a) for prompt, group in zip(prompts, groups, strict=True) for a in group]
        off_policy = learn(policy, optimizer, answers, advantages)
        learned = time.monotonic()

        llm.update_weights(policy.weights())
        colour, length = rewards.mean((0, 1)).tolist()
        yield Iteration(
            reward=colour + length,
            colour=colour,
            length=length,
            words=fmean(len(a.text.split()) for _, a in answers),
            off_policy=off_policy,
            rollout_tokens=sum(len(a.token_ids) for _, a in answers),
            rollout_seconds=rolled_out - start,
            train_seconds=learned - rolled_out,
            update_seconds=time.monotonic() - learned,
        )


def learn(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    answers: Sequence[tuple[list[int], CompletionOutput]],
    advantages: torch.Tensor,
) -> float:
    """Take one step of the optimizer. Returns how far the importance ratio was from 1, at the token where it was farthest."""
    sequences = [[*prompt, *answer.token_ids] for prompt, answer in answers]
    sampled = [engine_logprobs(answer) for _, answer in answers]
    found = policy.logprobs(sequences, [len(prompt) for prompt, _ in answers])
    loss = policy_loss(found, sampled, advantages)
    optimizer.zero_grad()
    with all_cores():  # backwards no bit must be the engine's
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
    ratio = importance_ratio(torch.cat(found).detach(), torch.cat(sampled))
    return float((ratio - 1).abs().max())


@contextmanager
def all_cores() -> Iterator[None]:
    """Let torch use a thread for each core, and as many as before afterwards, also after an error or Ctrl-C."""
    threads = torch.get_num_threads()
    torch.set_num_threads(num_cores())
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def engine_logprobs(answer: CompletionOutput) -> torch.Tensor:
    """The log-probabilities of an answer's tokens as the engine sampled them, [tokens]."""
    assert answer.logprobs is not None
    pairs = zip(answer.logprobs, answer.token_ids, strict=True)
    return torch.tensor([each[token].logprob for each, token in pairs])


def run_demo(options: Options, save: Path | None) -> Run:
    """Run the demo and print what happens. Ctrl-C ends it early, and what it has is printed and saved all the same."""
    run = Run(options)
    with LLM(device="cpu", use_tqdm=False, batch_invariant=options.batch_invariant, max_num_seqs=64) as llm:
        run.before = story(llm)
        print(f"before: {run.before}\n\n  #  reward  colour  length  words  off-policy  tokens/s  seconds")
        iterations = train(llm, options)
        try:
            for number in range(1, options.iterations + 1):
                run.curve.append(next(iterations))
                print(line(number, run.curve[-1]), flush=True)
        except KeyboardInterrupt:
            print("ended early")
        run.after = story(llm)
    print(f"\nafter: {run.after}\n\nreward {sparkline([each.reward for each in run.curve])}")
    if save is not None:
        run.save(save)
    return run


def story(llm: LLM) -> str:
    """The story that is most likely at each token."""
    params = SamplingParams(temperature=0, max_tokens=160)
    return llm.generate([prompt_of(llm, "blue")], params, use_tqdm=False)[0].outputs[0].text.strip()


def line(number: int, of: Iteration) -> str:
    """An iteration as a line of the table."""
    speed = of.rollout_tokens / of.rollout_seconds
    seconds = of.rollout_seconds + of.train_seconds + of.update_seconds
    return f"{number:3}  {of.reward:6.2f}  {of.colour:6.2f}  {of.length:6.2f}  {of.words:5.0f}  {of.off_policy:10.1e}  {speed:8.0f}  {seconds:7.1f}"


def sparkline(values: Sequence[float]) -> str:
    """Values as bars of eight heights, between their extremes."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return "".join(BARS[round((value - low) / ((high - low) or 1) * (len(BARS) - 1))] for value in values)
