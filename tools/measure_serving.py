"""Measure serving on a GPU, in one call: our offline throughput, our server, vLLM's server, under the same load.

    python3 tools/measure_serving.py --peers PEERS --out "$OUT"

PEERS is a folder with `load.py` (a load for any OpenAI-compatible server) and `vllm-0.26.0/` (vLLM for a machine without a
network, and what servers need). Weights and tokenizer are made up: a vocabulary of Qwen3's size in which each token is a word,
so that each token is text. Nobody caches prefixes.

Each step has a time limit of its own, and all of them together have `--seconds`: one that fails or hangs costs no other.
`OUT/serving.json` is written anew after each, and there is a log for each program.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OURS = ("starlette", "uvicorn", "msgspec", "httptools")  # what our server needs, from vLLM's bundle
TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 12_000,
}  # fmt: skip
SAME = ["--max-num-batched-tokens", "16384", "--max-model-len", "4096"]
TICKS = os.sysconf("SC_CLK_TCK")
OFFLINE = """
import json, sys
from pathlib import Path
from folovllm.bench.report import Result
from folovllm.bench.throughput import bench_latency, bench_throughput
folder, workload, out = sys.argv[1:4]
fields = {"model": folder, "milestone": "m6", "random_weights": True, "model_impl": "native", "use_tqdm": False,
          "max_num_batched_tokens": 16384, "max_model_len": 4096}
