"""The work file of a calibration: its text and every tail measured so far, written whole after each of them."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from alula.engine.engine import Engine
from alula.engine.rollout import Rollout, Sampling
from alula.errors import SettingError
from alula.files import check_same_settings, write_atomically
from alula.mismatch.calibrate.file import Measured, tail_from_dict, tail_to_dict
from alula.mismatch.measure import Bins
from alula.mismatch.tail import Estimate, Tail
from alula.models.residual import residual_of
from alula.sparsity.family import PolicyFamily

if TYPE_CHECKING:
    from alula.mismatch.calibrate.calibrate import Text

VERSION = 1


@dataclass
class Work:
    path: Path
    made_with: dict[str, Any]
    """What every number in it depends on: another value makes it another calibration."""
    sampling: Sampling
    rollouts: list[Rollout] = field(default_factory=list)
    floor: Tail | None = None
    measured: dict[tuple[PolicyFamily, int], Measured] = field(default_factory=dict)
    forward: dict[str, Estimate] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, engine: Engine, text: "Text", bins: Bins) -> "Work":
        """The work done so far, or none; work of another calibration is refused, not overwritten."""
        work = cls(path, made_with(engine, text, bins), text.sampling)
        if path.exists():
            work._read()
        return work

    def keep_text(self, rollouts: list[Rollout], floor: Tail) -> None:
        self.rollouts, self.floor = rollouts, floor
        self._write()

    def keep(self, measured: Measured) -> None:
        self.measured[measured.family, measured.budget] = measured
        self._write()

    def keep_forward(self, name: str, tail: Estimate) -> None:
        self.forward[name] = tail
        self._write()

    def notes(self) -> dict[str, Any]:
        return self.made_with | {"tokens": sum(map(len, self.rollouts))}

    def _write(self) -> None:
        data = {
            "version": VERSION,
            "made_with": self.made_with,
            "text": [[r.prompt_index, r.sample_index, r.prompt_ids, r.token_ids] for r in self.rollouts],
            "floor": None if self.floor is None else tail_to_dict(self.floor),
            "measured": [one.to_dict() for one in self.measured.values()],
            "forward": {name: asdict(tail) for name, tail in self.forward.items()},
        }
        write_atomically(self.path, json.dumps(data, allow_nan=False) + "\n")

    def _read(self) -> None:
        try:
            data = json.loads(self.path.read_text())
            before = data["made_with"] if data["version"] == VERSION else {}
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise SettingError(f"work file {self.path}: not one of a calibration ({error!r}); remove it.") from error
        hint = "use the same setting to continue, remove the file to start again, or write to another one"
        check_same_settings(f"work file {self.path}", before, self.made_with, hint)
        self.rollouts = [
            Rollout(prompt, tokens, None, "length", prompt_index=i, sample_index=k, sampling=self.sampling)
            for i, k, prompt, tokens in data["text"]
        ]
        self.floor = None if data["floor"] is None else tail_from_dict(data["floor"])
        for one in map(Measured.from_dict, data["measured"]):
            self.measured[one.family, one.budget] = one
        self.forward = {name: Estimate(**tail) for name, tail in data["forward"].items()}


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Of 64 values spread over each tensor: two models of one name, or a model and its trained self, differ in it."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        flat = tensor.detach().flatten()
        found.update(flat[:: max(1, len(flat) // 64)].float().cpu().numpy().tobytes())
    return found.hexdigest()


def made_with(engine: Engine, text: "Text", bins: Bins) -> dict[str, Any]:
    prompts = hashlib.blake2b(json.dumps(text.prompts).encode(), digest_size=8).hexdigest()
    return {
        "model": engine.name,
        "weights": fingerprint(p for _, p in sorted(engine.model.named_parameters())),
        "adapter": "none" if engine.sparse_model is None else fingerprint(engine.sparse_model.parameters()),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "residual": residual_of(engine.model),
        "device": engine.device.type,
        "prompts": len(text.prompts),
        "prompt_ids": prompts,
        "length": text.length,
        "samples": text.samples,
        "temperature": text.temperature,
        "seed": text.seed,
        "bin": bins.width,
        "bins": bins.count,
        "quantile": bins.quantile,
        "confidence": bins.confidence,
    }
