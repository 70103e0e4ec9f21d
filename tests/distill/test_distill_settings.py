"""Settings of distillation: invalid values raise, and the criterion for moving to a sparser policy."""

import numpy as np
import pytest

from alula.config.load import read_tree
from alula.distill.run_stage import lowest_bound, may_move, measures_at
from alula.errors import SettingError
from alula.mismatch.tail import tail
from alula.settings import DistillSettings, MoveSettings
from distill_runs import RECIPE


def test_invalid_settings_raise():
    for settings, message in (
        ({"rank": 0}, "rank=0"),
        ({"alpha": 0}, "alpha=0"),
        ({"fraction": 0.0}, r"fraction=0\.0"),
        ({"weight": -1}, "weight=-1"),
        ({"targets": ()}, "targets"),
        ({"max_grad_norm": 0}, "max_grad_norm=0"),
        ({"loss": "both"}, "'loss'"),
        ({"first": {"minibatches": 5, "prompts": 4}}, r"first\.minibatches=5: .* 4 "),
        ({"move": {"sparsity": "rkv:64", "tau": 1.5}}, r"move\.tau=1\.5"),
    ):
        with pytest.raises(SettingError, match=message):
            DistillSettings(**settings)


def test_invalid_recipes_raise():
    for changes, message in (
        ({"sparsity": {}}, "distill: .*sparsity"),
        (
            {"sparsity": RECIPE["sparsity"] | {"select": {"method": "quest", "budget": 64}}},
            "distill: .*evictor.*selector",
        ),
        ({"distill": {"first": {"steps": 0}}}, r"distill\.first\.steps=0"),
        ({"distill": {"first": {"prompts": 3}}}, r"distill\.first\.minibatches=4: .* 3 "),
        ({"distill": {"first": {}, "weight": 0.0}}, r"distill\.first .*distill\.weight=0"),
        (
            {"distill": {"move": {"sparsity": "snapkv:8+2,window=2,sinks=1", "prompts": 19}}},
            r"distill\.move\.prompts=19: .* at least 20",
        ),
        ({"distill": {"move": {"sparsity": "rkv:8", "tau": 2.0}}}, r"distill\.move\.tau=2\.0"),
        ({"distill": {"move": {"sparsity": "dense"}}}, r"distill\.move\.sparsity=dense: "),
        (
            {"distill": {"move": {"sparsity": "rkv:10+2,window=2,sinks=1"}}},
            r"distill\.move\.sparsity=rkv:10\+2.*budget.* 10;",
        ),
        (
            {"distill": {"move": {"sparsity": "rkv:8+2,window=2,sinks=1 & quest:64"}}},
            r"distill\.move\.sparsity=.* & quest:64: ",
        ),
        ({"distill": {"move": {"sparsity": "rkv:8+2,window=2,sinks=1", "at": 9}}}, r"distill\.move\.at=9: .*steps=4"),
        ({"control": {"enabled": True, "tau": 0.8}}, r"distill\.move .*control\.enabled"),
        ({"distill": {"rnk": 4}}, "distill.rank"),
    ):
        with pytest.raises(SettingError, match=message):
            read_tree(RECIPE | {"out": "nowhere"} | changes)


def test_criterion_for_moving_to_the_sparser_policy():
    positions, prompts = np.tile(np.arange(100), 30), np.repeat(np.arange(30), 100)
    good = tail(np.full(3000, 0.9), positions, prompts, width=50)
    late = tail(np.where(positions < 50, 0.9, 0.7), positions, prompts, width=50)
    few = tail(np.full(500, 0.9), positions[:500], prompts[:500], width=50)
    assert lowest_bound(good) == pytest.approx(0.9)
    assert lowest_bound(late) == pytest.approx(0.7), "every bin counts"
    assert lowest_bound(few) == -np.inf, "five prompts are too few"
    unlike = tail(np.where(prompts < 28, 0.9, 0.5), positions, prompts, quantile=0.07, width=50)
    assert unlike.value.min() > 0.86 > unlike.lower.max(), "two low prompts of thirty lower the bound"
    assert lowest_bound(unlike) < 0.86
    waits, planned = MoveSettings(sparsity="rkv:64", every=5), MoveSettings(sparsity="rkv:64", at=12)
    assert [step for step in range(1, 16) if measures_at(waits, step)] == [5, 10, 15]
    assert (may_move(waits, 5, good), may_move(waits, 5, late)) == (True, False)
    assert [step for step in range(1, 16) if measures_at(planned, step)] == [12]
    assert may_move(planned, 12, late)
