"""How a training step divides over a cluster that need not exist: rollouts, scoring, updates and weight transfer.

The decode and learner costs are those of `speed_plan`, measured on one H200. What several GPUs add is bytes over links:
no contention, no stragglers, nothing hidden behind computation but the learner's gathers within a node. Rewards,
evaluations and checkpoints are not counted. Every engine gets the same mix of answer lengths.
"""

from dataclasses import dataclass

from alula.bench.ceilings import Ceilings
from alula.config.run import RunConfig
from alula.distributed import World
from alula.errors import SettingError, require
from alula.mismatch.plan.cost import HARDWARE, AnalyticCost, Hardware
from alula.trainer.build import check_shares
from alula.trainer.host_plan import network_bytes
from alula.trainer.memory_plan import USABLE, MemoryPlan, plan_memory
from alula.trainer.rollout_simulation import answer_lengths, decode_seconds
from alula.trainer.speed_plan import (
    EVICTION_LAYER_MS,
    LAYER_MS,
    PREFILL_SHARE,
    kv_memory,
    learner_seconds,
    scoring_passes,
)

MATRIX_SHARE, COPY_SHARE = 0.81, 0.89
"""Shares of the data sheet's matrix rate and bandwidth that an H200 reaches (benchmarks/results/training-h200.json)."""
MEMORY = {"h200": 139, "h100": 79, "a100": 79}
"""GiB that a GPU offers."""
NVLINK = {"h200": 450e9, "h100": 450e9, "a100": 300e9}
"""Bytes per second to the other GPUs of a node, one way, by the data sheet."""
STORE_RATE = 0.88e9
"""Bytes per second through Ray's object store into a worker, measured on two CPU cores with 264 MB: a lower bound
(benchmarks/results/ray-rollouts.json; 3 GB went twice as fast)."""


class DoesNotFit(SettingError):
    """A division whose learners or engines have too little memory, or nothing to do."""


@dataclass(frozen=True)
class Cluster:
    gpu: str = "h200"
    nodes: int = 1
    gpus: int = 1
    """Per node."""
    network: float = 50e9
    """Bytes per second between a node and the others, one way."""

    def __post_init__(self) -> None:
        require(self.gpu in MEMORY, f"gpu={self.gpu}: known: {', '.join(MEMORY)}.")

    @property
    def size(self) -> int:
        return self.nodes * self.gpus

    @property
    def ceilings(self) -> Ceilings:
        sheet = HARDWARE[self.gpu]
        return Ceilings(COPY_SHARE * sheet.terabytes_per_second * 1e12, MATRIX_SHARE * sheet.tflops * 1e12)

    @property
    def memory(self) -> int:
        return MEMORY[self.gpu] << 30


@dataclass(frozen=True)
class StepPlan:
    """Seconds of one step, and bytes per GPU."""

    learners: int
    workers: int
    """GPUs that only generate; 0: the learners' do it, before they learn."""
    rollouts: float
    score: float
    update: float
    weights: float
    learning_bytes: int
    generating_bytes: int

    @property
    def in_turn(self) -> float:
        """The step if rollouts wait for the newest weights."""
        return self.rollouts + self.learner

    @property
    def one_step_off(self) -> float:
        """The step if the next rollouts run while the learner learns; only with workers."""
        return max(self.rollouts, self.learner)

    @property
    def learner(self) -> float:
        return self.score + self.update + self.weights


