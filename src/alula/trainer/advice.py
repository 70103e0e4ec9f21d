"""What else may be done about the mismatch, by the correction in use: see docs/which-setting.md."""

ANOTHER = "{another correction}"
"""In an advice: the place of these words."""
CONTROLLER = " (control={enabled: true, on_violation: adapt, vetoed: 0.05} does so by itself)"
"""In an advice, unless there is one."""


def another(correction: str) -> str:
    """`correction` is the preset's name; those that reject nothing, or only cut weights, all get the same words."""
    if correction == "reroll":
        return "try another compressor"
    if correction == "strict":
        return "try another compressor, distill.first or objective.correction=reroll"
    if correction.startswith("sparse-rl"):
        return "reject more (objective.correction=strict), or repair instead (reroll)"
    return "use a correction that rejects (objective.correction=strict, or sparse-rl)"


def filled(advice: str, correction: str, controlled: bool) -> str:
    return advice.replace(ANOTHER, another(correction)).replace(CONTROLLER, "" if controlled else CONTROLLER)
