"""The PyTorch side of hf_compare.py, which calls it: makes and evaluates models with transformers."""

import argparse
import json
from pathlib import Path
from typing import Any

import hf_fixtures
import numpy as np
import torch
import transformers

COMMON: dict[str, Any] = {"vocab_size": hf_fixtures.VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
GPT2 = COMMON | {"n_positions": 64, "n_embd": 128, "n_layer": 3, "n_head": 4}
OPT = COMMON | {"max_position_embeddings": 64, "hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 256}
OPT |= {"num_hidden_layers": 3, "num_attention_heads": 4, "pad_token_id": 1}
LLAMA = COMMON | {"max_position_embeddings": 128, "hidden_size": 128, "intermediate_size": 192}
LLAMA |= {"num_hidden_layers": 3, "num_attention_heads": 4}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3_ROPE = {"rope_theta": 500000.0, **hf_fixtures.LLAMA3_ROPE}

ONE, MANY = "1GB", "200KB"
CASES: dict[str, tuple[Any, torch.dtype, str]] = {
    "gpt2": (transformers.GPT2Config(**GPT2), torch.float32, ONE),
    "gpt2-untied-gelu": (
        transformers.GPT2Config(**GPT2, activation_function="gelu", tie_word_embeddings=False, n_inner=200),
        torch.bfloat16,
        MANY,
    ),
    "opt": (transformers.OPTConfig(**OPT), torch.float16, ONE),
    "opt-untied": (transformers.OPTConfig(**OPT, tie_word_embeddings=False), torch.float32, MANY),
    "llama2": (transformers.LlamaConfig(**LLAMA), torch.float32, MANY),
    "llama-linear-biases": (
        transformers.LlamaConfig(**LLAMA, rope_parameters=LINEAR_ROPE, attention_bias=True, mlp_bias=True),
        torch.float32,
        ONE,
    ),
    "llama3": (
        transformers.LlamaConfig(
            **LLAMA,
            num_key_value_heads=2,
            head_dim=64,
            rope_parameters=LLAMA3_ROPE,
            tie_word_embeddings=True,
        ),
        torch.bfloat16,
        ONE,
    ),
}
CASES |= {name: (config, torch.bfloat16, ONE) for name, config in hf_fixtures.FAMILIES.items()}


def load(folder: Path) -> torch.nn.Module:
    """A model in fp32, with its linear layers decoded if they are quantized."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def mean_loss(folder: Path, tokens: np.ndarray) -> float:
    """Nats per token of int rows [rows, time + 1], each predicting all but its first."""
    rows = torch.from_numpy(tokens).long()
    logits = load(folder)(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


@torch.no_grad()
def inspect(folder: Path, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """The logits of some tokens, and the weights used."""
    model = load(folder)
    logits = model(torch.from_numpy(tokens).long()).logits
    weights = {name: parameter.float().numpy() for name, parameter in model.named_parameters()}
    return {"logits": logits.float().numpy(), **weights}


def main() -> None:
    """Make models, or evaluate one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("make", "loss", "inspect"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokens", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    options = parser.parse_args()
    if options.task == "make":
        hf_fixtures.write(options.folder, CASES)
        # To be trained: keeps the initial weights of transformers.
        torch.manual_seed(0)
        fresh = options.folder.with_name("fresh")
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(fresh)
        hf_fixtures.make_tokenizer().save_pretrained(fresh)
        return
    tokens = np.load(options.tokens)
    if options.task == "loss":
        options.out.write_text(json.dumps(mean_loss(options.folder, tokens)))
    else:
        np.savez(options.out, allow_pickle=False, **inspect(options.folder, tokens))


if __name__ == "__main__":
    main()
