"""How far a device agrees with the reference values under tests/data.

    python3 docs/perf/oracle_agreement.py --device cuda:0 --dtype float32 --drafts 0 3 8 --probes
    python3 docs/perf/oracle_agreement.py --device cpu --dtype bfloat16 --output cpu.json
    python3 docs/perf/oracle_agreement.py --device cuda:0 --dtype bfloat16 --beside cpu.json

Runs `tandem generate` (target/release, or --tandem) from the root of the repository on the cases of
both bundled checkpoints. A row of the table is a model and a number of drafts: cases that are equal
as a whole, tokens up to the first one that differs, and the acceptance length. `--probes` compares
the three drafts behind each prefix of the draft probes. In float32 everything must be equal, or the
program ends with an error.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

MODELS = ["tiny-dsv3", "tiny-glm52"]
ROOT = pathlib.Path(__file__).parents[2]


def read(model: str, name: str) -> list:
    return json.loads((ROOT / f"tests/data/oracle-{model}/{name}.json").read_text())


def generate(args: argparse.Namespace, model: str, n_drafts: int, prompts: list) -> list:
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(prompt) + "\n" for prompt in prompts)
        file.flush()
        command = [args.tandem, "generate", "--json", "--prompts", file.name]
        command += ["--model", str(ROOT / "crates/bundled-checkpoints/checkpoints" / model)]
        command += ["--device", args.device, "--dtype", args.dtype]
        command += ["--num-speculative-tokens", str(n_drafts), *args.generate_args.split()]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def n_equal(found: list, expected: list) -> int:
    pairs = enumerate(zip(found, expected))
    return next((at for at, (a, b) in pairs if a != b), min(len(found), len(expected)))


def cases(args: argparse.Namespace, model: str, n_drafts: int) -> dict:
    expected = read(model, "cases")
    prompts = [
        {"prompt_ids": case["prompt_ids"], "max_tokens": len(case["greedy_ids"])}
        for case in expected
    ]
    answers = generate(args, model, n_drafts, prompts)
    pairs = [(a["token_ids"], case["greedy_ids"]) for a, case in zip(answers, expected, strict=True)]
    stats = [answer["spec_decode"] for answer in answers]
    n_drafted = sum(stat["num_draft_tokens"] for stat in stats)
    n_accepted = sum(stat["num_accepted_tokens"] for stat in stats)
    return {
        "cases": f"{sum(found == expected for found, expected in pairs)} of {len(pairs)}",
        "tokens": sum(n_equal(found, expected) for found, expected in pairs),
        "of": sum(len(expected) for _, expected in pairs),
        "acceptance_length": round(1 + n_drafts * n_accepted / n_drafted, 3) if n_drafted else 1.0,
    }


def probes(args: argparse.Namespace, model: str) -> dict:
    expected, prompts = [], []
    for probe_set in read(model, "draft_probes"):
        for probe in probe_set["probes"]:
            expected.append([probe["next_token"], *probe["drafts"]])
            # The drafts behind the first token are made as long as they can be used.
            prefix = probe_set["prompt_ids"][: probe["prefix_len"]]
            prompts.append({"prompt_ids": prefix, "max_tokens": 5, "ignore_eos": True})
    answers = generate(args, model, 3, prompts)
    found = [[a["token_ids"][0], *a["spec_decode"]["drafts_per_step"][0]] for a in answers]
    pairs = list(zip(found, expected, strict=True))
    return {
        "cases": f"{sum(found == expected for found, expected in pairs)} of {len(pairs)} probes",
        "tokens": sum(n_equal(found, expected) for found, expected in pairs),
        "of": sum(len(expected) for expected in expected),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tandem", default=str(ROOT / "target/release/tandem"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--drafts", type=int, nargs="*", default=[0, 3])
    parser.add_argument("--probes", action="store_true")
    parser.add_argument("--generate-args", default="", help="more arguments of tandem generate")
    parser.add_argument("--output", type=pathlib.Path, help="also write the figures there")
    parser.add_argument("--beside", type=pathlib.Path, help="such figures of another device")
    args = parser.parse_args()
    beside = json.loads(args.beside.read_text()) if args.beside else {}

    figures, differs = {}, False
    print(f"{args.device}, {args.dtype}" + (f"; in brackets: {args.beside.name}" if beside else ""))
    print("| | equal | tokens up to the first difference | acceptance length |\n|---|---|---|---|")
    for model in MODELS:
        runs = {f"{model}, k = {n}": lambda n=n: cases(args, model, n) for n in args.drafts}
        if args.probes:
            runs[f"{model}, draft probes"] = lambda: probes(args, model)
        for name, run in runs.items():
            figures[name] = run()
            differs |= figures[name]["tokens"] < figures[name]["of"]
            row = [cells(figures[name])]
            if name in beside:
                row.append(cells(beside[name]))
            both = [" ".join([a, *(f"({b})" for b in rest)]) for a, *rest in zip(*row)]
            print(f"| {name} | {' | '.join(both)} |", flush=True)
    if args.output:
        args.output.write_text(json.dumps(figures, indent=1))
    if differs and args.dtype == "float32":
        sys.exit("the device differs from the reference")


def cells(figure: dict) -> list:
    share = 100 * figure["tokens"] / figure["of"]
    tokens = f"{figure['tokens']} of {figure['of']}, {share:.1f} %"
    return [figure["cases"], tokens, str(figure.get("acceptance_length", ""))]


if __name__ == "__main__":
    main()
