"""Offloading: wherever a prefix was, the answer is bit by bit that of an engine that never lost it."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from folovllm.apps.cli.show import step_line
from folovllm.electives.kv_transfer.disk import NAME, BlockFiles, file_of, private_folder, remove
from folovllm.electives.kv_transfer.offload import HostIndex
from folovllm.electives.kv_transfer.store import BlockFile, BlockStore, ConnectorMetadata
from folovllm.electives.rollouts.sleep import sleep, wake_up
from folovllm.electives.rollouts.weights import get_weights, update_weights
from folovllm.electives.server.aggregator import Aggregator
from folovllm.electives.server.metrics import Counters, metrics_page
from folovllm.engine.events import BlocksMoved, Event
from folovllm.engine.llm_engine import LLMEngine
from tests.helpers import prompts, tiny_checkpoint
from tests.workloads import Request, assert_nothing_left, serve
from tests.x7.engines import (
    COUNTS,
    PLAIN,
    ROOMY,
    SMALL,
    answers,
    check_aborts,
    connector_of,
    make_engine,
    poison_early_reads,
    rounds,
    settle,
)

OFFLOAD = {"kv_offload": "4MiB"}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_early_reads(monkeypatch)


def check(engine: LLMEngine, expected: LLMEngine) -> None:
    for requests in rounds():
        assert answers(engine, requests) == answers(expected, requests)
        assert_nothing_left(engine)


CASES: dict[str, dict[str, Any]] = {
    "m5": {"milestone": "m5"},
    "m6, disk": {"milestone": "m6"},
    "fp8, disk": {"milestone": "m6", "kv_cache_dtype": "fp8"},
    "ngram": {
        "milestone": "m6",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "adaptive": False},
    },
    "chunks, disk": {"milestone": "m6", "max_num_batched_tokens": 9},
    "invariant": {"milestone": "m6", "batch_invariant": True},
    "little": {"milestone": "m6", "kv_offload": "40KiB"},  # a few blocks: most are lost
    "little, disk": {"milestone": "m6", "kv_offload": "40KiB"},
}


@pytest.mark.parametrize("case", CASES)
def test_every_answer_is_that_of_a_cache_with_room(case: str, tmp_path: Path) -> None:
    fields, has_disk = CASES[case], case.endswith("disk")
    more = {"kv_offload_dir": str(tmp_path)} if has_disk else {}
    engine, expected = make_engine(**SMALL | OFFLOAD | fields | more), make_engine(**ROOMY | fields)
    check(engine, expected)
    counts = COUNTS[engine]
    assert counts["offloaded_host"] > 20
    if not case.startswith("little"):  # there the disk cannot keep up
        assert counts["loaded_host"] > 8
    engine.close()


def test_a_restarted_engine_finds_its_prefixes(tmp_path: Path) -> None:
    fields = {"milestone": "m6", **SMALL, **OFFLOAD, "kv_offload_dir": str(tmp_path)}
    first = rounds()[0]
    engine = make_engine(**fields)
    expected = answers(engine, first)
    engine.close()
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o700
    again = make_engine(**fields)
    outputs = serve(again, first)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [24, 24, 28]
    other = make_engine(**fields | {"kv_cache_dtype": "fp8"})
    assert [output.num_cached_tokens for output in serve(other, first)] == [0, 0, 0]


@pytest.mark.parametrize("lie", ["bit", "short", "long", "tokens", "swapped", "gone", "empty"])
def test_a_file_that_lies_is_a_miss_and_goes(tmp_path: Path, lie: str) -> None:
    fields = {"milestone": "m6", **SMALL, **OFFLOAD, "kv_offload_dir": str(tmp_path)}
    first = rounds()[0]
    engine = make_engine(**fields)
    expected = answers(engine, first)
    engine.close()
    again = make_engine(**fields)
    files = sorted((tmp_path / NAME).glob("*.kv"))
    contents = [file.read_bytes() for file in files]
    for i, (file, data) in enumerate(zip(files, contents, strict=True)):
        changed = {
            "bit": data[:-5] + bytes([data[-5] ^ 1]) + data[-4:], "short": data[:-1], "long": data + b"x", "empty": b"",
            "tokens": data[:29] + bytes([data[29] ^ 1]) + data[30:], "swapped": contents[i - 1],
        }  # fmt: skip
        file.unlink() if lie == "gone" else file.write_bytes(changed[lie])
    outputs = serve(again, first)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert {output.num_cached_tokens for output in outputs} == {0}
    assert_nothing_left(again)
    assert (COUNTS[again]["lost_disk"] > 0) == (lie != "gone") and not connector_of(again)._loads


def test_a_disk_that_breaks_ends_the_disk_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockFiles, "write", write)
    engine = make_engine(milestone="m6", **SMALL, **OFFLOAD, kv_offload_dir=str(tmp_path))
    with caplog.at_level("WARNING", "folovllm"):
        check(engine, make_engine(milestone="m6", **ROOMY))
        engine.close()
    assert [record.message for record in caplog.records if "disk" in record.message] == [
        "K/V go to the disk no more, and are not read from it: [Errno 28] No space left on device"
    ]


def test_the_folder_keeps_its_bound(tmp_path: Path) -> None:
    fields = {"milestone": "m6", **SMALL, **OFFLOAD, "kv_offload_dir": str(tmp_path)}
    (stale := private_folder(tmp_path) / "tmp1").touch()
    os.utime(stale, (0, 0))  # a process was killed while it wrote it
    engine = make_engine(**fields, kv_offload_dir_size="64KiB")
    assert not stale.exists()
    check(engine, make_engine(milestone="m6", **ROOMY))
    settle(engine)
    engine.close()
    size = sum(file.stat().st_size for file in (tmp_path / NAME).iterdir())
    assert 16 << 10 < size < 70 << 10


def test_a_slow_disk_holds_up_only_who_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"milestone": "m6", **SMALL, **OFFLOAD, "kv_offload_dir": str(tmp_path)}
    engine, first = make_engine(**fields), rounds()[0]
    expected = answers(engine, first[:2])
    engine.close()
    read = BlockFiles.read

    def slowly(self: BlockFiles, *arguments: Any) -> bool:
        time.sleep(0.3)
        return read(self, *arguments)

    monkeypatch.setattr(BlockFiles, "read", slowly)
    again = make_engine(**fields)
    tail = Request(prompts([11], seed=77)[0], PLAIN)
    for name, request in (("old", first[0]), ("gone", first[1]), ("new", tail)):
        again.add_request(name, request.prompt, request.params, stream=False)
    order, outputs = [], {}
    again.step()
    assert len(connector_of(again)._loads) == 2
    again.abort_request("gone")
    while again.has_unfinished_requests():
        for output in again.step():
            order.append(output.request_id)
            outputs[output.request_id] = output
    assert order == ["new", "old"]
    assert list(outputs["old"].outputs[0].token_ids) == expected[0] and outputs["old"].num_cached_tokens == 24
    while connector_of(again)._loads:
        connector_of(again).get_finished()
    assert_nothing_left(again)
    settle(again)
    assert COUNTS[again]["loaded_disk"] == 6, "what nobody waited for did not go to the device"


def test_other_weights_find_nothing_of_before(tmp_path: Path) -> None:
    fields = {"milestone": "m6", **SMALL, **OFFLOAD, "kv_offload_dir": str(tmp_path)}
    engine, (first, others, *_) = make_engine(**fields), rounds()
    before = answers(engine, first)
    answers(engine, others)
    weights = {name: tensor.clone() for name, tensor in get_weights(engine).items()}
    changed = {
        name: tensor * 1.25 if "k_proj" in name or "v_proj" in name else tensor for name, tensor in weights.items()
    }
    update_weights(engine, changed)
    fresh = make_engine(milestone="m6", **ROOMY)
    update_weights(fresh, changed)
    for requests in (first, others, first):
        assert answers(engine, requests) == answers(fresh, requests)
    assert answers(engine, first) != before
    sleep(engine)
    wake_up(engine, weights)
    assert answers(engine, first) == before
    engine.close()
    assert answers(make_engine(**fields), first) == before  # and no file is of the other weights


@pytest.mark.parametrize("change", ["weights", "reset", "abort"])
def test_what_is_on_its_way_when_all_is_forgotten_does_not_count(change: str) -> None:
    engine, (first, others, *_) = make_engine(milestone="m6", **SMALL, **OFFLOAD), rounds()
    expected = answers(engine, first[:1])
    answers(engine, others)
    engine.add_request("1", first[0].prompt, first[0].params, stream=False)
    engine.step()
    assert connector_of(engine)._loads
    if change == "reset":
        engine.reset_prefix_cache()
    elif change == "abort":
        engine.abort_request("1")
        assert_nothing_left(engine)
        engine.add_request("1", first[0].prompt, first[0].params, stream=False)
        connector_of(engine).reset()
    else:
        changed = {name: tensor * 1.25 for name, tensor in get_weights(engine).items()}
        fresh = make_engine(milestone="m6", **ROOMY)
        update_weights(fresh, changed)
        update_weights(engine, changed, in_flight="keep")
        expected = answers(fresh, first[:1])
    outputs = [output for _ in range(100) for output in engine.step()]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert outputs[0].num_cached_tokens == 0
    assert answers(engine, first[:1]) == expected


def test_one_transfer_serves_all_who_wait_for_it() -> None:
    engine, (first, others, *_) = make_engine(milestone="m6", **SMALL, **OFFLOAD), rounds()
    expected = answers(engine, first[:1])[0]
    answers(engine, others)
    before = COUNTS[engine]["loaded_host"]
    for i in range(3):
        engine.add_request(str(i), first[0].prompt, first[0].params, stream=False)
    outputs = [output for _ in range(200) for output in engine.step()]
    assert [list(output.outputs[0].token_ids) for output in outputs] == [expected] * 3
    assert {output.num_cached_tokens for output in outputs} == {24}
    assert COUNTS[engine]["loaded_host"] - before == 6


def test_salts_are_kept_apart() -> None:
    engine = make_engine(milestone="m6", **SMALL, **OFFLOAD)
    (request, *_), others, *_ = rounds()
    cached = []
    for salt in ("a", "b", "a"):
        engine.add_request("1", request.prompt, request.params, cache_salt=salt, stream=False)
        while not (outputs := engine.step()):
            pass
        cached.append(outputs[0].num_cached_tokens)
        answers(engine, others)
    assert cached == [0, 0, 24]


@pytest.mark.parametrize("seed", range(4))
def test_aborts_and_preemptions_at_any_moment(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few blocks, many requests with few heads, aborts at random; a disk that is slow, and lies at times."""
    rng, read = random.Random(seed), BlockFiles.read

    def unreliable(self: BlockFiles, key: bytes, *arguments: Any) -> bool:
        time.sleep(rng.choice((0.0, 0.0, 0.003)))
        if rng.random() < 0.1:
            remove(file_of(self._folder, key))
        return read(self, key, *arguments)

    monkeypatch.setattr(BlockFiles, "read", unreliable)
    engine = make_engine(milestone="m6", **SMALL, kv_offload="100KiB", kv_offload_dir=str(tmp_path))
    check_aborts(engine, make_engine(milestone="m6", **ROOMY), prompts([28, 24, 21], seed=2), 12, rng)


