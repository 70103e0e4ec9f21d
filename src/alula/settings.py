"""Settings of a run, section by section: each is declared, checked and documented here, once.

Components take these objects (`Learner(model, LearnerSettings(lr=1e-5))`), a recipe is a tree of them
(`alula.config.run`). The checks here concern single values; this module imports nothing heavy.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from alula.errors import SettingError, require
from alula.section import Section

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
COLDEST, HOTTEST = 1e-4, 1e4
"""Limits of a sampling temperature above 0. Far beyond them it would be 0 or infinite in float32."""
Temperature = Annotated[float, Field(ge=COLDEST, le=HOTTEST)]
Decay = Literal["constant", "linear", "cosine"]
Shard = Literal["node", "all"]


class ModelSettings(Section):
    source: str
    """Hub id, Hugging Face folder, GGUF file, or `shape:<name>` for random weights."""
    tokenizer: str | None = None
    """Hub id or folder of a tokenizer that replaces the model's, or `task:<name>` for a generated task's. By default a
    `shape:` model on `task:` data uses the task's tokenizer, and its vocabulary is cut to it."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of weights and compute; by default bfloat16 on CUDA (with float32 masters) and float32 on the CPU."""
    residual: Literal["float32"] | None = None
    """`float32` keeps the residual stream of a 16-bit model in float32, in rollouts and training alike: the engine's
    and the learner's log-probs come closer. Without effect on a float32 model."""
    device: Literal["cpu", "cuda"] | None = None
    """Device; by default CUDA if available."""


class Source(Section):
    """A data source; see docs/rewards-and-data.md."""

    source: str
    """File, folder, benchmark, hub id, `task:<name>`, `reasoning-gym:<task>` or `verifiers:<environment>`."""
    split: str | None = None
    """Split of a stored data set."""
    data_dir: str | None = None
    """Folder with local copies of the benchmarks."""
    prompt: str | None = None
    """Template of the prompt, with `{field}`s of the row."""
    answer: str | None = None
    """Template of the reference answer; an empty text for data without answers."""
    answer_form: str | None = None
    """How the answer is written: `plain`, `####`, `boxed` or `unit`."""
    size: Count | None = None
    """Number of examples to generate, or to take from the start of a stored set."""
    seed: Seed = 0
    """Seed for generated examples."""
    options: dict[str, Any] = {}
    """Options of a generator."""


class DataSettings(Source):
    """The training data, and how prompts are formatted."""

    max_prompt_tokens: Count | None = None
    """Longer prompts are dropped; the log reports how many."""
    chat: bool | None = None
    """Apply the tokenizer's chat template; by default if it has one."""
    system: str | None = None
    """System prompt, with a chat template."""
    template_options: dict[str, Any] = {}
    """Passed to the chat template, for example `enable_thinking: false`."""


class RewardTerm(Section):
    """One reward of the weighted sum."""

    name: str
    """`math`, `code`, `format`, `length`, `task:<name>`, `reasoning-gym:<task>`, `model:<folder>`,
    `package.module:function`, or `environment` for the environment's own."""
    weight: float = 1.0
    """Its weight in the sum."""
    options: dict[str, Any] = {}
    """Options of that reward."""


def _as_term(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, (str, dict)) else value


def _as_stops(value: Any) -> Any:
    return [value] if isinstance(value, (str, int)) else value


class EnvironmentSettings(Section):
    """An environment that answers the policy's turns; see docs/environments.md."""

    use: str
    """`lookup`, `verifiers:<environment>` or `package.module:Class`."""
    max_turns: Count = 8
    """Turns of the policy per episode. An episode that is not done by then counts as truncated."""
    max_tokens: Annotated[int, Field(ge=2)]
    """Most tokens of an episode: prompt, sampled tokens and the environment's messages together."""
    timeout: Positive = 60.0
    """Seconds that one call of the environment may take. After that the episode is given up, and not trained on."""
    options: dict[str, Any] = {}
    """Options of that environment."""


