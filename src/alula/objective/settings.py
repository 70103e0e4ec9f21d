"""The objective's settings, free of torch: what is done about ξ (`Correction`) and the loss (`Loss`)."""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from alula.errors import SettingError, require, unknown
from alula.objective.losses import LOSSES

Level = Literal["none", "token", "sequence", "geometric"]
Counted = Literal["all", "accepted"]


@dataclass(frozen=True)
class Correction:
    """What is done about ξ. The plain constructor does nothing; see the presets, or `named`."""

    weight: Level = "none"
    """Level of the importance weight that multiplies the clipped objective."""
    cap: float | None = None
    """Largest weight (truncated importance sampling); None leaves it raw."""
    batch_normalise: bool = False
    """Divide the weights by their mean over the optimizer step and all ranks, dropped tokens included:
    a mean over tokens at level `token`, over rollouts at the others."""
    mask: Level = "none"
    """Level at which tokens or rollouts outside the band are dropped."""
    mask_low: float | None = None
    mask_high: float | None = None
    veto: float | None = None
    """Drop the whole rollout when any ξ_t is below this."""
    prefix_only: bool = False
    """A control, not a method: a veto drops only the first vetoed token and what follows. The prefix keeps an
    advantage that the corrupted suffix earned."""
    reroll: bool = False
    """Vetoed rollouts are regenerated densely from `first_vetoed` on before they are rewarded."""
    vetoed_in_baseline: bool = True
    """Whether dropped rollouts enter the mean and the std of their group."""
    inner: Counted = "all"
    """What a rollout's own divisor counts: |o_i|, or its accepted tokens."""
    outer: Counted = "all"
    """What the batch divisor counts: every rollout, or those not dropped."""
    mask_kl: bool = False
    """Whether the KL to the reference leaves out dropped tokens too (and shares the divisors)."""
    clamp: float = 20.0
    """|log ξ| is cut here before exp, at whatever level it is taken."""

    def __post_init__(self) -> None:
        for setting, names in (("weight", Level), ("mask", Level), ("inner", Counted), ("outer", Counted)):
            if getattr(self, setting) not in get_args(names):
                raise unknown(f"value of {setting}", getattr(self, setting), get_args(names))
        for setting in ("cap", "mask_low", "mask_high", "veto", "clamp"):
            value = getattr(self, setting)
            require(value is None or value > 0, f"{setting}={value}: a ratio's bound must be above 0.")
        low, high = self.mask_low, self.mask_high
        weighted, masked = self.weight != "none", self.mask != "none"
        banded = low is not None or high is not None
        after_veto = [setting for setting in ("prefix_only", "reroll") if getattr(self, setting)]
        for wrong, message in (
            (low and high and low >= high, f"mask_low={low} must be below mask_high={high}."),
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
        return cls(weight="token", veto=1e-4)

    @classmethod
    def sparse_rl_code(cls) -> "Correction":
        """Sparse-RL as released: ξ_t capped at 1.5 and normalised, band [0.5, 1.5], veto, accepted means."""
        return cls(
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
        """Rejection alone, as if a spoilt rollout had never been sampled: veto at 1e-3, out of its group's baseline."""
        return cls(veto=1e-3, vetoed_in_baseline=False)

    @classmethod
    def tis(cls, cap: float = 2.0) -> "Correction":
        """Truncated importance sampling, min(ξ_t, cap): what Sparrow trains with, cap not stated there."""
        return cls(weight="token", cap=cap)

    @classmethod
    def mis(cls, high: float = 3.0, low: float | None = None) -> "Correction":
        """Masked importance sampling, of sequences: weight Π ξ_t, rollouts outside the band dropped."""
        return cls(weight="sequence", mask="sequence", mask_low=low, mask_high=high)

    @classmethod
    def icepop(cls, low: float = 0.5, high: float = 5.0) -> "Correction":
        """IcePop (arXiv 2510.18855): weight ξ_t, tokens outside the band dropped."""
        return cls(weight="token", mask="token", mask_low=low, mask_high=high)

    @classmethod
    def geometric(cls, low: float = 0.99, high: float = 1.01) -> "Correction":
        """Rollouts whose geometric mean ξ is outside the band dropped, the others not weighted."""
        return cls(mask="geometric", mask_low=low, mask_high=high)

    @classmethod
    def rerolled(cls) -> "Correction":
        """`sparse-rl`, but a vetoed rollout is regenerated densely from its first vetoed token."""
        return replace(cls.sparse_rl(), reroll=True)

    @classmethod
    def prefix(cls) -> "Correction":
        """`sparse-rl`, but a veto keeps the tokens before it: the control that shows why not to."""
        return replace(cls.sparse_rl(), prefix_only=True)

    @classmethod
    def named(cls, name: str, **options: Any) -> "Correction":
        """A preset, with any of its settings changed: `Correction.named("tis", cap=5.0)`."""
        if name not in PRESETS:
            raise unknown("correction", name, PRESETS)
        known = [field.name for field in fields(cls)]
        for option in options:
            if option not in known:
                raise unknown("correction setting", option, known)
        return replace(PRESETS[name], **options)


PRESETS: dict[str, Correction] = {
    "none": Correction.none(),
    "sparse-rl": Correction.sparse_rl(),
    "sparse-rl-code": Correction.sparse_rl_code(),
    "strict": Correction.strict(),
    "tis": Correction.tis(),
    "mis": Correction.mis(),
    "icepop": Correction.icepop(),
    "geometric": Correction.geometric(),
    "reroll": Correction.rerolled(),
    "prefix-only": Correction.prefix(),
}


if TYPE_CHECKING:
    LossName = str
else:
    LossName = Literal[tuple(LOSSES)]


@dataclass(frozen=True)
class Loss:
    """The policy loss; formulas in `alula.objective.losses`."""

    kind: LossName = "grpo"
    clip_low: float | None = None
    """None: the published value, as registered."""
    clip_high: float | None = None
    dual_clip: float | None = None
    """Bounds a token of negative advantage: its loss is at most dual_clip · |A| (arXiv 1912.09729)."""
    kl: float = 0.0
    """Coefficient β of the KL to the reference (k3)."""
    kl_clamp: float | None = None
    """Cut a token's k3 here, as slime and verl do at 10."""

    def __post_init__(self) -> None:
        if self.kind not in LOSSES:
            raise unknown("loss", self.kind, LOSSES)
        low, high = self.clip
        require(0 <= low <= 1, f"clip_low={low}: must lie in [0, 1].")
        require(high >= 0, f"clip_high={high}: must be 0 or above.")
        require(self.kl >= 0, f"kl={self.kl}: the KL coefficient must be 0 or above.")
        require(self.kl_clamp is None or self.kl_clamp > 0, f"kl_clamp={self.kl_clamp}: must be above 0, or null.")
        if self.dual_clip is not None:
            require(
                LOSSES[self.kind].pessimistic,
                f"dual_clip={self.dual_clip}: {self.kind} has no clipped minimum to bound; set it to null.",
            )
            require(
                self.dual_clip > 1 + high,
                f"dual_clip={self.dual_clip}: must lie above 1 + clip_high = {1 + high}.",
            )

    @property
    def clip(self) -> tuple[float, float]:
        low, high = LOSSES[self.kind].clip
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )


def check(loss: Loss, correction: Correction, *, one_update: bool = False) -> None:
    """Refuse a loss and a correction that mean nothing together.

    `one_update`: old log-probs are the training forward's own, so ξ is not known before the update.
    """
    kind = LOSSES[loss.kind]
    if kind.ratio == "geometric":
        for setting, per_token in (
            ("weight=token", correction.weight == "token"),
            ("mask=token", correction.mask == "token"),
            ("prefix_only=true", correction.prefix_only),
        ):
            if per_token:
                raise SettingError(
                    f"loss {loss.kind} with {setting}: its ratio belongs to the whole rollout, so a correction of "
                    "single tokens has no place in it; use level geometric or sequence, or another loss."
                )
    if kind.divisor == "max_length" and correction.inner == "accepted":
        raise SettingError(
            f"loss {loss.kind} with inner=accepted: it divides by max_length, not by tokens; set inner to all."
        )
    if one_update:
        for setting, needed in (
            ("batch_normalise=true", correction.batch_normalise),
            ("outer=accepted", correction.outer == "accepted"),
            ("inner=accepted", correction.inner == "accepted" and kind.divisor == "step"),
            ("vetoed_in_baseline=false", not correction.vetoed_in_baseline),
            ("reroll=true", correction.reroll),
        ):
            if needed:
                raise SettingError(
                    f"{setting} needs every ξ of the step before the update, which one-update mode does not "
                    "have; turn one-update mode off, or change the setting."
                )