def test_listeners_hear_what_moves(tmp_path: Path) -> None:
    engine = make_engine(milestone="m6", **SMALL, **OFFLOAD, kv_offload_dir=str(tmp_path))
    heard: list[Event] = []
    engine.subscribe(heard.extend)
    engine.history = []
    check(engine, make_engine(milestone="m6", **ROOMY))
    connector = connector_of(engine)
    moved, counts = [event for event in heard if isinstance(event, BlocksMoved)], COUNTS[engine]
    assert counts["offloaded_host"] and counts["loaded_host"]
    for name, count in counts.items():
        assert sum(event.num_blocks for event in moved if f"{event.what}_{event.place}" == name) == count, name
    assert all(event.num_bytes == event.num_blocks * connector._block_bytes for event in moved)
    assert sum(step.num_offloaded for step in engine.history) == counts["offloaded_host"]
    assert any("offloaded" in step_line(step) for step in engine.history)
    stats = Aggregator(True).take(moved, []).stats
    page = metrics_page("tiny", stats, Counters(), [], False).decode()
    line = next(line for line in page.splitlines() if "kv_blocks_moved_total" in line and 'what="loaded"' in line)
    assert float(line.split()[-1]) == counts["loaded_host"]


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_two_ranks(tmp_path: Path) -> None:
    fields = {"milestone": "m6", "tensor_parallel_size": 2}
    engine = make_engine(**SMALL, **OFFLOAD, **fields, kv_offload_dir=str(tmp_path))
    expected = make_engine(**ROOMY, **fields)
    check(engine, expected)
    assert COUNTS[engine]["loaded_host"] > 8
    engine.close()
    again = make_engine(**SMALL, **OFFLOAD, **fields, kv_offload_dir=str(tmp_path))
    outputs = serve(again, rounds()[0])
    assert [list(o.outputs[0].token_ids) for o in outputs] == answers(expected, rounds()[0])
    assert min(output.num_cached_tokens for output in outputs) >= 20
    os.kill(again.executor.pids[1], signal.SIGKILL)  # type: ignore[attr-defined]
    again.close()  # a rank that died does not keep the engine from its end


