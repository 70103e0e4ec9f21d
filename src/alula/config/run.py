"""A run as one tree of typed settings: a YAML file, and `key=value` overrides on top (see `config_file`).

Free of torch, so that a recipe is checked before anything heavy is imported. Every setting's text below is its
documentation; docs/training.md lists them all.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, model_validator

from alula.data.load import load
from alula.distill.config import DistillConfig
from alula.distill.first import First
from alula.distill.move import Move
from alula.errors import SettingError, require, unknown
from alula.learner import learner_config
from alula.learner.learner_config import LearnerConfig
from alula.objective.settings import Correction, Loss, LossName, check
from alula.sparsity.schedule import Schedule
from alula.sparsity.text import budget, parse_sparsity, settings_of

if TYPE_CHECKING:
    from alula.data import Dataset
    from alula.mismatch.control.control import Control
    from alula.rewards import Rewards, RewardSpec
    from alula.sparsity.policy import Sparsity

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, given: Any) -> Any:
        """Where the default is an empty list or mapping, `null` means it."""
        if not isinstance(given, dict):
            return given
        empty = {name for name, field in cls.model_fields.items() if field.default in ({}, [])}
        return {name: value for name, value in given.items() if value is not None or name not in empty}


class ModelSettings(Section):
    source: str
    """Hub id, Hugging Face folder, GGUF file, or `shape:<name>` for random weights."""
    tokenizer: str | None = None
    """Hub id or folder of another tokenizer than the model's own, or `task:<name>` for a generated task's. A bare
    shape on `task:` data takes the task's by itself, and its vocabulary is cut to it."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of weights and compute; by default bfloat16 on CUDA (with float32 masters) and float32 on the CPU."""
    residual: Literal["float32"] | None = None
    """`float32` keeps the residual stream of a 16-bit model in float32, in rollouts and training alike: the engine's
    and the learner's log-probs come closer. Without effect on a float32 model."""
    device: Literal["cpu", "cuda"] | None = None
    """By default CUDA where there is one."""


class Source(Section):
    """Where examples come from: see docs/rewards-and-data.md."""

    source: str
    """File, folder, benchmark, hub id, `task:<name>` or `reasoning-gym:<task>`."""
    split: str | None = None
    """Which part of a stored data set."""
    data_dir: str | None = None
    """Folder with local copies of the benchmarks."""
    prompt: str | None = None
    """Template of the prompt, with `{field}`s of the row."""
    answer: str | None = None
    """Template of the reference answer; an empty text for data without answers."""
    answer_form: str | None = None
    """How the answer is written: `plain`, `####`, `boxed` or `unit`."""
    size: Count | None = None
    """Examples to generate, or the first so many of a stored set."""
    seed: int = 0
    """Of generated examples."""
    options: dict[str, Any] = {}
    """Options of a generator."""

    def load(self) -> "Dataset":
        return load(
            self.source,
            split=self.split,
            data_dir=self.data_dir,
            prompt=self.prompt,
            answer=self.answer,
            answer_form=self.answer_form,
            size=self.size,
            seed=self.seed,
            options=self.options,
        )


class DataSettings(Source):
    """The training data, and how every prompt is put to the model."""

    max_prompt_tokens: Count | None = None
    """Longer prompts are left out, and counted."""
    chat: bool | None = None
    """Whether to apply the tokenizer's chat template; by default where it has one."""
    system: str | None = None
    """System prompt, with a chat template."""
    template_options: dict[str, Any] = {}
    """Passed to the chat template, `enable_thinking: false` for instance."""


class RewardTerm(Section):
    name: str
    """`math`, `format`, `length`, `task:<name>`, `reasoning-gym:<task>`, `model:<folder>` or
    `package.module:function`."""
    weight: float = 1.0
    """What its value is multiplied with in the sum."""
    options: dict[str, Any] = {}
    """Options of that reward."""


