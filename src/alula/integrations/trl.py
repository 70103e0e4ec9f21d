"""TRL's GRPO trainer with sparse rollouts: Alula's engine generates, TRL scores, Alula corrects, TRL trains.

    prompts ─► Engine.generate ─► completions, sparse log-probs ─► TRL: rewards, advantages A [B], dense log-probs
                                                                         │
    TRL's loss ◄── advantages [B, T] = A · w · keep ◄── correct (ξ = p_dense_old / p_sparse) ◄────┘

Every loss of TRL but `vespo` is positively homogeneous in the advantage, so a weight w ≥ 0 that is folded into it
multiplies the clipped objective, as `alula.objective.losses` defines it, and no more of TRL need be replaced. The two
hooks used here are private to TRL, and change: hence the version in the extra `alula[trl]`.
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
from alula.errors import SettingError, require
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

    Either may be written as on Alula's command line ("rkv:512+128", "sparse-rl"). `engine` holds options of
    `alula.Engine`, such as {"kv_memory": "20GiB"}. Completions for evaluation are sampled densely. All else, and all
    other arguments, are TRL's.
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
        refuse_settings(args or GRPOConfig(), self.correction)
        for name in ("tools", "rollout_func", "environment_factory"):
            require(not others.get(name), f"{name}: Alula's engine generates single answers here; leave it out.")
        super().__init__(model=model, reward_funcs=reward_funcs, args=args, train_dataset=train_dataset, **others)
        self.shares_weights, self.engine = self._build_engine(dict(engine or {}))

    def _build_engine(self, options: dict[str, Any]) -> tuple[bool, Engine]:
        """An engine in the dtype that TRL computes in: on the trainer's own parameters where they have it already,
        otherwise (float32 parameters under autocast) on a copy that follows them."""
        self._refuse_model()
        require("sparse_adapter" not in options, f"engine: sparse_adapter is not kept up to date here; {INSTEAD}.")
        check_dry_run(self.model, share_weights(self.model))
        twin = share_weights(self.model).eval()
        own = next(self.model.parameters()).dtype
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else own
        if dtype != own:
            twin = copy.deepcopy(twin)
            for parameter in twin.parameters():  # not the buffers: RoPE's frequencies stay float32
                parameter.data = parameter.data.to(dtype)
        device = self.accelerator.device
        if device.type == "cuda" and "kv_memory" not in options:  # AdamW's moments and the gradients come later
            options["kv_memory"] = default_memory(device) - 3 * sum(p.nbytes for p in self.model.parameters())
        page = self.sparsity.select.block if self.sparsity.select else 16
        name = self.model.config.name_or_path.rstrip("/").rpartition("/")[2]
        loaded = LoadedModel(twin, self.processing_class, name, tuple(self.eos_token_ids))
        engine = Engine(loaded, **({"page": page} | options))
        engine.check(self.sparsity)
        engine.sleep()
        return dtype == own, engine

    def _refuse_model(self) -> None:
        require(not self._is_vlm, "processing_class: a vision model's prompts are not text alone; use a text model.")
        require(
            isinstance(self.model, PreTrainedModel),
            f"model: a {type(self.model).__name__} has weights beside those that the engine runs; {INSTEAD} "
            "(learner.lora), or train without peft_config.",
        )
        check_config(self.model.config)
        require(
            not (self.is_fsdp_enabled or self.is_deepspeed_enabled),
            f"the trainer shards weights (FSDP or DeepSpeed), and the engine needs them whole; {INSTEAD}, or launch "
            "with plain data parallelism.",
        )
        devices = {str(parameter.device) for parameter in self.model.parameters()}
        require(
            len(devices) == 1,
            f"the model lies on {', '.join(sorted(devices))}, and the engine runs on one device; show one GPU to each "
            "process (CUDA_VISIBLE_DEVICES).",
        )

    @property
    def _reduce(self) -> Callable[[Tensor], Tensor] | None:
        """Sums over processes, where there are several."""
        return (lambda value: self.accelerator.reduce(value, "sum")) if self.accelerator.num_processes > 1 else None

    def _gather(self, value: Any) -> list[Any]:
        """The values of all processes."""
        return gather_object([value])

    # -- what TRL calls -------------------------------------------------------------------------------------

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, num_generations: int, *_: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Completions and their log-probs under the policy that sampled them."""
        training = self.model.training
        # TRL repeats a prompt for every completion of it; as one request they share the prompt's KV. A group that is
        # split between processes is sampled one by one.
        first = prompt_ids[::num_generations]
        whole = prompt_ids == [prompt for prompt in first for _ in range(num_generations)]
        sampling = Sampling(
            n=num_generations if whole else 1,
            max_new_tokens=self.max_completion_length,  # type: ignore[arg-type]
            temperature=self.temperature,
            seed=int(torch.randint(2**62, ())),  # torch's state differs by process and is part of a checkpoint
        )
        self.engine.wake()
        if not self.shares_weights:
            self.engine.update_weights(self.model.named_parameters())
        self.engine.policy_version = self.state.global_step
        rollouts = self.engine.generate(
            first if whole else prompt_ids, sampling, self.sparsity if training else DENSE, progress=False
        )
        self.engine.sleep()
        require(
            all(rollout.finish != "error" for rollout in rollouts),
            "the model's output is not finite: training has diverged, or the weights do not fit the dtype.",
        )
        if training:
            self._log_kv(rollouts)
        return [r.token_ids for r in rollouts], [r.sampler_logprobs().tolist() for r in rollouts]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch with A · w · keep in place of A; dropped tokens also leave TRL's own loss mask where the
        correction's divisors count accepted tokens only."""
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
        """TRL's own forward, where it would have done without: one update per batch of completions."""
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


def refuse_settings(args: GRPOConfig, correction: Correction) -> None:
    """What cannot be right together, before a model is loaded."""
    for name, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", None), ("repetition_penalty", 1.0)):
        value = getattr(args, name)
        require(
            value in (None, neutral),
            f"{name}={value}: tokens drawn from a changed distribution have no log-prob under the policy, which the "
            f"correction needs; set it to {neutral}.",
        )
    accepted = correction.inner == "accepted"
    for wrong, message in (
        (args.use_vllm, "use_vllm=True: Alula's engine generates; set it to False."),
        (
            args.use_transformers_continuous_batching,
            "use_transformers_continuous_batching=True: Alula's engine "
            "generates, and batches continuously itself; set it to False.",
        ),
        (
            args.generation_kwargs,
            f"generation_kwargs={args.generation_kwargs}: these are for transformers' generate, "
            "which is not used; leave them out.",
        ),
        (
            args.cast_lm_head_to_fp32,
            "cast_lm_head_to_fp32=True: the engine needs one dtype, and takes its logits in "
            "float32 anyway; set it to False.",
        ),
        (
            args.loss_type == "vespo",
            "loss_type=vespo: it reshapes the importance weight itself, so a correction cannot "
            "be folded into the advantages; choose another loss.",
        ),
        (correction.reroll, f"correction reroll: it generates again before rewards are computed; {INSTEAD}."),
        (
            not correction.vetoed_in_baseline,
            f"correction vetoed_in_baseline=false: TRL computes the baseline; {INSTEAD}.",
        ),
        (correction.outer == "accepted", f"correction outer=accepted: TRL counts every rollout; {INSTEAD}."),
        (
            args.beta and accepted != correction.mask_kl,
            "correction inner and mask_kl: TRL has one mask for both with "
            "beta above 0; set inner=accepted with mask_kl=true, or inner=all with mask_kl=false.",
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
