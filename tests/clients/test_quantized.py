"""Checkpoints in every quantised format, against the dequantised values of another implementation.

Each is made of a bundled checkpoint. In float32 it must continue prompts just as its reference
does, drafts included, with the same log probabilities; what it costs in acceptance is shown beside
the checkpoint that it was made of.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import PATIENCE, ROOT, TANDEM, run_tests

QUANTIZE = ROOT / "tests/checkpoints/quantize.py"
CHECKPOINTS = ROOT / "crates/bundled-checkpoints/checkpoints"
MODELS = ["tiny-dsv3", "tiny-glm52"]
FORMATS = [
    ["fp8-block"],
    # No size of the models is a multiple of it.
    ["fp8-block", "--block", "48", "48"],
    ["fp8-channel"],
    ["fp8-tensor"],
    ["mxfp8"],
    ["mxfp4"],
    ["mxfp4-attn-fp8"],
    ["mixed"],
]
# Log probabilities in float32: the values of the weights are the same.
TOLERANCE = 1e-5


def continuations(model, prompts, dtype):
    """What `tandem generate` says of each prompt, with the likeliest tokens of each step."""
    command = [TANDEM, "generate", "--model", model, "--dtype", dtype, "--prompts", prompts]
    command += ["--num-speculative-tokens", "3", "--logprobs", "5", "--json"]
    ran = subprocess.run(command, capture_output=True, timeout=PATIENCE, encoding="utf-8")
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def chosen(said):
    """All that must not differ between equal weights: tokens, and what was drafted."""
    return [(one["token_ids"], one["spec_decode"]["drafts_per_step"]) for one in said]


def logprobs(value):
    """Every log probability in an answer, in order."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value) if key not in ("id", "token_id", "rank")]
    if isinstance(value, list):
        return [number for inner in value for number in logprobs(inner)]
    return [value] if isinstance(value, float) else []


def of_all(said):
    return [one["logprobs"] for one in said]


def acceptance_length(said):
    """Tokens that a step yields, over all prompts."""
    steps = [n for one in said for n in one["spec_decode"]["accepted_per_step"]]
    return 1 + sum(steps) / len(steps)


def n_bytes(folder):
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def check(model, format, work, prompts, bf16):
    quantised, reference = work / "quantised", work / "reference"
    command = [sys.executable, QUANTIZE, "--format", *format, CHECKPOINTS / model]
    subprocess.run([*command, quantised, "--reference", reference], check=True, timeout=PATIENCE)
    ours, theirs = (continuations(of, prompts, "float32") for of in [quantised, reference])
    name = f"{model} {' '.join(format)}"
    assert chosen(ours) == chosen(theirs), f"{name}: other tokens or drafts than the reference"
    pairs = zip(logprobs(of_all(ours)), logprobs(of_all(theirs)), strict=True)
    differences = [abs(a - b) for a, b in pairs]
    assert len(differences) > 2000, f"{name}: only {len(differences)} log probabilities"
    assert max(differences) <= TOLERANCE, f"{name}: log probabilities differ by {max(differences)}"

    said = continuations(quantised, prompts, "bfloat16")
    n_equal = sum(a["token_ids"] == b["token_ids"] for a, b in zip(said, bf16))
    mib = n_bytes(quantised) / 2**20
    print(
        f"{name:34} {mib:5.1f} MiB, log probabilities within {max(differences):.1e}, acceptance "
        f"length {acceptance_length(said):.2f} (bf16 {acceptance_length(bf16):.2f}), "
        f"{n_equal} of {len(said)} texts as in bf16",
        flush=True,
    )
    for folder in [quantised, reference]:
        shutil.rmtree(folder)


def test_every_format_has_the_values_of_its_reference(work):
    for model in MODELS:
        cases = json.loads((ROOT / f"tests/data/oracle-{model}/cases.json").read_text())
        asked = [{"prompt_ids": case["prompt_ids"], "max_tokens": 40} for case in cases]
        prompts = work / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in asked))
        bf16 = continuations(model, prompts, "bfloat16")
        for format in FORMATS:
            check(model, format, work, prompts, bf16)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as folder:
        run_tests(dict(globals()), Path(folder))
