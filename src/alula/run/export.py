"""Exports a trained model as a Hugging Face folder that transformers loads."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from alula.distributed import World
from alula.files import apply_umask
from alula.models.load import no_progress_bars


def export(
    folder: Path | str,
    model: PreTrainedModel,
    parameters: Iterable[tuple[str, Tensor]],
    tokenizer: Any | None = None,
    world: World | None = None,
    card: str | None = None,
) -> Path:
    """Write `parameters` (see `Learner.full_parameters`) with the config of `model`, in their dtype; `card` is the
    README.md.

    Every rank must call it; the first one writes. An existing folder is replaced once the new one is complete.
    """
    world, final = world or World(), Path(folder)
    state: dict[str, Tensor] = {}
    for name, value in parameters:
        if world.rank == 0:
            state[name] = value.detach().cpu().contiguous()
    if world.rank == 0:
        aside, old = (final.with_name(f".{kind}-{final.name}") for kind in ("aside", "old"))
        for leftover in (aside, old):
            shutil.rmtree(leftover, ignore_errors=True)
        aside.mkdir(parents=True)
        with no_progress_bars():  # they would break the live display
            model.save_pretrained(aside, state_dict=state)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        if card is not None:
            (aside / "README.md").write_text(card)
        apply_umask(aside)
        if final.exists():
            final.rename(old)
        aside.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    world.barrier()
    return final
