"""Which models and answers fit which GPU: the memory plan of `--check`, as the table of docs/out-of-memory.md.

    python benchmarks/fits.py

recipes/start.yaml with 64 rollouts at a time, prompts of 512 tokens, bfloat16, on one GPU. Needs no GPU.
"""

from functools import cache
from math import inf

from alula.config.load import load_config
from alula.config.run import RunConfig
from alula.errors import SettingError
from alula.trainer.memory_plan import USABLE, plan_memory

GPUS = {"24 GB": 24e9, "48 GB": 48e9, "80 GB": 80e9, "141 GB": 141e9}
MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "qwen2.5-1.5b", "qwen3-1.7b", "qwen2.5-3b", "qwen3-4b")
MODELS += ("qwen2.5-7b", "qwen3-8b", "qwen3-14b")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
ROWS = 64


def config_of(model: str, lora: bool, sparsity: str, answer: int) -> RunConfig:
    settings = [
        f"model={{source: shape:{model}, dtype: bfloat16}}",
        f"sparsity={sparsity}",
        f"sampling.max_new_tokens={answer}",
        f"engine.max_rows={ROWS}",
        f"learner.token_budget={max(16384, answer + 512)}",  # a sequence is never cut
        *(["learner.lora={rank: 32}"] if lora else []),
        *(["control.enabled=false"] if sparsity == "dense" else []),
    ]
    return load_config("start", settings)


def longest(model: str, lora: bool, sparsity: str, memory: float) -> int | None:
    """The longest answer whose run fits, or None."""
    needs = ((answer, need(model, lora, sparsity, answer)) for answer in LENGTHS)
    return max((answer for answer, need in needs if need <= USABLE * memory), default=None)


@cache
def need(model: str, lora: bool, sparsity: str, answer: int) -> float:
    """Bytes while learning or generating, whichever is more; infinite for more tokens than the model has positions."""
    try:
        plan = plan_memory(config_of(model, lora, sparsity, answer))
    except SettingError:
        return inf
    return max(plan.learning, plan.generating(None))


def cell(model: str, lora: bool, memory: float) -> str:
    dense, sparse = (longest(model, lora, policy, memory) for policy in ("dense", "rkv:512+128"))
    if sparse is None:
        return "–"
    return f"{text(dense)} / {text(sparse)}"


def text(answer: int | None) -> str:
    return "–" if answer is None else f"{answer // 1024}k" if answer >= 1024 else str(answer)


def main() -> None:
    print(f"| model | trained | {' | '.join(GPUS)} |")
    print("|---|---|" + "---|" * len(GPUS))
    for model in MODELS:
        for lora in (False, True):
            cells = " | ".join(cell(model, lora, memory) for memory in GPUS.values())
            print(f"| {model} | {'LoRA' if lora else 'all weights'} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
