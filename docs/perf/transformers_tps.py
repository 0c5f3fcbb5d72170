"""Tokens per second of transformers on a checkpoint folder, greedy, KV cache on, no drafting.

    python3 docs/perf/transformers_tps.py DIR --dtype float32 --batch 1 --new-tokens 128 --repeats 3

Prints one JSON line. The prompts are random ids of one length, so that the batch needs no padding;
the end-of-sequence id is masked, so that every row runs to the limit.
"""
import argparse
import json
import statistics
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.dir, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(0)
    shape = (args.batch, args.prompt_tokens)
    ids = torch.randint(16, model.config.vocab_size, shape, generator=generator)
    options = {
        "max_new_tokens": args.new_tokens,
        "min_new_tokens": args.new_tokens,
        "do_sample": False,
        "use_cache": True,
        "attention_mask": torch.ones_like(ids),
        "pad_token_id": 2,
    }

    def run() -> float:
        start = time.perf_counter()
        with torch.no_grad():
            out = model.generate(ids, **options)
        assert out.shape[1] == args.prompt_tokens + args.new_tokens
        return args.batch * args.new_tokens / (time.perf_counter() - start)

    run()
    rates = sorted(run() for _ in range(args.repeats))
    print(json.dumps({
        "dtype": args.dtype,
        "batch": args.batch,
        "threads": torch.get_num_threads(),
        "tokens_per_second": {
            "min": round(rates[0], 2),
            "median": round(statistics.median(rates), 2),
            "max": round(rates[-1], 2),
        },
    }))


if __name__ == "__main__":
    main()
