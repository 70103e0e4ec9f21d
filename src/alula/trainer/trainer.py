"""The trainer: sparse rollouts, a dense learner, and the loop around them.

    step:  collect → score → correct → advantages → update → publish → log

Between two steps: held-out evaluation, checkpoint. A checkpoint holds everything that the next step depends on, so a
run that was killed at any moment resumes exactly.
"""

import gc
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from safetensors import SafetensorError
from torch import Tensor

from alula.config.run import RunConfig
from alula.cpus import set_threads
from alula.data import PromptStream
from alula.distributed import init_world
from alula.errors import SettingError, in_section
from alula.heap import frozen_heap
from alula.models.experts import expert_parameters
from alula.models.geometry import Geometry
from alula.rewards import Rewards
from alula.rollouts.build import load_policy
from alula.run.checkpoint import CheckpointError, Checkpoints, Misfit, Resume
from alula.run.environment import recorded_threads
from alula.run.export import export
from alula.run.model_card import model_card
from alula.run.run_log import RunLogger, check_same_shape, printer
from alula.trainer.batch import RolloutBatch
from alula.trainer.build import (
    build_learner,
    build_monitor,
    build_rollouts,
    build_run_distiller,
    check_shares,
    measure_matrix_rate,
    query_text,
)
from alula.trainer.collector import Collector
from alula.trainer.distillation import distill_first, try_move
from alula.trainer.evaluation import HeldOutEvaluation, describe_score
from alula.trainer.health import HealthMonitor, StepAlerts, TrainingFailed
from alula.trainer.learner_fit import describe_choice, fit_learner
from alula.trainer.longest_sequences import LongestPrompt, Policies, check_kv_pool, longest_sequence
from alula.trainer.preflight import check_steps_left
from alula.trainer.run_data import load_data
from alula.trainer.signals import Stopped, StopRequest
from alula.trainer.staleness import staleness_metrics
from alula.trainer.start_warnings import start_warnings
from alula.trainer.step_metrics import Clock, generating_seconds, step_metrics
from alula.trainer.token_log import group_tokens
from alula.trainer.update import StepResult, Updater

if TYPE_CHECKING:
    from alula.distill.run_stage import RunDistiller

__all__ = ["Trainer", "TrainingFailed", "train"]


def train(config: RunConfig, *, resume: Resume = False, stream: TextIO | None = None) -> bool:
    """Run the training that `config` describes, in its folder `out`. `resume="auto"` continues if the folder has a
    checkpoint, and starts otherwise. Returns False if the run was stopped."""
    return Trainer(config, resume=resume, stream=stream).run()


