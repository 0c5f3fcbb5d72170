"""Tokens per second of transformers on a GPU, from a config alone: seeded random weights, greedy.

    python3 docs/perf/transformers_gpu.py crates/bundled-checkpoints/checkpoints/dsv3-lite

The model is built on the meta device and filled on the GPU: norms 1, biases 0, matrices of standard
deviation 0.02. Every request runs to 256 tokens. A row is a cell of requests and prompt length, plain
and with `use_mtp`: the median of the repeats, and their range. What fails is a row that says why.
"""
import argparse
import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def build(folder: str, device: str) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device=device).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.fill_(1)
            elif tensor.dim() < 2:
                tensor.zero_()
            else:
                tensor.normal_(0, 0.02)
        # Frequencies are no weights: they are computed anew.
        rotary = model.model.rotary_emb
        model.model.rotary_emb = type(rotary)(config=config, device=torch.device(device))
    return model


def seconds(model: torch.nn.Module, ids: torch.Tensor, new_tokens: int, use_mtp: bool) -> float:
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    if use_mtp:
        options["use_mtp"] = True
    begin = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), pad_token_id=2, **options
        ).cpu()
    assert out.shape[1] == ids.shape[1] + new_tokens, "an answer has another length"
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cells", nargs="*", default=["1x1024", "16x1024", "16x8192"])
    args = parser.parse_args()

    model = build(args.folder, args.device)
    print("| requests x input | drafting | output tokens/s, median (range) |\n|---|---|---|")
    for cell in args.cells:
        batch, length = map(int, cell.split("x"))
        ids = torch.randint(2, model.config.vocab_size, (batch, length), device=args.device)
        for use_mtp in (False, True):
            try:
                seconds(model, ids, min(8, args.new_tokens), use_mtp)
                times = [seconds(model, ids, args.new_tokens, use_mtp) for _ in range(args.repeats)]
                rates = sorted(batch * args.new_tokens / time for time in times)
                median = statistics.median(rates)
                text = f"{median:,.1f} ({rates[0]:,.1f} to {rates[-1]:,.1f})"
            except Exception as error:
                text = f"does not run: {type(error).__name__}: {str(error).splitlines()[:1]}"
            print(f"| {cell} | {'use_mtp' if use_mtp else 'plain'} | {text} |", flush=True)


if __name__ == "__main__":
    main()
