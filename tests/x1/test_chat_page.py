"""The chat page in a real browser, against a real server with the embedded model; faults are scripted at the browser's border."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from openai import OpenAI

from folovllm.electives.server.config import ServerConfig
from tests.inspector.browser import chromium
from tests.x1.background import PATIENCE, Background, eventually, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow
CHAT = "**/v1/chat/completions"
OVER = ".answer:last-child:not(.running)"


@pytest.fixture(scope="module")
def server() -> Iterator[Background]:
    yield from served(ServerConfig(served_model_name=["little"]), max_model_len=4096)


@pytest.fixture(scope="module")
def watched() -> Iterator[Background]:
    yield from served(ServerConfig(served_model_name=["little"], inspector=True), max_model_len=1024)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


class Visit:
    """A page that was opened, and what it asked for."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.page: Page = browser.new_context(**options).new_page()
        self.page.set_default_timeout(PATIENCE * 1000)
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda said: self.complaints.append(said.text) if "Policy" in said.text else None)
        self.page.goto(url)
        self.page.wait_for_selector("#model:not(:empty)")

    def send(self, question: str) -> None:
        self.page.fill("#question", question)
        self.page.press("#question", "Enter")

    def answer(self) -> str:
        """The last answer, once it is over."""
        self.page.wait_for_selector(OVER)
        return "\n\n".join(self.page.locator(".answer").last.locator(".text > *").all_inner_texts())

    def ask(self, question: str, *pieces: Any) -> str:
        """The answer to a question: with `pieces` these, as if the server had sent them."""
        if pieces:
            self.answers_with(sse(*pieces))
        self.send(question)
        return self.answer()

    def settings(self, **fields: str) -> None:
        self.page.click("#settings")
        for name, value in fields.items():
            self.page.fill(f"#controls [name={name}]", value)
        self.page.click("text=Done")

    def answers_with(self, text: str, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """The next answers are this text, as if the server had sent it."""
        self.page.route(CHAT, lambda route: route.fulfill(status=status, body=text, headers=headers or {}))

    def answers_at_length(self) -> None:
        """The server answers, with 3000 tokens. (What Playwright lets through, it does not break off when the page does.)"""
        self.page.evaluate(
            """() => {
                const ask = window.fetch;
                window.fetch = (url, options) =>
                    ask(url, {...options, body: options.body.replace("{", '{"ignore_eos": true, ').replace("1024", "3000")});
            }"""
        )


@pytest.fixture
def visit(server: Background, browser: Browser) -> Iterator[Visit]:
    visit = Visit(browser, server.url)
    yield visit
    assert visit.complaints == []
    elsewhere = [url for url in visit.asked if not url.startswith((server.url, "data:"))]
    assert elsewhere == [], "the page asks somebody else"
    visit.page.context.close()


def sse(*pieces: Any, end: str = "data: [DONE]\n\n") -> str:
    """Events of a stream: texts as they come, anything else as it is."""
    said = [{"choices": [{"delta": {"content": piece}}]} if isinstance(piece, str) else piece for piece in pieces]
    return "".join(f"data: {json.dumps(each)}\n\n" for each in said) + end


class TestAnswers:
    def test_an_answer_streams(self, server: Background, visit: Visit) -> None:
        visit.settings(temperature="0", max_tokens="60")
        visit.page.evaluate(
            "window.seen = new Set(); new MutationObserver(() => seen.add(document.querySelector('.answer .text')?.textContent))"
            ".observe(document.querySelector('#log'), {subtree: true, childList: true, characterData: true})"
        )
        visit.send("Tell me about Lily.")
        shown = visit.answer()
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        messages: Any = [{"role": "user", "content": "Tell me about Lily."}]
        said = client.chat.completions.create(model="little", messages=messages, temperature=0, max_tokens=60)
        assert shown == said.choices[0].message.content
        states = sorted(visit.page.evaluate("[...seen].filter(Boolean)"), key=len)
        assert len(states) > 3 and all(shown.startswith(state) for state in states)
        figures = visit.page.inner_text(".answer .figures")
        assert re.fullmatch(r"\d+ tokens · TTFT [\d.]+ m?s · [\d.]+ tokens/s( · cut off .*)?", figures)
        assert said.usage and int(figures.split()[0]) == said.usage.completion_tokens

    def test_stop(self, server: Background, visit: Visit) -> None:
        """Esc and the button end the work on the server, and the reader keeps what there is."""
        visit.answers_at_length()
        for i in range(2):
            before = server.engine.counters.finished["abort"]
            visit.send("A long story, please.")
            answer = visit.page.locator(".answer.running .text")
            answer.wait_for()
            eventually(lambda: len(answer.inner_text()) > 40)  # noqa: B023
            if i:
                visit.page.click("#stop")
            else:
                visit.page.press("#question", "Escape")
            visit.page.wait_for_selector(OVER)
            eventually(lambda: server.engine.counters.finished["abort"] == before + 1)  # noqa: B023
            server.wait_until_idle()
            assert visit.page.locator(".answer .figures").last.inner_text().endswith(" · stopped")
            assert len(visit.answer()) > 40
        assert visit.page.is_hidden("#stop") and visit.page.is_visible("#send")
        assert visit.page.evaluate("document.activeElement.id") == "question"

    def test_what_is_asked(self, visit: Visit) -> None:
        """The controls arrive as they were set; later turns have the earlier ones, without thoughts; a failed one is no part of it."""
        asked: list[Any] = []
        visit.page.on("request", lambda request: asked.append(request.post_data_json) if request.post_data else None)
        assert visit.ask("First", {"choices": [{"delta": {"reasoning_content": "Let me see."}}]}, "Fine.") == "Fine."
        assert visit.page.locator(".thought").text_content() == "ThoughtsLet me see."
        streamed = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
        first = {"messages": [{"role": "user", "content": "First"}], "model": "little", "max_tokens": 1024}
        assert 0 <= asked[0]["seed"] < 2**31, "without one nobody could have the answer again"
        assert asked[0] == first | streamed | {"seed": asked[0]["seed"]}
        given = {"temperature": "0.5", "top_p": "0.9", "top_k": "7", "min_p": "0.05", "max_tokens": "33", "seed": "4"}
        given["system"] = "Be brief."
        visit.settings(**given)
        visit.answers_with("", status=500)
        visit.ask("Second")
        visit.answers_with(sse("Well."))
        visit.page.focus("#question")
        for key in ("T", "Shift+Enter", "h", "Enter"):
            visit.page.keyboard.press(key)
        assert visit.answer() == "Well." and visit.page.input_value("#question") == ""
        visit.page.keyboard.press("Enter")  # nothing to send
        assert visit.page.locator(".question").count() == 3
        fields = asked[2]
        assert [(message["role"], message["content"]) for message in fields.pop("messages")] == [
            ("system", "Be brief."), ("user", "First"), ("assistant", "Fine."), ("user", "T\nh")
        ]  # fmt: skip
        wanted = {name: float(value) for name, value in given.items() if name != "system"}
        assert {name: fields[name] for name in wanted} == wanted

    def test_an_answer_is_text(self, visit: Visit) -> None:
        """Markup stays what was written; blocks of code and paragraphs are all that is made of it."""
        evil = "<img src=x onerror='window.harm = 1'> <b>bold</b> `<i>`\nline\n\n```html\n<script>window.harm = 1</script>\n\n  end\n```\nafter"
        visit.ask("<img src=x onerror='window.harm = 1'>", *evil)  # a character at a time
        paragraphs = visit.page.locator(".answer .text > p").all_inner_texts()
        assert paragraphs == ["<img src=x onerror='window.harm = 1'> <b>bold</b> <i>\nline", "after"]
        assert visit.page.inner_text(".answer pre") == "<script>window.harm = 1</script>\n\n  end"
        assert visit.page.inner_text(".answer .bar span") == "html"
        assert visit.page.inner_text(".answer p > code") == "<i>"
        assert visit.page.locator("#log :is(img, b, i, script)").count() == 0
        assert visit.page.evaluate("window.harm") is None


class TestWatching:
    def test_an_answer_in_the_inspector(self, watched: Background, browser: Browser) -> None:
        """It is given again, by its seed, while the inspector looks on, which shows this request and no other."""
        visit = Visit(browser, watched.url, bypass_csp=True)  # else waiting for the inspector is refused as "eval"
        visit.settings(temperature="1", max_tokens="20")
        idea = visit.page.locator(".ideas button").first
        question = idea.inner_text()
        idea.click()
        answer = visit.answer()
        visit.settings(temperature="0", max_tokens="5")  # of answers to come, and not of this one
        with visit.page.expect_popup() as opening:
            visit.page.get_by_role("button", name="Watch").click()
        page = opening.value
        page.wait_for_function("window.inspector?.lanes[0]?.recording.ended.length === 1")
        assert page.locator("body").inner_text().count(question) == 1
        page.wait_for_function("inspector.lanes[0].selected !== null")
        said = page.evaluate(
            "(({recording, selected}) => { const it = recording.infos.get(selected);"
            " return recording.text(it, it.prompt.length, it.prompt.length + it.drawn.length); })(inspector.lanes[0])"
        )
        assert visit.answer() == answer and said.strip().startswith(answer[:40])
        visit.page.context.close()


class TestErrors:
    @pytest.mark.parametrize(
        ("text", "status", "says"),
        [
            (sse("Once ", {"error": {"message": "the engine's process ended"}}), 200, "The engine's process ended."),
            (sse("Once ", end=""), 200, "The server ended the connection before the answer was over."),
            ('{"error": {"message": "the queue is full: come"}}', 429, "The queue is full: come (try again in 7 s)."),
            ("<html>", 502, "The server answered with status 502 (try again in 7 s)."),
        ],
    )
    def test_a_sentence_and_another_try(self, visit: Visit, text: str, status: int, says: str) -> None:
        visit.answers_with(text, status, {"Retry-After": "7"})
        assert visit.ask("Hello") == ("Once " if status == 200 else "")
        assert visit.page.inner_text(".answer .error") == says
        visit.answers_with(sse("Here I am."))
        visit.page.click("button:text('Again'):visible")
        visit.page.wait_for_selector("text=Here I am.")
        assert visit.answer() == "Here I am." and visit.page.is_hidden(".answer .error")
        assert visit.page.locator(".question").count() == 1

    def test_what_the_server_refuses(self, server: Background, visit: Visit) -> None:
        """And a server that is gone."""
        visit.settings(top_k="-5")
        visit.page.wait_for_selector("#dialog[open]")  # the field says which values there are
        visit.page.fill("[name=top_k]", "")
        visit.page.click("text=Done")
        visit.send("long " * 5000)
        visit.page.wait_for_selector(".answer .error:visible")
        assert "leaves no room" in visit.page.inner_text(".answer .error")
        visit.page.route(CHAT, lambda route: route.abort())
        visit.ask("Hello")
        said = visit.page.locator(".answer .error").last.inner_text()
        assert said == "The server cannot be reached: is it still running?"

    def test_a_key(self, browser: Browser) -> None:
        with Background(ServerConfig(api_key=["a-key"]), max_model_len=512) as server:
            visit = Visit(browser, server.url)
            visit.page.wait_for_selector("#dialog[open]")
            assert visit.page.inner_text("#asks") == "This server wants a key."
            assert visit.page.evaluate("document.activeElement.name") == "key"
            assert visit.page.is_hidden("[name=temperature]")
            visit.page.keyboard.type("another")
            visit.page.keyboard.press("Enter")
            visit.page.wait_for_selector("#asks:has-text('does not know this key')")
            visit.page.fill("[name=key]", "")
            visit.page.keyboard.type("a-key")
            visit.page.keyboard.press("Enter")
            visit.page.wait_for_selector("#model:has-text('up to 512 tokens')")
            assert visit.ask("Tell me about Lily.")
            visit.page.reload()
            visit.page.wait_for_selector("#model:has-text('up to 512 tokens')")  # this tab still has it
            kept = visit.page.evaluate("JSON.stringify(localStorage)")
            assert "a-key" not in kept and visit.page.is_hidden("#dialog")
            visit.page.context.close()


class TestConversations:
    def test_two_and_a_reload(self, visit: Visit) -> None:
        page = visit.page
        visit.ask("The first", "I am one.")
        page.click("#new")
        visit.ask("The second", "I am two.")
        names = page.locator("#list .open")
        assert names.all_inner_texts() == ["The second", "The first"]
        page.fill("#title", "Number two")
        page.press("#title", "Enter")
        page.reload()
        assert names.all_inner_texts() == ["Number two", "The first"]
        assert page.inner_text(".answer .text") == "I am two."
        page.click("text=The first")
        assert page.inner_text(".answer .text") == "I am one." and page.input_value("#title") == "The first"
        page.click("[aria-label='Delete The first']")
        assert names.all_inner_texts() == ["Number two"] and page.is_visible("#welcome")
        page.click("text=Undo")
        assert page.inner_text(".answer .text") == "I am one."
        page.click("[aria-label='Delete Number two']")
        page.reload()
        assert names.all_inner_texts() == ["The first"]

    def test_an_answer_comes_while_another_conversation_is_shown(self, server: Background, visit: Visit) -> None:
        page = visit.page
        visit.answers_at_length()
        visit.send("A long one")
        page.wait_for_selector(".answer .figures:not(:empty)")
        page.click("#new")
        assert page.locator("#list .answering").count() == 1 and page.is_visible("#send")
        assert visit.ask("A short one", "Short.") == "Short."
        page.click("#list .answering .open")
        page.wait_for_selector(".answer.running")
        page.reload()  # ends it, and what had come is kept
        server.wait_until_idle()
        assert page.inner_text("#list .current") == "A short one"
        page.click("text=A long one")
        assert page.inner_text(".answer .text") and page.inner_text(".answer .figures").endswith("stopped")


class TestNames:
    def test_everything_has_a_name(self, visit: Visit) -> None:
        """For who hears the page: names of controls, one region that grows and says when it is busy."""
        page = visit.page
        page.evaluate("localStorage['folovllm.conversation.x'] = '{'; localStorage['folovllm.settings'] = 'x'")
        page.reload()  # what is damaged does no harm
        assert visit.ask("Hello", "Fine.") == "Fine."
        assert not page.get_by_role("button", name="Watch").is_visible(), "without an inspector"
        assert page.get_by_text("folovllm serve --inspector").is_visible()
        page.click("#settings")
        nameless = page.evaluate(
            "[...document.querySelectorAll('button, input, textarea')].filter(one => !(one.ariaLabel || one.textContent.trim()"
            " || [...one.labels].some(label => label.textContent.trim()))).map(one => one.outerHTML)"
        )
        assert nameless == []
        assert page.get_attribute("#log", "aria-live") == "polite"
        assert page.get_attribute(".answer", "aria-busy") == "false"
        assert page.text_content("#status", timeout=1000) == "The answer is there, 0 tokens."
