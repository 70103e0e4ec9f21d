"""Which rounding of KV costs what: keys and values apart, in every 8-bit format, on given text.

    python benchmarks/kv_formats.py MODEL --data-dir DATA --out benchmarks/results/kv-formats-smollm2.json

Each problem of GSM8K is read with its solution, once exactly and once with every key and value rounded as the cache
would store it. Compared are the distributions of the solution's tokens: acceptance (the overlap) and KL divergence. In
float32 on a CPU, so that nothing else is rounded.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from alula.data import load
from alula.models.load import load_model
from alula.ops.eight_bits import DTYPES, dequantise, quantise

ROUNDED: dict[str, str | None] = {"keys": None, "values": None}
"""The formats in force."""


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> tuple:
    group = query.shape[1] // key.shape[1]
    key, value = (
        rounded(x, ROUNDED[name]).repeat_interleave(group, 1) for name, x in (("keys", key), ("values", value))
    )
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def rounded(x: Tensor, kv_dtype: str | None) -> Tensor:
    return x if kv_dtype is None else dequantise(*quantise(x, DTYPES[kv_dtype]), x.dtype)


@torch.no_grad()
def distributions(model: Any, texts: list[tuple[list[int], list[int]]]) -> Tensor:
    """Log-probs [tokens of all solutions, vocabulary]."""
    found = [model(torch.tensor([prompt + solution])).logits[0, len(prompt) - 1 : -1] for prompt, solution in texts]
    return torch.cat(found).log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    loaded = load_model(given.model, device="cpu", dtype="float32")
    model, tokenizer = loaded.model, loaded.tokenizer
    AttentionInterface.register("rounded", attention)
    model.config._attn_implementation = "rounded"
    texts = []
    for example in load("gsm8k", data_dir=given.data_dir).examples[: given.problems]:
        asked = [{"role": "user", "content": example.prompt}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        texts.append((prompt, tokenizer(example.fields["answer"], add_special_tokens=False)["input_ids"]))
    exact = distributions(model, texts)
    rows = []
    for kv_dtype in DTYPES:
        for parts in (("keys", "values"), ("keys",), ("values",)):
            ROUNDED.update({name: kv_dtype if name in parts else None for name in ROUNDED})
            other = distributions(model, texts)
            acceptance = torch.minimum(exact.exp(), other.exp()).sum(-1)
            row = {
                "format": kv_dtype,
                "rounded": " and ".join(parts),
                "tail": float(acceptance.quantile(0.05)),
                "mean": float(acceptance.mean()),
                "kl": float((exact.exp() * (exact - other)).sum(-1).mean()),
                "tokens": len(exact),
            }
            rows.append(row)
            print(row, flush=True)
    given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