class StepPlanner:
    """Plans of one recipe on one cluster, with answers of `mean_length` tokens on average."""

    def __init__(self, config: RunConfig, cluster: Cluster, mean_length: int | None = None) -> None:
        self.config, self.cluster = config, cluster
        self.most = config.most_sampled()
        self.mean = mean_length or self.most
        require(self.mean <= self.most, f"length={self.mean}: answers have at most {self.most} tokens; lower it.")

    def extrapolated(self) -> list[str]:
        """What of this plan was not measured."""
        cluster, plan = self.cluster, plan_memory(self.config)
        parts = {
            f"{cluster.gpu}: data-sheet rates × what an H200 reaches of its own": cluster.gpu != "h200",
            "several GPUs: bytes ÷ NVLink's rate, without contention": cluster.size > 1,
            "several nodes: bytes ÷ the given rate, without contention": cluster.nodes > 1,
            f"weights to workers: at least {STORE_RATE / 1e9:.2f} GB/s, as on two CPU cores": cluster.size > 1,
            f"{plan.parameters / 1e9:.1f} B parameters: steps were measured up to 1.7": plan.parameters > 1.8e9,
            f"answers of {self.most:,} tokens: steps were measured up to 8,192": self.most > 8192,
            "block selection: no whole step was measured": self.config.sparsity.select is not None,
            "KV in 8 bits: no whole step was measured": self.config.engine.kv_dtype is not None,
            "an environment's own time is not counted": self.config.environment is not None,
        }
        return [text for text, applies in parts.items() if applies]

    def together(self) -> StepPlan:
        """Every GPU generates, then learns."""
        return self._plan(self.cluster.size, 0)

    def apart(self) -> StepPlan | None:
        """Learners and rollout workers on separate GPUs: the division with the shortest step one step off; None if no
        division fits."""
        plans = []
        for learners in self._numbers_of_learners():
            try:
                plans.append(self._plan(learners, self.cluster.size - learners))
            except DoesNotFit:
                continue
        return min(plans, key=lambda plan: plan.one_step_off, default=None)

    def _numbers_of_learners(self) -> list[int]:
        """Some of one node, or whole nodes."""
        return [n for n in range(1, self.cluster.size) if n < self.cluster.gpus or n % self.cluster.gpus == 0]

    def _plan(self, ranks: int, workers: int) -> StepPlan:
        try:
            check_shares(self.config, World(size=ranks))
        except SettingError as error:
            raise DoesNotFit(str(error)) from error
        nodes = max(1, ranks // self.cluster.gpus)
        plan = plan_memory(self.config, ranks, nodes=nodes, workers=workers)
        usable = USABLE * self.cluster.memory
        if plan.learning > usable:
            raise DoesNotFit(
                f"the learner needs {plan.learning / 2**30:.0f} GiB on each of {ranks} GPUs, and a plan may use "
                f"{usable / 2**30:.0f} of an {self.cluster.gpu}; use more GPUs, or learner.lora."
            )
        score, update = self._learn(plan)
        return StepPlan(
            learners=ranks,
            workers=workers,
            rollouts=self._generate(plan),
            score=score,
            update=update,
            weights=self._publish(plan),
            learning_bytes=plan.learning,
            generating_bytes=plan.generating(self.config.engine.kv_memory),
        )

    def _generate(self, plan: MemoryPlan) -> float:
        config, ceilings, geometry = self.config, self.cluster.ceilings, plan.geometry
        engines = plan.workers or plan.ranks
        lengths = answer_lengths(-(-plan.rollouts // engines), self.mean, self.most)
        kv_bytes = kv_memory(config, plan, self.cluster.memory)
        if kv_bytes < plan.kv_sparse / plan.running:
            raise DoesNotFit(f"an {self.cluster.gpu} has no room for the KV of one answer; use more GPUs.")
        prompts = -(-config.sampling.prompts // engines) * plan.prompt
        prefill = 2 * geometry.parameters * prompts / (PREFILL_SHARE * ceilings.matrix)
        rows = min(config.engine.max_rows, len(lengths))
        cost = self.decode_cost()
        return prefill + decode_seconds(cost, config.sparsity, lengths, plan.prompt, rows=rows, kv_bytes=kv_bytes)

    def decode_cost(self) -> AnalyticCost:
        """The cost model of the decode step on this GPU."""
        ceilings, geometry = self.cluster.ceilings, plan_memory(self.config).geometry
        hardware = Hardware(ceilings.matrix / 1e12, ceilings.bandwidth / 1e12)
        return AnalyticCost(geometry, hardware, layer_ms=LAYER_MS, eviction_layer_ms=EVICTION_LAYER_MS)

    def _learn(self, plan: MemoryPlan) -> tuple[float, float]:
        """Scoring and updates of a rank. Gathers within a node are hidden behind computation as far as it lasts."""
        config, width = self.config, plan.geometry.value_bytes
        answers = answer_lengths(-(-plan.rollouts // plan.ranks), self.mean, self.most)
        lengths = [plan.prompt + answer for answer in answers]
        score, update = learner_seconds(config, plan.geometry, self.cluster.ceilings, lengths)
        if plan.ranks == 1:
            return score, update
        passes = max(config.learner.updates, -(-sum(lengths) // config.learner.tokens))
        others, spans_nodes = (plan.shards - 1) / plan.shards, plan.shards > self.cluster.gpus
        rate = self.cluster.network / self.cluster.gpus if spans_nodes else NVLINK[self.cluster.gpu]
        gather, scatter = (others * size / rate for size in (plan.parameters * width, 4 * plan.trained))
        across = 0.0
        if plan.nodes > 1 and not spans_nodes:
            across = config.learner.updates * network_bytes(config, plan) / self.cluster.network
        score = max(score, scoring_passes(config) * passes * gather)
        return score, max(update, passes * (2 * gather + scatter)) + across

    def _publish(self, plan: MemoryPlan) -> float:
        """New weights to every engine: gathered on a node, or through the object store to nodes with workers."""
        others = (plan.shards - 1) / plan.shards
        gathered = others * plan.published / NVLINK[self.cluster.gpu]
        if not plan.workers:
            return gathered + 2 * plan.published / self.cluster.ceilings.bandwidth
        remote = self.cluster.nodes - max(1, plan.ranks // self.cluster.gpus)
        return gathered + plan.published / STORE_RATE + remote * plan.published / self.cluster.network
