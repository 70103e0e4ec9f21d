"""Whether all that a run will ask of its engine fits: the longest prompts, under every policy that may come.

A prompt comes up when its turn is, which may be hours later, and again at every resume; so it is asked before the first
step.


What `--check` learns from the data, the hub's aside: how much there is, how long the prompts are, and whether the
rewards can grade it.

A published schedule on a model that it was not made for: it is taken, but not in silence.

One that `alula plan` wrote is made out to its model and refused with any other (`Schedule.check`); a preset names its
model in its notes only. A model of that shape may have been trained from it, under any name; one of another shape not.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig

from alula.config.run import RunConfig
from alula.config.settings import Source
from alula.data import Dataset
from alula.data.load import is_path, load_source, on_hub
from alula.distill.run_stage import Stage
from alula.engine.engine import Engine
from alula.engine.rollout import Sampling
from alula.errors import require
from alula.mismatch.control.monitor import Monitor
from alula.models.load import SHAPE, TOKENIZER_FILES, find_pretrained
from alula.models.shapes import SHAPES
from alula.rewards.scoring import try_out
from alula.sparsity.policy import DENSE, Sparsity
from alula.sparsity.schedule import Schedule
from alula.trainer.build import TASK, Data, named_tokenizer, split_data, tokenized


@dataclass(frozen=True)
class Longest:
    """The longest prompt of some data, and the setting that says how long its answer may be."""

    kind: str
    prompt: list[int]
    setting: str
    answer: int

    @classmethod
    def of(cls, kind: str, dataset: Dataset, config: RunConfig, section: str = "sampling") -> "Longest":
        prompt = max((list(example.prompt_ids or ()) for example in dataset), key=len)
        answer = config.eval.max_new_tokens if section == "eval" else None
        if answer is None:
            section, answer = "sampling", config.sampling.max_new_tokens
        return cls(kind, prompt, f"{section}.max_new_tokens", answer)

    def __len__(self) -> int:
        return len(self.prompt) + self.answer

    def __str__(self) -> str:
        return f"the longest {self.kind} prompt of {len(self.prompt)} tokens with {self.setting}={self.answer}"

    @property
    def way_out(self) -> str:
        return f"lower {self.setting}, or leave longer prompts out with data.max_prompt_tokens"


def all_longest(config: RunConfig, training: Dataset, held_out: Dataset | None) -> list[Longest]:
    found = [Longest.of("training", training, config)]
    if held_out is not None:
        found.append(Longest.of("held-out", held_out, config, "eval"))
        if config.distill and config.distill.move:  # measured with answers as long as the training's
            found.append(Longest.of("held-out", held_out, config))
    return found


def longest_sequence(config: RunConfig, model: PreTrainedConfig, training: Dataset, held_out: Dataset | None) -> int:
    """Tokens of the longest sequence of the run. One that the model has no positions for is refused under an evictor
    too: it may hold few tokens, but the dense learner reads them all. `engine.max_length` overrules the model."""
    longest = max(all_longest(config, training, held_out), key=len)
    positions = positions_of(model)
    require(
        len(longest) <= max(positions, config.engine.max_length or 0),
        f"model.source={config.model.source!r} has max_position_embeddings={positions}, and {longest} comes to "
        f"{len(longest)}; {longest.way_out}, or set engine.max_length={len(longest)} if the model can read so far.",
    )
    return len(longest)


def positions_of(model: PreTrainedConfig) -> int:
    """How long a text the model says that it reads; those without such a limit read any."""
    return getattr(model.get_text_config(), "max_position_embeddings", 1 << 20)


def check_room(
    config: RunConfig,
    engine: Engine,
    monitor: Monitor,
    stage: Stage | None,
    training: Dataset,
    held_out: Dataset | None,
) -> None:
    """Refuse a run of which the engine would refuse a prompt later on."""
    e = config.engine
    longest = all_longest(config, training, held_out)
    for what, one, policy in asked(config, monitor, stage, longest):
        [request] = engine.requests([one.prompt], Sampling(max_new_tokens=one.answer), policy)
        tokens, pages = engine.need(request)
        require(
            pages <= engine.pool.usable,
            f"engine.kv_memory={e.kv_memory or 'null'} holds {engine.pool.usable} pages of {engine.page} tokens, and "
            f"{what} ({policy.describe()}) of {one} need {pages}; raise it, {one.way_out}.",
        )
        require(
            tokens <= engine.max_length,
            f"engine.max_length={e.max_length}: {what} ({policy.describe()}) of {one} may hold {tokens} KV tokens; "
            f"raise it, {one.way_out}.",
        )


def asked(
    config: RunConfig, monitor: Monitor, stage: Stage | None, longest: list[Longest]
) -> Iterator[tuple[str, Longest, Sparsity]]:
    """What the run generates, of which prompts, under which policy."""
    training, *held_out = longest
    sparse = [("rollouts", monitor.sparsity)]
    if monitor.densest != monitor.sparsity:
        sparse.append(("rollouts at the controller's largest budget", monitor.densest))
    if stage and stage.candidate:
        sparse.append(("rollouts after distill.move", stage.candidate))
        yield "measurements of distill.move", longest[-1], stage.candidate
    for what, policy in sparse:
        yield what, training, policy
    if config.correction.reroll:
        yield "rerolls", training, DENSE
    if held_out:
        yield "evaluations", held_out[0], DENSE
        for _, policy in sparse if config.eval.sparse else ():
            yield "evaluations", held_out[0], policy


def read_data(config: RunConfig) -> Data | None:
    """None where some of it is on the hub; what is here is read all the same, so that a wrong name or field is found
    now."""
    if not any(map(remote, sources(config))):
        return split_data(config)
    for one in sources(config):
        if not remote(one):
            load_source(one)
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
        try_out(config.rewards.use, [example.record() for example in data[0]], config.rewards.timeout)


def tokenizer_at_hand(config: RunConfig) -> Any | None:
    """The run's tokenizer, where the hub need not be asked for it."""
    name, source = config.model.tokenizer, config.model.source
    folder = Path(source).expanduser()
    own = not source.startswith(SHAPE) and (
        not folder.is_dir() or any((folder / file).exists() for file in TOKENIZER_FILES)
    )
    if name is None and not own and config.data.source.startswith(TASK):
        name = config.data.source
    if name and (name.startswith(TASK) or is_path(name) or os.path.exists(name)):
        return named_tokenizer(name, config.data.options if config.data.source == name else {})
    if name is None and not own:
        return None
    try:
        place = {"pretrained_model_name_or_path": name} if name else find_pretrained(source)
        return AutoTokenizer.from_pretrained(**place, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, ImportError):  # whoever needs it will say what is wrong with it
        return None


