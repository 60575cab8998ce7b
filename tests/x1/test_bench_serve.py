"""`folovllm bench serve`: loads on a clock of the test's own, replies torn into any pieces, and a real server at the end."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from folovllm.apps.bench.http_load import Reply, Server, read_reply
from folovllm.apps.bench.report import load, show
from folovllm.apps.bench.serving import Point, arrivals, drive, figures, server_at, sweep
from folovllm.apps.bench.workload import BenchRequest, Workload
from folovllm.apps.cli import main
from tests.x1.background import Background


class NoWait(selectors.SelectSelector):
    """Waits on the loop's own clock: time passes when nothing else is left to do."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


def in_made_up_time(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine whose sleeps take no time, on a clock that begins at 0."""
    selector = NoWait()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main)


def requests(count: int) -> list[BenchRequest]:
    return [BenchRequest([i], 1) for i in range(count)]


class Slow:
    """A server that takes ten seconds for everything; when it was asked, and how many were asked at once."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.busy = self.most = 0

    async def __call__(self, request: BenchRequest) -> None:
        self.asked.append(asyncio.get_running_loop().time())
        self.busy += 1
        self.most = max(self.most, self.busy)
        await asyncio.sleep(10)
        self.busy -= 1


class TestLoads:
    def test_a_rate_waits_for_nobody(self) -> None:
        """Requests come when they come: that is what makes a queue."""
        server = Slow()
        in_made_up_time(drive(requests(50), Point(rate=2.0), server))
        assert server.asked == pytest.approx(arrivals(2.0, 50), abs=1e-6)
        assert server.most > 10

    def test_clients_wait_for_their_answers(self) -> None:
        server = Slow()
        in_made_up_time(drive(requests(6), Point(clients=2), server))
        assert server.asked == pytest.approx([0, 0, 10, 10, 20, 20])
        assert server.most == 2

    def test_arrivals_are_a_poisson_process(self) -> None:
        """The mean gap is one over the rate, and as large as its deviation; the same each time."""
        times = arrivals(4.0, 4000)
        gaps = [after - before for before, after in itertools.pairwise(times)]
        mean = sum(gaps) / len(gaps)
        deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
        assert times[0] == 0 and times == arrivals(4.0, 4000)
        assert mean == pytest.approx(0.25, rel=0.05) and deviation == pytest.approx(0.25, rel=0.1)

    def test_a_load_shares_no_prompt_with_the_one_before(self) -> None:
        """A cache must not find what the pass before left; what requests share among themselves stays shared."""
        workload = Workload("w", [BenchRequest([1, 2, 3], 1), BenchRequest([1, 2, 9], 1)])
        first, second = (workload.for_vocabulary(10, by).requests for by in (1, 2))
        assert [request.prompt for request in first] == [[2, 3, 4], [2, 3, 0]]
        assert all(a.prompt[0] != b.prompt[0] for a, b in zip(first, second, strict=True))


class TestFigures:
    def test_a_worked_case(self) -> None:
        """Three answers: 1 s and then a token each 0.1 s; 2 s and 0.2 s; one that failed."""
        quick = Reply(0.0, [1.0, 1.1, 1.2], 3)
        slow = Reply(1.0, [3.0, 3.2, 4.0], 6)
        found = figures([quick, slow, Reply(1.0, [], 0, "no")], begin=0.0)
        metrics = {name: metric.median for name, metric in found.items()}
        assert (metrics["answered"], metrics["failed"], metrics["requests"]) == (2, 1, 0.5)
        assert metrics["output tokens"] == pytest.approx(9 / 4)
        assert metrics["TTFT median"] == metrics["TTFT p99"] == pytest.approx(2000)
        assert metrics["TPOT p99"] == pytest.approx(200) and metrics["ITL p99"] == pytest.approx(800)

    def test_nothing_was_answered(self) -> None:
        metrics = figures([Reply(1.0, [], 0, "no")], begin=1.0)
        assert {name: metric.median for name, metric in metrics.items()} == {"answered": 0, "failed": 1}


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [
    b'data: {"choices":[{"text":"a"}]}\n\n',
    b'data: {"choices":[{"text":"b\\n"}],"usage":null}\n\ndata: {"choices":[{"text":"c"}]}\n\n',
    b'data: {"choices":[],"usage":{"completion_tokens":5}}\n\n',
    b"data: [DONE]\n\n",
]


def chunked(*bodies: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(body), body) for body in bodies) + b"0\r\n\r\n"


def read(*pieces: bytes) -> Reply:
    """A reply that comes in these pieces, a second apart."""
    reply = Reply(0.0)

    async def receive() -> None:
        stream = asyncio.StreamReader()
        reading = asyncio.ensure_future(read_reply(stream, reply))
        for piece in pieces:
            await asyncio.sleep(1)
            stream.feed_data(piece)
        await asyncio.sleep(1)
        stream.feed_eof()
        reply.error = await reading

    in_made_up_time(receive())
    return reply


