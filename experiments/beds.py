"""The two test beds: a task that tempts a model to stop thinking under a small KV cache, and a model warmed up on it.

Pointer chasing with a hint (`alula.demo.problems`): the careful chain looks every hop up in its own context and is
right as long as it can; the shortcut repeats the hint and is right in a fixed share of problems. Both beds are warmed
up on 60 % careful chains and 40 % shortcuts, so that reinforcement learning decides between the two.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from alula.data.tasks.tokenizer import task_tokenizer
from alula.demo.problems import HintedPointer, write_problems
from alula.demo.tiny_model import Progress, WarmUp, teach, tiny_llama
from alula.errors import SettingError
from alula.model import load_model
from alula.rl.export import export

HERE = Path(__file__).parent


def tiny(task: HintedPointer, seed: int) -> tuple[Any, Any]:
    """85,000 parameters with random weights, and a word-level tokenizer."""
    tokenizer = task_tokenizer(task)
    return tiny_llama(len(tokenizer), tokenizer, seed), tokenizer


def smollm2(task: HintedPointer, seed: int) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct with its own tokenizer, from the GGUF file that ALULA_SMOLLM2 names."""
    path = os.environ.get("ALULA_SMOLLM2")
    if not path:
        raise SettingError("ALULA_SMOLLM2 is not set; let it name SmolLM2-135M-Instruct's GGUF file (`make model`).")
    cuda = torch.cuda.is_available()
    loaded = load_model(path, device="cuda" if cuda else "cpu", dtype="bfloat16" if cuda else "float32")
    return loaded.model, loaded.tokenizer


@dataclass(frozen=True)
class Bed:
    name: str
    task: HintedPointer
    fresh: Callable[[HintedPointer, int], tuple[Any, Any]]
    """(task, seed) -> model before the warm-up, tokenizer."""
    warm: WarmUp
    warm_seeds: bool
    """Whether every seed has a warm-up of its own; otherwise all start from the same model."""
    evict: str
    """What follows an evictor's budget: buffer, window, sinks."""
    budgets: tuple[int, ...]
    select: str
    """What follows a selector's budget."""
    read_budgets: tuple[int, ...]
    train_problems: int
    held_out: int
    probe_prompts: int

    @property
    def recipe(self) -> Path:
        return HERE / f"{self.name}.yaml"

    def evictor(self, method: str, budget: int) -> str:
        """As the command line spells it."""
        return f"{method}:{budget}{self.evict}"

    def selector(self, budget: int) -> str:
        return f"block-topk:{budget}{self.select}"


TINY = Bed(
    name="tiny",
    task=HintedPointer(symbols=12, min_hops=10, max_hops=12, hint=0.5),
    fresh=tiny,
    warm=WarmUp(careful_steps=1000, mastered=0.003, careful_lr=3e-3, mixture_steps=150, mixture_lr=2e-3),
    warm_seeds=True,
    evict="+4,window=4,sinks=1",
    budgets=(16, 20, 24, 28, 32, 36, 40, 44, 48, 52),
    select=",block=4,dense_layers=0",
    read_budgets=(12, 16, 20, 24, 28, 32, 36, 40, 44, 48),
    train_problems=2048,
    held_out=256,
    probe_prompts=128,
)
SMOLLM2 = Bed(
    name="smollm2",
    task=HintedPointer(symbols=26, min_hops=50, max_hops=60, hint=0.5),
    fresh=smollm2,
    warm=WarmUp(problems=4096, batch=64, careful_steps=400, mastered=0.0005, careful_lr=3e-4, mixture_steps=100,
                mixture_lr=1e-4),
    warm_seeds=False,
    evict="+16,window=8,sinks=4",
    budgets=(48, 64, 96, 128, 160, 192, 256, 320),
    select=",block=16,dense_layers=2",
    read_budgets=(48, 64, 96, 128, 160, 192, 256, 320),
    train_problems=4096,
    held_out=256,
    probe_prompts=64,
)  # fmt: skip
BEDS = {bed.name: bed for bed in (TINY, SMOLLM2)}


def prepared(bed: Bed, seed: int, work: Path, progress: Progress) -> Path:
    """Folder with `model`, `train.jsonl` and `held.jsonl` of a seed, made where it is missing."""
    start, own = work / f"start-{seed if bed.warm_seeds else 0}", work / f"data-{seed}"
    if not (start / "model").exists():
        warm_seed = seed if bed.warm_seeds else 0
        model, tokenizer = bed.fresh(bed.task, warm_seed)
        learner = teach(model, tokenizer, bed.task, bed.warm, warm_seed, progress)
        export(start / "model", model, learner.full_parameters(), tokenizer)
    if not (own / "held.jsonl").exists():
        own.mkdir(parents=True, exist_ok=True)
        write_problems(bed.task.dataset(bed.train_problems, 1000 + seed), own / "train.jsonl")
        write_problems(bed.task.dataset(bed.held_out, 2000 + seed), own / "held.jsonl")
    return start
