"""Whether all that a run will ask of its engine fits: the longest prompts, under every policy that may come.

A prompt comes up when its turn is, which may be hours later, and again at every resume; so it is asked before the first
step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedConfig

from alula.config import RunConfig
from alula.data import Dataset
from alula.distill.stage import Stage
from alula.engine.engine import Engine
from alula.engine.rollout import Sampling
from alula.errors import require
from alula.mismatch.monitor import Monitor
from alula.sparsity.policy import DENSE, Sparsity


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
