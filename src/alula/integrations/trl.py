"""TRL's GRPO trainer with sparse rollouts: Alula's engine generates, TRL scores, Alula corrects, TRL trains.

    prompts ─► Engine.generate ─► completions, sparse log-probs ─► TRL: rewards, advantages A [B], dense log-probs
                                                                         │
    TRL's loss ◄── advantages [B, T] = A · w · keep ◄── correct (ξ = p_dense_old / p_sparse) ◄────┘

Every loss of TRL except `vespo` is positively homogeneous in the advantage. A weight w ≥ 0 folded into the advantage
therefore multiplies the clipped objective, as `alula.objective.losses` defines it, and TRL's loss stays as it is. The
two hooks used here are private to TRL and may change, so the extra `alula[trl]` pins its version.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel

from alula.engine.engine import Engine
from alula.engine.kv_cache import default_memory
from alula.engine.rollout import Rollout, Sampling, kv_tokens, saved_share
from alula.errors import SettingError, reject_unknown_arguments, require
from alula.models.load import LoadedModel, share_weights
from alula.models.supported import check_config, check_dry_run
from alula.objective import ragged
from alula.objective.correction import Correction, correct
from alula.objective.losses import LOSSES
from alula.objective.mismatch_metrics import correction_metrics, mismatch_metrics
from alula.objective.settings import Loss, check
from alula.sparsity.policy import DENSE, Sparsity

try:
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise ImportError("alula.integrations.trl needs TRL: pip install 'alula[trl]'.") from error

INSTEAD = "use `alula train` for that"


class SparseGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` whose training completions are sampled under `sparsity` and corrected by `correction`.

    Either may be given as text, as on Alula's command line ("rkv:512+128", "sparse-rl"). `engine` holds options of
    `alula.Engine`, such as {"kv_memory": "20GiB"}. Completions for evaluation are sampled densely. All other arguments
    are TRL's.
    """

    model: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        *,
        sparsity: Sparsity | str,
        correction: Correction | str = "sparse-rl",
        engine: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self.sparsity = Sparsity.parse(sparsity) if isinstance(sparsity, str) else sparsity
        self.correction = Correction.named(correction) if isinstance(correction, str) else correction
        require(isinstance(self.sparsity, Sparsity), f"sparsity={sparsity!r}: must be a text or a Sparsity.")
        require(
            isinstance(self.correction, Correction),
            f"correction={correction!r}: must be a preset's name, such as none.",
        )
        check_settings(args or GRPOConfig(), self.correction)
        for name in ("tools", "rollout_func", "environment_factory"):
            require(not others.get(name), f"{name}: Alula's engine generates single answers; leave it out.")
        super().__init__(model=model, reward_funcs=reward_funcs, args=args, train_dataset=train_dataset, **others)
        self.shares_weights, self.engine = self._build_engine(dict(engine or {}))

    def _build_engine(self, options: dict[str, Any]) -> tuple[bool, Engine]:
        """(shares weights, engine): an engine in TRL's compute dtype. It uses the trainer's parameters if they are in
        it; otherwise (float32 under autocast) a copy, updated before every generation."""
        self._check_model()
        reject_unknown_arguments(Engine, options)
        require("sparse_adapter" not in options, f"engine: sparse_adapter would not be trained; {INSTEAD}.")
        check_dry_run(self.model, share_weights(self.model))
        twin = share_weights(self.model).eval()
        parameter_dtype = next(self.model.parameters()).dtype
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else parameter_dtype
        if dtype != parameter_dtype:
            twin = copy.deepcopy(twin)
            for parameter in twin.parameters():  # not the buffers: RoPE's frequencies stay float32
                parameter.data = parameter.data.to(dtype)
        device = self.accelerator.device
        if device.type == "cuda" and "kv_memory" not in options:  # AdamW's moments and the gradients come later
            options["kv_memory"] = default_memory(device) - 3 * sum(p.nbytes for p in self.model.parameters())
        name = self.model.config.name_or_path.rstrip("/").rpartition("/")[2]
        loaded = LoadedModel(twin, self.processing_class, name, tuple(self.eos_token_ids))
        engine = Engine(loaded, **({"page": self.sparsity.page()} | options))
        engine.check(self.sparsity)
        engine.sleep()
        return dtype == parameter_dtype, engine

    def _check_model(self) -> None:
        """Raise for models that the engine cannot serve next to TRL's trainer."""
        require(not self._is_vlm, "processing_class: vision models are not supported; use a text model.")
        require(
            isinstance(self.model, PreTrainedModel),
            f"model: {type(self.model).__name__} has weights that the engine does not apply; {INSTEAD} "
            "(learner.lora), or train without peft_config.",
        )
        check_config(self.model.config)
        require(
            not (self.is_fsdp_enabled or self.is_deepspeed_enabled),
            f"the trainer shards weights (FSDP or DeepSpeed), but the engine needs full weights; {INSTEAD}, or launch "
            "with plain data parallelism.",
        )
        devices = {str(parameter.device) for parameter in self.model.parameters()}
        require(
            len(devices) == 1,
            f"the model is on {', '.join(sorted(devices))}, but the engine runs on one device; give each process one "
            "GPU (CUDA_VISIBLE_DEVICES).",
        )

    @property
    def _reduce(self) -> Callable[[Tensor], Tensor] | None:
        """Sums a tensor over processes; None with a single one."""
        return (lambda value: self.accelerator.reduce(value, "sum")) if self.accelerator.num_processes > 1 else None

    def _gather(self, value: Any) -> list[Any]:
        """The values of all processes."""
        return gather_object([value])

    # -- hooks that TRL calls -------------------------------------------------------------------------------------

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, num_generations: int, *_: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Completions and their log-probs under the policy that sampled them."""
        training = self.model.training
        # TRL repeats a prompt for each of its completions; as one request they share the prompt's KV. If a group is
        # split between processes, its completions become separate requests.
        first = prompt_ids[::num_generations]
        complete_groups = prompt_ids == [prompt for prompt in first for _ in range(num_generations)]
        sampling = Sampling(
            n=num_generations if complete_groups else 1,
            max_new_tokens=self.max_completion_length,  # type: ignore[arg-type]
            temperature=self.temperature,
            seed=int(torch.randint(2**62, ())),  # torch's RNG state differs per process and is saved in checkpoints
        )
        self.engine.wake()
        if not self.shares_weights:
            self.engine.update_weights(self.model.named_parameters())
        self.engine.policy_version = self.state.global_step
        rollouts = self.engine.generate(
            first if complete_groups else prompt_ids, sampling, self.sparsity if training else DENSE, progress=False
        )
        self.engine.sleep()
        require(
            all(rollout.finish != "error" for rollout in rollouts),
            "the model's output is not finite: training diverged, or the weights overflow the dtype.",
        )
        if training:
            self._log_kv(rollouts)
        return [r.token_ids for r in rollouts], [r.sampler_logprobs().tolist() for r in rollouts]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch with A · w · keep instead of A. With `inner=accepted` TRL's loss mask drops them too."""
        batch = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return batch
        dense = batch.get("old_per_token_logps")
        if dense is None:
            dense = self._dense_logprobs(batch)
        mask, rollouts, c = batch["completion_mask"], len(batch["completion_mask"]), self.correction
        sequence, dense, sparse = ragged.flatten(mask, dense.float(), batch["sampling_per_token_logps"])
        corrected = correct(dense, sparse, sequence, c, sequences=rollouts, reduce=self._reduce)
        batch["advantages"] = batch["advantages"][:, None] * ragged.unflatten(corrected.weights, mask)
        if c.inner == "accepted":
            batch["tool_mask"] = ragged.unflatten(corrected.token_keep, mask).long()
            batch["num_items_in_batch"] = self.accelerator.reduce(batch["tool_mask"].sum(), "sum")
        metrics = mismatch_metrics(dense - sparse, sequence, rollouts, c.veto, c.clamp, self._gather)
        for name, value in (metrics | correction_metrics(corrected, self._gather)).items():
            self._metrics["train"][f"mismatch/{name}"].append(value)
        return batch

    @torch.no_grad()
    def _dense_logprobs(self, batch: dict[str, Any]) -> Tensor:
        """Old log-probs from TRL's forward, which TRL skips with one update per batch of completions."""
        ids, mask = (
            torch.cat([batch[f"prompt_{what}"], batch[f"completion_{what}"]], dim=1) for what in ("ids", "mask")
        )
        length, rows = batch["completion_ids"].shape[1], self.args.per_device_train_batch_size
        return self._get_per_token_logps_and_entropies(self.model, ids, mask, length, batch_size=rows)[0]

    def _log_kv(self, rollouts: list[Rollout]) -> None:
        """As docs/metrics.md defines them."""
        held, dense = kv_tokens(rollouts)
        means = sum(r.kv.mean_tokens for r in rollouts)
        sums = torch.tensor([held, dense, means, len(rollouts)], device=self.accelerator.device)
        held, dense, means, count = self.accelerator.reduce(sums, "sum").tolist()
        self._metrics["train"]["kv/saved"].append(saved_share(held, dense))
        self._metrics["train"]["kv/tokens_mean"].append(means / count)


