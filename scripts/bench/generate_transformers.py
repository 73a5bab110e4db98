#!/usr/bin/env python3
"""Time transformers' `generate` on the model of generate.py, in bf16.

    scripts/bench/generate_transformers.py --layers 32 --d-model 4096 --rows 64 --prompt 128 --new 256

"dynamic" is its growing cache, "static" one of fixed length, for which it compiles the model.
"""

# PyTorch is not a dependency of zerojax.
import statistics

import harness
import torch
from generation_rows import Generated, Shape, add_options, report
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    """Parse the command line, time each kind of cache, print a line for each, write JSON."""
    parser = harness.parser(__doc__)
    add_options(parser)
    parser.add_argument("--caches", nargs="+", default=["dynamic", "static"])
    options = parser.parse_args()
    shape = Shape.of(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.d_model, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.prompt + shape.new, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    rate, rows = copy_rate(device), []
    prompts = torch.randint(0, shape.vocab, (shape.rows, shape.prompt), device=device)

    def generate(cache: str, new: int) -> None:
        model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, min_new_tokens=new,
            do_sample=False, cache_implementation=cache, pad_token_id=0,
        )  # fmt: skip
        finished()

    for cache in options.caches:
        times: dict[int, list[float]] = {}
        for new in (shape.short, shape.new):
            times[new] = harness.seconds_of(
                lambda cache=cache, new=new: generate(cache, new), options.repeats, untimed=2
            )
        rows.append(Generated.of(f"transformers, {cache} cache", shape, times))
        report(rows[-1:], shape, rate, None)
    report(rows, shape, rate, options.json)


def finished() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy of 2 GiB on the device."""
    size = 2 << 30 if device.type == "cuda" else 64 << 20
    x = torch.ones(size // 4, dtype=torch.float32, device=device)
    y = torch.empty_like(x)

    def copy() -> None:
        y.copy_(x)
        finished()

    seconds = harness.seconds_of(copy, 10)
    return 2 * size / statistics.median(seconds)


if __name__ == "__main__":
    main()
