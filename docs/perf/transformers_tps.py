"""Tokens per second of transformers on a checkpoint folder, greedy, KV cache on, no drafting.

    python3 docs/perf/transformers_tps.py DIR --dtype float32 --batch 1 --repeats 5

Prints one JSON line. All prompts have one length, so that a batch needs no padding; the
end-of-sequence id is masked, so that every row runs to the limit.
"""
import argparse
import json
import statistics
import time

import torch
from prompts import prompts
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.dir, dtype=getattr(torch, args.dtype)).eval()
    ids = torch.tensor(prompts(args.prompt_tokens))
    options = {
        "max_new_tokens": args.new_tokens,
        "min_new_tokens": args.new_tokens,
        "do_sample": False,
        "use_cache": True,
        "pad_token_id": 2,
    }

    def rate(repeat: int) -> float:
        start = repeat * args.batch % len(ids)
        batch = ids[start : start + args.batch]
        begin = time.perf_counter()
        with torch.no_grad():
            out = model.generate(batch, attention_mask=torch.ones_like(batch), **options)
        assert out.numel() == batch.numel() + args.batch * args.new_tokens
        return args.batch * args.new_tokens / (time.perf_counter() - begin)

    rate(0)
    rates = sorted(rate(repeat) for repeat in range(args.repeats))
    print(json.dumps({
        "engine": "transformers",
        "dtype": args.dtype,
        "batch": args.batch,
        "threads": torch.get_num_threads(),
        "tokens_per_second": [round(r, 1) for r in (rates[0], statistics.median(rates), rates[-1])],
    }))


if __name__ == "__main__":
    main()