class RewardSettings(Section):
    use: Annotated[
        list[Annotated[RewardTerm, BeforeValidator(_as_term)]], Field(min_length=1), BeforeValidator(_as_list)
    ]
    """The rewards to add up, or a single one; a bare name means that reward with weight 1."""
    correct: str | None = None
    """The reward that decides whether an answer is correct (accuracy); by default the first."""
    threshold: float = 1.0
    """An answer is correct if that reward is at least this."""
    timeout: Positive = 10.0
    """Time limit for grading one answer, in seconds."""
    workers: Count | None = None
    """Grading processes; by default four, or the number of cores if smaller."""
    memory: Positive = 4.0
    """Memory limit of a grading process, in GiB."""


class SamplingSettings(Section):
    prompts: Count = 32
    """Prompts per step, over all ranks."""
    n: Annotated[int, Field(ge=2)] = 8
    """Rollouts per prompt: the group that an advantage is taken against."""
    max_new_tokens: Count = 1024
    """Longest answer."""
    temperature: Temperature = 1.0
    """Sampling temperature; the learner scores at the same temperature."""
    stop: Annotated[list[int | Annotated[str, Field(min_length=1)]], BeforeValidator(_as_stops)] = []
    """Texts and token ids that end an answer, in rollouts and evaluations, in addition to the model's end-of-sequence
    tokens. Rewards read the text before the one that ended it."""
    dynamic: bool = False
    """Draw further prompts while groups have equal rewards, until `prompts` groups have a signal (DAPO)."""
    max_rounds: Count = 4
    """With `dynamic`: draw at most this many times `prompts`, then fill up with groups without signal."""

    @model_validator(mode="before")
    @classmethod
    def _reject_filters(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name, off in (("top_p", 1.0), ("top_k", 0)):
                if values.get(name, off) != off:
                    raise SettingError(
                        f"{name}={values[name]}: training needs the probability of every token under the whole "
                        f"vocabulary, which {name} cuts; leave it out and use temperature alone."
                    )
            return {name: value for name, value in values.items() if name not in ("top_p", "top_k")}
        return values


class LoRASettings(Section):
    rank: Count = 32
    """Rank of the update of every linear layer."""
    alpha: Positive = 64.0
    """The update is scaled by alpha / rank."""
    seed: Seed = 0
    """Seed for the adapters' initial values."""


class LearnerSettings(Section):
    updates: Count = 1
    """Optimizer steps per batch of rollouts."""
    minibatch: Literal["groups", "rollouts"] = "groups"
    """Whether mini-batches hold whole groups or shuffled rollouts."""
    lr: Positive = 1e-6
    """Learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: Positive = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""
    max_grad_norm: Positive | None = 1.0
    """Gradients are clipped to this global norm; null switches clipping off."""
    warmup_steps: Natural = 0
    """Optimizer steps of linear warm-up."""
    decay: Decay = "constant"
    """`constant`, or `linear` or `cosine` down to `min_lr_ratio` at the end of the run."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate of the decay, as a share of `lr`."""
    max_skipped: Count = 5
    """The run stops after this many updates in a row with a loss or gradient that is not finite."""
    token_budget: Count | None = None
    """Tokens per micro-batch, prompts included; a longer sequence is a micro-batch by itself. By default 16384; on a
    GPU what its memory allows, 4096 to 65536."""
    logprob_chunk: Count = 2048
    """Positions whose logits are in memory at the same time."""
    activation_checkpointing: bool | None = None
    """Keep only each layer's input and recompute the rest in the backward pass: a third more work. By default on, but
    off on a GPU whose memory allows it."""
    compile: bool | None = None
    """Compile the decoder layers; by default on a single GPU."""
    shard: Shard = "node"
    """Ranks that share the weights, gradients and moments of the learner: those of one node, with a replica on every
    node (HSDP), or `all` of them, for a model that does not fit one node."""
    timeout: Positive = 3600.0
    """Seconds that a rank waits for the others before the run fails. Rollouts on one rank may take longer than on
    another; torch's own limit on GPUs is 600."""
    lora: LoRASettings | None = None
    """Train low-rank adapters (LoRA) instead of the weights."""

    @property
    def checkpoints_activations(self) -> bool:
        return self.activation_checkpointing is not False

    @property
    def tokens(self) -> int:
        """The token budget."""
        return self.token_budget or 16384

    def check_decay(self, total_steps: int) -> None:
        """A decay needs steps after the warm-up; `total_steps` are the optimizer steps of the run."""
        require(
            self.decay == "constant" or total_steps > self.warmup_steps,
            f"decay={self.decay} needs more optimizer steps than warmup_steps={self.warmup_steps}, "
            f"but the run has {total_steps}; lower warmup_steps or train longer.",
        )


class FirstSettings(Section):
    """Distillation before the run's first step: the adapter is trained on rollouts of the initial sparse policy, which
    then starts out close to the dense one. The weights do not change."""

    steps: Count = 20
    """Batches of rollouts."""
    prompts: Count = 64
    """Prompts per batch, one rollout each, over all ranks."""
    minibatches: Count = 4
    """Optimizer steps per batch."""

    @model_validator(mode="after")
    def _enough_rollouts(self) -> "FirstSettings":
        require(
            self.minibatches <= self.prompts,
            f"minibatches={self.minibatches}: must be at most {self.prompts} (prompts); lower it, or raise prompts.",
        )
        return self


class MoveSettings(Section):
    """A sparser policy that the run switches to once the adapter has brought it close enough to the dense one."""

    sparsity: str
    """The candidate in the command line's syntax: `block-topk:512`, `rkv:256+64`, `block-topk:qwen3-4b-0.80`."""
    tau: Fraction = 0.86
    """Least tail of acceptance, measured at the candidate: its lower bound, in every length bin."""
    at: Count | None = None
    """Move after this step whatever the tail, which is still measured; by default as soon as the tail allows."""
    every: Count = 20
    """Steps between measurements of the candidate."""
    prompts: Annotated[int, Field(ge=2)] = 64
    """Prompts per measurement, held-out ones if there are any."""
    width: Count = 2000
    """Tokens per length bin."""


class DistillSettings(Section):
    """DistillSparse: a LoRA adapter that only the sparse rollout uses, trained to agree with the dense policy; see
    docs/distill.md."""

    adapter: str | None = None
    """Start from this adapter, a folder written by `alula distill` or a run; it determines rank, alpha and targets."""
    rank: Count = 16
    """Rank of the update of every targeted layer."""
    alpha: Positive = 32.0
    """The update is scaled by alpha / rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("all",)
    """Linear layers with an adapter, by the last part of their name (`q_proj`), or `all` of them but the head."""
    seed: Seed = 0
    """Seed for the adapter's initial values and for the choice of prompts to distil."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """λ in the loss L = L_policy + λ · KL(sparse ‖ dense)."""
    lr: Positive = 1e-4
    """Learning rate of the adapter."""
    max_grad_norm: Positive | None = 1.0
    """The adapter's gradients are clipped to this global norm; null switches clipping off."""
    minibatches: Count = 1
    """Optimizer steps per training step that distils."""
    every: Count = 1
    """Distil after every `every`-th training step."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of a step's prompts whose rollouts are distilled."""
    token_budget: Count = 16384
    """Tokens per micro-batch, prompts included."""
    chunk: Count = 1024
    """Positions whose logits, of both policies, are in memory at the same time."""
    activation_checkpointing: bool = True
    """Keep only each layer's input and recompute the rest in the backward pass."""
    compile: bool | None = None
    """Compile the decoder layers; by default as `learner.compile`, or on a GPU."""
    first: FirstSettings | None = None
    """Distillation before the first training step; `{}` takes the defaults."""
    move: MoveSettings | None = None
    """A sparser policy to move to."""


class EngineSettings(Section):
    page: int = 16
    """KV tokens per page; with a selector, its block size is used instead."""
    kv_memory: str | int | None = None
    """Size of the KV pool, for example `60GiB`; by default twice what `max_rows` dense sequences of `max_length` need
    (an evicting sequence compacts next to the prompt it shares), but at most 80 % of the free memory on a GPU and 1 GiB
    on the CPU."""
    kv_dtype: Literal["int8", "fp8"] | None = None
    """KV in 8 bits: nearly twice the tokens of bfloat16 in the same memory, for rollouts, rerolls and evaluations.
    `int8` is closer to the dense policy than `fp8`. The learner stays exact, and the correction sees the difference. By
    default the model's dtype."""
    max_rows: Count = 256
    """Sequences that decode together."""
    max_length: Count | None = None
    """Most KV tokens of one sequence; by default the longest prompt with the longest answer of this run. A run that
    exceeds the model's max_position_embeddings raises, unless this setting allows it."""
    lookahead: Count | None = None
    """Decode steps launched at a time; by default 8 on a GPU, 16 with more than 256 rows, 1 on the CPU."""
    swap_memory: str | int | None = None
    """Host memory of each rank for the KV of preempted rollouts, for example `32GiB`; by default a quarter of the free
    memory, divided by the ranks of a node. When it is full, the youngest rollout is computed again from its prompt,
    with the same tokens."""
    buckets: list[int] | None = None
    """Batch sizes that decode steps are padded to; a single value makes results independent of batch composition, bit
    for bit."""
    graphs: bool | None = None
    """Capture decode steps and small evictions as CUDA graphs; by default on CUDA."""
    compiled: bool | None = None
    """Run Llama- and Qwen-shaped models in kernels of Alula's own, and compile other models; by default on CUDA."""


class RolloutSettings(Section):
    """Where rollouts are generated; see docs/scale-out.md."""

    backend: Literal["local", "ray"] = "local"
    """`local`: every rank has an engine and generates its share. `ray`: workers on a Ray cluster generate for all
    ranks (`pip install 'alula[ray]'`)."""
    address: str | None = None
    """The Ray cluster to join, such as `10.0.0.1:6379`; by default the one that RAY_ADDRESS names or that runs on this
    machine; if there is none, one is started here. `local` always starts one."""
    workers: Count = 1
    """Rollout workers, each with an engine of its own."""
    gpus_per_worker: Annotated[float, Field(ge=0)] | None = None
    """GPUs that Ray sets aside for a worker; by default 1 if the model is on a GPU. Below 1, several workers share
    one."""
    min_workers: Count = 1
    """With fewer workers than this the run waits for others to return."""
    colocated: bool = False
    """The workers share the learner's GPUs: they release their KV memory while it learns."""
    stale: Natural = 0
    """Steps that rollouts may be ahead of the learner. 0: generating and learning take turns. With 1, the next batch
    is generated while the learner works on this one, by weights that are up to one step old."""
    timeout: Positive = 600.0
    """A worker that has generated no token for so many seconds is replaced. It covers the loading of the model, too."""


class EvalSource(Source):
    """A held-out data set."""

    k: Count | None = None
    """Answers per problem of this data set; by default `eval.k`."""


class EvalSettings(Section):
    every: Natural = 10
    """Evaluate the dense policy on held-out data every `every` steps, and before the first and after the last step;
    0 switches it off."""
    data: Annotated[list[EvalSource], BeforeValidator(_as_list)] = []
    """Held-out data, one set or a list of them; by default `size` examples are set aside from the training data. The
    best checkpoint has the best accuracy, averaged over the sets."""
    size: Count = 128
    """Most problems of a set to evaluate on."""
    k: Count = 1
    """Answers per problem."""
    temperature: Annotated[float, Field(ge=0, le=HOTTEST)] = 0.0
    """Sampling temperature of the evaluation; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling of the evaluation."""
    top_k: Natural = 0
    """Top-k sampling of the evaluation; 0 switches it off."""
    max_new_tokens: Count | None = None
    """Longest answer; by default `sampling.max_new_tokens`."""
    sparse: bool = False
    """Evaluate the sparse policy as well."""

    @model_validator(mode="after")
    def _check_temperature(self) -> "EvalSettings":
        require(
            self.temperature == 0 or self.temperature >= COLDEST,
            f"temperature={self.temperature}: must be 0 (greedy), or at least {COLDEST:g}.",
        )
        most = max([source.k or self.k for source in self.data] or [self.k])
        require(
            most == 1 or self.temperature > 0,
            f"k={most} with temperature=0: greedy answers are all equal; set eval.temperature.",
        )
        return self

    def answers(self, index: int) -> int:
        """Answers per problem of the held-out set `index`."""
        return (self.data[index].k if self.data else None) or self.k


class MonitorSettings(Section):
    """The tail of acceptance during the run; see docs/sparrow.md."""

    rollouts: Natural = 8
    """Rollouts per step whose acceptance is measured, each of a different prompt, over all ranks; 0 switches the
    monitor off."""
    quantile: Fraction = 0.05
    """The quantile of acceptance that is called the tail."""
    bin: Count | None = None
    """Tokens per length bin if the budget is not a schedule; by default 2000, or an eighth of the longest sequence."""


class ControlSettings(Section):
    """The controller that holds the tail and keeps vetoed rollouts rare; see docs/sparrow.md."""

    enabled: bool = False
    """React to a tail below tau, or to too many vetoed rollouts."""
    tau: Fraction | None = None
    """The tail to hold; by default the one that the schedule was planned for."""
    vetoed: Fraction | None = None
    """Largest share of rollouts that may be vetoed (some token with p_dense / p_sparse below the correction's veto, or
    1e-4), for example 0.05; it sees what the tail does not. Under `adapt` no budget falls without confident evidence of
    less than a quarter of it. By default vetoes are not counted."""
    on_violation: Literal["warn", "adapt", "dense", "stop"] = "warn"
    """Reaction to confident evidence of a tail below tau, or of too many vetoes: `warn` reports it, `adapt` changes
    budgets, `dense` reads and keeps everything from that length on, `stop` ends the run."""
    margin: Positive = 0.03
    """Under `adapt` a budget falls only where the tail is confidently above tau + margin."""
    false_alarm_steps: Annotated[float, Field(ge=1)] = 200.0
    """Lower bound of the expected number of steps to the first false alarm, and to the first false fall of a budget."""
    patience: Count = 10
    """Observed steps without a change before a budget may fall."""
    ladder: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    """Budgets that may be used; by default Sparrow's grid, rungs a quarter apart from a smaller budget up to it, and
    the longest sequence."""


class CheckpointSettings(Section):
    every: Natural = 10
    """Steps between checkpoints; 0 writes one at the end only."""
    keep: Count = 2
    """Number of recent checkpoints to keep."""
    best: bool = True
    """Also keep the checkpoint with the best held-out accuracy of the dense policy."""


class LoggingSettings(Section):
    sinks: Annotated[
        list[Literal["tensorboard", "wandb", "trackio"]],
        BeforeValidator(_as_list),
        AfterValidator(lambda names: list(dict.fromkeys(names))),
    ] = []
    """Where metrics go in addition to the run's folder: `tensorboard`, `wandb`, `trackio`, or a list of them."""
    completions: Natural = 4
    """Sampled completions written per step."""
    rollouts: Natural = 10
    """At the first step and then after every so many, all rollouts of one prompt are written token by token, with their
    evictions, for `alula watch`; 0: never."""

    def rollouts_due(self, step: int) -> bool:
        """Whether training step `step`, counted from 1, writes its first prompt's rollouts token by token."""
        return self.rollouts > 0 and (step - 1) % self.rollouts == 0