def read_by(tokenizer: Any | None, config: RunConfig, data: Data | None) -> Data | None:
    """The data with the prompts' tokens, as the run would take it."""
    return None if data is None or tokenizer is None else tokenized(config, data, tokenizer)


def longest_prompt(data: Data | None) -> int | None:
    """In tokens."""
    if data is None:
        return None
    return max(len(example.prompt_ids or ()) for dataset in data if dataset for example in dataset)


def check_positions(config: RunConfig, model: PreTrainedConfig, data: Data | None) -> None:
    """Refuse sequences that the model has no positions for; of prompts that are not known at least the answers."""
    if data is not None:
        longest_sequence(config, model, *data)
        return
    answer = config.sampling.max_new_tokens
    positions = positions_of(model)
    require(
        answer < max(positions, config.engine.max_length or 0),
        f"sampling.max_new_tokens={answer}: model.source={config.model.source!r} has "
        f"max_position_embeddings={positions}; lower it, or set engine.max_length if the model can read so far.",
    )


SIZES = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
ADVICE = "Measure it with `alula calibrate --verify`, or make one for this model: `alula calibrate`, then `alula plan`."


def made_for_another(policies: Sequence[Sparsity], config: PreTrainedConfig) -> list[str]:
    """A sentence for every schedule whose model has another shape than `config` says."""
    budgets = [part.budget for sparsity in policies for part in (sparsity.evict, sparsity.select) if part is not None]
    return [said for budget in budgets if isinstance(budget, Schedule) and (said := difference(budget, config))]


def difference(schedule: Schedule, config: PreTrainedConfig) -> str | None:
    origin = str(schedule.notes.get("model", ""))
    model, shape = config.get_text_config(), SHAPES.get(origin.rpartition("/")[2].lower(), {})
    for size in SIZES:
        here = getattr(model, size, None)
        if shape and here != shape[size]:
            return (
                f"Schedule {schedule.name!r} was made for {origin} ({size}={shape[size]}, here {here}): "
                "the tail that it holds there says nothing about this model."
            )
    return None
