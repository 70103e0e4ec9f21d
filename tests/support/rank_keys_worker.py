"""Trains the toy recipe in several ways and writes down every sampled token, on any number of ranks."""

import json
import sys
from pathlib import Path

from alula.config.load import load_config
from alula.trainer.trainer import Trainer

RECIPE = Path(__file__).parents[2] / "recipes" / "toy.yaml"
COMMON = ["steps=3", "checkpoint.every=0", "model.device=cpu", "eval.every=3", "eval.size=24"]
SCENARIOS = {
    "groups": [],
    "rollouts": ["learner.minibatch=rollouts", "learner.updates=3", "objective.correction=reroll"],
    "dynamic": ["sampling.dynamic=true", "sampling.prompts=6", "sampling.n=2", "objective.kl=0", "learner.updates=1"],
}


def train(name: str, out: Path) -> None:
    trainer = Trainer(load_config(RECIPE, [*COMMON, *SCENARIOS[name], f"out={out / name}"]))
    steps: list[dict[str, list[int]]] = []
    collect = trainer.collector.collect

    def recorded(*arguments):
        batch = collect(*arguments)
        steps.append({f"{r.prompt_index}/{r.sample_index}": r.token_ids for r in batch.rollouts})
        return batch

    trainer.collector.collect = recorded
    trainer.run()
    (out / f"{name}-{trainer.world.rank}.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    for scenario in SCENARIOS:
        train(scenario, Path(sys.argv[1]))
