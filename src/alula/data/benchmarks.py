"""Benchmarks by name: where their rows are, which fields hold question and answer, which splits may be trained on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from alula.data import code_benchmarks as code
from alula.data.mapping import FieldMapping
from alula.errors import require

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Hub:
    """The copy on the Hugging Face hub. Fields are given where they differ from the local copy's."""

    path: str
    question: str | None = None
    answer: str | None = None
    answer_form: str | None = None
    split: str = "test"
    """The split that stands for the benchmark's default one."""
    config: str | None = None
    files: str | None = None
    """Files to read, for a repository whose own loading script or configuration does not list them. {split} is filled
    in."""


@dataclass(frozen=True)
class Benchmark:
    """A data set by name. `<data_dir>/<name>/<split>.jsonl` has these fields, or the hub's copy."""

    name: str
    hub: Hub
    question: str = "{problem}"
    answer: str | None = "{answer}"
    answer_form: str = "plain"
    split: str = "test"
    """The split to evaluate on, which is also the default."""
    train_split: str | None = None
    """The split to train on; None for a set that is for evaluation only."""
    convert: Callable[[Row], dict[str, Any] | None] | None = None
    """Turns a published row of a coding task into one with `prompt` and `tests`; None for a row without tests."""
    split_of: Callable[[Row], str] | None = None
    """The split of each row of `<data_dir>/<name>/<name>.jsonl`, for a set that is published as one file."""

    @property
    def reward(self) -> str:
        return "code" if self.convert else "math"

    def mapping(self, from_hub: bool) -> FieldMapping:
        if self.convert:
            return FieldMapping("{prompt}", None)
        question, answer, form = self.question, self.answer, self.answer_form
        if from_hub:
            question, answer = self.hub.question or question, self.hub.answer or answer
            form = self.hub.answer_form or form
        return FieldMapping(f"{question}\n{INSTRUCTION}", answer, form)

    def training_split(self, split: str | None) -> str:
        """The split to train on. Raises for the split that the benchmark is evaluated on."""
        require(
            self.train_split is not None,
            f"data.source={self.name}: a test set, for evaluation only; train on a set with a train split, such as "
            f"{', '.join(trainable())}.",
        )
        split = split or self.train_split
        require(
            split == self.train_split or split != self.split,
            f"data.split={split}: {self.name}'s test split is for evaluation only; use data.split={self.train_split}.",
        )
        assert split is not None
        return split


def _mathematics() -> list[Benchmark]:
    return [
        Benchmark(
            "gsm8k",
            Hub("openai/gsm8k", config="main"),
            "{question}",
            answer_form="####",
            train_split="train",
        ),
        Benchmark("math500", Hub("HuggingFaceH4/MATH-500")),
        Benchmark(
            "gaokao2023en",
            Hub("MARIO-Math-Reasoning/Gaokao2023-Math-En", split="train"),
            "{question}",
        ),
        Benchmark(
            "minerva_math",
            Hub("math-ai/minervamath", "{question}", "{answer}", "plain"),
            answer="{solution}",
            answer_form="boxed",
        ),
        Benchmark(
            "olympiadbench",
            Hub("Hothan/OlympiadBench", split="train", config="OE_TO_maths_en_COMP"),
            "{question}",
            "{final_answer}",
        ),
        Benchmark("aime24", Hub("HuggingFaceH4/aime_2024", split="train")),
        Benchmark("aime25", Hub("MathArena/aime_2025", split="train")),
        Benchmark("aime26", Hub("MathArena/aime_2026", split="train")),
        Benchmark("amc23", Hub("math-ai/amc23", "{question}")),
        Benchmark("amc22-23", Hub("AI-MO/aimo-validation-amc", split="train")),
        Benchmark("amc12-24", Hub("rawsh/2024_AMC12", split="train")),
        Benchmark("svamp", Hub("ChilleD/SVAMP"), "{Body} {Question}", "{Answer}", train_split="train"),
        Benchmark(
            "mawps", Hub("MU-NLPC/Calc-mawps", "{question}", "{result}"), "{input}", "{target}", train_split="train"
        ),
        Benchmark("asdiv", Hub("EleutherAI/asdiv", split="validation"), "{body} {question}", answer_form="unit"),
        Benchmark(
            "math_level3to5",
            Hub(
                "hkust-nlp/SimpleRL-Zoo-Data",
                "{extra_info.question}",
                "{extra_info.answer}",
                split="train",
                files="simplelr_qwen_level3to5/train.parquet",
            ),
            split="train",
            train_split="train",
        ),
        Benchmark(
            "polaris",
            Hub("POLARIS-Project/Polaris-Dataset-53K", split="train"),
            split="train",
            train_split="train",
        ),
    ]


def _coding() -> list[Benchmark]:
    return [
        Benchmark("humaneval", Hub("openai/openai_humaneval"), convert=code.humaneval),
        Benchmark("humaneval+", Hub("evalplus/humanevalplus"), convert=code.humaneval_plus),
        Benchmark(
            "mbpp",
            Hub("google-research-datasets/mbpp", config="full"),
            train_split="train",
            convert=code.mbpp,
            split_of=code.mbpp_split,
        ),
        Benchmark("mbpp+", Hub("evalplus/mbppplus"), convert=code.mbpp_plus),
        Benchmark(
            "livecodebench",
            Hub("livecodebench/code_generation_lite", files="test*.jsonl"),
            convert=code.livecodebench,
        ),
        Benchmark("taco", Hub("BAAI/TACO", files="ALL/{split}-*.parquet"), train_split="train", convert=code.taco),
    ]


BENCHMARKS = {benchmark.name: benchmark for benchmark in (*_mathematics(), *_coding())}


def trainable() -> list[str]:
    return [name for name, benchmark in BENCHMARKS.items() if benchmark.train_split]


def hub_split(benchmark: Benchmark, split: str | None) -> Hub:
    """The hub's copy with the split to read: the hub's own default, or `split`."""
    if split is None or split == benchmark.split:
        return benchmark.hub
    return replace(benchmark.hub, split=split)
