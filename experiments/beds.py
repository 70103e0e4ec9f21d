"""The test beds: a task that tempts a model to stop thinking under a small KV cache, and a model warmed up on it.

Pointer chasing with a hint (`alula.demo.problems`): the careful chain looks every hop up in its own context and is
right as long as it can; the shortcut repeats the hint and is right in a fixed share of problems. `programs` does the
same with code: the careful program looks every statement up, the shortcut calls a function that is right in a fixed
share of problems. These three beds are warmed up on 60 % careful answers and 40 % shortcuts, so that reinforcement
learning decides between the two. Two more beds have no shortcut: GSM8K as it is, and open-ended `tips` under a rule.
"""

import json
import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import programs
import tips
import torch
from lines import write_lines

from alula.data import Dataset, prepare
from alula.data.dataset import Example
from alula.data.tasks.pointer import Pointer
from alula.data.tasks.tokenizer import task_tokenizer
from alula.demo.problems import HintedPointer, write_problems
from alula.demo.tiny_model import Progress, WarmUp, teach, tiny_llama
from alula.errors import SettingError
from alula.learner.learner import Learner
from alula.learner.sft import Trace, warm_up
from alula.models.load import load_model
from alula.run.export import export
from alula.settings import LearnerSettings

HERE = Path(__file__).parent


def tiny(task: Any, seed: int) -> tuple[Any, Any]:
    """85,000 parameters with random weights, and a tokenizer with one token per word of the task."""
    tokenizer = task_tokenizer(task)
    return tiny_llama(len(tokenizer), tokenizer, seed), tokenizer


