"""Run by vLLM: loads folders one by one, and prints what a new vLLM has in memory and completes for each.

Standard input has {"folders": [...], "prompts": [token ids, ...], "tokens": N}.
"""

# pyright: reportMissingImports=false

import gc
import json
import sys

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def main() -> None:
    """Print a line of JSON for each folder: SHA-256 of tensors by name, and greedy completions."""
    asked = json.load(sys.stdin)
    greedy = SamplingParams(temperature=0, max_tokens=asked["tokens"], detokenize=False, ignore_eos=True)
    for folder in asked["folders"]:
        engine = LLM(folder, dtype="bfloat16", enforce_eager=True, max_num_seqs=32, skip_tokenizer_init=True)
        found = [
            engine.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)[0].outputs[0].token_ids
            for prompt in asked["prompts"]
        ]
        (sums,) = engine.collective_rpc("compute_weight_checksums")
        memory = {name.rpartition(":")[2]: x for name, x in sums.items()}
        print(json.dumps([memory, [list(tokens) for tokens in found]]), flush=True)
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()


main()
