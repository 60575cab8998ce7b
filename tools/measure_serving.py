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
import sys
from pathlib import Path

from programs import Measurement, Place, Server, Start, cpu_seconds

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


def starts_of(args: argparse.Namespace) -> dict[str, Start]:
    """How each server is started."""
    model, bundle = str(args.work / "model"), args.peers / "vllm-0.26.0"
    ours = [sys.executable, "-m", "folovllm", "serve", model, "--served-model-name", "m", "--port", "8011", "--random-weights",
            "--model-impl", "native", "--no-use-tqdm", "--engine-process", "--no-enable-prefix-caching", *SAME]  # fmt: skip
    vllm = ["sh", str(bundle / "serve_vllm.sh"), str(args.work / "site"), model, "8012", *SAME]
    ours_env = dict(os.environ) | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}{os.pathsep}{args.work / 'ours'}",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    of = 2 if args.beside else 1
    return {
        "ours": Start(ours, 8011, Place(0, of), ours_env),
        "vllm": Start(vllm, 8012, Place(of - 1, of), dict(os.environ) | {"PYTHON": sys.executable}),
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


def offline(measurement: Measurement, args: argparse.Namespace, ours: Start) -> None:
    """Our engine without a server: nano-vllm's workload, and one request alone."""
    for workload in ("default" if args.tiny else "nano-vllm", "latency"):
        name, result = f"offline {workload}", args.out / f"offline-{workload}.json"
        command = [*ours.place.before, sys.executable, "-c", OFFLINE, str(args.work / "model"), workload, str(result)]
        if measurement.run(name, command, 75, ours.env | ours.place.env) is not None:
            (run,) = json.loads(result.read_text())["runs"]
            measurement.note(
                name, {key: [metric["median"], *metric["spread"]] for key, metric in run["metrics"].items()}
            )


def measure(measurement: Measurement, args: argparse.Namespace, starts: dict[str, Start], parts: list[str]) -> None:
    """Our engine offline, then each server under each load; both servers at once with `--beside`."""
    ours, names, running = starts["ours"], [name for name in starts if name in parts], dict[str, Server]()
    with contextlib.ExitStack() as early:
        if args.beside and "vllm" in names:  # it takes two minutes, and nothing is measured on its GPU
            running["vllm"] = early.enter_context(Server(measurement, "vllm", starts["vllm"]))
        if args.meanwhile:
            command = [*ours.place.before, "bash", "-c", args.meanwhile]
            measurement.run("meanwhile", command, 100, dict(os.environ) | ours.place.env)
        if any(server.process.poll() is not None for server in running.values()):
            sys.exit(f"vLLM's server has ended: see {args.out / 'vllm.log'}")  # there would be nothing to stand beside
        if "offline" in parts:
            offline(measurement, args, ours)
        for group in [names] if args.beside else [[name] for name in names]:
            with contextlib.ExitStack() as stack:
                servers = [
                    running.get(name) or stack.enter_context(Server(measurement, name, starts[name])) for name in group
                ]
                ready = [server for server in servers if server.is_ready(200)]
                for i, kind in enumerate(args.loads.split(",")):
                    for server in ready:
                        load(measurement, server, args, i, kind)


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
    starts, measurement = starts_of(args), Measurement(args.out, args.seconds)
    make_model(args.work / "model", args.tiny)
    unpack(measurement, args)
    measure(measurement, args, starts, args.only.split(","))


if __name__ == "__main__":
    main()