found = bench_throughput([("m6", fields)], workload, repeats=2) if workload != "latency" else bench_latency([("m6", fields)], 3)
found.describe_here().save(Path(out))
"""


class Measurement:
    """All that was found so far, and how much time is left."""

    def __init__(self, out: Path, seconds: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self._end = out, time.monotonic() + seconds
        self.found: dict[str, Any] = {}

    def left(self, most: float) -> float:
        """Seconds for the next step."""
        return min(most, self._end - time.monotonic())

    def note(self, name: str, what: Any) -> None:
        """Keep a result, and show it."""
        self.found[name] = what
        (self.out / "serving.json").write_text(json.dumps(self.found, indent=1) + "\n")
        print(f"{name}: {json.dumps(what)}", flush=True)

    def run(self, name: str, command: list[str], most: float, env: dict[str, str]) -> str | None:
        """Run a program to its end; what it said, or None where it failed or took too long."""
        seconds = self.left(most)
        if seconds <= 0:
            self.note(name, {"error": "no time was left"})
            return None
        try:
            done = subprocess.run(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired as error:
            self.note(name, {"error": f"took more than {seconds:.0f} s", "said": str(error.stdout)[-1500:]})
            return None
        if done.returncode:
            self.note(name, {"error": f"status {done.returncode}", "said": done.stdout[-1500:]})
            return None
        return done.stdout


def make_model(folder: Path, tiny: bool) -> None:
    """A model's folder without weights: Qwen3-0.6B's shape (or a tiny one), and a word for each id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from folovllm.bench.contenders import GEOMETRIES

    shape = GEOMETRIES["qwen3-0.6b"] | (TINY if tiny else {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape | {"eos_token_id": 0}))
    vocab = {symbol: i for i, symbol in enumerate(["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    for i in range(len(vocab), shape["vocab_size"]):
        vocab["\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}w" + "".join(chr(97 + int(digit)) for digit in str(i))] = i
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


def for_our_server(site: Path, extras: Path, links: Path) -> None:
    """A folder that holds of vLLM's bundle what our server needs and this machine does not have."""
    links.mkdir(exist_ok=True)
    for name in OURS:
        if importlib.util.find_spec(name) is not None:
            continue
        found = next((folder / name for folder in (site, extras) if (folder / name).exists()), None)
        if found is not None and not (links / name).exists():
            (links / name).symlink_to(found)


@contextlib.contextmanager
def server(
    measurement: Measurement, name: str, command: list[str], port: int, most: float, env: dict[str, str]
) -> Iterator[int | None]:
    """Start a server and wait until it is healthy; its process id, or None where it did not come. It is ended afterwards."""
    began = time.monotonic()
    with (measurement.out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            end = time.monotonic() + measurement.left(most)
            while process.poll() is None and time.monotonic() < end and not is_healthy(port):
                time.sleep(0.5)
            if process.poll() is None and is_healthy(port):
                measurement.note(f"{name}: start-up seconds", round(time.monotonic() - began, 1))
                yield process.pid
            else:
                measurement.note(f"{name}: start-up", {"error": f"not there after {time.monotonic() - began:.0f} s"})
                yield None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(8)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def is_healthy(port: int) -> bool:
    """Whether a server answers there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def cpu_seconds(session: int) -> dict[str, float]:
    """What each process of a session has used so far, by a name for it: the server itself, and those that it started."""
    used: dict[str, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has ended
        fields = rest.split()
        if int(fields[3]) == session:
            pid = int(stat.parent.name)
            used["server" if pid == session else f"{name} {pid}"] = (int(fields[11]) + int(fields[12])) / TICKS
    return used


def load(measurement: Measurement, name: str, peers: Path, port: int, pid: int, model: str, loads: list[str]) -> None:
    """Put each load on a server: `nano`, `c1`, or `rate:R`."""
    for i, kind in enumerate(loads):
        what, _, rate = kind.partition(":")
        command = [sys.executable, str(peers / "load.py"), f"http://127.0.0.1:{port}", model, "--workload", what]
        command += ["--rate", rate, "--seconds", "10", "--seed", str(i)] if rate else ["--seed", str(i)]
        before = cpu_seconds(pid)
        said = measurement.run(f"{name}, {kind}", command, 45, dict(os.environ))
        if said is None or "RESULT" not in said:
            continue
        found = json.loads(said.rpartition("RESULT ")[2])
        after = cpu_seconds(pid)
        found["cpu_s"] = {one: round(after[one] - before.get(one, 0), 2) for one in after}
        measurement.note(f"{name}, {kind}, pass {i}", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/measure_serving"), help="for the model and the bundle")
    parser.add_argument("--seconds", type=float, default=530.0, help="for all of it")
    parser.add_argument("--loads", default="nano,nano,nano,c1,c1,rate:8,rate:16,rate:32,rate:64", help="on each server")
    parser.add_argument("--only", default="offline,ours,vllm", help="parts, with commas between them")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: to try this script without a GPU")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    measurement, loads, parts = Measurement(args.out, args.seconds), args.loads.split(","), args.only.split(",")
    model, site = args.work / "model", args.work / "site"
    extras, links = args.work / "site_extras", args.work / "ours"
    make_model(model, args.tiny)
    bundle = args.peers / "vllm-0.26.0"
    for folder, archive in ((site, "vllm.tar.xz"), (extras, "serve_extras.tar.xz")):
        if not (folder / ".unpacked").exists():
            unpack = [sys.executable, str(bundle / "unpack_vllm.py"), str(folder), str(bundle / archive)]
            if measurement.run(f"unpack {archive}", unpack, 60, dict(os.environ)) is not None:
                (folder / ".unpacked").touch()
    for_our_server(site, extras, links)
    env = dict(os.environ) | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{links}",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for workload in ("default" if args.tiny else "nano-vllm", "latency") if "offline" in parts else ():
        name = f"offline {workload}"
        command = [sys.executable, "-c", OFFLINE, str(model), workload, str(args.out / f"offline-{workload}.json")]
        if measurement.run(name, command, 75, env) is not None:
            (run,) = json.loads((args.out / f"offline-{workload}.json").read_text())["runs"]
            measurement.note(
                name, {key: [metric["median"], *metric["spread"]] for key, metric in run["metrics"].items()}
            )
    if "ours" in parts:
        command = [sys.executable, "-m", "folovllm", "serve", str(model), "--served-model-name", "m", "--port", "8011", "--random-weights",
                   "--model-impl", "native", "--no-use-tqdm", "--engine-process", "--no-enable-prefix-caching", *SAME]  # fmt: skip
        with server(measurement, "ours", command, 8011, 90, env) as pid:
            if pid is not None:
                load(measurement, "ours", args.peers, 8011, pid, "m", loads)
    if "vllm" in parts:
        command = ["sh", str(bundle / "serve_vllm.sh"), str(site), str(model), "8012", *SAME]
        with server(measurement, "vllm", command, 8012, 200, dict(os.environ) | {"PYTHON": sys.executable}) as pid:
            if pid is not None:
                load(measurement, "vllm", args.peers, 8012, pid, "m", loads)


if __name__ == "__main__":
    main()
