"""How far bf16 log-probs are from float32 ones, with the residual stream in bf16 or in float32 (CPU, SmolLM2).

`python benchmarks/precision.py MODEL.gguf --out benchmarks/results/precision.json`
"""

import argparse
import copy
import json
from pathlib import Path

import torch
from torch import Tensor

from alula.model import lm_logits, load_model

TEXT = (
    "Birds are fascinating creatures that have evolved over millions of years. They are found on every continent and "
    "come in many shapes, sizes and colours. Some birds, such as the albatross, can glide for hours without flapping "
    "their wings."
)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    loaded = load_model(arguments.model, dtype="bfloat16")
    model, tokenizer = loaded.model, loaded.tokenizer
    assert tokenizer is not None
    chat = [{"role": "user", "content": "Tell me about birds."}]
    prompt = list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    ids = torch.tensor([prompt + list(tokenizer(TEXT)["input_ids"])])
    head = model.get_output_embeddings().weight

    def logprobs(hidden: Tensor, weight: Tensor) -> Tensor:
        found = torch.log_softmax(lm_logits(hidden[0, :-1], weight), -1)
        return found.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :, 0]

    exact = copy.deepcopy(model).float()
    truth = logprobs(exact.base_model(ids).last_hidden_state, exact.get_output_embeddings().weight)
    plain = logprobs(model.base_model(ids).last_hidden_state, head)
    with torch.autocast("cpu", torch.bfloat16):
        wide = model.base_model(inputs_embeds=model.get_input_embeddings()(ids).float()).last_hidden_state
    found = {}
    for name, values in (("bf16", plain), ("bf16, float32 residual", logprobs(wide.bfloat16(), head))):
        gap = (values - truth).abs()
        found[name] = {"mean": gap.mean().item(), "max": gap.max().item(), "tokens": len(gap)}
    arguments.out.write_text(json.dumps({"model": loaded.name, "against float32": found}, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
