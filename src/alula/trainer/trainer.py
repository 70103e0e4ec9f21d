"""The story of a run: rollouts under a sparse policy, a dense learner, and everything written down on the way.

    step:  prompts ─► rollouts ─► rewards ─► dense scores ─► correction ─► advantages ─► optimizer steps ─► metrics

Between two steps: held-out evaluation, checkpoint. A checkpoint holds everything that the next step depends on, so
a run that is killed at any moment continues as if nothing had happened.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from safetensors import SafetensorError
from torch import Tensor

from alula.bench.ceilings import matrix_rate
from alula.config.run import RunConfig
from alula.data import PromptStream
from alula.distributed import World, init_world
from alula.rewards import Rewards
from alula.run.checkpoint import CheckpointError, Checkpoints
from alula.run.export import export
from alula.run.run_log import RunLogger, printer
from alula.trainer.build import (
    build_learner_and_engine,
    build_monitor,
    build_run_distiller,
    check_shares,
    load_data,
    load_policy,
)
from alula.trainer.collector import Collector
from alula.trainer.evaluation import HeldOut, evaluate_policy
from alula.trainer.health import HealthMonitor, StepAlerts, TrainingFailed
from alula.trainer.health_checks import HealthWarning
from alula.trainer.preflight import (
    OTHER_MODEL_ADVICE,
    Policies,
    check_kv_pool,
    check_steps_left,
    longest_sequence,
    schedules_of_other_models,
)
from alula.trainer.signals import Stopped, StopRequest
from alula.trainer.step_metrics import Clock, step_metrics
from alula.trainer.update import Updater

if TYPE_CHECKING:
    from alula.distill.run_stage import RunDistiller

__all__ = ["Trainer", "TrainingFailed", "train"]


def train(config: RunConfig, *, resume: bool = False, stream: TextIO | None = None) -> bool:
    """Train as `config` says, into its folder `out`. True where the run finished, False where it was stopped."""
    return Trainer(config, resume=resume, stream=stream).run()


class Trainer:
    def __init__(self, config: RunConfig, *, resume: bool = False, stream: TextIO | None = None) -> None:
        self.config = config
        self.world = world = init_world(config.model.device)
        check_shares(config, world)
        config.sparsity.build()  # a misspelt policy is refused before weights are loaded and a folder is made
        self.out = Path(config.out)
        say = printer(world, stream)
        self.checkpoints = Checkpoints(self.out / "checkpoints", config.checkpoint.keep, world, say)
        self.resumed = self.checkpoints.begin(resume)
        lines = self.checkpoints.state(self.resumed).get("lines") if self.resumed else None
        self.record = RunLogger(config, world, stream, resume_from=self._resume_from(resume), lines=lines)
        with ExitStack() as on_failure:
            on_failure.push(self.record)
            self._build()
            self._begin()
            on_failure.pop_all()

    def _build(self) -> None:
        config, world = self.config, self.world
        self.matrix_rate = device_matrix_rate(world)
        self.loaded = load_policy(config, world)
        training, self.held_out = load_data(config, self.loaded.tokenizer)
        self.stream = PromptStream(training, config.seed)
        r = config.rewards
        self.rewards = Rewards(r.use, timeout=r.timeout, workers=r.workers)
        longest = longest_sequence(config, self.loaded.model.config, training, self.held_out)
        self.learner, self.engine, distiller = build_learner_and_engine(config, self.loaded, world, longest)
        self.stop = StopRequest(world)
        self.monitor = build_monitor(config, self.engine, training, world)
        self.distill = build_run_distiller(config, distiller, self.engine, self.held_out or training)
        self.collector = Collector(
            config,
            self.engine,
            self.learner,
            self.rewards,
            self.monitor,
            world,
            self.stop,
            distill=self.distill,
            show_phase=self.record.phase,
        )
        self.updater = Updater(config, self.learner)
        candidate = self.distill.candidate if self.distill else None
        policies = Policies(self.monitor.recommended, self.monitor.densest, candidate)
        check_kv_pool(config, self.engine, policies, training, self.held_out)
        self.health = HealthMonitor(config.objective.correction.preset, config.control.enabled)
        self.alerts = StepAlerts(self.record, world, config.learner.max_skipped)

    def _begin(self) -> None:
        """What a run carries from step to step, from the beginning or from a checkpoint."""
        self.step = 0
        """Steps done."""
        self.evaluated = -1
        """The step of the last held-out evaluation."""
        self.saved = -1
        self.save_failed = False
        self.best: float | None = None
        self.accuracy: float | None = None
        """Of the dense policy, if it was evaluated after this step."""
        self.position = self.stream.state_dict()
        self.settled: dict[str, Any] = {}
        """All of this and the parts' own states, from when nothing was half done: what a checkpoint holds."""
        if self.resumed:
            self._load(self.resumed)
        self.record.start(self.stream.dataset, self.held_out)
        if self.resumed:
            self.record.say(f"continuing after step {self.step}.")
        else:
            if self.record.resumed_from is not None:
                self.record.say(f"{self.out} has no checkpoint; starting from the beginning.")
            for message in schedules_of_other_models(self.config.policies(), self.loaded.model.config):
                self.record.event(0, "other-model", message, OTHER_MODEL_ADVICE)
        if shortage := self.checkpoints.shortage(self._tensors()):
            advice = "Free some space, or give the run another folder: out=FOLDER."
            self.record.event(self.step, "disk-space", f"There is no room for a checkpoint: {shortage}.", advice)
        self._settle()

    # -- the run ------------------------------------------------------------------------------------------

    def run(self) -> bool:
        config = self.config
        with ExitStack() as stack:
            stack.callback(self.rewards.close)
            stack.enter_context(self.record)
            stack.enter_context(self.stop.listening())
            self.rewards.start()
            try:
                if self.distill and self.distill.first_due():
                    self.distil_first(self.distill)
                while True:
                    if self._evaluation_due():
                        self.evaluate()
                    if self.distill and self.distill.move_due(self.step):
                        self.try_sparser(self.distill)
                    if self._checkpoint_due():
                        self.save()
                    if self.step == config.steps:
                        break
                    self.train_step()
            except Stopped:
                self.save()
                self.record.state = "stopped"
                self.record.say(f"stopped after step {self.step}{self._continued()}")
                return False
            self._export()
            if self.saved != self.step:
                raise CheckpointError(
                    f"the model is in {self.out / 'model'}, but the run's last checkpoint could not "
                    "be written: --resume would repeat the steps since the one before."
                )
            self.record.say(
                f"finished: the model is in {self.out / 'model'}; look at the run with `alula report {self.out}`."
            )
        return True

    def distil_first(self, distill: "RunDistiller") -> None:
        """φ alone, on prompts in an order of their own: the run's is the same with and without."""
        first = distill.settings.first
        assert first is not None
        if self.step > 0:
            self.record.say("distill.first: the run has begun, so nothing is distilled before its first step.")
            return
        done = len(distill.divergences)
        self.record.say(f"distilling before the first step, {first.steps - done} batches of {first.prompts} rollouts.")
        stream = PromptStream(self.stream.dataset, ~self.config.seed)
        stream.next(done * first.prompts)
        while distill.first_due():
            self.stop.raise_if_stop_requested()
            done = len(distill.divergences)
            self.record.phase(f"distilling before the first step, {done + 1} of {first.steps}")
            examples = self.world.local_slice(stream.next(first.prompts))
            prompts = [list(example.prompt_ids or ()) for example in examples]
            sampling, sparsity = self.collector.sampling("first", done), self.collector.sparsity
            distill.first_step(self.collector.generate(prompts, sampling, sparsity, record=sparsity.evict is not None))
            self._settle()
        skipped = distill.distiller.skipped
        self.record.event(
            0,
            "distilled-first",
            f"The adapter was trained on {first.steps} batches before the first step: divergence "
            f"of the first {distill.divergences[0]:.4f}, of the last {distill.divergences[-1]:.4f}"
            + (f"; {skipped} updates were not finite and were skipped." if skipped else "."),
            "See mismatch/veto_rate of the first step for what it left.",
        )
        self._settle()
        if self.config.checkpoint.every:
            self.save()

    def train_step(self) -> None:
        """One batch of rollouts and the optimizer steps on it."""
        step, clock, pool = self.step + 1, Clock(self.world.device), self.engine.pool
        self.stop.requested |= self.monitor.stopped
        self.stop.raise_if_stop_requested()
        pool.peak = 0
        batch = self.collector.collect(step, self.stream, clock)
        with self.engine.asleep():
            self.record.phase("scoring")
            with clock.phase("score"):
                self.updater.score(batch)
            self.stop.raise_if_stop_requested()  # the last chance: from here on the step is finished
            self.record.phase("learning")
            with clock.phase("update"):
                minibatch = self.updater.assign_minibatches(batch, step)
                corrected = self.updater.correct(batch, minibatch)
                advantages = self.updater.advantages(batch, corrected)
                result = self.updater.update(batch, minibatch, corrected, advantages)
            with clock.phase("weights"):
                self._publish_weights()
            distilled: dict[str, float] = {}
            if self.distill:
                self.record.phase("distilling")
                with clock.phase("distill"):
                    distilled = self.distill.step(
                        step, batch.rollouts, batch.n, advantages, self.collector.sparsity, batch.rerolled
                    )
                    self.distill.publish()

        metrics = step_metrics(
            self.config,
            batch,
            result,
            clock,
            self.world,
            peak_bytes=pool.peak * self.engine.page * self.engine.geometry.kv_token_bytes,
            epoch=self.stream.seen / len(self.stream.dataset),
            matrix_rate=self.matrix_rate,
        )
        metrics |= batch.observed.metrics | distilled | (self.distill.cost_metrics(metrics) if self.distill else {})
        self.step, self.accuracy, self.position = step, None, self.stream.state_dict()
        self.record.log_step(step, metrics, batch.completions(self.config.logging.completions, result.vetoed))
        self._warn(self.health.observe(metrics))
        for event in batch.observed.events:
            self.record.event(step, "tail", event, "See mismatch/tail in the metrics.")
        counted = self.monitor.count_vetoes(batch.rollouts, result.vetoed, batch.n)
        for event in counted.events:
            self.record.event(step, "vetoes", event, "See mismatch/veto_rate in the metrics.")
        self.collector.sparsity = counted.sparsity or self.collector.sparsity
        self.alerts.check(step, batch, result)
        self._settle()

    def evaluate(self) -> None:
        """The dense policy on held-out data; the sparse one first, where asked, so that the two can be compared."""
        assert self.held_out is not None
        found: dict[str, HeldOut] = {}
        for policy in ("sparse", "dense") if self._sparse_too() else ("dense",):
            self.record.phase(f"evaluation ({policy})")
            found[policy] = evaluate_policy(
                self.config, self.collector, self.rewards, self.held_out, self.world, policy == "sparse"
            )
            self.stop.raise_if_stop_requested()
        for policy, one in found.items():
            self._log_evaluation(policy, one)
        self.evaluated = self.step
        self._settle()

    def try_sparser(self, distill: "RunDistiller") -> None:
        """Measure the sparser policy that the run may move to, and move where it can."""
        self.record.phase("measuring a sparser policy")
        candidate, sampling = distill.candidate, self.collector.sampling("move", self.step)
        assert candidate is not None
        rollouts = self.collector.generate(distill.prompts, sampling, candidate, record=candidate.evict is not None)
        message = distill.try_move(self.step, rollouts)
        if distill.moved:
            self.collector.adopt(candidate)
        self.record.event(self.step, "sparser", message, "See distill/candidate_tail in the metrics.")
        self._settle()

    def save(self) -> None:
        """A checkpoint of the state between two steps. Where the disk is full the run goes on and tries again, which is
        told once."""
        self.record.phase("checkpoint")
        score = self.accuracy if self.config.checkpoint.best else None
        try:
            self.checkpoints.save(self.step, self._tensors(), self.settled, score)
            self.saved, self.save_failed = self.step, False
        except CheckpointError as error:
            if self.stop.requested:
                raise
            if not self.save_failed:
                self.record.say(f"{error} The run goes on, and tries again after every step.")
            self.save_failed = True

    def _export(self) -> None:
        """The trained model, and φ where there is one, as folders that others read."""
        self.record.phase("export")
        try:
            export(
                self.out / "model",
                self.learner.model,
                self.learner.full_parameters(),
                self.loaded.tokenizer,
                self.world,
            )
            if self.distill and self.world.rank == 0:
                self.distill.distiller.adapter().save(self.out / "sparse_adapter")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.out / 'model'} could not be written: {error}; free some space and use "
                "--resume, which goes on from the last checkpoint."
            ) from error

    def _continued(self) -> str:
        """How to go on with a run that was stopped."""
        if self.monitor.stopped:
            return ", as control.on_violation=stop asks; continue with --resume control.on_violation=adapt, or =warn."
        return "; continue with --resume."

    # -- between two steps --------------------------------------------------------------------------------

    def _evaluation_due(self) -> bool:
        every = self.config.eval.every
        if not every or self.evaluated == self.step:
            return False
        return self.step % every == 0 or self.step == self.config.steps

    def _checkpoint_due(self) -> bool:
        """At its time, again after a failure, and when the dense policy was never better."""
        every = self.config.checkpoint.every
        if self.step == 0 or self.saved == self.step:
            return False
        on_time = self.save_failed or (every > 0 and self.step % every == 0)
        better = self.config.checkpoint.best and self.accuracy is not None and self.accuracy == self.best
        return on_time or better or self.step == self.config.steps

    def _sparse_too(self) -> bool:
        return self.config.eval.sparse and not self.collector.sparsity.dense

    def _publish_weights(self) -> None:
        if self.learner.in_place:
            self.engine.policy_version += 1  # the optimizer wrote into the engine's own parameters
        else:
            self.engine.update_weights(self.learner.full_parameters(), lazily=True)

    # -- what is said -------------------------------------------------------------------------------------

    def _log_evaluation(self, policy: str, found: HeldOut) -> None:
        assert self.held_out is not None
        numbers = {"accuracy": found.accuracy, "stderr": found.stderr}
        self.record.log_eval(self.step, self.held_out.name, policy, vars(found))
        self._warn(self.health.observe_eval(self.held_out.name, policy, **numbers))
        if policy == "dense":
            self.accuracy = found.accuracy
            self.best = found.accuracy if self.best is None else max(self.best, found.accuracy)

    def _warn(self, warnings: list[HealthWarning]) -> None:
        for warning in warnings:
            self.record.event(self.step, warning.kind, warning.message, warning.advice)

    # -- what survives ------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Where a stop finds the next step begun, its checkpoint is of here."""
        names = ("step", "evaluated", "best", "accuracy", "position")
        self.settled = {name: getattr(self, name) for name in names} | {
            "lines": self.record.lines,
            "learner": self.learner.state(),
            "health": self.health.state_dict(),
            "alerts": self.alerts.state_dict(),
            "monitor": self.monitor.state_dict(),
            "distill": self.distill.state() if self.distill else None,
        }

    def _tensors(self) -> dict[str, Tensor]:
        return self.learner.tensors() | (self.distill.tensors() if self.distill else {})

    def _resume_from(self, resume: bool) -> int | None:
        """The step to continue from: None for a new run, -1 without a checkpoint."""
        if not resume:
            return None
        return check_steps_left(self.config, self.resumed) if self.resumed else -1

    def _load(self, path: Path) -> None:
        state = self.checkpoints.load(path, self._tensors())
        state.pop("lines", None)
        self.learner.resume(state.pop("learner"))
        self.health.load_state_dict(state.pop("health"))
        self.alerts.load_state_dict(state.pop("alerts"))
        self.monitor.load_state_dict(state.pop("monitor"))
        self.collector.sparsity = self.monitor.recommended
        distilled = state.pop("distill")
        if self.distill and distilled:
            self.distill.resume(distilled)
            if self.distill.moved and self.distill.candidate:
                self.collector.adopt(self.distill.candidate)
        for name, value in state.items():
            setattr(self, name, value)
        self.stream.load_state_dict(self.position)
        self.saved = self.step
        self._publish_weights()
        if self.distill:
            self.distill.publish()


def device_matrix_rate(world: World) -> float | None:
    """FLOP/s of the device in a large bfloat16 product, what the learner's utilisation is measured against."""
    if world.device.type != "cuda":
        return None
    rate = matrix_rate(world.device)
    torch.cuda.empty_cache()  # the memory is the engine's and the learner's
    return rate
