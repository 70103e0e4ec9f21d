"""An endless stream of prompts, shuffled again every epoch, with a position that can be saved and restored."""

from functools import cached_property
from typing import Any

from alula.data.dataset import Dataset, Example, shuffled
from alula.errors import SettingError, require


class PromptStream:
    """Every epoch visits every example once, in an order that depends only on (seed, epoch).

    A batch may span two epochs: nothing is dropped at the boundary and nothing is visited twice.
    """

    def __init__(self, dataset: Dataset, seed: int = 0) -> None:
        require(len(dataset) > 0, "the data set is empty; nothing to train on.")
        self.dataset, self.seed = dataset, seed
        self.epoch, self.position = 0, 0
        self._order = shuffled(len(dataset), seed, 0)

    @property
    def seen(self) -> int:
        """Examples returned since the beginning."""
        return self.epoch * len(self.dataset) + self.position

    def next(self, count: int) -> list[Example]:
        taken: list[Example] = []
        while len(taken) < count:
            if self.position == len(self.dataset):
                self._seek(self.epoch + 1, 0)
            end = min(self.position + count - len(taken), len(self.dataset))
            taken += [self.dataset[i] for i in self._order[self.position : end]]
            self.position = end
        return taken

    @cached_property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint()

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "data": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["data"] != self.fingerprint:
            raise SettingError(
                "the training data differs from the checkpoint's, so its position is not valid; restore the data and "
                "its settings (eval.size and eval.every too, if examples are set aside), or start a new run."
            )
        require(
            state["seed"] == self.seed,
            f"seed={self.seed}: the checkpoint's data order has seed {state['seed']}; use that one.",
        )
        self._seek(state["epoch"], state["position"])

    def _seek(self, epoch: int, position: int) -> None:
        if epoch != self.epoch:
            self._order = shuffled(len(self.dataset), self.seed, epoch)
        self.epoch, self.position = epoch, position
