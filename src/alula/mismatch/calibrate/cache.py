"""The work file of a calibration: its text and all tails measured so far, rewritten after each measurement."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from alula.engine.engine import Engine
from alula.engine.rollout import Rollout, Sampling
from alula.files import read_continued, write_atomically
from alula.mismatch.calibrate.file import MeasuredPolicy, tail_from_dict, tail_to_dict
from alula.mismatch.measure import Bins
from alula.mismatch.tail import BinTail, Tail
from alula.models.residual import residual_of
from alula.sparsity.family import PolicyFamily

if TYPE_CHECKING:
    from alula.mismatch.calibrate.calibrate import TextSettings


@dataclass
class CalibrationCache:
    """Measurements of a calibration, saved to its work file."""

    path: Path
    settings: dict[str, Any]
    """Settings that the measurements depend on. A work file with other values is rejected."""
    sampling: Sampling
    rollouts: list[Rollout] = field(default_factory=list)
    floor: Tail | None = None
    measured: dict[tuple[PolicyFamily, int], MeasuredPolicy] = field(default_factory=dict)
    bin_tails: dict[str, BinTail] = field(default_factory=dict)
    """Tails of single bins under growing schedules, by `MeasureBin.key`."""

    @classmethod
    def open(cls, path: Path, engine: Engine, text: "TextSettings", bins: Bins) -> "CalibrationCache":
        """Read the work file if it exists; raises if it was written with other settings."""
        cache = cls(path, calibration_settings(engine, text, bins), text.sampling)
        if path.exists():
            cache._read()
        return cache

    def add_text(self, rollouts: list[Rollout], floor: Tail) -> None:
        self.rollouts, self.floor = rollouts, floor
        self._write()

    def add_policy(self, measured: MeasuredPolicy) -> None:
        self.measured[measured.family, measured.budget] = measured
        self._write()

    def add_bin_tail(self, name: str, tail: BinTail) -> None:
        self.bin_tails[name] = tail
        self._write()

    def notes(self) -> dict[str, Any]:
        return self.settings | {"tokens": sum(map(len, self.rollouts))}

    def _write(self) -> None:
        data = {
            "settings": self.settings,
            "text": text_to_lists(self.rollouts),
            "floor": None if self.floor is None else tail_to_dict(self.floor),
            "measured": [one.to_dict() for one in self.measured.values()],
            "bin_tails": {name: asdict(tail) for name, tail in self.bin_tails.items()},
        }
        write_atomically(self.path, json.dumps(data, allow_nan=False) + "\n")

    def _read(self) -> None:
        data = read_continued(self.path, "work file", self.settings, ("text", "floor", "measured", "bin_tails"))
        self.rollouts = text_from_lists(data["text"], self.sampling)
        self.floor = None if data["floor"] is None else tail_from_dict(data["floor"])
        for one in map(MeasuredPolicy.from_dict, data["measured"]):
            self.measured[one.family, one.budget] = one
        self.bin_tails = {name: BinTail(**tail) for name, tail in data["bin_tails"].items()}


def text_to_lists(rollouts: Iterable[Rollout]) -> list[list[Any]]:
    return [[r.prompt_index, r.sample_index, r.prompt_ids, r.token_ids] for r in rollouts]


def text_from_lists(lists: Iterable[list[Any]], sampling: Sampling) -> list[Rollout]:
    """Rollouts without log-probs."""
    return [
        Rollout(prompt, tokens, None, "length", prompt_index=i, sample_index=k, sampling=sampling)
        for i, k, prompt, tokens in lists
    ]


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Hash of 64 values from each tensor: tells models of the same name apart, such as before and after training."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        flat = tensor.detach().flatten()
        digest.update(flat[:: max(1, len(flat) // 64)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def calibration_settings(engine: Engine, text: "TextSettings", bins: Bins) -> dict[str, Any]:
    return text_settings(engine, text) | {
        "bin": bins.width,
        "bins": bins.count,
        "quantile": bins.quantile,
        "confidence": bins.confidence,
    }


def text_settings(engine: Engine, text: "TextSettings") -> dict[str, Any]:
    """What rollouts of the dense policy, and of a sparse one, depend on."""
    prompts = hashlib.blake2b(json.dumps(text.prompts).encode(), digest_size=8).hexdigest()
    return {
        "model": engine.name,
        "weights": fingerprint(p for _, p in sorted(engine.model.named_parameters())),
        "adapter": "none" if engine.sparse_model is None else fingerprint(engine.sparse_model.parameters()),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "residual": residual_of(engine.model),
        "kv_dtype": engine.geometry.kv_dtype,
        "device": engine.device.type,
        "prompts": len(text.prompts),
        "length": text.length,
        "samples": text.samples,
        "temperature": text.temperature,
        "seed": text.seed,
        "text": "own" if text.own else "dense",
        "prompt_ids": prompts,  # last: the seed and what else may have changed them is named before
    }
