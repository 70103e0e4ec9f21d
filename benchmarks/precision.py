"""Where 16-bit log-probs come apart: engine against `score`, and what each rounding adds (CPU, SmolLM2).

`python benchmarks/precision.py MODEL.gguf --out benchmarks/results/precision.json`

Two kernels for one product differ in the last bits of float32 (here: random noise of 5e-7 of the product's size), and
rounding to 16 bits makes that a whole step of the last bit, now and then, soon everywhere. So a float32 model is run
twice with that noise, rounding at the places where a 16-bit model does; leaving a place out shows what it adds. The
real engine against its own `score` shows that the imitation is true. The learner's sparse forward, which distillation
trains, is compared with the engine as well, with `residual=float32` and without.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from alula import Engine, Evict, Sampling, Select, Sparsity
from alula.distill.attention.visibility import Visibility
from alula.distill.distiller import Distiller
from alula.engine.rollout import Rollout
from alula.models.load import load_model

ASKED = (
    "Tell me about birds.",
    "What is 17 * 23? Think step by step.",
    "Write a short story about a lighthouse.",
    "Why is the sky blue?",
)
NOISE = 5e-7

OPERANDS = {"norm", "attention", "activation", "last norm"}
"""What a matrix product reads must be 16 bits wide."""
PRODUCTS = {"q, k, v": {"q", "k before RoPE", "v"}, "gate, up": {"gate", "up"}, "o, down": {"o", "down"}}
INSIDE = {"q rotated", "k", "softmax"}
ALL = {"residual"} | OPERANDS | INSIDE | set.union(*PRODUCTS.values())
LEFT_OUT: dict[str, set[str]] = {
    "everything rounded": set(),
    "float32 residual": {"residual"},
    "float32 residual, o, down": {"residual"} | PRODUCTS["o, down"],
    "float32 residual and products": {"residual"}.union(*PRODUCTS.values()) - {"v"},
    "only what products read": ALL - OPERANDS,
} | {
    f"only {name}": ALL - places
    for name, places in {
        "residual": {"residual"},
        "norm": {"norm"},
        "activation": {"activation"},
        "attention": {"attention"},
        "softmax": {"softmax"},
        "KV cache": {"k", "v"},
        "q rotated": {"q rotated"},
        **PRODUCTS,
    }.items()
}


class Imitation:
    """A float32 model that rounds to `dtype` at chosen places, its products a little noisy."""

    def __init__(self, path: str) -> None:
        self.model = load_model(path, dtype="bfloat16").model.float()
        self.table = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0))
        self.generator = torch.Generator()
        self.places: set[str] = set()
        self.dtype = torch.bfloat16
        self.noise = 0.0
        AttentionInterface.register("imitation", self.attend)
        self.model.config._attn_implementation = "imitation"
        for layer in self.model.base_model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for module, place in (
                (attention.q_proj, "q"),
                (attention.k_proj, "k before RoPE"),
                (attention.v_proj, "v"),
                (attention.o_proj, "o"),
                (mlp.gate_proj, "gate"),
                (mlp.up_proj, "up"),
                (mlp.down_proj, "down"),
            ):
                module.register_forward_hook(self.after(place, product=True))
            mlp.down_proj.register_forward_pre_hook(lambda _, x: (self.round(x[0], "activation"),))
            layer.input_layernorm.register_forward_hook(self.after("norm"))
            layer.post_attention_layernorm.register_forward_hook(self.after("norm"))
            layer.post_attention_layernorm.register_forward_pre_hook(self.round_sum)
            layer.register_forward_hook(self.after("residual"))
        self.model.base_model.norm.register_forward_hook(self.after("last norm"))

    def round(self, x: Tensor, place: str) -> Tensor:
        return x.to(self.dtype).float() if place in self.places else x

    def round_sum(self, norm: nn.Module, inputs: tuple[Tensor]) -> None:
        """In place: the layer will add to this very tensor."""
        inputs[0].copy_(self.round(inputs[0], "residual"))

    def jitter(self, x: Tensor) -> Tensor:
        if not self.noise:
            return x
        first = int(torch.randint(0, 100_000, (), generator=self.generator))
        noise = self.table[first : first + x.numel()].view(x.shape)
        return x + noise * (x.norm() / x.numel() ** 0.5 * self.noise)

    def after(self, place: str, product: bool = False) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        return lambda module, inputs, x: self.round(self.jitter(x) if product else x, place)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        q, k = self.round(q, "q rotated"), self.round(k, "k")
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        later = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
        logits = (q @ k.transpose(-1, -2) * scaling).masked_fill_(later, -torch.inf)
        weights = torch.exp(logits - logits.amax(-1, keepdim=True))
        out = self.jitter(self.round(weights, "softmax") @ v) / weights.sum(-1, keepdim=True)
        return self.round(out, "attention").transpose(1, 2).contiguous(), None

    @torch.no_grad()
    def logprobs(self, rollouts: list, places: set[str], noise: float) -> Tensor:
        self.places, self.noise, found = places, noise, []
        self.generator.manual_seed(0)
        for r in rollouts:
            ids = torch.tensor([r.prompt_ids + r.token_ids])
            hidden = self.model.base_model(ids, use_cache=False).last_hidden_state[0, len(r.prompt_ids) - 1 : -1]
            logits = (hidden @ self.model.get_output_embeddings().weight.T).log_softmax(-1)
            found.append(logits.gather(-1, torch.tensor(r.token_ids)[:, None])[:, 0])
        return torch.cat(found)


def gap(a: Tensor, b: Tensor) -> dict[str, float]:
    apart = (a - b).abs()
    return {"mean": apart.mean().item(), "p99": apart.quantile(0.99).item(), "max": apart.max().item()}


PROMPTS: list[Any] = [[{"role": "user", "content": text}] for text in ASKED]


def engine(path: str, dtype: str, tokens: int) -> tuple[list, Tensor, Tensor]:
    """Rollouts of the dense engine, their log-probs and those that `score` gives the same tokens."""
    one = Engine.load(path, dtype=dtype, kv_memory="256MiB")
    made = one.generate(PROMPTS, Sampling(n=1, max_new_tokens=tokens, seed=1), progress=False)
    return made, joined(made), torch.cat([s.logprobs for s in one.score(made)])


def sparse(path: str, dtype: str, residual: str | None, tokens: int) -> dict[str, dict[str, float]]:
    """The learner's forward under a policy against the engine that sampled with it; dense: `score`."""
    loaded, found = load_model(path, dtype=dtype, residual=residual), {}
    one, learner = Engine(loaded, kv_memory="256MiB"), Distiller(loaded.model)
    for policy in (
        Sparsity(),
        Sparsity(evict=Evict("rkv", 96, buffer=32, window=8, sinks=4)),
        Sparsity(select=Select("block-topk", 96, block=16, dense_layers=2)),
    ):
        sampling = Sampling(n=1, max_new_tokens=tokens, seed=1)
        made = one.generate(PROMPTS, sampling, policy, record=not policy.dense, progress=False)
        scored = [s.logprobs for s in one.score(made)] if policy.dense else learner.score(made)
        found[policy.describe()] = gap(torch.cat(scored), joined(made))
        if policy.select is not None:
            replayed = torch.cat([learner_reading_what_was_read(learner, rollout) for rollout in made])
            found[f"{policy.describe()}, choices replayed"] = gap(replayed, joined(made))
    return found


