"""Settings of the objective: the policy loss (`Loss`), the correction of ξ (`Correction`), and the whole section.

Does not import torch.
"""

from dataclasses import asdict, field, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import ArgsKwargs

from alula.errors import SettingError, require, unknown
from alula.objective.losses import LOSSES
from alula.section import settings_type
from alula.settings import Positive

Level = Literal["none", "token", "sequence", "geometric"]
Counted = Literal["all", "accepted"]
EQUAL = "a token with equal probabilities has ξ = 1"


@settings_type
class Correction:
    """What is done about ξ = p_dense / p_sparse. The plain constructor does nothing; see the presets, or `named`.

    A recipe gives a preset's name, or `preset` and the settings that differ from it.
    """

    preset: str = field(default="none", compare=False)
    """`none`, `sparse-rl`, `sparse-rl-code`, `strict`, `tis`, `mis`, `icepop`, `geometric`, `reroll` or
    `prefix-only`."""
    weight: Level = "none"
    """Level of the importance weight that multiplies the clipped objective."""
    cap: Positive | None = None
    """Largest weight (truncated importance sampling); null leaves it unbounded."""
    batch_normalise: bool = False
    """Divide the weights by their mean over the optimizer step and all ranks, dropped tokens included:
    a mean over tokens at level `token`, over rollouts at the others."""
    mask: Level = "none"
    """Level at which tokens or rollouts outside the band are dropped."""
    mask_low: Positive | None = None
    """Lower end of the band."""
    mask_high: Positive | None = None
    """Upper end of the band."""
    veto: Positive | None = None
    """Drop the whole rollout when any ξ_t is below this."""
    prefix_only: bool = False
    """A control, not a method: a veto drops only the first vetoed token and what follows. The prefix keeps an
    advantage that the corrupted suffix earned."""
    reroll: bool = False
    """Vetoed rollouts are regenerated densely from the first vetoed token on before they are rewarded."""
    vetoed_in_baseline: bool = True
    """Whether dropped rollouts enter the mean and the std of their group."""
    inner: Counted = "all"
    """What a rollout's own divisor counts: |o_i|, or its accepted tokens."""
    outer: Counted = "all"
    """What the batch divisor counts: every rollout, or those not dropped."""
    mask_kl: bool = False
    """Whether the KL to the reference leaves out dropped tokens too (and shares the divisors)."""
    clamp: Positive = 20.0
    """|log ξ| is cut here before exp, at whatever level it is taken."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        """From a recipe: a preset's name, or a mapping of the settings that differ from the preset."""
        if isinstance(given, ArgsKwargs | Correction):
            return given
        changes = dict(given) if isinstance(given, dict) else {"preset": given}
        preset = changes.pop("preset", "sparse-rl")
        is_name = isinstance(preset, str)
        require(is_name, f"preset={preset!r}: must be the name of a preset; none switches the correction off.")
        return asdict(cls.named(preset)) | changes

    def __post_init__(self) -> None:
        low, high = self.mask_low, self.mask_high
        weighted, masked = self.weight != "none", self.mask != "none"
        banded = low is not None or high is not None
        after_veto = [setting for setting in ("prefix_only", "reroll") if getattr(self, setting)]
        for wrong, message in (
            (low and high and low >= high, f"mask_low={low} must be below mask_high={high}."),
            (low and low >= 1, f"mask_low={low}: should be below 1; {EQUAL}."),
            (high and high <= 1, f"mask_high={high}: should be above 1; {EQUAL}."),
            (self.veto and self.veto >= 1, f"veto={self.veto}: should be below 1; {EQUAL}."),
            (self.cap and self.cap < 1, f"cap={self.cap}: should be at least 1; {EQUAL}."),
            (self.cap and not weighted, f"cap={self.cap} caps nothing: set weight, or cap to null."),
            (self.batch_normalise and not weighted, "batch_normalise=true: there is no weight; set weight."),
            (masked and not banded, f"mask={self.mask}: give mask_low, mask_high or both."),
            (banded and not masked, f"mask_low={low}, mask_high={high}: set mask to the level they bound."),
            (
                after_veto and not self.veto,
                "prefix_only and reroll act on vetoed rollouts: set veto, say 1e-4.",
            ),
            (len(after_veto) > 1, "prefix_only and reroll: choose what happens after a vetoed token."),
        ):
            require(not wrong, message)

    @classmethod
    def none(cls) -> "Correction":
        """Naive sparse: nothing weighted, nothing dropped; the metrics are still taken."""
        return cls()

    @classmethod
    def sparse_rl(cls) -> "Correction":
        """Sparse-RL as its paper describes it (arXiv 2601.10079): raw ξ_t outside the clip, veto at 1e-4."""
        return cls("sparse-rl", weight="token", veto=1e-4)

    @classmethod
    def sparse_rl_code(cls) -> "Correction":
        """Sparse-RL as released: ξ_t capped at 1.5 and normalised, band [0.5, 1.5], veto, accepted means."""
        return cls(
            "sparse-rl-code",
            weight="token",
            cap=1.5,
            batch_normalise=True,
            mask="token",
            mask_low=0.5,
            mask_high=1.5,
            veto=1e-4,
            inner="accepted",
            mask_kl=True,
        )

    @classmethod
    def strict(cls) -> "Correction":
        """Rejection alone, as if the rejected rollout had never been sampled: veto at 1e-3, out of its group's
        baseline."""
        return cls("strict", veto=1e-3, vetoed_in_baseline=False)

    @classmethod
    def tis(cls, cap: float = 2.0) -> "Correction":
        """Truncated importance sampling, min(ξ_t, cap): what Sparrow trains with, cap not stated there."""
        return cls("tis", weight="token", cap=cap)

    @classmethod
    def mis(cls, high: float = 3.0, low: float | None = None) -> "Correction":
        """Masked importance sampling, of sequences: weight Π ξ_t, rollouts outside the band dropped."""
        return cls("mis", weight="sequence", mask="sequence", mask_low=low, mask_high=high)

    @classmethod
    def icepop(cls, low: float = 0.5, high: float = 5.0) -> "Correction":
        """IcePop (arXiv 2510.18855): weight ξ_t, tokens outside the band dropped."""
        return cls("icepop", weight="token", mask="token", mask_low=low, mask_high=high)

    @classmethod
    def geometric(cls, low: float = 0.99, high: float = 1.01) -> "Correction":
        """Rollouts whose geometric mean ξ is outside the band dropped, the others not weighted."""
        return cls("geometric", mask="geometric", mask_low=low, mask_high=high)

    @classmethod
    def rerolled(cls) -> "Correction":
        """`sparse-rl`, but a vetoed rollout is regenerated densely from its first vetoed token."""
        return replace(cls.sparse_rl(), preset="reroll", reroll=True)

    @classmethod
    def prefix(cls) -> "Correction":
        """`sparse-rl`, but a veto keeps the tokens before it: the control that shows why not to."""
        return replace(cls.sparse_rl(), preset="prefix-only", prefix_only=True)

    @classmethod
    def named(cls, name: str, **options: Any) -> "Correction":
        """A preset, with any of its settings changed: `Correction.named("tis", cap=5.0)`."""
        if name not in PRESETS:
            raise unknown("correction", name, PRESETS)
        return replace(PRESETS[name], **options)


