"""Tokens per second of tandem on a bundled checkpoint, at a number of running requests.

    python3 docs/perf/tandem_tps.py --model tiny-dsv3 --dtype float32 --batch 16

Runs `tandem generate` (target/release, or --tandem) on the prompts of `transformers_tps.py` and
reads the rate from its log: prefill is in it, loading is not. Prints one JSON line with minimum,
median and maximum over the repeats.
"""
import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import tempfile

from prompts import prompts

ROOT = pathlib.Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tandem", default=str(ROOT / "target/release/tandem"))
    parser.add_argument("--model", default="tiny-glm52")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for ids in prompts(args.prompt_tokens):
            line = {"prompt_ids": ids, "max_tokens": args.new_tokens, "ignore_eos": True}
            file.write(json.dumps(line) + "\n")
        file.flush()
        k = str(args.num_speculative_tokens)
        command = [args.tandem, "generate", "--model", args.model, "--prompts", file.name, "--json"]
        command += ["--dtype", args.dtype]
        command += ["--max-num-seqs", str(args.batch), "--num-speculative-tokens", k]

        def run() -> tuple[float, str]:
            environment = {**os.environ, "RUST_LOG": "info"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found = re.search(r"tokens_per_second=(\S+)(?: acceptance_length=(\S+))?", done.stderr)
            return float(found[1]), found[2]

        runs = sorted(run() for _ in range(args.repeats))
    rates = [rate for rate, _ in runs]
    print(json.dumps({
        "engine": "tandem",
        "dtype": args.dtype,
        "batch": args.batch,
        "num_speculative_tokens": args.num_speculative_tokens,
        "acceptance_length": runs[0][1],
        "tokens_per_second": [round(r, 1) for r in (rates[0], statistics.median(rates), rates[-1])],
    }))


if __name__ == "__main__":
    main()
