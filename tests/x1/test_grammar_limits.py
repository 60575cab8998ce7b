"""What one request's form may cost, and what it may be: it is refused, or others notice nothing."""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import decoders
from transformers import AutoTokenizer

from folovllm.electives.structured_output.choice import ChoiceGrammar
from folovllm.electives.structured_output.guidance import LIMITS
from folovllm.electives.structured_output.params import GrammarLimits, StructuredOutputsParams
from folovllm.electives.structured_output.vocabulary import Vocabulary, read_vocabulary
from folovllm.llm import LLM
from folovllm.sampling_params import SamplingParams
from tests.helpers import tiny_checkpoint
from tests.x1.background import PATIENCE, Background, eventually

CHECKER = "folovllm.electives.structured_output.grammar_check"


@pytest.fixture
def server(open_server: Background) -> Background:
    return open_server


def ask(server: Background, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Status and reply of a completion."""
    return server.ask("/v1/completions", {"prompt": "a", "max_tokens": 3, "seed": 1} | fields)


def of_processes(files: str) -> Iterator[str]:
    """The texts of these files below /proc. A process may end before its own are read."""
    for file in glob(f"/proc/{files}"):
        with suppress(FileNotFoundError, ProcessLookupError):
            yield Path(file).read_text()


def children(pid: int | str) -> list[int]:
    """The processes that a process has started, and those that they have."""
    own = [int(child) for text in of_processes(f"{pid}/task/*/children") for child in text.split()]
    return own + [each for child in own for each in children(child)]


def checkers() -> set[int]:
    """The processes that check grammars: of each server one that waits, and a fork for each grammar."""
    return {pid for pid in children(os.getpid()) if CHECKER in "".join(of_processes(f"{pid}/cmdline"))}


def memory() -> int:
    """MiB that this process and all its children hold."""
    stats = [stat for pid in (os.getpid(), *children(os.getpid())) for stat in of_processes(f"{pid}/statm")]
    return sum(int(stat.split()[1]) for stat in stats) * os.sysconf("SC_PAGESIZE") >> 20


def doubled(depth: int) -> str:
    """A grammar whose one text is 2 ** `depth` letters long."""
    return "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(depth)) + f'a{depth}: "x"'


BOMBS: dict[str, dict[str, Any]] = {
    "a large prime": {"json": {"type": "integer", "multipleOf": 62615533}},
    "primes multiplied": {"json": {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}},
    "repetitions later": {"regex": "x{3}(a{1000}){1000}"},
    "repetitions of up to": {"regex": "(a{1,1000}){1,1000}"},
    "long": {"regex": "a{1000000000}"},
    "products": {"json": {"allOf": [{"type": "string", "pattern": f".*{a}.*{b}.*"} for a, b in zip("abcdefghij", "bcdefghijk", strict=True)]}},
    "ambiguous": {"regex": "(x+x+)+y"},
    "what was long ago": {"regex": "[a-z]*a[a-z]{2000}"},
    "unicode": {"regex": r"(\p{L}{1,50}\p{N}*){1,50}"},
    "properties": {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(4500)}}},
    "patternProperties": {"json": {"patternProperties": {f".*{a}.*b.{{30}}": {} for a in "cdefghijkl"}}},
    "nested": {"json": '{"items":' * 3000 + "{}" + "}" * 3000},
    "doubled": {"grammar": doubled(40)},
    "GBNF": {"grammar": 'root ::= (("x"{1000}){1000}){1000}'},
    "a grammar in several ways": {"grammar": 'start: e\ne: e e | e "+" e | "x" | "y" | "xy"'},
}  # fmt: skip


class TestCost:
    @pytest.mark.parametrize("form", BOMBS.values(), ids=list(BOMBS))
    def test_others_notice_nothing(self, server: Background, form: dict[str, Any]) -> None:
        """It is refused, or cheap. Others are answered meanwhile, and the memory stays what it was."""
        assert ask(server, structured_outputs={"regex": "a"})[0] == 200  # what checks is there
        before = memory()
        with ThreadPoolExecutor(1) as pool:
            refused = pool.submit(ask, server, structured_outputs=form)
            most = memory()
            while not refused.done():
                assert ask(server)[0] == 200, "a request without a form is answered beside it"
                most = max(most, memory())
                wait([refused], 0.1)
        status, reply = refused.result()
        assert status in (200, 400), reply
        assert most - before < 300, f"the server has taken {most - before} MiB"
        if status == 400 and "too complex" in (message := reply["error"]["message"]):
            assert message.startswith("structured_outputs is") and "--grammar-seconds" in message

    def test_who_leaves_ends_it(self) -> None:
        """A check without a limit ends with its client; if its process was killed, there is another. Without grammars, none."""
        before = checkers()
        with Background(model=str(tiny_checkpoint()), max_model_len=256) as server:
            assert ask(server, structured_outputs={"choice": ["a", "b"]})[0] == 200
            assert checkers() == before
            server.engine.grammars._limits = GrammarLimits(seconds=600, memory=8192)
            body = json.dumps({"prompt": "a", "structured_outputs": BOMBS["a large prime"]})
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            eventually(lambda: len(checkers() - before) == 2)
            connection.close()
            eventually(lambda: len(checkers() - before) == 1)
            (waits,) = checkers() - before
            os.kill(waits, signal.SIGKILL)
            eventually(lambda: checkers() == before)
            eventually(lambda: ask(server, structured_outputs={"regex": "a"})[0] == 200)
        assert checkers() == before, "the server has ended, and what it started has not"


class Counted(dict[bytes, list[int]]):
    """Counts what is asked of it."""

    num_asked = 0

    def get(self, key: bytes, default: Any = None) -> Any:  # type: ignore[override]
        self.num_asked += 1
        return super().get(key, default)


@pytest.fixture
def vocabulary() -> Vocabulary:
    letters = {bytes([i]): [i] for i in range(256)}
    return Vocabulary({i: text for text, (i,) in letters.items()}, Counted(letters | {b"abcd": [256]}), 4)


class TestChoices:
    @pytest.mark.parametrize("num_letters", [3, 900])
    def test_128_answers(self, vocabulary: Vocabulary, num_letters: int) -> None:
        """A step looks up a few bytes for each answer, however many choices there are and however long they are."""
        rng = random.Random(0)
        choices = ["".join(rng.choices("abcdefgh", k=num_letters)).encode() for _ in range(64_000 // num_letters)]
        shared, counted = ChoiceGrammar(vocabulary, choices, [0]), vocabulary.ids_of
        assert isinstance(counted, Counted)
        first, words = np.empty((1, 9), np.int32), np.empty((1, 9), np.int32)
        shared.fill(first, [])
        answers, counted.num_asked = [shared.copy() for _ in range(128)], 0
        for answer in answers:
            answer.fill(words, [])
            assert (words == first).all()
        assert counted.num_asked == 0, "all answers that are at the same place share a mask"
        for answer in answers:
            chosen = rng.choice(choices)
            assert answer.accept_token(chosen[0]) and answer.accept_token(chosen[1])
            answer.fill(words, [])
        assert counted.num_asked < 128 * vocabulary.longest * (1 + len(choices) // 64)


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """A byte-level tokenizer two of whose tokens have letters that stand for no byte."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(), folder)
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    vocab = described["model"]["vocab"]
    for letter, name in (("\u0143", "a b"), ("\u0142", "Ġ日")):
        vocab[name] = vocab.pop(letter)
    file.write_text(json.dumps(described))
    return folder


def test_strange_tokens_stand_for_what_they_are_decoded_to(strange: Path) -> None:
    """And a form is kept with them."""
    tokenizer = AutoTokenizer.from_pretrained(strange)
    bytes_of = read_vocabulary(tokenizer).bytes_of
    for name in ("a b", "Ġ日", "Ġ", "a"):
        assert bytes_of[tokenizer.get_vocab()[name]].decode() == decoders.ByteLevel().decode([name])
    forms: list[Any] = [{"choice": ["yes", "a b"]}, {"regex": "yes|no"}, {"regex": "yes", "after": "e"}]
    params = [SamplingParams(structured_outputs=form, max_tokens=60, seed=3) for form in forms]
    with LLM(str(strange), max_model_len=200, device="cpu", use_tqdm=False) as llm:
        choice, regex, behind = (output["text"] for output in llm.generate([[5]] * 3, params, use_tqdm=False))
    assert choice in ("yes", "a b") and regex in ("yes", "no") and behind


def test_too_complex_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an answer is given up, and never passes for one that is complete. The next request begins anew."""
    monkeypatch.setitem(LIMITS, "max_lexer_states", 50)
    form = StructuredOutputsParams(regex="[a-z]*a[a-z]{2000}")
    with LLM(str(tiny_checkpoint()), max_model_len=200, device="cpu", use_tqdm=False) as llm:
        for seed in range(2):
            params = SamplingParams(n=3, seed=seed, max_tokens=90, structured_outputs=form)
            answers = llm.generate([[5]], params)[0].outputs
            assert {answer.finish_reason for answer in answers} == {"abort"}
            assert all(len(answer.token_ids) > 5 for answer in answers), "what another request found out is forgotten"


def test_two_checks_at_once(server: Background) -> None:
    """A cheap grammar does not wait for a dear one."""
    done: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        dear = pool.submit(ask, server, structured_outputs={"json": {"multipleOf": 999983}})
        cheap = pool.submit(ask, server, structured_outputs={"regex": "a[b-f]"})
        dear.add_done_callback(lambda _: done.append("dear"))
        cheap.add_done_callback(lambda _: done.append("cheap"))
    assert (dear.result()[0], cheap.result()[0], done) == (400, 200, ["cheap", "dear"])
