"""The text form of policies and families: parsed, printed, and read back."""

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.errors import SettingError
from alula.sparsity.evict import METHODS as EVICTORS
from alula.sparsity.family import PolicyFamily, parse_families
from alula.sparsity.policy import Evict, Select, Sparsity
from alula.sparsity.schedule import Schedule
from alula.sparsity.select import METHODS as SELECTORS

PRESET = Schedule.load("qwen3-4b-0.86")
OPTIONS = {
    "mix": st.floats(0, 1),
    "large": st.floats(0, 1),
    "horizon": st.integers(1, 1 << 20),
    "rank": st.integers(1, 64),
    "threshold": st.floats(0, 1, exclude_max=True),
    "kernel": st.integers(0, 9).map(lambda n: 2 * n + 1),
}
"""Values of every option that some evictor has; a new option needs a line here."""


@st.composite
def evictors(draw) -> Evict:
    method = draw(st.sampled_from(list(EVICTORS)))
    names = [f.name for f in fields(EVICTORS[method]) if f.name != "window"]
    options = {name: draw(OPTIONS[name]) for name in names if draw(st.booleans())}
    if draw(st.booleans()):
        options |= {"window": draw(st.integers(1, 64)), "sinks": draw(st.integers(0, 64))}
    if draw(st.booleans()):
        options |= {"buffer": draw(st.integers(1, 4096)), "protect_prompt": draw(st.booleans())}
    return Evict(method, draw(st.one_of(st.integers(128, 1 << 20), st.just(PRESET))), **options)


@st.composite
def selectors(draw) -> Select:
    method, block = draw(st.sampled_from(list(SELECTORS))), draw(st.sampled_from([1, 16, 64]))
    budget = draw(st.one_of(st.integers(3 * block, 1 << 20), st.just(PRESET)))
    return Select(method, budget, block, draw(st.integers(0, 40)))


def policies() -> st.SearchStrategy[Sparsity]:
    return st.builds(Sparsity, st.none() | evictors(), st.none() | selectors())


@settings(max_examples=300, deadline=None)
@given(policies(), st.booleans())
@pytest.mark.slow
def test_a_policy_reads_back(policy, full):
    assert Sparsity.parse(policy.describe(full=full)) == policy


@settings(max_examples=300, deadline=None)
@given(policies().filter(lambda policy: not policy.dense), st.booleans())
@pytest.mark.slow
def test_a_family_reads_back(policy, full):
    family = PolicyFamily(policy)
    assert parse_families(family.describe(full=full)) == [family]
    assert family.policy(512) == policy.with_budget(family.kind, 512)


@pytest.mark.parametrize(
    "text",
    [
        "rkv:512+64,window=4,mix=0.25",
        "snapkv:48+8,sinks=0 & block-topk:1024,block=32",
        "h2o:40+128",
        "quest:64,dense_layers=0",
        "dense",
    ],
)
def test_defaults_are_left_out(text):
    assert Sparsity.parse(text).describe() == text


@pytest.mark.parametrize("text", ["rkv:buffer=64:mix=0.25", "snapkv:48+128:sinks=0&block-topk:block=32", "quest"])
def test_defaults_of_families_are_left_out(text):
    [family] = parse_families(text)
    assert family.describe() == text


def test_a_family_is_listed_once():
    assert parse_families("rkv,quest,rkv:mix=0.1,quest", (16,)) == parse_families("rkv,quest", (16,))


def test_a_list_of_families():
    families = parse_families("block-topk:dense_layers=1, rkv:buffer=64:mix=0.2,quest:block=8", (16, 32))
    assert [(c.kind, c.method, c.part.settings) for c in families] == [
        ("select", "block-topk", {"block": 16, "dense_layers": 1}),
        ("select", "block-topk", {"block": 32, "dense_layers": 1}),
        (
            "evict",
            "rkv",
            {"buffer": 64, "window": 8, "sinks": 4, "protect_prompt": False, "mix": 0.2, "kernel": 7, "threshold": 0.5},
        ),
        ("select", "quest", {"block": 8, "dense_layers": 2}),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("block-tok", "did you mean 'block-topk'"),
        ("rkv:buffer=8,sinks=1", "'sinks=1' is no method; separate settings by colons"),
        ("rkv:64", "methods: rkv has a budget"),
        ("rkv:budget=64", "methods: rkv has a budget"),
        ("block-topk:blok=4", "did you mean 'block'"),
        ("snapkv&quest", "snapkv & quest: the evictor needs a budget"),
        ("quest&rkv", "rkv is an evictor; write it before the &"),
        ("quest:block=8&block-topk", "are both selectors"),
        ("rkv:budget=64&rkv:budget=64&quest", "one evictor and one selector"),
    ],
)
def test_bad_families(text, reason):
    with pytest.raises(SettingError, match=reason):
        parse_families(text)