def learner_reading_what_was_read(learner: Distiller, rollout: Rollout) -> Tensor:
    """The learner's log-probs with the engine's recorded choices in place of its own."""
    own, prompt = Visibility.visible, len(rollout.prompt_ids)

    def visible(view: Visibility, layer: int, query: Tensor, first: int, summaries: Tensor | None) -> Tensor:
        seen = own(view, layer, query, first, None)
        if summaries is None or view.select is None:
            return seen
        seen = seen.expand(-1, summaries.shape[1], -1, -1).clone()
        for at in range(max(first, prompt), first + query.shape[2]):
            read = rollout.selected[at - prompt][layer] if at - prompt < len(rollout.selected) else None
            if read is not None:
                for head, pages in enumerate(read.long()):
                    held = torch.zeros(-(-seen.shape[-1] // view.select.block), dtype=torch.bool)
                    held[pages] = True
                    seen[0, head, at - first] &= held.repeat_interleave(view.select.block)[: seen.shape[-1]]
        return seen

    Visibility.visible = visible  # type: ignore[method-assign]
    try:
        return learner.score([rollout])[0]
    finally:
        Visibility.visible = own  # type: ignore[method-assign]


def joined(made: list) -> Tensor:
    return torch.cat([r.logprobs for r in made])


def dense_rows(model: str, tokens: int) -> dict[str, Any]:
    """The engine against its `score`, and the imitation."""
    made, *exact = engine(model, "float32", tokens)
    measured = {"float32": gap(*exact)}
    for name in ("bfloat16", "float16"):
        _, *both = engine(model, name, tokens)
        measured[name] = gap(*both)
        print(name, measured[name], flush=True)
    found: dict[str, Any] = {"tokens": sum(map(len, made)), "engine against score": measured}
    imitation = Imitation(model)
    truth = imitation.logprobs(made, set(), 0.0)
    for dtype in (torch.bfloat16, torch.float16):
        imitation.dtype, rows = dtype, {}
        for name, left_out in LEFT_OUT.items():
            first, second = (imitation.logprobs(made, ALL - left_out, noise) for noise in (0.0, NOISE))
            rows[name] = {"apart": gap(first, second), "from float32": gap(first, truth)}
            print(dtype, name, rows[name]["apart"]["mean"], flush=True)
            if dtype == torch.float16 and name == "float32 residual":
                break
        found[f"imitated, {str(dtype).removeprefix('torch.')}"] = rows
    return found


def sparse_rows(model: str, tokens: int) -> dict[str, Any]:
    found = {}
    for name, residual in (("bfloat16", None), ("bfloat16, float32 residual", "float32")):
        found[name] = sparse(model, "bfloat16", residual, tokens)
        print(name, {policy: row["mean"] for policy, row in found[name].items()}, flush=True)
    return {"sparse forward against engine": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True, help="results are merged into this file")
    parser.add_argument("--only", choices=("dense", "sparse"), help="one of the two parts")
    parser.add_argument("--tokens", type=int, default=160)
    arguments = parser.parse_args()
    found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    found |= {"model": Path(arguments.model).name, "torch": torch.__version__}
    for part, rows in (("dense", dense_rows), ("sparse", sparse_rows)):
        if arguments.only in (None, part):
            found |= rows(arguments.model, arguments.tokens)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
