"""The load test, in short: `tests/support/serve_load.py` runs it for a minute with 200 clients."""

import pytest

import serve_load


@pytest.mark.slow
def test_every_request_is_answered_or_cancelled_and_no_page_is_left():
    result = serve_load.run(clients=40, seconds=5)
    outcomes = result["outcomes"]
    assert set(outcomes) <= {"200", "hung up"}
    assert sum(outcomes.values()) == result["sent"]
    assert outcomes["hung up"] > 3
    assert outcomes["200"] > 40
    assert not any(result["left"].values())
    memory = result["memory_mib"]
    assert memory[-1] < 1.3 * memory[len(memory) // 3]
    assert result["exit_code"] == 0
