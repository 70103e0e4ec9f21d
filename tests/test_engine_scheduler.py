"""The scheduler and the page pool on their own: every plan runs on a simulated device that checks each page."""

from hypothesis import given, settings
from hypothesis import strategies as st

from alula.sparsity.policy import Evict, Select, Sparsity
from alula.sparsity.schedule import Schedule
from simulated import Arrival, Simulation

PAGES = st.sampled_from([1, 2, 4])


@st.composite
def evictions(draw):
    window, sinks = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    budgets = draw(st.lists(st.integers(window + sinks, 14), min_size=1, max_size=3))
    budget = budgets[0] if len(budgets) == 1 else Schedule(tuple(budgets), width=draw(st.integers(1, 12)))
    return Evict(
        draw(st.sampled_from(["streaming", "knorm"])), budget, buffer=draw(st.integers(1, 6)), window=window,
        sinks=sinks, protect_prompt=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def arrivals(draw, page):
    new = draw(st.integers(1, 24))
    kind = draw(st.sampled_from(["dense", "dense", "evict", "evict", "select", "both"]))
    select = Select("quest", 3 * page, block=page) if kind in ("select", "both") else None
    evict = draw(evictions()) if kind in ("evict", "both") else None
    return Arrival(
        at=draw(st.integers(0, 12)),
        prompt=draw(st.integers(1, 18)),
        new=new,
        stops=draw(st.lists(st.integers(1, new) | st.just(new), min_size=1, max_size=4)),
        sparsity=Sparsity(evict, select),
        abort_at=draw(st.none() | st.none() | st.integers(0, 20)),
    )


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_pages_are_conserved_and_everybody_finishes(data):
    page = data.draw(PAGES)
    simulation = Simulation(
        pages=data.draw(st.integers(8, 60)),
        page=page,
        rows=data.draw(st.integers(1, 6)),
        lookahead=data.draw(st.integers(1, 7)),
        ahead=data.draw(st.integers(0, 1)),
        prefill_tokens=data.draw(st.sampled_from([1, 20, 1000])),
    )
    simulation.run(data.draw(st.lists(arrivals(page), min_size=1, max_size=6)))