def test_slots_are_held_while_something_moves() -> None:
    index = HostIndex(2)
    (a, evicted), (b, _) = index.put(1, b"1"), index.put(2, b"2")
    assert a is not None and b is not None and evicted is None
    a.is_loading = True
    assert index.put(3, b"3") == (b, 2) and (b.hash, b.token_ids, index.get(2)) == (3, b"3", None)
    b.is_loading = True
    index.drop(a)
    assert index.get(1) is None and index.put(4, b"4") == (None, None)
    a.is_loading = False
    assert index.put(4, b"4") == (a, None) and index.get(4) is a


def test_a_file_has_the_block_that_its_name_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot gets another block while its file is written, or waits for that."""
    write, cache = BlockFiles.write, torch.arange(40, dtype=torch.int32).reshape(1, 40, 1).repeat(2, 1, 8)

    def slowly(self: BlockFiles, key: bytes, *arguments: Any) -> None:
        time.sleep(0.02)
        write(self, key, *arguments)

    monkeypatch.setattr(BlockFiles, "write", slowly)
    monkeypatch.setattr("folovllm.electives.kv_transfer.store.NUM_THREADS", 1)
    store = BlockStore(cache, 2, BlockFiles(tmp_path, 0, 1 << 20))
    for i in range(0, 40, 2):
        store.start_load_kv(ConnectorMetadata([i, i + 1]))
        store.save([0, 1], [BlockFile(slot, bytes([i + slot]), b"") for slot in (0, 1)])
        time.sleep(0.005)
    store.start_load_kv(ConnectorMetadata(reads={7: {0: BlockFile(1, b"\0", b""), 1: BlockFile(0, b"gone", b"")}}))
    while not (report := store.get_finished()).loads:
        time.sleep(0.01)
    assert report.loads == {7: {1}} and store.host[1].unique().tolist() == [0]
    store.close()
    written = {int(file.name[:2], 16): file.read_bytes() for file in tmp_path.iterdir()}
    assert 2 < len(written) < 40
    assert all(content.endswith(bytes([i, 0, 0, 0]) * 16) for i, content in written.items())


WRONG: dict[str, dict[str, Any]] = {
    "kv_offload must be a number of bytes": {"kv_offload": "much"},
    "kv_offload_dir needs memory on the way": {"kv_offload_dir": "somewhere"},
    "more than this machine's memory": {"kv_offload": "900TiB"},
    r"must be a number of bytes, .* not '9999": {"kv_offload": "9" * 400},
    "kv_offload holds no block": {"kv_offload": "1B"},
    "kv_offload_dir_size holds no block": {**OFFLOAD, "kv_offload_dir": "DIR", "kv_offload_dir_size": "1B"},
    r"nothing can be written to '\\x00": {**OFFLOAD, "kv_offload_dir": "\0"},
    "nothing can be written to .*file": {**OFFLOAD, "kv_offload_dir": "DIR/file"},
    "not a folder of yours": {**OFFLOAD, "kv_offload_dir": "DIR/link"},
    "takes what the prefix cache evicts": {"kv_offload": "1M", "enable_prefix_caching": False},
    "keep states": {**OFFLOAD, "model": "qwen3_next"},
    "window": {**OFFLOAD, "model": "mistral"},
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_bad_option_is_refused_in_a_sentence(sentence: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / NAME).symlink_to(tmp_path)
    fields = {
        name: value.replace("DIR", str(tmp_path)) if isinstance(value, str) else value
        for name, value in WRONG[sentence].items()
    }
    if "model" in fields:
        fields["model"] = str(tiny_checkpoint(fields["model"]))
    with pytest.raises(ValueError, match=sentence):
        make_engine(milestone="m6", **ROOMY | fields)
