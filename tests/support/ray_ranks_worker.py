"""Trains the toy recipe with rollouts on Ray; the environment names the cluster."""

import sys
from pathlib import Path

import toy

PINNED = ("steps=2", "engine={buckets: [8], kv_memory: 16MiB}", "sampling.prompts=6", "sampling.n=4", "eval.every=0")


def main(out: Path) -> None:
    run = toy.trainer(toy.toy(out, *PINNED, "rollouts.backend=ray", "rollouts.workers=1"))
    assert run.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
