"""Sixteen prompts of one length, cut from the longest prompt of the reference cases."""
import json
import pathlib

CASES = pathlib.Path(__file__).parents[2] / "tests/data/oracle-tiny-dsv3/cases.json"


def prompts(n_tokens: int = 32, n_prompts: int = 16) -> list[list[int]]:
    cases = json.loads(CASES.read_text())
    ids = max((case["prompt_ids"] for case in cases), key=len)
    step = (len(ids) - n_tokens) // (n_prompts - 1)
    return [ids[i * step : i * step + n_tokens] for i in range(n_prompts)]
