"""Settings of `rollouts:` that do not go together."""

import pytest

import toy
from alula.errors import SettingError
from alula.rollouts import build

RAY = "rollouts.backend=ray"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("rollouts.workers=2",), r"rollouts\.workers without rollouts\.backend=ray"),
        (("rollouts.stale=1",), r"rollouts\.stale without rollouts\.backend=ray"),
        ((RAY, "rollouts.min_workers=2"), r"min_workers=2: there are only rollouts\.workers=1"),
        ((RAY, "rollouts.stale=1", "sampling.dynamic=true"), r"rollouts\.stale=1 with sampling\.dynamic"),
        ((RAY, "rollouts.stale=1", "rollouts.colocated=true"), r"rollouts\.stale=1 with rollouts\.colocated"),
        ((RAY, "rollouts.workers=0"), r"rollouts\.workers"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path, settings, message):
    with pytest.raises(SettingError, match=message):
        toy.toy(tmp_path, *settings)


def test_without_ray_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    build.check_backend(toy.toy(tmp_path))
    with pytest.raises(SettingError, match=r"Ray is not installed; pip install 'alula\[ray\]'"):
        build.check_backend(toy.toy(tmp_path, RAY))
