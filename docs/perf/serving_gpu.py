"""Serving tables of a GPU, by `tandem bench sweep` on dummy weights at acceptance length 3.07.

    python3 docs/perf/serving_gpu.py vllm --repeats 5     # 16 cells beside vLLM 0.26.0
    python3 docs/perf/serving_gpu.py seed --num-prompts 32   # index sharing off, on, off; and k = 0
    python3 docs/perf/serving_gpu.py output --rounds 3    # deferred and immediate output in turn

Greedy, ids in, end of sequence ignored, no prefix cache. A server is started once for each column.
A run is one wave of requests, all sent at once; figures are the median of the runs and their range.
The step of `vllm` is derived: median TPOT times mean tokens a request's step, so that at several at
once it includes the waiting for prompts.
"""
import argparse
import contextlib
import json
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]
# (requests at once, input): dsv3-lite k = 0 and 3, glm52-lite k = 0 and 3, measured elsewhere.
VLLM = {
    (1, 1024): (300, 398, 511, 349),
    (16, 1024): (1792, 3411, 4007, 3351),
    (16, 8192): (1052, 1464, 1591, 1515),
    (64, 1024): (4801, 8150, 9029, 5362),
}
COLUMNS = [(model, k) for model in ("dsv3-lite", "glm52-lite") for k in (0, 3)]


@contextlib.contextmanager
def server(args: argparse.Namespace, model: str, k: int, more: list):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [args.tandem, "serve", "--model", args.model or model, "--port", str(port)]
    command += ["--load-format", "dummy", "--device", args.device, "--no-prefix-caching"]
    command += ["--num-speculative-tokens", str(k), "--drafting", "fixed", *more]
    command += ["--spec-decode-acceptance-length", "3.07"] if k else []
    command += args.serve_args.split()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(f"{' '.join(command)}: {log.read()[-2000:]}")
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()
            process.wait()


def sweep(args: argparse.Namespace, port: int, cell: tuple, output_len: int, n: list) -> list:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "result.json"
        command = [args.tandem, "bench", "sweep", "--port", str(port), "--output", str(path)]
        command += ["--concurrencies", str(cell[0]), "--input-lens", str(cell[1] // args.scale)]
        command += ["--random-output-len", str(output_len // args.scale), *n]
        command += ["--num-warmups", "1", "--repeats", str(args.repeats)]
        while True:
            done = subprocess.run(command, capture_output=True, text=True)
            # The port is open before the weights are loaded.
            if "is being loaded" not in done.stderr:
                break
            time.sleep(0.2)
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-1000:])
        return json.loads(path.read_text())["runs"]


def spread(values: list) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def rates(runs: list) -> list:
    return [run["metrics"]["output_throughput"] for run in runs]


def tpot(runs: list) -> float:
    return statistics.median(run["metrics"]["tpot_ms"]["p50"] for run in runs)


def step(runs: list) -> float:
    steps = sum(run["counters"]["verify_steps"] for run in runs)
    accepted = sum(run["counters"]["accepted_tokens"] for run in runs)
    return tpot(runs) * (1 + (accepted / steps if steps else 0))


def vllm(args: argparse.Namespace) -> None:
    print("| | at once, input | output tokens/s (range) | step ms | vLLM | ratio |")
    print("|---|---|---|---|---|---|", flush=True)
    for column, (model, k) in enumerate(COLUMNS):
        with server(args, model, k, []) as port:
            for cell, theirs in VLLM.items():
                runs = sweep(args, port, cell, 256, ["--prompts-per-place", str(args.waves)])
                ratio = statistics.median(rates(runs)) / theirs[column]
                row = [f"{model} k = {k}", f"{cell[0]}, {cell[1]:,}", spread(rates(runs))]
                row += [f"{step(runs):.2f}", f"{theirs[column]:,}", f"{ratio:.2f}"]
                print(f"| {' | '.join(row)} |", flush=True)


def seed(args: argparse.Namespace) -> None:
    waves = max(1, args.num_prompts // 16)
    print(f"{16 * waves} prompts instead of 160, 16 at once, 1,024 tokens out.\n")
    print("| | input | output tokens/s (range) | TPOT ms |\n|---|---|---|---|", flush=True)
    columns = [("off", 3, "off"), ("on", 3, "on"), ("off again", 3, "off"), ("k = 0", 0, "on")]
    for name, k, share in columns:
        with server(args, "glm52-lite", k, ["--index-share", share]) as port:
            for length in (1024, 8192, 10240):
                runs = sweep(args, port, (16, length), 1024, ["--prompts-per-place", str(waves)])
                row = f"{name} | {length:,} | {spread(rates(runs))} | {tpot(runs):.2f}"
                print(f"| {row} |", flush=True)


def output(args: argparse.Namespace) -> None:
    found = {"deferred": [], "immediate": []}
    for _ in range(args.rounds):
        for mode, all_runs in found.items():
            with server(args, "glm52-lite", 3, ["--output-mode", mode]) as port:
                n = ["--prompts-per-place", str(args.waves)]
                all_runs += sweep(args, port, (16, 1024), 256, n)
    print("| output | tokens/s (range) | step ms |\n|---|---|---|")
    for mode, runs in found.items():
        print(f"| {mode} | {spread(rates(runs))} | {step(runs):.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=["vllm", "seed", "output"])
    parser.add_argument("--tandem", default=str(ROOT / "target/release/tandem"))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", help="in place of the tables' models, to try the program")
    parser.add_argument("--serve-args", default="", help="more arguments of tandem serve")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waves", type=int, default=1, help="prompts for each place")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--scale", type=int, default=1, help="divides lengths, to try the program")
    args = parser.parse_args()
    try:
        {"vllm": vllm, "seed": seed, "output": output}[args.table](args)
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