class TestClient:
    @given(st.lists(st.integers(1, 300), max_size=8))
    def test_however_it_is_torn(self, cuts: list[int]) -> None:
        wire = HEAD + chunked(*EVENTS)
        places = [0, *sorted({min(cut, len(wire)) for cut in cuts}), len(wire)]
        reply = read(*(wire[a:b] for a, b in itertools.pairwise(places) if b > a))
        assert (len(reply.times), reply.num_tokens, reply.error) == (3, 5, None)

    def test_times(self) -> None:
        reply = read(
            HEAD + chunked(EVENTS[0])[:-5], *(chunked(event)[:-5] for event in EVENTS[1:3]), chunked(EVENTS[3])
        )
        assert reply.times == [1, 2, 2] and reply.ttft == 1 and reply.gaps == [1, 0] and reply.tpot == 0.25

    def test_what_goes_wrong_is_said(self) -> None:
        refused = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 13\r\n\r\nqueue is full"
        assert read(refused).error == "HTTP/1.1 429 Too Many Requests: queue is full"
        assert "nonsense" in str(read(b"nonsense\r\n\r\n").error)
        assert "without [DONE]" in str(read(HEAD + chunked(EVENTS[0])[:-5]).error)
        assert read(HEAD + chunked(b'data: {"error":{"message":"died"}}\n\n')).error == "{'message': 'died'}"


@pytest.fixture
def server(open_server: Background) -> Background:
    return open_server


SMALL = Workload("small", [BenchRequest([5, 6, i], 8) for i in range(6)])
ONE = [Point(clients=1)]


class TestSweep:
    def test_a_server_that_is_there(
        self, server: Background, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Each point is a run in the common format, which comes back from its file."""
        found, is_whole = sweep(server_at(server.url), SMALL, [Point(rate=50.0), Point(clients=2)])
        assert is_whole and [run.name for run in found.runs] == ["stories-5m at 50/s", "stories-5m at 2 clients"]
        for run in found.runs:
            assert (run.metrics["answered"].median, run.metrics["failed"].median) == (6, 0)
            assert run.metrics["requests"].median > 0
        found.describe_here().save(tmp_path / "found.json")
        assert load(tmp_path / "found.json") == found
        show(found)
        assert "TTFT" in capsys.readouterr().out

    def test_what_was_found_before_ctrl_c_is_kept(self, server: Background, monkeypatch: pytest.MonkeyPatch) -> None:
        """In the second load: the first one counts."""
        own, count = Server.ask, 0

        async def ask(self: Server, *args: Any) -> Reply:
            nonlocal count
            count += 1
            if count > 3 + 6 + 3:
                raise KeyboardInterrupt
            return await own(self, *args)

        monkeypatch.setattr(Server, "ask", ask)
        found, is_whole = sweep(server_at(server.url), SMALL, 3 * ONE)
        assert not is_whole and [run.metrics["answered"].median for run in found.runs] == [6]

    def test_nobody_answers(self, server: Background) -> None:
        with pytest.raises(ValueError, match="write http"):
            Server("localhost:8000", "m")
        with pytest.raises(ValueError, match="no server answers"):
            server_at("http://127.0.0.1:9")
        with pytest.raises(ValueError, match="404"):
            sweep(server_at(server.url, "another model"), SMALL, ONE)
        too_long = Workload("long", [BenchRequest([5] * 600, 8)])
        with pytest.raises(ValueError, match=r"answered nothing: .*400"):
            sweep(server_at(server.url), too_long, ONE)

    @pytest.mark.slow
    @pytest.mark.usefixtures("warm")
    def test_the_command_starts_its_own(self, tmp_path: Path) -> None:
        file, workload = tmp_path / "found.json", tmp_path / "small.jsonl"
        workload.write_text('{"prompt_len": 5, "output_len": 4}\n' * 2)
        arguments = ["--compare", "m3:max_num_seqs=2", "--clients", "2", "--workload", str(workload)]
        with pytest.raises(SystemExit) as ended:
            main(["bench", "serve", *arguments, "--max-model-len", "512", "--save", str(file)])
        (run,) = load(file).runs
        assert ended.value.code == 0 and run.metrics["output tokens"].median > 0
        assert run.name == "m3:max_num_seqs=2 at 2 clients" and run.config["max_num_seqs"] == 2

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--rates", "0"], "numbers above 0"),
            (["--rates", "1", "--clients", "1"], "not both"),
            (["--url", "http://x", "--max-num-seqs", "2"], "nothing of the engine"),
            (["--slo", "ttft=1s"], "--slo is gone"),
        ],
    )
    def test_what_cannot_be(self, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["bench", "serve", *arguments])
        assert ended.value.code == 2 and says in " ".join(capsys.readouterr().err.split())
