"""Field mappings of mathematics benchmarks: the seven that Sparse-RL reports, and smaller ones."""

from dataclasses import dataclass

from alula.data.mapping import FieldMapping

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Hub:
    """The copy on the Hugging Face hub, whose field names often differ."""

    path: str
    question: str
    answer: str
    answer_form: str = "plain"
    split: str = "test"
    config: str | None = None
    files: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """Fields of `<data_dir>/<name>/<split>.jsonl`, as published with SimpleRL-Zoo, and of the hub's copy."""

    name: str
    question: str
    answer: str
    hub: Hub
    answer_form: str = "plain"
    samples: int = 1
    """Samples per problem in Sparse-RL: pass@1, or avg@32 for the two small sets."""
    split: str = "test"

    def mapping(self, from_hub: bool) -> FieldMapping:
        source = self.hub if from_hub else self
        return FieldMapping(f"{source.question}\n{INSTRUCTION}", source.answer, source.answer_form)


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "gsm8k",
            "{question}",
            "{answer}",
            answer_form="####",
            hub=Hub("openai/gsm8k", "{question}", "{answer}", "####", config="main"),
        ),
        Benchmark("math500", "{problem}", "{answer}", hub=Hub("HuggingFaceH4/MATH-500", "{problem}", "{answer}")),
        Benchmark(
            "gaokao2023en",
            "{question}",
            "{answer}",
            hub=Hub("MARIO-Math-Reasoning/Gaokao2023-Math-En", "{question}", "{answer}", split="train"),
        ),
        Benchmark(
            "minerva_math",
            "{problem}",
            "{solution}",
            answer_form="boxed",
            hub=Hub("math-ai/minervamath", "{question}", "{answer}"),
        ),
        Benchmark(
            "olympiadbench",
            "{question}",
            "{final_answer}",
            hub=Hub(
                "Hothan/OlympiadBench", "{question}", "{final_answer}", split="train", config="OE_TO_maths_en_COMP"
            ),
        ),
        Benchmark(
            "aime24",
            "{problem}",
            "{answer}",
            samples=32,
            hub=Hub("HuggingFaceH4/aime_2024", "{problem}", "{answer}", split="train"),
        ),
        Benchmark(
            "amc23",
            "{problem}",
            "{answer}",
            samples=32,
            hub=Hub("math-ai/amc23", "{question}", "{answer}"),
        ),
        Benchmark(
            "svamp",
            "{Body} {Question}",
            "{Answer}",
            hub=Hub("ChilleD/SVAMP", "{Body} {Question}", "{Answer}"),
        ),
        Benchmark("mawps", "{input}", "{target}", hub=Hub("MU-NLPC/Calc-mawps", "{question}", "{result}")),
        Benchmark(
            "asdiv",
            "{body} {question}",
            "{answer}",
            answer_form="unit",
            hub=Hub("EleutherAI/asdiv", "{body} {question}", "{answer}", "unit", split="validation"),
        ),
        Benchmark(
            "math_level3to5",
            "{problem}",
            "{answer}",
            split="train",
            hub=Hub(
                "hkust-nlp/SimpleRL-Zoo-Data",
                "{extra_info.question}",
                "{extra_info.answer}",
                split="train",
                files="simplelr_qwen_level3to5/train.parquet",
            ),
        ),
    )
}