def check_settings(args: GRPOConfig, correction: Correction) -> None:
    """Raise for settings that cannot work together, before a model is loaded."""
    for name, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", None), ("repetition_penalty", 1.0)):
        value = getattr(args, name)
        require(
            value in (None, neutral),
            f"{name}={value}: the correction needs log-probs under the unmodified distribution; set it to {neutral}.",
        )
    accepted = correction.inner == "accepted"
    for wrong, message in (
        (args.use_vllm, "use_vllm=True: Alula's engine generates; set it to False."),
        (
            args.use_transformers_continuous_batching,
            "use_transformers_continuous_batching=True: Alula's engine generates; set it to False.",
        ),
        (
            args.generation_kwargs,
            f"generation_kwargs={args.generation_kwargs}: transformers' generate is not used; leave them out.",
        ),
        (
            args.cast_lm_head_to_fp32,
            "cast_lm_head_to_fp32=True: the engine needs one dtype; its logits are float32 anyway; set it to False.",
        ),
        (
            args.loss_type == "vespo",
            "loss_type=vespo: it transforms the importance weight, so a correction cannot be folded into the "
            "advantages; choose another loss.",
        ),
        (correction.reroll, f"correction reroll=true: it regenerates before rewards are computed; {INSTEAD}."),
        (
            not correction.vetoed_in_baseline,
            f"correction vetoed_in_baseline=false: TRL computes the baseline; {INSTEAD}.",
        ),
        (correction.outer == "accepted", f"correction outer=accepted: TRL counts every rollout; {INSTEAD}."),
        (
            args.beta and accepted != correction.mask_kl,
            "correction inner and mask_kl: with beta above 0 TRL has one mask for both; set inner=accepted with "
            "mask_kl=true, or inner=all with mask_kl=false.",
        ),
        (
            correction.batch_normalise and args.steps_per_generation != args.gradient_accumulation_steps,
            f"correction batch_normalise=true: its mean is over an optimizer step, so steps_per_generation="
            f"{args.steps_per_generation} must equal gradient_accumulation_steps={args.gradient_accumulation_steps}.",
        ),
    ):
        if wrong:
            raise SettingError(message)
    kind: Any = "gspo" if args.importance_sampling_level == "sequence" else args.loss_type
    if kind in LOSSES:
        check(Loss(kind), correction)
