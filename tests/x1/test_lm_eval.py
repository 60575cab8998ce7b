"""lm-eval, the harness that most published figures come from, against our server: what it measures is the model's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from folovllm.electives.server.config import ServerConfig
from tests.x1.background import Background, served

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[eval]'")
pytest.importorskip("tenacity", reason="lm-eval's API extra is not installed: pip install -e '.[eval]'")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the harness's own

MODEL = Path(__file__).parents[2] / "folovllm" / "assets" / "stories-5m"
STARTS = (
    "Once upon a time there was a",
    "Lily saw a big",
    "The dog ran to the",
    "Tom was sad because",
    "In the park, Mia found",
)
CHOICES = (" little girl", " red ball", " a silver kite", " quantum engine", " he lost his toy")
TASKS = {
    "choices": {
        "output_type": "multiple_choice", "doc_to_text": "{{start}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}",
        "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    },
    "whole": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{start}}{{choices[0]}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "continued": {
        "output_type": "generate_until", "doc_to_text": "{{start}}", "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 16}, "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Background]:
    yield from served(ServerConfig(served_model_name=["stories"]), model=str(MODEL), max_model_len=256)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tasks, and the documents that all of them read."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = [{"start": start, "choices": CHOICES, "gold": i} for i, start in enumerate(STARTS)]
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    for name, task in TASKS.items():
        where = {"data_files": {"test": str(folder / "documents.jsonl")}, "cache_dir": str(folder / "cache")}
        source = {"dataset_path": "json", "dataset_kwargs": where}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test", **source, **task}))
    return folder


def samples(
    server: Background, tasks: Path, kind: str, names: list[str], **more: Any
) -> dict[str, list[dict[str, Any]]]:
    """What the harness asked and was answered, by task, in the order of the documents."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    path = "chat/completions" if "chat" in kind else "completions"
    arguments = {"model": "stories", "base_url": f"{server.url}/v1/{path}", "tokenizer": str(MODEL), "max_length": 256}
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments | {"tokenizer_backend": "huggingface", "max_retries": 1} | more,
        tasks=names,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        apply_chat_template="chat" in kind,
    )
    return {name: sorted(found["samples"][name], key=lambda sample: sample["doc_id"]) for name in names}


@pytest.fixture(scope="module")
def reference() -> Any:
    """The model in transformers."""
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@torch.inference_mode()
def score(reference: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The log-likelihood of the continuation, and whether each of its tokens is the most likely one."""
    ids = torch.tensor([context + continuation])
    logprobs = reference(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)  # [n, V]
    own = torch.tensor(continuation)
    return float(logprobs.gather(1, own[:, None]).sum()), bool((logprobs.argmax(-1) == own).all())


def test_loglikelihoods_are_those_of_transformers(server: Background, tasks: Path, reference: Any) -> None:
    """Prompts as token ids, `echo` and `logprobs`, several in a request; of a whole text every token counts, the first behind the end-of-text token."""
    found = samples(server, tasks, "local-completions", ["choices", "whole"], batch_size=4)
    tokenizer, likely = AutoTokenizer.from_pretrained(MODEL), []
    for sample in found["choices"]:
        for (start, choice), ((loglikelihood, greedy),) in zip(sample["arguments"], sample["resps"], strict=True):
            context = tokenizer.encode(start)
            expected, is_greedy = score(reference, context, tokenizer.encode(start + choice)[len(context) :])
            assert float(loglikelihood) == pytest.approx(expected, abs=1e-3) and bool(greedy) == is_greedy
            likely.append(is_greedy)
    assert len(likely) == len(STARTS) * len(CHOICES) and any(likely)
    for sample in found["whole"]:
        ids = tokenizer.encode(sample["arguments"][0][0], add_special_tokens=False)
        expected, _ = score(reference, [tokenizer.bos_token_id or tokenizer.eos_token_id], ids)
        assert float(sample["resps"][0][0]) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("kind", ["local-completions", "local-chat-completions"])
def test_continuations(server: Background, tasks: Path, reference: Any, kind: str) -> None:
    """Greedy, until a stop string; and the same question in a conversation."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for sample in samples(server, tasks, kind, ["continued"])["continued"]:
        messages, prompt = [{"role": "user", "content": sample["doc"]["start"]}], sample["arguments"][0][0]
        if "chat" in kind:
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens="chat" not in kind).input_ids
        answer = reference.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
        assert sample["resps"][0][0] == tokenizer.decode(answer, skip_special_tokens=True).partition(".")[0]