def _term(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _terms(value: Any) -> Any:
    return [value] if isinstance(value, (str, dict)) else value


class RewardSettings(Section):
    use: Annotated[list[Annotated[RewardTerm, BeforeValidator(_term)]], Field(min_length=1), BeforeValidator(_terms)]
    """The rewards that are added up, or the only one; a bare name stands for that reward with weight 1."""
    correct: str | None = None
    """Which of them says whether an answer is right (accuracy); by default the first."""
    threshold: float = 1.0
    """Its value from which an answer is right."""
    timeout: Positive = 10.0
    """Seconds that grading one answer may take before it is given up."""
    workers: Count | None = None
    """Grading processes; by default four, or as many as there are cores."""

    @model_validator(mode="after")
    def _known_judge(self) -> "RewardSettings":
        if self.correct is not None:
            from alula.rewards.scoring import distinct

            names = distinct([term.name for term in self.use])
            if self.correct not in names:
                raise unknown("reward that says what is correct", self.correct, names)
        return self

    def specs(self) -> "list[RewardSpec]":
        from alula.rewards import RewardSpec

        return [RewardSpec(term.name, term.weight, term.options) for term in self.use]

    def build(self) -> "Rewards":
        from alula.rewards import Rewards

        return Rewards(self.specs(), timeout=self.timeout, workers=self.workers)


def _tokens_or_schedule(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{value!r} is neither a whole number of KV tokens (512, 2k) nor a schedule's name or file.")
    return int(value) if isinstance(value, str) and value.isdigit() else value  # one value, however it was written


BudgetSetting = Annotated[int | str, BeforeValidator(_tokens_or_schedule)]


def _budget(given: int | str) -> int | Schedule:
    return given if isinstance(given, int) else budget(given)


class EvictSettings(Section):
    method: str
    """`rkv`, `snapkv`, `streaming`, `h2o`, `tova`, `keydiff`, `knorm` or `random`."""
    budget: BudgetSetting
    """KV tokens kept per layer and head, or a schedule: a file or a preset's name."""
    buffer: int = 128
    """Tokens that may pile up before the next eviction."""
    window: int = 8
    """Most recent tokens, always kept."""
    sinks: int = 4
    """First tokens, always kept; 0 is the papers' setting."""
    protect_prompt: bool = False
    """Keep the prompt whole and outside the budget."""
    options: dict[str, Any] = {}
    """Settings of the method itself, such as `mix` of `rkv`."""


class SelectSettings(Section):
    method: str
    """`block-topk` or `quest`."""
    budget: BudgetSetting
    """KV tokens read per layer and head, or a schedule: a file or a preset's name."""
    block: int = 16
    """Tokens per block; the engine's page takes this size."""
    dense_layers: int = 2
    """First layers, which read everything."""


def spelt_sparsity(text: str) -> dict[str, Any]:
    """The sections that the command line's spelling stands for."""
    evict, select = settings_of(text)
    if evict:
        own = {name: evict.pop(name) for name in [*evict] if name not in EvictSettings.model_fields}
        evict["options"] = own
    return {name: part for name, part in (("evict", evict), ("select", select)) if part}


class SparsitySettings(Section):
    evict: EvictSettings | None = None
    """Drop KV for good during rollouts."""
    select: SelectSettings | None = None
    """Keep all KV and read a part of it during rollouts."""

    @model_validator(mode="before")
    @classmethod
    def _spelt(cls, given: Any) -> Any:
        return spelt_sparsity(given) if isinstance(given, str) else given or {}

    def build(self) -> "Sparsity":
        from alula.sparsity.evict import check_settings
        from alula.sparsity.policy import Evict, Select, Sparsity

        evict = select = None
        if e := self.evict:
            with _named_in("sparsity.evict", e):
                for name, value in e.options.items():
                    own = name not in EvictSettings.model_fields
                    require(own, f"{name}={value}: not the method's own; give it as sparsity.evict.{name}.")
                check_settings(e.method, e.options, common=(), kind="option")
                evict = Evict(
                    e.method,
                    _budget(e.budget),
                    buffer=e.buffer,
                    window=e.window,
                    sinks=e.sinks,
                    protect_prompt=e.protect_prompt,
                    **e.options,
                )
        if s := self.select:
            with _named_in("sparsity.select", s):
                select = Select(s.method, _budget(s.budget), s.block, s.dense_layers)
        return Sparsity(evict, select)


@contextmanager
def _named_in(section: str, given: EvictSettings | SelectSettings) -> Iterator[None]:
    """A refused setting is called what the recipe calls it: `budget=8` is `sparsity.evict.budget=8`."""
    try:
        yield
    except SettingError as error:
        name = re.split(r"\W", str(error))[0]  # with which most messages begin
        if name in getattr(given, "options", {}):
            section += ".options"
        elif name not in type(given).model_fields:
            raise SettingError(f"{section}: {error}") from error
        raise SettingError(f"{section}.{error}") from error


class SamplingSettings(Section):
    prompts: Count = 32
    """Prompts per step, over all ranks."""
    n: Annotated[int, Field(ge=2)] = 8
    """Rollouts per prompt: the group that an advantage is taken against."""
    max_new_tokens: Count = 1024
    """Longest answer."""
    temperature: Positive = 1.0
    """Of the rollouts; the learner scores at the same one."""
    dynamic: bool = False
    """Draw further prompts while groups have equal rewards, until `prompts` groups have a signal (DAPO)."""
    max_rounds: Count = 4
    """With `dynamic`: at most so many times `prompts`; what is missing then is filled with groups without signal."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_filters(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name, off in (("top_p", 1.0), ("top_k", 0)):
                if values.get(name, off) != off:
                    raise SettingError(
                        f"{name}={values[name]}: training needs the probability of every token under the whole "
                        f"vocabulary, which {name} cuts; leave it out and use temperature alone."
                    )
            return {name: value for name, value in values.items() if name not in ("top_p", "top_k")}
        return values


class CorrectionSettings(Section):
    """A preset of docs/corrections.md, and any setting of `alula.objective.settings.Correction` that should differ."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    preset: str = "sparse-rl"
    """`none`, `sparse-rl`, `sparse-rl-code`, `strict`, `tis`, `mis`, `icepop`, `geometric`, `reroll` or
    `prefix-only`."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """Every setting of the preset, so that a run's config.yaml says them all."""
        options = dict(given) if isinstance(given, dict | Section) else {"preset": given}
        preset = options.pop("preset", "sparse-rl")
        named = isinstance(preset, str)
        require(named, f"preset={preset!r}: must be the name of a preset; none switches the correction off.")
        changed = asdict(Correction.named(preset)) | options
        if unknown_names := set(options) - set(asdict(Correction())):
            Correction.named(preset, **{unknown_names.pop(): None})
        return {"preset": preset} | asdict(TypeAdapter(Correction).validate_python(changed))

    def build(self) -> Correction:
        return Correction(**(self.model_extra or {}))


class ObjectiveSettings(Section):
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """Advantage of a rollout against its group: mean and std, mean only, or the mean of the others."""
    loss: LossName = "grpo"
    """Policy loss: `grpo`, `dr_grpo`, `dapo`, `gspo` or `cispo`."""
    clip_low: float | None = None
    """The ratio is clipped below at 1 - clip_low; by default the loss's published value."""
    clip_high: float | None = None
    """And above at 1 + clip_high."""
    dual_clip: float | None = None
    """Bounds the loss of tokens with negative advantage."""
    kl: float = 0.0
    """Coefficient of the KL to the initial policy; above 0 that policy is kept in memory (not under LoRA)."""
    kl_clamp: float | None = None
    """Cut a token's KL here."""
    correction: CorrectionSettings = CorrectionSettings()
    """What is done about the difference between sparse and dense policy: a preset's name, or `preset` and the
    settings that differ from it."""
    one_update: bool = False
    """Take old log-probs from the training forward itself and save the scoring pass; one update per batch."""
    skip_no_signal: bool = True
    """Leave rollouts that add exactly nothing (equal rewards, all tokens dropped) out of the update. The divisors
    still count them. Without effect where `kl` is above 0."""
    mask_truncated: bool = False
    """Answers cut off by `max_new_tokens` teach nothing; they still count in their group's mean."""

    def build_loss(self) -> Loss:
        return Loss(self.loss, self.clip_low, self.clip_high, self.dual_clip, self.kl, self.kl_clamp)


class LoRASettings(Section):
    rank: int = 32
    """Rank of the update of every linear layer."""
    alpha: float = 64.0
    """The update is scaled by alpha / rank."""
    seed: int = 0
    """Of the adapters' first values."""


class LearnerSettings(Section):
    updates: Count = 1
    """Optimizer steps per batch of rollouts."""
    minibatch: Literal["groups", "rollouts"] = "groups"
    """Whether those steps share out whole groups or shuffled rollouts."""
    lr: float = 1e-6
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this norm; null leaves them."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    decay: learner_config.Decay = "constant"
    """`constant`, or `linear` or `cosine` down to `min_lr_ratio` at the end of the run."""
    min_lr_ratio: float = 0.0
    """Where the decay ends, as a share of `lr`."""
    max_skipped: Count = 5
    """The run stops after so many updates in a row whose loss or gradient was not finite."""
    token_budget: int = 16384
    """Tokens per micro-batch, prompts included."""
    logprob_chunk: int = 2048
    """Positions whose logits exist at one time."""
    activation_checkpointing: bool = True
    """Keep only each layer's input and compute the rest again in the backward pass."""
    compile: bool | None = None
    """Compile the decoder layers; by default on a single GPU."""
    lora: LoRASettings | None = None
    """Train low-rank adapters instead of the weights."""

    def build(self, steps: int, reference: bool) -> LearnerConfig:
        own = {"updates", "minibatch", "max_skipped", "lora"}
        lora = learner_config.LoRA(**self.lora.model_dump()) if self.lora else None
        return LearnerConfig(
            **self.model_dump(exclude=own), lora=lora, total_steps=steps * self.updates, reference=reference
        )


class MoveSettings(Section):
    """The sparser policy that a run goes over to once φ has brought it close enough to the dense one."""

    sparsity: str
    """The candidate as one short text: `block-topk:512`, `rkv:256+64`, `block-topk:qwen3-4b-0.80`."""
    tau: float = 0.86
    """The least tail of acceptance, measured at the candidate: its lower bound, in every length bin."""
    at: int | None = None
    """Move after this step whatever the tail, which is measured all the same; by default when the tail allows."""
    every: int = 20
    """Measure the candidate every so many steps."""
    prompts: int = 64
    """Prompts of a measurement, held-out ones where there are any."""
    width: int = 2000
    """Tokens per length bin."""


class FirstSettings(Section):
    """φ alone is trained before the run's first step, so that the sparse policy is close to the dense one from the
    beginning: on rollouts of its own, by the divergence, while θ stands still."""

    steps: int = 20
    """Batches of rollouts."""
    prompts: int = 64
    """Prompts of a batch, one rollout each, over all ranks."""
    minibatches: int = 4
    """Optimizer steps that a batch is shared out to."""


class DistillSettings(Section):
    """DistillSparse: a LoRA φ that only the sparse rollout uses, trained to agree with the dense policy; see
    docs/distill.md."""

    adapter: str | None = None
    """Begin with this φ, a folder that `alula distill` or a run wrote; rank, alpha and targets are then its own."""
    rank: int = 16
    """Rank of the update of every targeted layer."""
    alpha: float = 32.0
    """The update is scaled by alpha / rank."""
    targets: list[str] = ["all"]
    """Linear layers with an adapter, by the last part of their name (`q_proj`), or `all` of them but the head."""
    seed: int = 0
    """Of the adapter's first values and of which prompts are distilled."""
    loss: Literal["both", "policy", "divergence"] = "both"
    """The clipped objective of the sparse policy, its divergence from the dense one, or both."""
    divergence: Literal["kl", "topk-kl", "sampled-kl", "overlap"] = "kl"
    """KL(sparse ‖ dense) over the whole vocabulary, over the teacher's `top_k` tokens, of the sampled tokens (k2), or
    1 - acceptance."""
    top_k: int = 64
    """Tokens of `topk-kl`."""
    weight: float = 1.0
    """λ, of the divergence."""
    teacher: Literal["after", "before"] = "after"
    """The dense policy after θ's update, or before it from the scores already taken (`sampled-kl` only)."""
    lr: float = 1e-4
    """Learning rate of φ."""
    max_grad_norm: float | None = 1.0
    """Gradients of φ are scaled down to this norm; null leaves them."""
    minibatches: int = 1
    """Optimizer steps per training step that distils."""
    every: int = 1
    """Distil at every so many training steps."""
    fraction: float = 0.25
    """Share of a step's prompts whose rollouts are distilled."""
    token_budget: int = 16384
    """Tokens per micro-batch, prompts included."""
    chunk: int = 1024
    """Positions whose logits, of both policies, exist at one time."""
    activation_checkpointing: bool = True
    """Keep only each layer's input and compute the rest again in the backward pass."""
    compile: bool | None = None
    """Compile the decoder layers; by default what `learner.compile` says, or on a GPU."""
    first: FirstSettings | None = None
    """Distillation before the first training step; `{}` takes the defaults."""
    move: MoveSettings | None = None
    """A sparser policy to go over to."""

    def build(self, learner_compiles: bool | None = None) -> DistillConfig:
        compiled = learner_compiles if self.compile is None else self.compile
        return DistillConfig(**(self.model_dump(exclude={"adapter", "first", "move"}) | {"compile": compiled}))

    def build_first(self) -> First | None:
        return First(**self.first.model_dump()) if self.first else None

    def build_move(self) -> Move | None:
        return Move(**self.move.model_dump()) if self.move else None


class EngineSettings(Section):
    page: int = 16
    """KV tokens per page; a selector's block takes its place."""
    kv_memory: str | int | None = None
    """Size of the KV pool, `60GiB` for instance; by default twice what `max_rows` dense sequences of `max_length` need
    (one that evicts compacts beside the prompt it shares), but at most 80 % of what is free on a GPU and 1 GiB on the
    CPU."""
    max_rows: Count = 256
    """Sequences that decode together."""
    max_length: Count | None = None
    """Most KV tokens of one sequence; by default the longest prompt with the longest answer of this run. Where those
    are more than the model's max_position_embeddings the run is refused, unless this says that it can read so far."""
    lookahead: Count | None = None
    """Decode steps launched at a time."""
    buckets: list[int] | None = None
    """Batch sizes that decode steps are padded to; one value makes results independent of the batch, bit for bit."""
    graphs: bool | None = None
    """Capture decode steps as CUDA graphs; by default on CUDA."""
    compiled: bool | None = None
    """Compile the layers; by default on CUDA."""


class EvalSettings(Section):
    every: Annotated[int, Field(ge=0)] = 10
    """Evaluate the dense policy on held-out data every so many steps, before the first and after the last too;
    0 switches it off."""
    data: Source | None = None
    """Held-out data; by default `size` examples are set aside from the training data."""
    size: Count = 128
    """Problems to evaluate on."""
    k: Count = 1
    """Answers per problem."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Of the evaluation; 0 is greedy."""
    max_new_tokens: Count | None = None
    """Longest answer; by default the training's."""
    sparse: bool = False
    """Evaluate the sparse policy as well."""


class MonitorSettings(Section):
    """The tail of acceptance during the run; see docs/sparrow.md."""

    rollouts: Annotated[int, Field(ge=0)] = 8
    """Rollouts per step whose acceptance is measured, of as many prompts, over all ranks; 0 switches it off."""
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Which quantile of acceptance is the tail."""
    bin: Count | None = None
    """Tokens per length bin where the budget is no schedule; by default 2000, or an eighth of the longest."""


class ControlSettings(Section):
    """The controller that holds the tail, and vetoed rollouts rare; see docs/sparrow.md."""

    enabled: bool = False
    """Whether anything is done about a tail that falls below tau, or about too many vetoed rollouts."""
    tau: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The tail to hold; by default the one that the schedule was planned for."""
    vetoed: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The largest share of rollouts that may be vetoed (some token with p_dense / p_sparse below the correction's veto,
    or 1e-4), say 0.05; it sees what the tail does not. By default they are not counted."""
    on_violation: Literal["warn", "adapt", "dense", "stop"] = "warn"
    """What confident evidence of a tail below tau, or of too many vetoes, does: report it, move budgets, read and keep
    everything from that length on, or stop the run."""
    margin: Positive = 0.03
    """Under `adapt` a budget falls only where the tail is confidently above tau + margin."""
    false_alarm_steps: Annotated[float, Field(ge=1)] = 200.0
    """Expected steps to the first false alarm, at least."""
    patience: Count = 10
    """Observed steps without a change before a budget may fall."""
    ladder: Annotated[list[Count], Field(min_length=1)] | None = None
    """Budgets that may be used; by default Sparrow's grid, rungs a quarter apart from a smaller budget up to it, and
    the longest sequence."""

    def build(self, sparsity: "Sparsity", quantile: float, max_length: int) -> "Control | None":
        from alula.mismatch.control.control import Control, default_ladder
        from alula.mismatch.control.monitor import budget_of, controlled, with_budget
        from alula.sparsity.policy import smallest

        if not self.enabled:
            return None
        parts = [part.budget for part in (sparsity.select, sparsity.evict) if part is not None]
        planned = [b.notes["tau"] for b in parts if isinstance(b, Schedule) and "tau" in b.notes]
        tau = self.tau if self.tau is not None else next(iter(planned), None)
        require(len(parts) > 0, "control.enabled=true, but the rollouts are dense; set a sparsity.")
        require(
            tau is not None or self.vetoed is not None,
            "control.enabled=true needs control.tau, as this budget was not planned for one, or control.vetoed.",
        )
        kind = controlled(sparsity)
        start, block = budget_of(sparsity, kind), sparsity.select.block if sparsity.select and kind == "select" else 1
        assert start is not None
        for rung in self.ladder or ():
            try:
                with_budget(sparsity, kind, rung)
            except SettingError as error:
                raise SettingError(f"control.ladder={self.ladder}: {error}") from error
        return Control(
            tau,
            max_length,
            True,
            self.on_violation,
            quantile,
            self.margin,
            self.false_alarm_steps,
            self.patience,
            ladder=tuple(self.ladder or default_ladder(smallest(start), max_length, block)),
            vetoed=self.vetoed,
        )


class CheckpointSettings(Section):
    every: Annotated[int, Field(ge=0)] = 10
    """Steps between checkpoints; 0 writes one at the end only."""
    keep: Count = 2
    """How many of the last ones stay."""
    best: bool = True
    """Also keep the one with the best held-out accuracy of the dense policy."""


class LoggingSettings(Section):
    sinks: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Where metrics go besides the run's folder: `tensorboard`, `wandb`, `trackio`."""
    completions: Annotated[int, Field(ge=0)] = 4
    """Sampled completions written per step."""


class RunConfig(Section):
    out: str
    """The run's folder; by default `runs/<name of the recipe>`."""
    steps: Count = 100
    """Batches of rollouts to train on."""
    seed: int = 0
    """Of data order, rollouts, mini-batches and random weights."""
    model: ModelSettings
    """What is trained."""
    data: DataSettings
    """What it is trained on."""
    rewards: RewardSettings
    """What an answer is worth."""
    sparsity: SparsitySettings = SparsitySettings()
    """What of the KV cache rollouts keep or read: these settings, or the command line's spelling of them, such as
    `rkv:512+128` or `dense`; nothing here is a dense run."""
    sampling: SamplingSettings = SamplingSettings()
    """How rollouts are drawn."""
    objective: ObjectiveSettings = ObjectiveSettings()
    """What is optimized."""
    learner: LearnerSettings = LearnerSettings()
    """How it is optimized."""
    distill: DistillSettings | None = None
    """Pull the sparse policy towards the dense one while training (DistillSparse)."""
    engine: EngineSettings = EngineSettings()
    """Memory and speed of the rollouts."""
    eval: EvalSettings = EvalSettings()
    """Held-out evaluation."""
    monitor: MonitorSettings = MonitorSettings()
    """How the mismatch is watched."""
    control: ControlSettings = ControlSettings()
    """What is done when it grows."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """What survives."""
    logging: LoggingSettings = LoggingSettings()
    """What is written down."""

    @property
    def loss(self) -> Loss:
        return self.objective.build_loss()

    @property
    def correction(self) -> Correction:
        return self.objective.correction.build()

    def learner_config(self) -> LearnerConfig:
        return self.learner.build(self.steps, reference=self.objective.kl > 0)

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        """Refuse what means nothing together, before anything is loaded."""
        one_update, updates = self.objective.one_update, self.learner.updates
        check(self.loss, self.correction, one_update=one_update)
        require(
            not one_update or updates == 1,
            f"objective.one_update=true with learner.updates={updates}: after the first update the old log-probs "
            "are gone; set learner.updates=1 or objective.one_update=false.",
        )
        unit = self.sampling.prompts * (self.sampling.n if self.learner.minibatch == "rollouts" else 1)
        require(
            updates <= unit,
            f"learner.updates={updates}: a step has only {unit} {self.learner.minibatch} to share out; lower it, or "
            "raise sampling.prompts.",
        )
        self.learner_config()
        asked = sorted(self.control.model_fields_set - {"enabled"})
        require(
            not asked or "enabled" in self.control.model_fields_set,
            f"control.{', control.'.join(asked)} without control.enabled: nothing is controlled; set "
            "control.enabled=true.",
        )
        if self.distill is not None:
            self._check_distill(self.distill)
        return self

    def policies(self) -> "list[Sparsity]":
        """What the run samples with, and what it may move to."""
        move = self.distill.move if self.distill else None
        return [self.sparsity.build(), *([parse_sparsity(move.sparsity)] if move else [])]

    def _check_distill(self, distill: DistillSettings) -> None:
        sparsity = self.sparsity.build()
        require(not sparsity.dense, "distill: the rollouts are dense; set a sparsity.")
        require(
            distill.first is None or distill.weight > 0,
            "distill.first trains by the divergence alone, and distill.weight=0 switches that off; raise it.",
        )
        require_one_part(sparsity, "distill")
        distill.build(), distill.build_first(), distill.build_move()
        before = distill.teacher == "before" and distill.loss != "policy"
        require(
            not before or (distill.divergence == "sampled-kl" and not self.objective.one_update),
            f"distill.teacher=before with divergence={distill.divergence}: a run keeps the dense scores of the sampled "
            "tokens only, and none in one-update mode; use sampled-kl with two passes, or teacher=after.",
        )
        require(
            distill.move is None or not self.control.enabled,
            "distill.move and control.enabled both choose the budgets; use one of them.",
        )
        if distill.move is not None:
            self._check_move(distill.move)

    def _check_move(self, move: MoveSettings) -> None:
        candidate, present = parse_sparsity(move.sparsity), self.sparsity.build()
        said = f"distill.move.sparsity={move.sparsity}"
        require(not candidate.dense, f"{said}: the run moves to a sparser policy; name one with a smaller budget.")
        require_one_part(candidate, said)
        for wanted, now in ((candidate.evict, present.evict), (candidate.select, present.select)):
            if wanted and now and wanted.method == now.method:
                fixed = isinstance(wanted.budget, int) and isinstance(now.budget, int)
                require(
                    not fixed or wanted.budget < now.budget,  # type: ignore[operator]
                    f"{said}: no sparser than the run's own budget of {now.budget}; name a smaller one.",
                )
        require(
            move.at is None or move.at <= self.steps,
            f"distill.move.at={move.at}: the run ends after steps={self.steps}; move earlier.",
        )


def require_one_part(sparsity: "Sparsity", said: str) -> None:
    require(
        sparsity.evict is None or sparsity.select is None,
        f"{said}: an evictor and a selector together cannot be replayed by the learner; use one of them.",
    )
