"""Measure serving on a GPU, in one call: our offline throughput, our server, vLLM's server, under the same load.

    python3 tools/measure_serving.py --peers PEERS --out "$OUT"              # one GPU: a server after the other
    python3 tools/measure_serving.py --peers PEERS --out "$OUT" --beside     # two: both at once, the loads in turns

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
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OURS = ("starlette", "uvicorn", "msgspec", "httptools")  # what our server needs, from vLLM's bundle
TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 12_000,
}  # fmt: skip
SAME = ["--max-num-batched-tokens", "16384", "--max-model-len", "4096"]
VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
BENCH_FLAGS = shlex.split("""
--model m --backend openai --dataset-name random --random-input-len 512 --random-output-len 128 --ignore-eos --temperature 0.6
--percentile-metrics ttft,tpot,itl --metric-percentiles 99 --disable-tqdm --ready-check-timeout-sec 0 --save-result
""")
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


class Place:
    """Where a program runs: a GPU and cores of its own, or the whole machine."""

    def __init__(self, index: int, of: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        mine = cores[index * len(cores) // of : (index + 1) * len(cores) // of]
        self.before = ["taskset", "-c", ",".join(map(str, mine))] if of > 1 else []
        self.env = {"CUDA_VISIBLE_DEVICES": str(index)} if of > 1 else {}


class Server:
    """A server that is starting from here on; `end` ends it with all that it has started."""

    def __init__(
        self, measurement: Measurement, name: str, command: list[str], port: int, place: Place, env: dict[str, str]
    ) -> None:
        self.name, self.port, self.place, self._measurement = name, port, place, measurement
        self._began = time.monotonic()
        with (measurement.out / f"{name}.log").open("w") as log:
            self.process = subprocess.Popen(
                place.before + command,
                env=env | place.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_ready(self, most: float) -> bool:
        """Wait until it is healthy, at most so many seconds after its start; say whether it is."""
        end = time.monotonic() + self._measurement.left(most - (time.monotonic() - self._began))
        while self.process.poll() is None and time.monotonic() < end and not is_healthy(self.port):
            time.sleep(0.5)
        took, ready = time.monotonic() - self._began, self.process.poll() is None and is_healthy(self.port)
        if ready:
            self._measurement.note(f"{self.name}: start-up seconds, at most", round(took, 1))
        else:
            self._measurement.note(f"{self.name}: start-up", {"error": f"not there after {took:.0f} s"})
        return ready

    def end(self) -> None:
        """End it, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(8)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


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


