"""Time and peak memory of loading one checkpoint: Tandem, transformers and safetensors in turns.

    cargo build --release -p weights -p models --examples
    target/release/examples/write_dummy docs/perf/loading target/loading
    python3 docs/perf/loading.py target/loading --dtype bfloat16

Each run is a process of its own. Seconds are those of loading, without starting Python or a
program; CPU seconds and the peak of resident memory are those of the whole process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

TRANSFORMERS = """
import json, sys, time, torch, transformers
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(int(sys.argv[3]))
start = time.perf_counter()
dtype = getattr(torch, sys.argv[2])
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=dtype)
print(json.dumps({"seconds": time.perf_counter() - start}))
"""

SAFETENSORS = """
import glob, json, sys, time, torch
from safetensors.torch import load_file
torch.set_num_threads(int(sys.argv[3]))
start = time.perf_counter()
tensors = {}
for file in sorted(glob.glob(sys.argv[1] + "/*.safetensors")):
    for name, tensor in load_file(file).items():
        # A copy, as a model that keeps its weights needs one: load_file maps the file.
        tensors[name] = tensor.to(getattr(torch, sys.argv[2]), copy=True)
print(json.dumps({"seconds": time.perf_counter() - start}))
"""


def run(command):
    """Seconds of loading, CPU seconds and peak MiB of one process."""
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            sys.exit(f"{command[:2]} failed with {child.returncode}")
        output.seek(0)
        seconds = json.loads(output.read().splitlines()[-1])["seconds"]
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(args.threads)
    own = ["target/release/examples/load", args.checkpoint, args.dtype]
    rest = [args.checkpoint, args.dtype, str(args.threads)]
    commands = {
        "tandem": own,
        "transformers": [sys.executable, "-c", TRANSFORMERS, *rest],
        "safetensors, copied": [sys.executable, "-c", SAFETENSORS, *rest],
    }
    results = {name: [] for name in commands}
    # One run of each that does not count fills the page cache.
    for count in range(args.runs + 1):
        for name, command in commands.items():
            result = run(command)
            if count:
                results[name].append(result)
    print(f"| {args.dtype} | seconds | CPU seconds | peak MiB |\n|---|---|---|---|")
    for name, rows in results.items():
        columns = [sorted(column) for column in zip(*rows)]
        cells = [
            f"{column[0]:.{digits}f} / **{statistics.median(column):.{digits}f}** / "
            f"{column[-1]:.{digits}f}"
            for column, digits in zip(columns, [2, 2, 0])
        ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
