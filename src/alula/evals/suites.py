"""Evaluation suites: the benchmarks of a paper with its samples and sampling settings, by name."""

from dataclasses import dataclass, replace

from alula.errors import unknown


@dataclass(frozen=True)
class Entry:
    """One benchmark of a suite."""

    data: str
    k: int = 1
    """Samples per problem."""
    max_new_tokens: int = 2048
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


def _entries(data: tuple[str, ...], like: Entry) -> tuple[Entry, ...]:
    return tuple(replace(like, data=name) for name in data)


_SPARSE_RL = Entry("", max_new_tokens=8192, temperature=0.8, top_p=0.95)
_SPARROW_MATH = Entry("", max_new_tokens=37000, temperature=1.0, top_p=0.7)
_SPARROW_CODE = Entry("", max_new_tokens=24000, temperature=1.0, top_p=0.7)

SUITES: dict[str, tuple[Entry, ...]] = {
    # arXiv 2601.10079: pass@1 on five sets, avg@32 on two; samples and settings of its evaluation script
    "sparse-rl": (
        *_entries(("gsm8k", "math500", "gaokao2023en", "minerva_math", "olympiadbench"), _SPARSE_RL),
        *_entries(("aime24", "amc23"), replace(_SPARSE_RL, k=32, max_new_tokens=16384)),
    ),
    # arXiv 2606.08446, table 1: mean@16 and pass@16, AMC with 4 samples
    "sparrow-math": (
        *_entries(("aime24", "aime25", "aime26"), replace(_SPARROW_MATH, k=16)),
        *_entries(("amc22-23", "amc12-24"), replace(_SPARROW_MATH, k=4)),
    ),
    # arXiv 2606.08446, coding; the number of samples is not published
    "sparrow-code": _entries(("livecodebench", "humaneval+", "mbpp+"), _SPARROW_CODE),
}


def suite(name: str) -> tuple[Entry, ...]:
    if name not in SUITES:
        raise unknown("suite", name, SUITES)
    return SUITES[name]