def smollm2(task: HintedPointer | None, seed: int) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct with its own tokenizer, from the GGUF file that ALULA_SMOLLM2 names."""
    path = os.environ.get("ALULA_SMOLLM2")
    if not path:
        raise SettingError("ALULA_SMOLLM2 is not set; let it name SmolLM2-135M-Instruct's GGUF file (`make model`).")
    cuda = torch.cuda.is_available()
    loaded = load_model(path, device="cuda" if cuda else "cpu", dtype="bfloat16" if cuda else "float32")
    return loaded.model, loaded.tokenizer


@dataclass(frozen=True, kw_only=True)
class Bed:
    name: str
    warm_seeds: bool
    """Whether every seed has a warm-up of its own; otherwise all start from the same model."""
    evict: str
    """What follows an evictor's budget: buffer, window, sinks."""
    budgets: tuple[int, ...]
    select: str
    """What follows a selector's budget."""
    read_budgets: tuple[int, ...]
    distill: tuple[str, ...]
    """Settings of the arms that distil."""
    distill_first: str
    """The setting of arms that also distil before their first step."""

    @property
    def recipe(self) -> Path:
        return HERE / f"{self.name}.yaml"

    def evictor(self, method: str, budget: int) -> str:
        """As the command line spells it."""
        return f"{method}:{budget}{self.evict}"

    def selector(self, budget: int | str) -> str:
        return f"block-topk:{budget}{self.select}"

    def warm_seed(self, seed: int) -> int:
        """The seed of the warm-up that a seed's runs start from."""
        return seed if self.warm_seeds else 0

    def warm_up(self, seed: int, folder: Path, progress: Progress) -> None:
        """Write the warmed-up model."""
        raise NotImplementedError

    def write_data(self, seed: int, folder: Path) -> None:
        """Write `train.jsonl` and `held.jsonl`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TaskBed(Bed):
    """A generated task with a careful answer and a shortcut."""

    task: Any
    """Has `hint`, the share of problems in which the shortcut is right, and `dataset(size, seed)`."""
    fresh: Callable[[Any, int], tuple[Any, Any]]
    """(task, seed) -> model before the warm-up, tokenizer."""
    warm: WarmUp
    train_problems: int
    held_out: int
    probe_prompts: int
    longest: int = 0
    """Tokens of the longest prompt and answer, where schedules are calibrated."""
    bin: int = 0
    """Tokens per length bin of a schedule."""

    def warm_up(self, seed: int, folder: Path, progress: Progress) -> None:
        model, tokenizer = self.fresh(self.task, seed)
        learner = teach(model, tokenizer, self.task, self.warm, seed, progress)
        export(folder, model, learner.full_parameters(), tokenizer)

    def write_data(self, seed: int, folder: Path) -> None:
        self.write(self.task.dataset(self.train_problems, 1000 + seed), folder / "train.jsonl")
        self.write(self.held(seed), folder / "held.jsonl")

    def held(self, seed: int) -> Dataset:
        """Problems that evaluations ask."""
        problems: Dataset = self.task.dataset(self.held_out, 2000 + seed)
        return problems

    def write(self, problems: Dataset, path: Path) -> None:
        write_problems(problems, path)

    def is_shortcut(self, text: str) -> bool:
        raise NotImplementedError

    def grade(self, texts: list[str], examples: list[dict[str, Any]]) -> list[float]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PointerBed(TaskBed):
    def is_shortcut(self, text: str) -> bool:
        return text.lstrip().startswith("=")

    def grade(self, texts: list[str], examples: list[dict[str, Any]]) -> list[float]:
        return [Pointer.score(text, example) for text, example in zip(texts, examples)]


@dataclass(frozen=True, kw_only=True)
class ProgramBed(TaskBed):
    def write(self, problems: Dataset, path: Path) -> None:
        programs.write_programs(problems, path)

    def is_shortcut(self, text: str) -> bool:
        return "old(x)" in text

    def grade(self, texts: list[str], examples: list[dict[str, Any]]) -> list[float]:
        return programs.grade(texts, examples)


@dataclass(frozen=True, kw_only=True)
class Gsm8kBed(Bed):
    """GSM8K with the model's own chat template, warmed up on the training set's solutions. ALULA_DATA names the folder
    that holds `gsm8k/train.jsonl` and `gsm8k/test.jsonl`."""

    epochs: int
    batch: int
    lr: float

    def warm_up(self, seed: int, folder: Path, progress: Progress) -> None:
        model, tokenizer = smollm2(None, seed)
        asked = Dataset(tuple(Example(row["question"]) for row in gsm8k("train")), "gsm8k")
        prompts = [list(example.prompt_ids or ()) for example in prepare(asked, tokenizer)]
        answers = tokenizer([solution(row["answer"]) for row in gsm8k("train")], add_special_tokens=False)["input_ids"]
        traces = [Trace(prompt, [*answer, tokenizer.eos_token_id]) for prompt, answer in zip(prompts, answers)]
        order = [i for epoch in range(self.epochs) for i in shuffled(len(traces), f"{seed}/{epoch}")]
        batches = [[traces[i] for i in order[at : at + self.batch]] for at in range(0, len(order), self.batch)]
        settings = LearnerSettings(
            lr=self.lr,
            warmup_steps=min(20, len(batches) - 1),
            decay="cosine",
            token_budget=1 << 15,
            activation_checkpointing=False,
        )
        learner = Learner(model, settings, total_steps=len(batches))
        warm_up(learner, batches, seen=lambda step, loss: progress("solutions", step, len(batches), loss))
        export(folder, model, learner.full_parameters(), tokenizer)

    def write_data(self, seed: int, folder: Path) -> None:
        for split, name in (("train", "train.jsonl"), ("test", "held.jsonl")):
            rows = (
                {"prompt": row["question"], "answer": row["answer"].rpartition("####")[2].strip()}
                for row in gsm8k(split)
            )
            write_lines(folder / name, rows)


@dataclass(frozen=True, kw_only=True)
class TipsBed(Bed):
    """Open-ended answers under a rule (`tips`), from SmolLM2 as it is."""

    train_problems: int
    held_out: int

    def warm_up(self, seed: int, folder: Path, progress: Progress) -> None:
        model, tokenizer = smollm2(None, seed)
        export(folder, model, model.named_parameters(), tokenizer)

    def write_data(self, seed: int, folder: Path) -> None:
        for name, count in (("train", self.train_problems), ("held", self.held_out)):
            rows = (tips.problem(f"{name}/{seed}/{i}") for i in range(count))
            write_lines(folder / f"{name}.jsonl", rows)


def gsm8k(split: str) -> list[dict[str, str]]:
    folder = os.environ.get("ALULA_DATA")
    if not folder:
        raise SettingError("ALULA_DATA is not set; let it name the folder that holds gsm8k/train.jsonl.")
    return [json.loads(line) for line in Path(folder, "gsm8k", f"{split}.jsonl").read_text().splitlines()]


def solution(answer: str) -> str:
    """GSM8K's own, without its calculator marks, its result where the reward looks for one."""
    steps, _, result = re.sub("<<[^>]*>>", "", answer).rpartition("####")
    return f"{steps.strip()}\nThe answer is \\boxed{{{result.strip()}}}."


def shuffled(count: int, seed: str) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


