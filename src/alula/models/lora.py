"""LoRA: low-rank updates of linear layers, for the learner and for the sparse rollout's adapter.

    W' = W + (alpha / rank) · B A        A [rank, in], B [out, rank]

The update is trained as two thin products next to the frozen layer (`LoRALinear`). For the engine it is merged into the
weights, where it costs nothing per token. Adapters are saved in peft's file format.
"""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from alula.distributed import full_tensor
from alula.errors import SettingError, require, unknown
from alula.files import apply_umask

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
BASE = ".base"
VARIANTS = (
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "alora_invocation_tokens",
    "layer_replication",
)
"""Settings of peft that change what an adapter with plain tensors computes."""
CHANGE_THE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Initial values of peft that are taken out of the model's own weights."""


@dataclass
class Adapter:
    """The LoRA weights of a model: `weights[module] = (A, B)`, keyed by the module's name in the Hugging Face model."""

    rank: int
    alpha: float
    weights: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    base_model: str = ""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def save(self, folder: str | Path) -> None:
        """Write files that `peft.PeftModel.from_pretrained` can read."""
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
        apply_umask(folder)

    @classmethod
    def load(cls, folder: str | Path, setting: str = "sparse_adapter") -> "Adapter":
        """Read a plain LoRA written by `save` or by peft. Variants such as DoRA raise.

        `setting` is the name of the setting that gave the folder, for error messages.
        """
        given, folder = f"{setting}={str(folder)!r}", Path(folder).expanduser()
        for name in (SETTINGS, WEIGHTS):
            require(
                (folder / name).is_file(),
                f"{given}: there is no {name}; name adapter/ of `alula distill`, or sparse_adapter/ of a run.",
            )
        try:
            settings = json.loads((folder / SETTINGS).read_text())
            require(isinstance(settings, dict), f"{SETTINGS} must hold a JSON object")
            tensors = load_file(folder / WEIGHTS)
            rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise SettingError(f"{given}: not a LoRA adapter ({error}).") from error
        unsupported = [name for name in VARIANTS if settings.get(name)]
        if str(initial := settings.get("init_lora_weights")).startswith(CHANGE_THE_BASE):
            unsupported.append(f"init_lora_weights={initial}, which changes the model's weights,")
        unsupported += [name for name in tensors if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
        require(not unsupported, f"{given}: {', '.join(unsupported[:3])} is not plain LoRA.")
        names = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors}
        halves = {name: [f"{PREFIX}{name}.lora_{half}.weight" for half in "AB"] for name in sorted(names)}
        missing = [half for both in halves.values() for half in both if half not in tensors]
        require(
            not missing,
            f"{given}: {WEIGHTS} has no tensor {', '.join(missing[:1])}; save it with peft's `save_pretrained`.",
        )
        weights = {name: (tensors[a], tensors[b]) for name, (a, b) in halves.items()}
        return cls(rank, alpha, weights, settings.get("base_model_name_or_path") or "")


