"""Chooses the budgets to measure next: k-ary search per bin and threshold, assuming that tails grow with budgets."""

from collections.abc import Mapping, Sequence

from alula.mismatch.tail import Tail


def next_budgets(
    ladder: Sequence[int], known: Mapping[int, Tail], taus: Sequence[float], together: int, *, sweep: bool = False
) -> list[int]:
    """At most `together` budgets of the ascending `ladder` that could still change a plan; empty if there are none.

    In every trusted bin and for every threshold the smallest passing budget (lower bound ≥ tau) lies between the
    largest one known to fail and the smallest one known to pass. Budgets outside all of these brackets are not
    measured. If the tail does not grow with the budget, a plan may cost more than necessary, but it stays safe,
    since it uses measured budgets only. `sweep` returns every budget.
    """
    open_budgets = {b for b in ladder if b not in known}
    if known and not sweep:
        inside: set[int] = set()
        bins = range(len(next(iter(known.values()))))
        for j in bins:
            for tau in taus:
                inside |= bracket(ladder, {b: t for b, t in known.items() if t[j].enough}, j, tau)
        open_budgets &= inside
    return spread(sorted(open_budgets), together)


def bracket(ladder: Sequence[int], known: Mapping[int, Tail], j: int, tau: float) -> set[int]:
    """Budgets strictly between the largest failing and the smallest passing one; none if `known` is empty."""
    if not known:
        return set()
    passing = min((b for b, tail in known.items() if tail.lower[j] >= tau), default=ladder[-1] + 1)
    failing = max((b for b, tail in known.items() if b < passing), default=ladder[0] - 1)
    return {b for b in ladder if failing < b < passing}


def spread(items: Sequence[int], count: int) -> list[int]:
    """`count` of the items that cut the list into equal parts, or all items if there are fewer."""
    if count >= len(items):
        return list(items)
    return [items[(i + 1) * len(items) // (count + 1)] for i in range(count)]