PRESETS: dict[str, Correction] = {
    correction.preset: correction
    for correction in (
        Correction.none(),
        Correction.sparse_rl(),
        Correction.sparse_rl_code(),
        Correction.strict(),
        Correction.tis(),
        Correction.mis(),
        Correction.icepop(),
        Correction.geometric(),
        Correction.rerolled(),
        Correction.prefix(),
    )
}


def _registered(name: str) -> str:
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES)
    return name


@settings_type
class Loss:
    """The policy loss; formulas in `alula.objective.losses`."""

    loss: Annotated[str, AfterValidator(_registered)] = "grpo"
    """Policy loss: `grpo`, `dr_grpo`, `dapo`, `gspo` or `cispo`."""
    clip_low: Annotated[float, Field(ge=0, le=1)] | None = None
    """The ratio is clipped below at 1 - clip_low; by default the loss's published value."""
    clip_high: Annotated[float, Field(ge=0)] | None = None
    """The ratio is clipped above at 1 + clip_high; by default the loss's published value."""
    dual_clip: float | None = None
    """Bound for tokens of negative advantage: their loss is at most dual_clip · |A| (arXiv 1912.09729)."""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient β of the KL to the initial policy (k3). Above 0 that policy is kept in memory (not under LoRA)."""
    kl_clamp: Positive | None = None
    """Upper bound of a token's k3, as in slime and verl (10)."""

    def __post_init__(self) -> None:
        if self.dual_clip is not None:
            require(
                LOSSES[self.loss].pessimistic,
                f"dual_clip={self.dual_clip}: {self.loss} has no clipped minimum to bound; set it to null.",
            )
            high = self.clip[1]
            require(
                self.dual_clip > 1 + high,
                f"dual_clip={self.dual_clip}: must lie above 1 + clip_high = {1 + high}.",
            )

    @property
    def clip(self) -> tuple[float, float]:
        """(clip_low, clip_high), with the published values filled in."""
        low, high = LOSSES[self.loss].clip
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )


