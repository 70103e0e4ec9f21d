"""φ: low-rank updates of linear layers that only the sparse rollout uses. Files are those of a peft adapter.

    W_sparse = W + (alpha / rank) · B A        A [rank, in], B [out, rank]

Trained as two thin products beside the frozen layer (`LowRank`), and merged into the engine's own weights, where it
then costs nothing per token.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from alula.errors import SettingError, require, unknown

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


@dataclass
class Adapter:
    """`weights[module] = (A, B)`, by the module's name in the Hugging Face model."""

    rank: int
    alpha: float
    weights: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    base_model: str = ""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def save(self, folder: str | Path) -> None:
        """As `peft.PeftModel.from_pretrained` reads it."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, (a, b) in self.weights.items():
            tensors[f"{PREFIX}{name}.lora_A.weight"] = a.detach().cpu().contiguous()
            tensors[f"{PREFIX}{name}.lora_B.weight"] = b.detach().cpu().contiguous()
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted(self.weights),
            "bias": "none",
            "inference_mode": True,
        }
        (folder / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n")

    @classmethod
    def load(cls, folder: str | Path, setting: str = "sparse_adapter") -> "Adapter":
        """A plain LoRA written by `save` or by peft; anything beyond W + scale · B A is refused. `setting` is what the
        caller calls the folder."""
        given, folder = f"{setting}={str(folder)!r}", Path(folder).expanduser()
        for name in (SETTINGS, WEIGHTS):
            require(
                (folder / name).is_file(),
                f"{given}: there is no {name}; name a folder that `alula distill` or a run with distill wrote.",
            )
        try:
            settings = json.loads((folder / SETTINGS).read_text())
            tensors = load_file(folder / WEIGHTS)
            rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
        except (ValueError, KeyError, SafetensorError) as error:
            raise SettingError(f"{given}: not a LoRA adapter ({error}).") from error
        strange = [name for name in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern") if settings.get(name)]
        strange += [name for name in tensors if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
        require(not strange, f"{given}: {', '.join(strange[:3])} is not plain LoRA.")
        names = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors}
        weights = {
            name: (tensors[f"{PREFIX}{name}.lora_A.weight"], tensors[f"{PREFIX}{name}.lora_B.weight"])
            for name in sorted(names)
        }
        return cls(rank, alpha, weights, settings.get("base_model_name_or_path") or "")


class LowRank(nn.Module):
    """A linear layer and its low-rank update."""

    def __init__(self, base: nn.Linear, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.lora_a, self.lora_b = nn.Parameter(a), nn.Parameter(b)

    def forward(self, x: Tensor) -> Tensor:
        # `scale` on the product of width `rank`, which is small; a compiled layer fuses the sum into what follows.
        return self.base(x) + F.linear(self.scale * F.linear(x, self.lora_a), self.lora_b)


def linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """Every linear layer but the head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield name, module


def targeted(model: PreTrainedModel, targets: Iterable[str]) -> list[str]:
    """Names of the linear layers that `targets` mean: `all`, or last parts of names such as q_proj."""
    names = [name for name, _ in linears(model)]
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in names)
    wanted = list(kinds) if list(targets) == ["all"] else list(targets)
    for target in wanted:
        if target not in kinds:
            raise unknown("distill target", target, ["all", *kinds])
    return [name for name in names if name.rpartition(".")[2] in wanted]


def fresh(model: PreTrainedModel, rank: int, alpha: float, targets: Iterable[str], seed: int) -> Adapter:
    """An adapter that changes nothing: A drawn as peft draws it (Kaiming, uniform), B zero."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name in targeted(model, targets):
        weight = model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        out_features, in_features = weight.shape
        bound = 1 / math.sqrt(in_features)
        a = (2 * torch.rand(rank, in_features, generator=generator) - 1) * bound
        weights[name] = (a.to(weight.device, weight.dtype), weight.new_zeros(out_features, rank))
    return Adapter(rank, alpha, weights)


def attach(model: PreTrainedModel, adapter: Adapter) -> dict[str, LowRank]:
    """Put the adapter's layers into `model`, in place; the layers below stay the very same modules."""
    check(model, adapter)
    layers = {}
    for name, (a, b) in adapter.weights.items():
        parent, _, leaf = name.rpartition(".")
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        like = base.weight
        layers[name] = LowRank(base, a.detach().to(like).clone(), b.detach().to(like).clone(), adapter.scale)
        setattr(model.get_submodule(parent), leaf, layers[name])
    return layers


def check(model: PreTrainedModel, adapter: Adapter) -> None:
    """Refuse an adapter of another model."""
    known = {name: module.weight.shape for name, module in linears(model)}
    for name, (a, b) in adapter.weights.items():
        if name not in known:
            raise unknown("module in the sparse adapter", name, known)
        shape = (b.shape[0], a.shape[1])
        require(
            shape == tuple(known[name]) and a.shape[0] == b.shape[1] == adapter.rank,
            f"sparse adapter: {name} is made for a weight of shape {shape} at rank {a.shape[0]}, the model has "
            f"{tuple(known[name])} at rank {adapter.rank}.",
        )


def own_linears(model: PreTrainedModel) -> None:
    """Give a model that shares its parameters linear layers of its own, to merge an adapter into."""
    for _, module in linears(model):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))


@torch.no_grad()
def merge(adapter: Adapter, dense: PreTrainedModel, sparse: PreTrainedModel) -> None:
    """Write W + scale · B A of `dense` into the linear layers of `sparse`, in place, rounded once.

    An adapter of zeros copies W bit for bit.
    """
    for name, module in linears(sparse):
        source = dense.get_submodule(name)
        for leaf, parameter in module.named_parameters(recurse=False):
            value = getattr(source, leaf)
            if leaf == "weight" and name in adapter.weights:
                a, b = (x.to(value.device, torch.float32) for x in adapter.weights[name])
                value = torch.addmm(value.float(), b, a, alpha=adapter.scale)
            parameter.copy_(value)
