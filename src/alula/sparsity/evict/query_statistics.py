"""Statistics of a model's queries, by head and RoPE frequency: what TriAttention knows of future queries."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from alula.errors import SettingError
from alula.files import replacement

FORMAT = "alula-query-statistics"


@dataclass(frozen=True, eq=False)
class QueryStatistics:
    """Means over the tokens of a text. A query before its rotation is one complex number per frequency f:
    q_f = q[f] + i·q[f + D/2]. Frequencies number F = D/2."""

    frequencies: Tensor
    """fp64 [F] ω: a token at position p is rotated by ω_f·p"""
    rope_scaling: float
    """the factor by which the rotation also lengthens queries and keys (YaRN); mostly 1"""
    mean: Tensor
    """complex64 [L, Hq, F] the mean of q_f"""
    size: Tensor
    """fp32 [L, Hq, F] the mean of |q_f|"""
    text: tuple[tuple[int, ...], ...]
    """the token ids that were measured"""

    def to(self, device: torch.device) -> "QueryStatistics":
        tensors = (self.frequencies.to(device), self.mean.to(device), self.size.to(device))
        return QueryStatistics(tensors[0], self.rope_scaling, tensors[1], tensors[2], self.text)

    def save(self, path: Path) -> None:
        """Write a safetensors file, atomically."""
        tensors = {
            "frequencies": self.frequencies,
            "mean": torch.view_as_real(self.mean).contiguous(),
            "size": self.size.contiguous(),
            "tokens": torch.tensor([token for sequence in self.text for token in sequence]),
            "lengths": torch.tensor([len(sequence) for sequence in self.text]),
        }
        metadata = {"format": FORMAT, "rope_scaling": repr(self.rope_scaling)}
        with replacement(path) as part:
            save_file({name: tensor.cpu() for name, tensor in tensors.items()}, part, metadata)

    @classmethod
    def load(cls, path: Path) -> "QueryStatistics":
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise SettingError(f"statistics={path}: cannot be read ({error}).") from None
        if metadata.get("format") != FORMAT:
            raise SettingError(
                f"statistics={path}: holds no statistics of queries; write it with `alula calibrate --statistics`."
            )
        text = tuple(tuple(part.tolist()) for part in tensors["tokens"].split(tensors["lengths"].tolist()))
        mean = torch.view_as_complex(tensors["mean"])
        return cls(tensors["frequencies"], float(metadata["rope_scaling"]), mean, tensors["size"], text)