class Trainer:
    """A training run: `run` takes all of its steps, `train_step` one."""

    def __init__(self, config: RunConfig, *, resume: Resume = False, stream: TextIO | None = None) -> None:
        self.config = config
        with in_section("model"):
            self.world = world = init_world(config.model.device, config.learner.timeout)
        check_shares(config, world)
        self.out = Path(config.out)
        self.checkpoints = Checkpoints(self.out / "checkpoints", config.checkpoint.keep, world, printer(world, stream))
        self.resumed = self.checkpoints.begin(resume)
        lines = self.checkpoints.state(self.resumed).get("lines") if self.resumed else None
        self.logger = RunLogger(config, world, stream, resume_from=self._resume_from(resume), lines=lines)
        with ExitStack() as on_failure:
            on_failure.push(self.logger)
            self._build(on_failure)
            self._start()
            on_failure.pop_all()

    def _resume_from(self, resume: Resume) -> int | None:
        """The step to continue from: None for a new run, -1 if there is no checkpoint."""
        if not resume:
            return None
        return check_steps_left(self.config, self.resumed) if self.resumed else -1

    def _build(self, on_failure: ExitStack) -> None:
        """Load model and data, and build the parts of the run."""
        config, world = self.config, self.world
        self.matrix_rate = measure_matrix_rate(world)
        self.loaded = load_policy(config, world.device)
        set_threads(self.loaded.model, recorded_threads(self.out) if self.resumed else None)
        training, self.held_out = load_data(config, self.loaded.tokenizer)
        self.stream = PromptStream(training, config.seed)
        rewards = config.rewards
        with in_section("rewards", "rewards.use"):
            self.rewards = Rewards(rewards.use, timeout=rewards.timeout, workers=rewards.workers, memory=rewards.memory)
        longest = longest_sequence(config, self.loaded.model.config, training, self.held_out)
        self.fitted = fit_learner(config, world, self.resumed is not None, (training, self.held_out))
        """The settings with the learner's choices filled in."""
        self.learner, for_engine, distiller = build_learner(self.fitted, self.loaded, world)
        self.stop = StopRequest(world)
        self.rollouts = build_rollouts(
            config,
            self.learner,
            for_engine,
            None if distiller is None else distiller.adapter(),
            world,
            longest,
            self.logger.message,
            lambda: self.stop.raise_if_stop_requested(all_ranks=False),
        )
        on_failure.callback(self.rollouts.close)
        self.monitor = build_monitor(config, self.rollouts, training, world)
        self.distill = build_run_distiller(
            config, distiller, self.rollouts, self.held_out[0] if self.held_out else training
        )
        self.collector = Collector(
            config,
            self.stream,
            self.rollouts,
            self.loaded.tokenizer,
            self.learner,
            self.rewards,
            self.monitor,
            world,
            self.stop,
            distill=self.distill,
            show_phase=self.logger.phase,
            show_progress=self.logger.progress,
        )
        self.updater = Updater(config, self.learner)
        candidate = self.distill.candidate if self.distill else None
        policies = Policies(self.collector.sparsity, self.monitor.densest, candidate)
        check_kv_pool(config, self.rollouts.need, policies, training, self.held_out)
        sparse = not config.sparsity.dense
        self.health = HealthMonitor(config.objective.correction.preset, config.control.enabled, sparse)
        self.evaluation = HeldOutEvaluation(
            config, self.held_out, self.collector, self.rewards, self.health, self.logger
        )
        self.alerts = StepAlerts(self.logger, world, config.learner.max_skipped)

    def _start(self) -> None:
        """Set the state of a new run, or load that of the checkpoint."""
        self.step = 0
        """Finished steps."""
        self.saved = -1
        """Step of the last checkpoint."""
        self.save_failed = False
        self.query_text: list[list[int]] | None = None
        """The text that the model's queries are measured on, if the evictor needs that."""
        self.checkpoint_state: dict[str, Any] = {}
        """The state after the last finished action; a run that is stopped inside the next one saves this."""
        if self.resumed:
            self._load(self.resumed)
        else:
            self.query_text = query_text(self.config, self.rollouts, self.stream.dataset)
        if self.query_text is not None:
            self.rollouts.measure_queries(self.query_text)
        self.logger.start(self.stream.dataset, self.held_out)
        self._describe_start()
        self._take_snapshot()

    def _describe_start(self) -> None:
        """Print where the run begins, and warn of what will probably go wrong."""
        if self.fitted is not self.config:
            self.logger.message(describe_choice(self.fitted.learner))
        if self.resumed:
            self.logger.message(f"continuing after step {self.step}.")
        elif self.logger.resumed_from is not None:
            self.logger.message(f"{self.out} has no checkpoint to resume from; starting from the beginning.")
        if not self.resumed:
            config, model = self.config, self.loaded.model
            prompt = LongestPrompt.of("training", self.stream.dataset, config).prompt
            layers, experts = Geometry.of(model).layers, expert_parameters(model)
            for warning in start_warnings(config, model.config, len(prompt), layers, experts, model.num_parameters()):
                self.logger.event(0, *warning)
        if shortage := self.checkpoints.shortage(self._tensors()):
            advice = "Free some space, or use another folder: out=FOLDER."
            self.logger.event(self.step, "disk-space", f"There is no room for a checkpoint: {shortage}.", advice)

    # -- the loop -----------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Train, evaluate and save until the last step or a stop; whether the run finished."""
        with ExitStack() as stack:
            stack.callback(self.rewards.close)
            stack.callback(self.rollouts.close)
            stack.enter_context(self.logger)
            stack.enter_context(self.stop.listening())
            self.rewards.start()
            frozen = False
            try:
                if self.distill and self.distill.first_due():
                    self.distill_first(self.distill)
                while True:
                    if self.evaluation.due(self.step):
                        self.evaluate()
                    if self.distill and self.distill.move_due(self.step):
                        self.try_move(self.distill)
                    if self._checkpoint_due():
                        self.save()
                    if self.step == self.config.steps:
                        break
                    self.train_step()
                    if not frozen and self.world.device.type == "cuda":  # by now everything is compiled
                        gc.collect()
                        stack.enter_context(frozen_heap())
                        frozen = True
            except Stopped:
                self.save()
                self.logger.state = "stopped"
                self.logger.message(f"stopped after step {self.step}{self._stop_hint()}")
                return False
            self._export()
            if self.saved != self.step:
                raise CheckpointError(
                    f"the model is in {self.out / 'model'}, but the last checkpoint could not be written; "
                    f"{self.checkpoints.resume_hint()}."
                )
            for name, score in self.evaluation.scores.items():
                self.logger.message(describe_score(name, score))
            self.logger.message(f"finished: the model is in {self.out / 'model'}; see `alula report {self.out}`.")
        return True

    def train_step(self) -> None:
        """One batch of rollouts and the optimizer steps on it."""
        step, clock = self.step + 1, Clock(self.world.device)
        self.stop.requested |= self.monitor.stopped
        self.stop.raise_if_stop_requested()
        self.rollouts.peak_bytes()  # of what ran between the steps
        batch = self.collector.collect(step, clock)
        with self.rollouts.asleep():
            if self.updater.skip_scoring:  # then the rewards tell what is left to score
                self.collector.grade(batch, clock)
            self.logger.phase("scoring")
            with clock.phase("score"):
                self.updater.score(batch)
            self.collector.grade(batch, clock)  # meanwhile the workers have graded
            self.stop.raise_if_stop_requested()  # for the last time: from here on the step is finished
            self.logger.phase("learning")
            with clock.phase("update"):
                minibatch = self.updater.assign_minibatches(batch)
                corrected = self.updater.correct(batch, minibatch)
                advantages = self.updater.advantages(batch, corrected)
                result = self.updater.update(batch, minibatch, corrected, advantages)
            with clock.phase("weights"):
                self.rollouts.publish(self.learner, step)
            distill_metrics = self._distill_step(step, batch, advantages, clock)
        self.step = step
        self._log_step(batch, result, clock, distill_metrics)
        self._take_snapshot()

    def _distill_step(self, step: int, batch: RolloutBatch, advantages: Tensor, clock: Clock) -> dict[str, float]:
        """Train the sparse policy's adapter on some of the rollouts, and publish it."""
        if self.distill is None:
            return {}
        self.logger.phase("distilling")
        with clock.phase("distill"):
            metrics = self.distill.step(step, batch.rollouts, advantages, batch.rerolled)
            self.distill.publish()
        return metrics

    def _log_step(
        self, batch: RolloutBatch, result: StepResult, clock: Clock, distill_metrics: dict[str, float]
    ) -> None:
        """Write the step's metrics, warnings and events, and pass its vetoes to the controller."""
        metrics = step_metrics(
            self.config,
            batch,
            result,
            clock,
            self.world,
            peak_bytes=self.rollouts.peak_bytes(),
            epoch=self.collector.seen / len(self.stream.dataset),
            matrix_rate=self.matrix_rate,
        )
        metrics |= batch.observed.metrics | distill_metrics | self.rollouts.metrics()
        stale, version = self.config.rollouts.stale > 0, self.step - 1
        if stale:
            metrics |= staleness_metrics(batch.rollouts, result.vetoed, version, self.world)
        if self.distill:
            metrics |= self.distill.cost_metrics(metrics, generating_seconds(self.config, metrics))
        self.logger.log_step(self.step, metrics, batch.completions(self.config.logging.completions, result.vetoed))
        if self.config.logging.rollouts_due(self.step) and batch.rollouts:
            veto = self.config.objective.correction.veto
            self.logger.log_rollouts(self.step, group_tokens(batch, result, self.loaded.tokenizer, veto))
        for warning in self.health.observe(metrics):
            self.logger.event(self.step, *warning)
        for event in batch.observed.events:
            self.logger.event(self.step, "tail", event, "See mismatch/tail in the metrics.")
        vetoes = self.monitor.count_vetoes(batch.rollouts, result.vetoed, batch.n, version if stale else None)
        for event in vetoes.events:
            self.logger.event(self.step, "vetoes", event, "See mismatch/veto_rate in the metrics.")
        self.collector.sparsity = vetoes.sparsity or self.collector.sparsity
        self.alerts.check(self.step, batch, result)

    # -- between two steps --------------------------------------------------------------------------------

    def evaluate(self) -> None:
        self.evaluation.evaluate(self.step)
        accuracy = self.evaluation.accuracy_after(self.step)
        if self.saved == self.step and self.config.checkpoint.best and accuracy is not None:
            self.checkpoints.rate(self.step, accuracy)
        self._take_snapshot()

    def distill_first(self, distill: "RunDistiller") -> None:
        if self.step > 0:
            self.logger.message("distill.first: the run has begun, so nothing is distilled before its first step.")
            return
        distill_first(distill, self.collector, self.logger, self._take_snapshot)
        self._take_snapshot()
        if self.config.checkpoint.every:
            self.save()

    def try_move(self, distill: "RunDistiller") -> None:
        try_move(distill, self.collector, self.step, self.logger)
        self._take_snapshot()

    # -- checkpoints --------------------------------------------------------------------------------------

    def _checkpoint_due(self) -> bool:
        """Every `checkpoint.every` steps, after a failure, at the best accuracy, and at the end."""
        every = self.config.checkpoint.every
        if self.step == 0 or self.saved == self.step:
            return False
        on_time = self.save_failed or (every > 0 and self.step % every == 0)
        is_best = self.config.checkpoint.best and self.evaluation.is_best(self.step)
        return on_time or is_best or self.step == self.config.steps

    def save(self) -> None:
        """Write a checkpoint. If that fails (disk full), report it once and try again after every step."""
        self.logger.phase("checkpoint")
        score = self.evaluation.accuracy_after(self.step) if self.config.checkpoint.best else None
        try:
            self.checkpoints.save(self.step, self._tensors(), self.checkpoint_state, score)
            self.saved, self.save_failed = self.step, False
        except CheckpointError as error:
            if self.stop.requested:
                raise
            if not self.save_failed:
                self.logger.message(f"{error} The run continues and tries again after every step.")
            self.save_failed = True

    def _take_snapshot(self) -> None:
        """Remember the state for the next checkpoint. Called whenever an action is complete."""
        self.checkpoint_state = {
            "step": self.step,
            "lines": self.logger.lines,
            "position": self.collector.position,
            "query_text": self.query_text,
            "learner": self.learner.state(),
            "evaluation": self.evaluation.state_dict(),
            "health": self.health.state_dict(),
            "alerts": self.alerts.state_dict(),
            "monitor": self.monitor.state_dict(),
            "distill": self.distill.state() if self.distill else None,
        }

    def _tensors(self) -> dict[str, Tensor]:
        return self.learner.tensors() | (self.distill.tensors() if self.distill else {})

    def _load(self, path: Path) -> None:
        try:
            state = self.checkpoints.load(path, self._tensors())
        except Misfit:
            check_same_shape(self.out / "config.yaml", self.config, path)
            raise
        try:
            self._restore(state)
        except SettingError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"checkpoint {path} was written by another version of Alula: its state does not fit this one "
                f"({type(error).__name__}: {error}). Continue with that version (environment.json names it), or start "
                "in another folder."
            ) from error
        self.saved = self.step
        self.rollouts.publish(self.learner, self.step)
        if self.distill:
            self.distill.publish()

    def _restore(self, state: dict[str, Any]) -> None:
        """The opposite of `_take_snapshot`."""
        self.step, self.query_text = state["step"], state["query_text"]
        self.learner.resume(state["learner"])
        self.evaluation.load_state_dict(state["evaluation"])
        self.health.load_state_dict(state["health"])
        self.alerts.load_state_dict(state["alerts"])
        self.monitor.load_state_dict(state["monitor"])
        self.collector.resume(state["position"], self.monitor.recommended)
        if self.distill and state["distill"]:
            self.distill.resume(state["distill"])
            if self.distill.moved and self.distill.candidate:
                self.collector.adopt(self.distill.candidate)

    def _export(self) -> None:
        """Write the trained model, and the sparse policy's adapter if there is one."""
        self.logger.phase("export")
        model = self.out / "model"
        try:
            parameters, card = self.learner.full_parameters(), model_card(self.config, self.out)
            export(model, self.learner.model, parameters, self.loaded.tokenizer, self.world, card)
            if self.distill and self.world.rank == 0:
                self.distill.distiller.adapter().save(self.out / "sparse_adapter")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{model} could not be written: {error}. Free some space; {self.checkpoints.resume_hint()}."
            ) from error

    def _stop_hint(self) -> str:
        if self.monitor.stopped:
            return " by control.on_violation=stop; continue with --resume control.on_violation=adapt, or =warn."
        return "; continue with --resume."
