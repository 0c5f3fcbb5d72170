"""Writes transformers_chain.json: what the LogitsProcessor chain of transformers' `generate` makes
of fixed logits, for random combinations of parameters.

    python transformers_chain.py > transformers_chain.json

Made with transformers 5.17.0 and torch 2.11.0. The chain is the one that `generate` itself builds,
in its own order. transformers has no presence and frequency penalties; they are handed in as a
processor of ours. Its place behind the masks makes no difference: an excluded token stays excluded.
"""

import json
import random
import sys
from types import SimpleNamespace

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor

N_CASES = 240


class Penalties(LogitsProcessor):
    """OpenAI's formula."""

    def __init__(self, n_prompt, presence, frequency):
        self.n_prompt, self.presence, self.frequency = n_prompt, presence, frequency

    def __call__(self, input_ids, scores):
        generated = input_ids[0, self.n_prompt :]
        counts = torch.bincount(generated, minlength=scores.shape[-1]).float()
        return scores - self.frequency * counts - self.presence * (counts > 0).float()


class Chain(GenerationMixin):
    config = SimpleNamespace(is_encoder_decoder=False)


def random_case(rng):
    vocab = rng.choice([8, 16, 32, 64])
    logits = rng.sample([round(x / 1000, 3) for x in range(-3000, 3001)], vocab)
    ids = range(vocab)
    case = {
        "logits": logits,
        "prompt": [rng.choice(ids) for _ in range(rng.randint(1, 8))],
        "generated": [rng.choice(ids) for _ in range(rng.randint(0, 8))],
    }
    optional = {
        "temperature": lambda: round(rng.uniform(0.2, 2.0), 2),
        "top_k": lambda: rng.randint(1, vocab + 4),
        "top_p": lambda: round(rng.uniform(0.05, 0.99), 2),
        "min_p": lambda: round(rng.uniform(0.01, 0.5), 2),
        "presence_penalty": lambda: round(rng.uniform(-2.0, 2.0), 2),
        "frequency_penalty": lambda: round(rng.uniform(-2.0, 2.0), 2),
        "repetition_penalty": lambda: round(rng.uniform(0.6, 1.8), 2),
        "logit_bias": lambda: [[i, round(rng.uniform(-5, 5), 2)] for i in rng.sample(ids, 3)],
        "allowed_token_ids": lambda: sorted(rng.sample(ids, vocab // 2)),
        "grammar": lambda: sorted(rng.sample(ids, vocab * 3 // 4)),
        "min_tokens": lambda: rng.randint(1, 8),
    }
    for name, value in optional.items():
        if rng.random() < 0.45:
            case[name] = value()
    case["end_ids"] = rng.sample(ids, 2)
    history = case["prompt"] + case["generated"]
    if rng.random() < 0.45:
        case["bad_words"] = bad_words(rng, [i for i in ids if i not in case["end_ids"]], history)
    return case


def bad_words(rng, ids, history):
    """One token, one that the history's end completes if it is long enough, one that it does not.

    transformers skips a word that is longer than the history, and ends that are a word.
    """
    n_prefix = rng.randint(1, 3)
    words = [[rng.choice(ids)], [rng.choice(ids), rng.choice(ids)]]
    if len(history) > n_prefix:
        words.append(history[-n_prefix:] + [rng.choice(ids)])
    return words


def distribution(case):
    n_prompt, vocab = len(case["prompt"]), len(case["logits"])
    allowed = set(case.get("allowed_token_ids", range(vocab)))
    allowed &= set(case.get("grammar", range(vocab)))
    if not allowed:
        return None
    bias = {(i,): b for i, b in case.get("logit_bias", [])}
    config = GenerationConfig(
        do_sample=True,
        num_beams=1,
        temperature=case.get("temperature", 1.0),
        top_k=case.get("top_k", 0),
        top_p=case.get("top_p", 1.0),
        min_p=case.get("min_p"),
        repetition_penalty=case.get("repetition_penalty", 1.0),
        sequence_bias=bias or None,
        bad_words_ids=case.get("bad_words"),
        min_new_tokens=case.get("min_tokens"),
        eos_token_id=case["end_ids"],
    )
    config._eos_token_tensor = torch.tensor(case["end_ids"])
    penalties = Penalties(
        n_prompt, case.get("presence_penalty", 0.0), case.get("frequency_penalty", 0.0)
    )
    processors = Chain()._get_logits_processor(
        config,
        n_prompt,
        prefix_allowed_tokens_fn=lambda _batch, _ids: sorted(allowed),
        logits_processor=[penalties],
        device="cpu",
    )
    history = torch.tensor([case["prompt"] + case["generated"]])
    scores = processors(history, torch.tensor([case["logits"]], dtype=torch.float32))
    if not scores.isfinite().any():
        return None
    return scores[0].double().softmax(-1)


def main():
    rng = random.Random(20)
    cases = []
    while len(cases) < N_CASES:
        case = random_case(rng)
        probs = distribution(case)
        if probs is not None:
            case["probs"] = [[i, float(f"{p:.8g}")] for i, p in enumerate(probs.tolist()) if p > 0]
            cases.append(json.dumps(case, separators=(",", ":")))
    sys.stdout.write("[\n" + ",\n".join(cases) + "\n]\n")


main()