TINY = PointerBed(
    name="tiny",
    task=HintedPointer(symbols=12, min_hops=10, max_hops=12, hint=0.5),
    fresh=tiny,
    warm=WarmUp(careful_steps=1000, mastered=0.003, careful_lr=3e-3, mixture_steps=150, mixture_lr=2e-3),
    warm_seeds=True,
    evict="+4,window=4,sinks=1",
    budgets=(16, 20, 24, 28, 32, 36, 40, 44, 48, 52),
    select=",block=4,dense_layers=0",
    read_budgets=(12, 16, 20, 24, 28, 32, 36, 40, 44, 48),
    distill=("distill.rank=8", "distill.lr=1e-3", "distill.fraction=1.0", "distill.activation_checkpointing=false"),
    distill_first="distill.first={steps: 20, prompts: 64, minibatches: 4}",
    train_problems=2048,
    held_out=256,
    probe_prompts=128,
)
SMOLLM2 = PointerBed(
    name="smollm2",
    task=HintedPointer(symbols=26, min_hops=50, max_hops=60, hint=0.5),
    fresh=smollm2,
    warm=WarmUp(
        problems=4096, batch=64, careful_steps=400, mastered=0.0005, careful_lr=3e-4, mixture_steps=100, mixture_lr=1e-4
    ),
    warm_seeds=False,
    evict="+16,window=8,sinks=4",
    budgets=(48, 64, 96, 128, 144, 160, 192, 256, 320),
    select=",block=16,dense_layers=2",
    read_budgets=(48, 64, 96, 128, 160, 192, 256, 320),
    distill=("distill.rank=16", "distill.lr=3e-4", "distill.fraction=0.5", "distill.activation_checkpointing=false"),
    distill_first="distill.first={steps: 20, prompts: 128, minibatches: 4}",
    train_problems=4096,
    held_out=256,
    probe_prompts=64,
)
GSM8K = Gsm8kBed(
    name="gsm8k",
    warm_seeds=False,
    evict="+16,window=8,sinks=4",
    budgets=(48, 64, 80, 96, 112, 128, 160, 192),
    select=",block=16,dense_layers=2",
    read_budgets=(48, 64, 80, 96, 112, 128, 160, 192),
    distill=("distill.rank=16", "distill.lr=3e-4"),
    distill_first="distill.first={steps: 20, prompts: 128, minibatches: 4}",
    epochs=3,
    batch=64,
    lr=3e-4,
)
TIPS = TipsBed(
    name="tips",
    warm_seeds=False,
    evict=GSM8K.evict,
    budgets=(32, 48, 64, 80, 96, 128, 160, 192),
    select=GSM8K.select,
    read_budgets=(48, 64, 96, 128, 160, 192),
    distill=GSM8K.distill,
    distill_first=GSM8K.distill_first,
    train_problems=2048,
    held_out=256,
)
PROGRAMS = ProgramBed(
    name="programs",
    task=programs.Programs(),
    fresh=tiny,
    warm=WarmUp(careful_steps=1200, mastered=0.003, careful_lr=4e-3, mixture_steps=150, mixture_lr=2e-3),
    warm_seeds=True,
    evict="+4,window=4,sinks=1",
    budgets=(24, 32, 40, 48, 56, 64, 72, 80),
    select=",block=4,dense_layers=0",
    read_budgets=(16, 24, 32, 40, 48, 56, 64, 72, 80),
    distill=TINY.distill,
    distill_first=TINY.distill_first,
    train_problems=2048,
    held_out=128,
    probe_prompts=64,
    longest=88,
    bin=24,
)
PROGRAMS_SMOLLM2 = ProgramBed(
    name="programs-smollm2",
    task=programs.Programs(variables=23, min_lines=18, max_lines=21),
    fresh=smollm2,
    warm=SMOLLM2.warm,
    warm_seeds=False,
    evict=SMOLLM2.evict,
    budgets=(96, 128, 144, 160, 176, 192, 208, 224),
    select=SMOLLM2.select,
    read_budgets=(64, 96, 128, 144, 160, 176, 192, 208, 224),
    distill=SMOLLM2.distill,
    distill_first=SMOLLM2.distill_first,
    train_problems=4096,
    held_out=256,
    probe_prompts=64,
    longest=264,
    bin=64,
)
TASK_BEDS = {bed.name: bed for bed in (TINY, SMOLLM2, PROGRAMS, PROGRAMS_SMOLLM2)}
BEDS: dict[str, Bed] = {**TASK_BEDS, GSM8K.name: GSM8K, TIPS.name: TIPS}


def prepared(bed: Bed, seed: int, work: Path, progress: Progress) -> Path:
    """Folder with `model`, `train.jsonl` and `held.jsonl` of a seed, made where it is missing."""
    start, own = work / f"start-{bed.warm_seed(seed)}", work / f"data-{seed}"
    if not (start / "model").exists():
        bed.warm_up(bed.warm_seed(seed), start / "model", progress)
    if not (own / "held.jsonl").exists():
        own.mkdir(parents=True, exist_ok=True)
        bed.write_data(seed, own)
    return start