@settings_type
class ObjectiveSettings(Loss):
    """What is optimized: the loss, the correction and the advantages."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """Advantage of a rollout relative to its group: mean and std, mean only, or the mean of the others."""
    correction: Correction = PRESETS["sparse-rl"]
    """Correction of the mismatch between sparse and dense policy: a preset's name, or `preset` and the settings that
    differ from it."""
    skip_scoring: bool | None = None
    """Take the old log-probs of the first optimizer step from its training forward, and save their scoring pass; by
    default on a GPU, if the correction allows it."""
    skip_no_signal: bool = True
    """Leave rollouts that contribute exactly nothing (equal rewards, all tokens dropped) out of the update. The
    divisors still count them. Without effect if `kl` is above 0."""
    mask_truncated: bool = False
    """Answers cut off by `max_new_tokens` are not trained on; they still count in their group's mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, self.correction, skip_scoring=bool(self.skip_scoring))

    def skips_scoring(self, device: str) -> bool:
        """Whether a run on a `device` of this type does."""
        if self.skip_scoring is not None:
            return self.skip_scoring
        return device == "cuda" and not needs_scores(self, self.correction)


def check(loss: Loss, correction: Correction, *, skip_scoring: bool = False) -> None:
    """Reject a loss and a correction that do not go together, or need what `skip_scoring` leaves out."""
    kind = LOSSES[loss.loss]
    if kind.ratio == "geometric":
        for setting, per_token in (
            ("weight=token", correction.weight == "token"),
            ("mask=token", correction.mask == "token"),
            ("prefix_only=true", correction.prefix_only),
        ):
            if per_token:
                raise SettingError(
                    f"loss {loss.loss} with {setting}: its ratio belongs to the whole rollout, so a correction of "
                    "single tokens has no place in it; use level geometric or sequence, or another loss."
                )
    if kind.divisor == "max_length" and correction.inner == "accepted":
        raise SettingError(
            f"loss {loss.loss} with inner=accepted: it divides by max_length, not by tokens; set inner to all."
        )
    needed = needs_scores(loss, correction) if skip_scoring else None
    if needed is not None:
        raise SettingError(
            f"skip_scoring=true with {needed}, which needs every ξ of the step before the first update; set "
            "skip_scoring to false, or change the other."
        )


def needs_scores(loss: Loss, correction: Correction) -> str | None:
    """The setting that needs every ξ of a step before its first update, if there is one."""
    for setting, needed in (
        ("batch_normalise=true", correction.batch_normalise),
        ("outer=accepted", correction.outer == "accepted"),
        ("inner=accepted", correction.inner == "accepted" and LOSSES[loss.loss].divisor == "step"),
        ("vetoed_in_baseline=false", not correction.vetoed_in_baseline),
        ("reroll=true", correction.reroll),
    ):
        if needed:
            return setting
    return None
