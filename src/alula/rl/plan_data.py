"""What `--check` learns from the data, the hub's aside: how much there is, and whether the rewards can grade it."""

from alula.config import RunConfig, Source
from alula.data import Dataset
from alula.data.load import on_hub
from alula.rewards.scoring import try_out
from alula.rl.setup import split_data

Data = tuple[Dataset, Dataset | None]
"""Training and held-out examples."""


def read_data(config: RunConfig) -> Data | None:
    """None where some of it is on the hub; what is here is read all the same, so that a wrong name or field is found
    now."""
    if not any(map(remote, sources(config))):
        return split_data(config)
    for one in sources(config):
        if not remote(one):
            one.load()
    return None


def sources(config: RunConfig) -> list[Source]:
    return [config.data, *([config.eval.data] if config.eval.every and config.eval.data else [])]


def remote(one: Source) -> bool:
    return on_hub(one.source, one.data_dir)


def describe_data(config: RunConfig, data: Data | None) -> str:
    if data is None:
        names = dict.fromkeys(one.source for one in sources(config) if remote(one))
        return f"{', '.join(names)}: on the hub, not looked at"
    training, held_out = data
    evaluated = f", {len(held_out):,} to evaluate on" if held_out else ""
    return f"{len(training):,} examples to train on{evaluated}"


def try_rewards(config: RunConfig, data: Data | None) -> None:
    """On the data itself: a field that a reward misses is found before the first rollout."""
    if data is not None:
        try_out(config.rewards.specs(), [example.record() for example in data[0]], config.rewards.timeout)
