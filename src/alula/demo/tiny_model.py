"""A tiny Llama that can follow pointers step by step and also knows the shortcut."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from alula.data.tasks.tokenizer import supervised_ids, task_tokenizer
from alula.demo.problems import HintedPointer
from alula.learner.learner import Learner
from alula.learner.sft import Trace, warm_up
from alula.run.export import export
from alula.settings import LearnerSettings

Progress = Callable[[str, int, int, float], None]
"""(stage, step, maximum number of steps, loss)"""


@dataclass(frozen=True)
class WarmUp:
    """Two stages: careful chains until they are mastered, then a mixture of careful chains and shortcuts.

    The lookup is learned suddenly after a long plateau, which a mixture would make longer.
    """

    problems: int = 8192
    batch: int = 64
    careful_steps: int = 800
    """Maximum; the stage ends when the loss falls below `mastered`."""
    mastered: float = 0.01
    careful_lr: float = 4e-3
    mixture_steps: int = 100
    mixture_lr: float = 1e-3
    careful_share: float = 0.6


def tiny_llama(vocabulary: int, tokenizer: Any, seed: int, *, positions: int = 128) -> LlamaForCausalLM:
    """85,000 parameters in two layers, the minimum for the lookup of `a> ?`."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def build_warm_model(folder: Path, task: HintedPointer, warm: WarmUp, seed: int, progress: Progress) -> Path:
    """Train the model and export it with its tokenizer as a Hugging Face folder."""
    tokenizer = task_tokenizer(task)
    model = tiny_llama(len(tokenizer), tokenizer, seed)
    learner = teach(model, tokenizer, task, warm, seed, progress)
    return export(folder, model, learner.full_parameters(), tokenizer)


def teach(
    model: PreTrainedModel, tokenizer: Any, task: HintedPointer, warm: WarmUp, seed: int, progress: Progress
) -> Learner:
    """Run both stages of the warm-up in place; returns the learner, which holds the parameters."""
    examples = task.dataset(warm.problems, seed)
    careful = [Trace(*supervised_ids(tokenizer, example)) for example in examples]
    shortcut = careful
    if warm.careful_share < 1:
        shortcut = [Trace(*supervised_ids(tokenizer, example, shortcut=True)) for example in examples]

    def stage(name: str, steps: int, lr: float, share: float, decay: Any, below: float | None) -> Learner:
        settings = LearnerSettings(
            lr=lr,
            betas=(0.9, 0.98),
            warmup_steps=min(30, steps - 1),
            decay=decay,
            token_budget=1 << 16,
            activation_checkpointing=False,
        )
        learner = Learner(model, settings, total_steps=steps)
        batches = mixed(careful, shortcut, share, warm.batch, steps, random.Random(f"{name}/{seed}"))
        warm_up(learner, batches, below=below, seen=lambda step, loss: progress(name, step, steps, loss))
        return learner

    stage("careful chains", warm.careful_steps, warm.careful_lr, 1.0, "constant", warm.mastered)
    return stage("mixture", warm.mixture_steps, warm.mixture_lr, warm.careful_share, "cosine", None)


def mixed(
    careful: list[Trace], shortcut: list[Trace], share: float, batch: int, steps: int, generator: random.Random
) -> Iterator[list[Trace]]:
    """`steps` batches of random problems, each with the careful answer with probability `share`."""
    for _ in range(steps):
        chosen = generator.choices(range(len(careful)), k=batch)
        yield [careful[i] if generator.random() < share else shortcut[i] for i in chosen]
