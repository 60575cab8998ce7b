"""Conversations: the model's own template, one or several, and the terminal's loop around them."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from folovllm import LLM, SamplingParams
from folovllm.apps.cli.conversation import Chat
from tests.helpers import tiny_checkpoint

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(tiny_checkpoint()), milestone="m1", max_model_len=160, use_tqdm=False)


def test_the_template_and_its_special_tokens(llm: LLM) -> None:
    ids = llm.render_chat(HELLO)
    assert llm.tokenizer.decode(ids) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(257) == 2 and ids.count(258) == 1, "special tokens, not their spelling"


def test_one_conversation_or_several(llm: LLM) -> None:
    (alone,) = llm.chat(HELLO, PARAMS, use_tqdm=False)
    several = llm.chat([HELLO, [*HELLO, {"role": "assistant", "content": "Hi"}]], PARAMS, use_tqdm=False)
    assert len(several) == 2 and several[0]["token_ids"] == alone["token_ids"]
    assert alone["token_ids"] == llm.generate(llm.render_chat(HELLO), PARAMS, use_tqdm=False)[0]["token_ids"]


def rendered(llm: LLM, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(llm.tokenizer.decode(llm.render_chat(messages, **options)))


class TestOptions:
    def test_a_keyword_that_nobody_knows(self, llm: LLM) -> None:
        for use in (llm.chat, llm.render_chat):
            with pytest.raises(TypeError, match="sampling_parms"):
                use(HELLO, sampling_parms=PARAMS)  # type: ignore[operator]
        assert not llm.engine.has_unfinished_requests()

    def test_what_the_template_reads(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ 'think' if enable_thinking else 'no' }}")
        for thinks, says in ((True, "think"), (False, "no")):
            options = {"chat_template_kwargs": {"enable_thinking": thinks}}
            assert rendered(llm, HELLO, **options) == says
            assert llm.chat(HELLO, PARAMS, use_tqdm=False, **options)[0].prompt == says  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ({"messages": []}, "chat_template_kwargs must not hold 'messages'"),
            ({"tokenize": True}, "chat_template_kwargs must not hold 'tokenize'"),
            ({1: 2}, "chat_template_kwargs must be a dictionary"),
            ([], "chat_template_kwargs must be a dictionary"),
        ],
    )
    def test_what_is_no_variable_of_the_template(self, llm: LLM, given: Any, says: str) -> None:
        with pytest.raises(ValueError, match=says):
            llm.chat(HELLO, PARAMS, use_tqdm=False, chat_template_kwargs=given)

    def test_the_generation_prompt(self, llm: LLM) -> None:
        assert not rendered(llm, HELLO, add_generation_prompt=False).endswith("assistant\n")

    def test_a_message_that_goes_on(self, llm: LLM) -> None:
        messages = [*HELLO, {"role": "assistant", "content": "Once upon"}]
        options = {"add_generation_prompt": False, "continue_final_message": True}
        assert rendered(llm, messages, **options).endswith("assistant\nOnce upon")
        (output,) = llm.chat(messages, PARAMS, use_tqdm=False, **options)  # type: ignore[arg-type]
        assert output.prompt is not None and output.prompt.endswith("Once upon")
        with pytest.raises(ValueError, match="continue_final_message=True needs add_generation_prompt=False"):
            llm.chat(messages, PARAMS, continue_final_message=True)

    def test_another_template_and_tools(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        tool = {"type": "function", "function": {"name": "clock", "parameters": {}}}
        template = "{% for t in tools %}{{ t.function.name }}{% endfor %}!"
        monkeypatch.setattr(llm.tokenizer, "chat_template", None)
        assert rendered(llm, HELLO, chat_template=template, tools=[tool]) == "clock!"

    def test_text_in_parts(self, llm: LLM) -> None:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, "three"]
        whole = rendered(llm, [{"role": "user", "content": "one\ntwo\nthree"}])
        assert rendered(llm, [{"role": "user", "content": parts}]) == whole

    @pytest.mark.parametrize(
        "part",
        [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {"type": "text", "text": 5}, 5, None],
    )
    def test_parts_that_are_no_text(self, llm: LLM, part: Any) -> None:
        with pytest.raises(ValueError, match=r"content of the kind .* is not supported: give texts"):
            llm.chat([{"role": "user", "content": [{"type": "text", "text": "what is this?"}, part]}], PARAMS)


def test_nothing_to_answer(llm: LLM) -> None:
    with pytest.raises(ValueError, match="conversation is empty"):
        llm.chat([], PARAMS)


def test_a_model_without_a_template(tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint(), tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink(missing_ok=True)
    file = tmp_path / "m" / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}))
    with pytest.raises(ValueError, match="no chat template: use generate"):
        LLM(str(tmp_path / "m"), milestone="m1", use_tqdm=False).chat(HELLO, PARAMS)


def test_the_terminals_loop_says_what_chat_says(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that is too long leaves the conversation as it was. (`test_cli.py` has the loop's other behaviours.)"""
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n" + "x" * 200 + "\n"))
    chat = Chat(llm, PARAMS)
    chat.run()
    assert chat.messages == [
        *HELLO,
        {"role": "assistant", "content": llm.chat(HELLO, PARAMS, use_tqdm=False)[0]["text"]},
    ]
    assert not llm.engine.has_unfinished_requests()