class LoRALinear(nn.Module):
    """A linear layer with its low-rank update."""

    def __init__(self, base: nn.Linear, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.base, self.scale, self.enabled = base, scale, True
        self.lora_a, self.lora_b = nn.Parameter(a), nn.Parameter(b)

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return self.base(x)
        # Scale the product of width `rank`, which is small; a compiled layer fuses the sum into the next operation.
        return self.base(x) + F.linear(self.scale * F.linear(x, self.lora_a), self.lora_b)


# -- building adapters ------------------------------------------------------------------------------------


def linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """All linear layers except the output head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield name, module


def targeted(model: PreTrainedModel, targets: Iterable[str]) -> list[str]:
    """Names of the linear layers selected by `targets`: `all`, or last name parts such as q_proj."""
    names = [name for name, _ in linears(model)]
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in names)
    wanted = list(kinds) if list(targets) == ["all"] else list(targets)
    for target in wanted:
        if target not in kinds:
            raise unknown("distill target", target, ["all", *kinds])
    return [name for name in names if name.rpartition(".")[2] in wanted]


def init_adapter(model: PreTrainedModel, rank: int, alpha: float, targets: Iterable[str], seed: int) -> Adapter:
    """A new adapter that changes nothing yet: A is Kaiming-uniform, B is zero."""
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


def init_like_peft(model: PreTrainedModel, rank: int, alpha: float, seed: int) -> Adapter:
    """A new adapter of all linear layers with the random numbers that peft draws after `torch.manual_seed(seed)`."""
    weights = {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, module in linears(model):
            a = nn.Linear(module.in_features, rank, bias=False)
            b = nn.Linear(rank, module.out_features, bias=False)  # draws numbers too, as in peft
            nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))
            nn.init.zeros_(b.weight)
            weights[name] = (a.weight.detach(), b.weight.detach())
    return Adapter(rank, alpha, weights)


# -- adapters in models -----------------------------------------------------------------------------------


def attach(model: PreTrainedModel, adapter: Adapter) -> dict[str, LoRALinear]:
    """Wrap the adapter's layers in `LoRALinear`, in place. The wrapped layers keep their parameter objects."""
    check_fits(model, adapter)
    layers = {}
    for name, (a, b) in adapter.weights.items():
        parent, _, leaf = name.rpartition(".")
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        like = base.weight
        layers[name] = LoRALinear(base, a.detach().to(like).clone(), b.detach().to(like).clone(), adapter.scale)
        setattr(model.get_submodule(parent), leaf, layers[name])
    return layers


def attach_trainable(model: PreTrainedModel, rank: int, alpha: float, seed: int) -> None:
    """Freeze the model and attach a new adapter to all its linear layers, in place.

    The adapter has the model's dtype; the optimizer holds its float32 master weights.
    """
    attach(model, init_like_peft(model, rank, alpha, seed))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def attached(model: nn.Module, rank: int, alpha: float) -> Adapter:
    """The adapter that was attached to a model, unsharded."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    weights = {
        name: (full_tensor(layer.lora_a.detach()), full_tensor(layer.lora_b.detach())) for name, layer in layers.items()
    }
    return Adapter(rank, alpha, weights)


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Run the model without its adapter: the policy that training started from."""
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def check_fits(model: PreTrainedModel, adapter: Adapter) -> None:
    """Raise if the adapter was built for another model."""
    shapes = {name: module.weight.shape for name, module in linears(model)}
    for name, (a, b) in adapter.weights.items():
        if name not in shapes:
            raise unknown("module in the sparse adapter", name, shapes)
        shape = (b.shape[0], a.shape[1])
        require(
            shape == tuple(shapes[name]) and a.shape[0] == b.shape[1] == adapter.rank,
            f"sparse adapter: {name} is built for a weight of shape {shape} at rank {a.shape[0]}, but the model has "
            f"{tuple(shapes[name])} at rank {adapter.rank}.",
        )


# -- merging ----------------------------------------------------------------------------------------------


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """float32 W + scale · B A."""
    return torch.addmm(
        weight.float(), b.to(weight.device, torch.float32), a.to(weight.device, torch.float32), alpha=scale
    )


def merged_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and unsharded values of the model's parameters with the attached adapter merged in."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            continue
        module, _, leaf = name.rpartition(".")
        value = full_tensor(parameter.detach())
        if module.endswith(BASE):
            module = module.removesuffix(BASE)
            layer = model.get_submodule(module)
            if leaf == "weight" and isinstance(layer, LoRALinear):
                a, b = (full_tensor(each.detach()) for each in (layer.lora_a, layer.lora_b))
                value = merged_weight(value, a, b, layer.scale).to(value.dtype)
        yield f"{module}.{leaf}", value


def copy_linears(model: PreTrainedModel) -> None:
    """Give a model that shares its parameters separate linear layers, as the target of `merge`."""
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
                value = merged_weight(value, *adapter.weights[name], adapter.scale)
            parameter.copy_(value)
