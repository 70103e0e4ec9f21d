"""A learned reward, end to end: a classifier is trained on graded rollouts, then a policy on the classifier.

    python experiments/learned_reward.py --bed tiny --seeds 3 --jobs 2
    python experiments/learned_reward.py --bed smollm2 --out OUT                 # one GPU

The classifier is the warmed-up model with a head of two labels, trained on its own dense rollouts and the verifier's
verdicts. Four arms: dense and `sparse-rl` (R-KV, one step of the grid above the tempting budget), each with the
verifier and with the classifier's probability of "right" as reward. The verifier decides accuracy in all of them. A
finished run is not repeated. --out receives `learned-reward/<bed>.jsonl`, one line per run, and
`learned-reward/<bed>-classifier.jsonl`, one line per seed.
"""

import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import command
import probe
import torch
from arms import DENSE, Arm, neighbour
from beds import TASK_BEDS, TaskBed, prepared
from choice import chosen_budgets
from lines import read_lines, write_lines
from raw import short, write_raw
from run import Run, in_a_child, run_all
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification

from alula.rewards.model import ModelReward
from alula.sparsity.policy import Sparsity

PROMPTS, ANSWERS, HELD_OUT = 512, 4, 0.2
EPOCHS, BATCH = 4, 32
LEARNING_RATE = {"tiny": 1e-3, "smollm2": 5e-5}


def classifier(bed: TaskBed, seed: int, work: Path) -> Path:
    """Folder of a seed's classifier."""
    return work / f"classifier-{bed.warm_seed(seed)}"


def train_classifier(bed: TaskBed, seed: int, work: Path) -> None:
    """Teach the warmed-up model which of its rollouts are right; `classifiers.jsonl` says how well it tells."""
    folder, path = classifier(bed, seed, work), work / "classifiers.jsonl"
    if any(row["seed"] == seed for row in read_lines(path)):
        return
    torch.manual_seed(seed)
    sampled = probe.Probe(bed, seed, work, bed.task.dataset(PROMPTS, 4000 + seed), ANSWERS)
    rollouts = sorted(sampled.generate(Sparsity()), key=lambda rollout: rollout.prompt_index)
    examples = [sampled.problems[rollout.prompt_index].record() for rollout in rollouts]
    texts = [rollout.text or "" for rollout in rollouts]
    labels = torch.tensor([int(value) for value in bed.grade(texts, examples)])
    tokenizer: Any = sampled.engine.tokenizer
    tokenizer.save_pretrained(folder)
    names = {0: "wrong", 1: "right"}
    AutoModelForSequenceClassification.from_pretrained(
        prepared(bed, seed, work, probe.print_step) / "model",
        num_labels=2,
        id2label=names,
        label2id={name: label for label, name in names.items()},
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    ).save_pretrained(folder)
    sampled.engine.sleep()
    reward = ModelReward(str(folder), label="right", device=device())
    inputs = [reward.text(text, example) for text, example in zip(texts, examples)]
    taught = round((1 - HELD_OUT) * len(inputs))  # of other prompts than the rest
    fit(reward, inputs[:taught], labels[:taught], LEARNING_RATE[bed.name])
    reward.model.save_pretrained(folder)
    scores = [scored(reward, inputs[at : at + BATCH]) for at in range(taught, len(inputs), BATCH)]
    row = {
        "bed": bed.name,
        "seed": seed,
        "rollouts": len(inputs),
        "right": fmean(labels.tolist()),
        "auc": ranked_right(torch.cat(scores), labels[taught:]),
    }
    with path.open("a") as file:
        file.write(json.dumps({name: short(value) for name, value in row.items()}) + "\n")
    print(f"classifier, seed {seed}: {row['right']:.0%} of its rollouts are right, AUC {row['auc']:.3f}", flush=True)


def fit(reward: ModelReward, texts: list[str], labels: torch.Tensor, rate: float) -> None:
    steps = EPOCHS * len(texts) // BATCH
    optimizer = torch.optim.AdamW(reward.model.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    reward.model.train()
    order = torch.cat([torch.randperm(len(texts)) for _ in range(EPOCHS)])
    for step in range(steps):
        rows = order[step * BATCH : (step + 1) * BATCH]
        loss = cross_entropy(logits(reward, [texts[i] for i in rows.tolist()]), labels[rows].to(reward.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reward.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        probe.print_step("classifier", step + 1, steps, loss.item())
    reward.model.eval()


def logits(reward: ModelReward, texts: list[str]) -> torch.Tensor:
    chat = reward.tokenizer.chat_template is not None
    batch = reward.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not chat)
    batch.pop("token_type_ids", None)
    found: torch.Tensor = reward.model(**batch.to(reward.device)).logits
    return found.float()


@torch.inference_mode()
def scored(reward: ModelReward, texts: list[str]) -> torch.Tensor:
    """Log-odds of "right"."""
    found = logits(reward, texts).cpu()
    return found[:, 1] - found[:, 0]


def ranked_right(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """The probability that a right rollout scores above a wrong one (the area under the ROC curve)."""
    right, wrong = scores[labels == 1], scores[labels == 0]
    above = (right[:, None] > wrong).float() + 0.5 * (right[:, None] == wrong).float()
    return float(above.mean())


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def planned(bed: TaskBed, seed: int, work: Path) -> list[Run]:
    budget = neighbour(bed, chosen_budgets(bed, seed, work, None)["rkv"], 1)
    verifier = f"task:{bed.task.name}"
    terms: list[dict[str, Any]] = [
        {
            "name": f"model:{classifier(bed, seed, work)}",
            "options": {"label": "right", "device": device(), "batch_size": 64},
        },
        {"name": verifier, "weight": 0.0},
    ]
    learned = (f"rewards.use={json.dumps(terms)}", f"rewards.correct={verifier}")
    arms = []
    for label, policy, correction in (("dense", "dense", "naive"), ("rkv", bed.evictor("rkv", budget), "sparse-rl")):
        arms += [Arm(label, policy, correction), Arm(f"{label}, learned", policy, correction, learned, "learned")]
    assert arms[0] == DENSE
    return [Run(bed, arm, seed, work) for arm in arms]


def main() -> None:
    parser = command.trainer(__doc__)
    parser.add_argument("--bed", choices=[*LEARNING_RATE], default="tiny")
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds
    bed, work = TASK_BEDS[options.bed], options.work / options.bed
    runs = []
    for seed in range(options.seeds):
        in_a_child(prepared, bed, seed, work, probe.print_step)
        in_a_child(probe.run, bed, seed, work, probe.grid(bed, ["rkv"]))
        in_a_child(train_classifier, bed, seed, work)
        runs += planned(bed, seed, work)
    run_all(runs, options.jobs, deadline)
    write_raw("learned-reward", bed, [(run.arm, run.seed) for run in runs], work, options.out)
    write_lines(options.out / "learned-reward" / f"{bed.name}-classifier.jsonl", read_lines(work / "classifiers.jsonl"))


if __name__ == "__main__":
    main()