def load(measurement: Measurement, server: Server, args: argparse.Namespace, index: int, kind: str) -> None:
    """Put a load on a server: `nano`, `c1`, `rate:R`, or `bench:R`, which is `rate:R` by vLLM's own `bench serve`."""
    what, _, rate = kind.partition(":")
    url, env = f"http://127.0.0.1:{server.port}", dict(os.environ)
    if what == "bench":
        result = args.work / f"bench-{server.name}-{index}.json"
        command = [sys.executable, "-c", VLLM_BENCH, "--base-url", url, "--tokenizer", str(args.work / "model"), "--seed", str(index),
                   "--request-rate", rate, "--num-prompts", str(int(args.rate_seconds * float(rate))),
                   "--result-dir", str(result.parent), "--result-filename", result.name, *BENCH_FLAGS]  # fmt: skip
        env["PYTHONPATH"] = (
            f"{args.work / 'site_extras'}{os.pathsep}{args.work / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        )
    else:
        command = [sys.executable, str(args.peers / "load.py"), url, "m", "--workload", what, "--seed", str(index)]
        command += ["--rate", rate, "--seconds", str(args.rate_seconds)] if rate else []
    before = cpu_seconds(server.process.pid)
    said = measurement.run(f"{server.name}, {kind}", server.place.before + command, 60, env)
    if said is None:
        return
    if what == "bench":
        found = {key: value for key, value in json.loads(result.read_text()).items() if not isinstance(value, list)}
    elif "RESULT " in said:
        found = json.loads(said.rpartition("RESULT ")[2])
    else:
        measurement.note(f"{server.name}, {kind}", {"error": "no result", "said": said[-1500:]})
        return
    after = cpu_seconds(server.process.pid)
    found["cpu_s"] = {one: round(after[one] - before.get(one, 0), 2) for one in after}
    measurement.note(f"{server.name}, {kind}, pass {index}", found)


def commands(args: argparse.Namespace) -> dict[str, tuple[list[str], int]]:
    """How each server is started, and its port."""
    model, bundle = str(args.work / "model"), args.peers / "vllm-0.26.0"
    ours = [sys.executable, "-m", "folovllm", "serve", model, "--served-model-name", "m", "--port", "8011", "--random-weights",
            "--model-impl", "native", "--no-use-tqdm", "--engine-process", "--no-enable-prefix-caching", *SAME]  # fmt: skip
    return {
        "ours": (ours, 8011),
        "vllm": (["sh", str(bundle / "serve_vllm.sh"), str(args.work / "site"), model, "8012", *SAME], 8012),
    }


def unpack(measurement: Measurement, args: argparse.Namespace) -> None:
    """vLLM's bundle, and what servers need beside it."""
    bundle = args.peers / "vllm-0.26.0"
    for name, archive in (("site", "vllm.tar.xz"), ("site_extras", "serve_extras.tar.xz")):
        folder = args.work / name
        if not (folder / ".unpacked").exists():
            command = [sys.executable, str(bundle / "unpack_vllm.py"), str(folder), str(bundle / archive)]
            if measurement.run(f"unpack {archive}", command, 60, dict(os.environ)) is not None:
                (folder / ".unpacked").touch()
    for_our_server(args.work / "site", args.work / "site_extras", args.work / "ours")


def offline(measurement: Measurement, args: argparse.Namespace, place: Place, env: dict[str, str]) -> None:
    """Our engine without a server: nano-vllm's workload, and one request alone."""
    for workload in ("default" if args.tiny else "nano-vllm", "latency"):
        name, result = f"offline {workload}", args.out / f"offline-{workload}.json"
        command = [*place.before, sys.executable, "-c", OFFLINE, str(args.work / "model"), workload, str(result)]
        if measurement.run(name, command, 75, env | place.env) is not None:
            (run,) = json.loads(result.read_text())["runs"]
            measurement.note(
                name, {key: [metric["median"], *metric["spread"]] for key, metric in run["metrics"].items()}
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/measure_serving"), help="for the model and the bundle")
    parser.add_argument("--seconds", type=float, default=530.0, help="for all of it")
    parser.add_argument("--loads", default="nano,nano,nano,c1,c1,rate:8,rate:16,rate:32,rate:64", help="on each server")
    parser.add_argument("--rate-seconds", type=float, default=10.0, help="of arrivals, for each rate")
    parser.add_argument("--only", default="offline,ours,vllm", help="parts, with commas between them")
    parser.add_argument("--beside", action="store_true", help="two GPUs: each server has one, and half of the cores")
    parser.add_argument("--meanwhile", help="a command for our GPU and cores while vLLM starts on its own")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: to try this script without a GPU")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    measurement, parts = Measurement(args.out, args.seconds), args.only.split(",")
    make_model(args.work / "model", args.tiny)
    unpack(measurement, args)
    ours_env = dict(os.environ) | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}{os.pathsep}{args.work / 'ours'}",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    envs = {"ours": ours_env, "vllm": dict(os.environ) | {"PYTHON": sys.executable}}
    num_places = 2 if args.beside else 1
    places = {"ours": Place(0, num_places), "vllm": Place(num_places - 1, num_places)}
    names, running = [name for name in ("ours", "vllm") if name in parts], {}

    def start(name: str, stack: contextlib.ExitStack) -> Server:
        server = Server(measurement, name, *commands(args)[name], places[name], envs[name])
        stack.callback(server.end)
        return server

    with contextlib.ExitStack() as early:
        if args.beside and "vllm" in names:
            running["vllm"] = start("vllm", early)  # it takes two minutes, and nothing is measured on its GPU
        if args.meanwhile:
            command = [*places["ours"].before, "bash", "-c", args.meanwhile]
            measurement.run("meanwhile", command, 100, dict(os.environ) | places["ours"].env)
        if any(server.process.poll() is not None for server in running.values()):
            sys.exit(f"vLLM's server has ended: see {args.out / 'vllm.log'}")  # there would be nothing to stand beside
        if "offline" in parts:
            offline(measurement, args, places["ours"], ours_env)
        for group in [names] if args.beside else [[name] for name in names]:
            with contextlib.ExitStack() as stack:
                servers = [running.get(name) or start(name, stack) for name in group]
                ready = [server for server in servers if server.is_ready(200)]
                for i, kind in enumerate(args.loads.split(",")):
                    for server in ready:
                        load(measurement, server, args, i, kind)


if __name__ == "__main__":
    main()
