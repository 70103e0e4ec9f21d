"""The long beds: generated tasks whose answers are long and whose choices carry entropy, on SmolLM2-135M and, smaller,
on a tiny model for the CPU. Design and gates: docs/results/long-bed.md.

`search` writes the search of a Countdown problem out; `machine` executes a register program line by line. Both are
warmed up on careful traces only (`alula.data.tasks.search`, `alula.data.tasks.machine`): traces differ in their
heuristics and line formats, and there is no shortcut to fall for.
"""

from dataclasses import dataclass, replace
from typing import Any

from beds import SMOLLM2, TINY, TaskBed, smollm2

from alula.data.tasks.machine import Machine
from alula.data.tasks.search import Search
from alula.data.tasks.tokenizer import task_tokenizer
from alula.demo.tiny_model import WarmUp, tiny_llama


@dataclass(frozen=True, kw_only=True)
class LongBed(TaskBed):
    """A task of `alula.data.tasks` without a shortcut to be tempted by."""

    def is_shortcut(self, text: str) -> bool:
        return False

    def grade(self, texts: list[str], examples: list[dict[str, Any]]) -> list[float]:
        return [self.task.score(text, example) for text, example in zip(texts, examples)]


def tiny(task: Any, seed: int) -> tuple[Any, Any]:
    """86,000 parameters with random weights and room for the long answers, one token per word."""
    tokenizer = task_tokenizer(task)
    return tiny_llama(len(tokenizer), tokenizer, seed, positions=1024), tokenizer


SEARCH_TINY = LongBed(
    name="search-tiny",
    task=Search(numbers=3, largest=9, limit=30, tries=14),
    fresh=tiny,
    warm=WarmUp(
        batch=48,
        careful_steps=500,
        mastered=0.0,
        careful_lr=5e-3,
        mixture_steps=300,
        mixture_lr=2e-3,
        careful_share=1.0,
    ),
    warm_seeds=True,
    evict="+4,window=4,sinks=8",
    budgets=(16, 32, 48, 64),
    select=",block=4,dense_layers=0",
    read_budgets=(12, 20, 28, 36, 48, 64, 96),
    distill=TINY.distill,
    distill_first=TINY.distill_first,
    train_problems=2048,
    held_out=256,
    probe_prompts=64,
    longest=320,
    bin=48,
)
MACHINE_TINY = replace(
    SEARCH_TINY,
    name="machine-tiny",
    task=Machine(registers=2, statements=2, min_rounds=8, max_rounds=8, marked=1),
    evict="+8,window=8,sinks=8",
    budgets=(16, 24, 32, 48, 64, 96),
    longest=240,
)
SEARCH = LongBed(
    name="search",
    task=Search(numbers=5, largest=30, limit=120, tries=96),
    fresh=smollm2,
    warm=WarmUp(
        batch=32,
        careful_steps=300,
        mastered=0.0,
        careful_lr=3e-4,
        mixture_steps=100,
        mixture_lr=1e-4,
        careful_share=1.0,
    ),
    warm_seeds=False,
    evict="+64,window=32,sinks=32",
    budgets=(64, 128, 192, 256, 384),
    select=SMOLLM2.select,
    read_budgets=(64, 128, 192, 256, 384),
    distill=SMOLLM2.distill,
    distill_first=SMOLLM2.distill_first,
    train_problems=4096,
    held_out=1024,
    probe_prompts=64,
    longest=6144,
    bin=1024,
)
MACHINE = replace(
    SEARCH,
    name="machine",
    task=Machine(registers=6, statements=8, min_rounds=46, max_rounds=50),
    evict="+64,window=32,sinks=64",
    budgets=(96, 128, 192, 256, 384),
)
LONG_BEDS = {bed.name: bed for bed in (SEARCH_TINY, MACHINE_TINY, SEARCH, MACHINE)}
