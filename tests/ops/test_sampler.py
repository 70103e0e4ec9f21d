"""The sampler: correct distribution, independent rollouts, random numbers that depend only on the key."""

import numpy as np
import pytest
import torch

import oracle
from alula import Engine, Sampling
from alula.engine.sequence import rollout_key
from alula.ops import sample as sample_module
from alula.ops.sample import (
    BLOCK,
    BLOCKS_FROM,
    block_noise,
    gumbel,
    philox,
    proposal_logits,
    sample_torch,
    token_noise,
    top_logprobs,
)
from evictor_formulas import philox_literal

CHI_SQUARE_999 = {9: 27.88, 15: 37.70, 19: 43.82, 49: 85.35, 63: 103.44, 80: 124.84}
"""p = 0.001 by degrees of freedom"""


def draw(logits, temperature=1.0, *, keys=None, counter=None, forced=-1, proposal=None, count=1):
    """`count` draws from one row of logits, each with its own key."""
    rows = logits.expand(count, -1).contiguous()
    keys = torch.tensor([rollout_key(0, 0, i) for i in range(count)]) if keys is None else keys
    counter = torch.full((count,), 7) if counter is None else counter
    return sample_torch(
        rows,
        torch.full((count,), float(temperature)),
        keys,
        counter,
        torch.full((count,), forced),
        None if proposal is None else proposal.expand(count, -1),
    )


def chi_square(observed, expected) -> float:
    observed, expected = np.asarray(observed, float), np.asarray(expected, float)
    return float(((observed - expected) ** 2 / expected).sum())


# --- random numbers ----------------------------------------------------------------------------------------------


def uniform(key, c0):
    """(0, 1) from the first word."""
    return (philox(key, c0, torch.zeros_like(c0))[0].double() + 0.5) / 2**32


def test_philox_is_the_published_one():
    # known answers of the Random123 distribution (kat_vectors, philox4x32-10), counter and key zero
    assert philox_literal(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    keys = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF, rollout_key(3, 4, 5)]
    for key in keys:
        for c0, c1 in ((0, 0), (1, 0), (0, 1), (2**31 - 1, 12345), (12345, 38911)):
            words = philox(torch.tensor([key]), torch.tensor([c0]), torch.tensor([c1]))
            assert [int(word) for word in words] == philox_literal(key % 2**64, c0, c1)


def test_noise_depends_on_key_position_and_id_only():
    keys, positions = torch.tensor([rollout_key(0, 1, 2), -5, 9]), torch.tensor([11, 4096, 0])
    blocks = block_noise(keys, positions, 38)
    for size in (16, BLOCK):
        tokens = token_noise(keys, positions, torch.tensor([0, 3, 37]), size)
        for row, block in enumerate((0, 3, 37)):
            key, position = int(keys[row]) % 2**64, int(positions[row])
            assert blocks[row, block] == gumbel(torch.tensor(philox_literal(key, position, BLOCKS_FROM + block)[0]))
            for inside in (0, 1, size // 2, size - 1):
                word, lane = divmod(inside, size // 4)
                words = philox_literal(key, position, block * (size // 4) + lane)
                assert tokens[row, inside] == gumbel(torch.tensor(words[word]))


def test_noise_is_gumbel_and_finite_at_both_ends():
    for word in (0, 1, 2**31, 2**32 - 1):
        u = min((word + 0.5) / 2**32, 1 - 2**-24)  # float32 resolves u = 1.2e-10 and is cut at 1 - 6e-8
        assert float(gumbel(torch.tensor(word))) == pytest.approx(-np.log(-np.log1p(-u)), rel=2e-6)
    noise = token_noise(torch.arange(250), torch.full((250,), 3), torch.arange(250) % 5, BLOCK).double().flatten()
    shares = torch.exp(-torch.exp(-noise))  # its distribution function: uniform
    counts = torch.histc(shares, 20, 0, 1)
    assert chi_square(counts, [len(noise) / 20] * 20) < CHI_SQUARE_999[19]


def test_numbers_are_uniform_over_rollouts_and_over_positions():
    keys = torch.tensor([rollout_key(s, p, i) for s in range(4) for p in range(25) for i in range(40)])
    assert len(keys.unique()) == 4000
    over_rollouts = uniform(keys, torch.full((4000,), 11))
    over_positions = uniform(torch.full((4000,), int(keys[0])), torch.arange(4000))
    for numbers in (over_rollouts, over_positions):
        assert numbers.min() > 0
        assert numbers.max() < 1
        counts = torch.histc(numbers.float(), 20, 0, 1)
        assert chi_square(counts, [200] * 20) < CHI_SQUARE_999[19]


@pytest.mark.parametrize(
    "pairs",
    [
        ((lambda i: (rollout_key(0, 0, 2 * i), 5)), (lambda i: (rollout_key(0, 0, 2 * i + 1), 5))),  # two rollouts
        ((lambda i: (rollout_key(0, i, 0), 5)), (lambda i: (rollout_key(0, i + 1, 0), 5))),  # two prompts
        ((lambda i: (rollout_key(i, 0, 0), 5)), (lambda i: (rollout_key(i + 1, 0, 0), 5))),  # two seeds
        ((lambda i: (rollout_key(0, 0, 0), 2 * i)), (lambda i: (rollout_key(0, 0, 0), 2 * i + 1))),  # two positions
        ((lambda i: (rollout_key(1, 2, i), 5)), (lambda i: (rollout_key(2, 1, i), 5))),  # words exchanged
    ],
    ids=["rollouts", "prompts", "seeds", "positions", "exchanged"],
)
def test_numbers_of_neighbours_are_independent(pairs):
    def numbers(place):
        drawn = [place(i) for i in range(6400)]
        return uniform(torch.tensor([k for k, _ in drawn]), torch.tensor([c for _, c in drawn]))

    first, second = (numbers(place) for place in pairs)
    cell = (first * 8).long() * 8 + (second * 8).long()
    assert chi_square(torch.bincount(cell, minlength=64), [100] * 64) < CHI_SQUARE_999[63]


def test_noise_of_neighbouring_token_ids_is_independent():
    noise = token_noise(torch.arange(40), torch.full((40,), 9), torch.zeros(40, dtype=torch.int64), BLOCK).double()
    shares = torch.exp(-torch.exp(-noise))
    for distance in (1, BLOCK // 4, BLOCK // 2):
        cell = (shares[:, :-distance] * 8).long() * 8 + (shares[:, distance:] * 8).long()
        counts = torch.bincount(cell.flatten(), minlength=64)
        assert chi_square(counts, [float(counts.sum()) / 64] * 64) < CHI_SQUARE_999[63]


# --- the distribution --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_softmax(temperature):
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 1.5
    tokens, logprobs = draw(logits, temperature, count=20000)
    probabilities = torch.softmax(logits / temperature, -1).double()
    assert chi_square(torch.bincount(tokens, minlength=50), 20000 * probabilities) < CHI_SQUARE_999[49]
    torch.testing.assert_close(logprobs, probabilities.log().float()[tokens], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_rare_tokens_of_a_real_vocabulary_have_their_share():
    """49,152 tokens, half of the mass on a few: each cell of rare tokens is drawn as often as its mass says."""
    count, vocabulary = 5000, 49152
    logits = 4 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(7))
    order = logits.argsort(descending=True)
    probabilities = torch.softmax(logits.double(), -1)
    mass = probabilities[order].cumsum(0)
    cell_of = torch.empty(vocabulary, dtype=torch.int64)
    cell_of[order] = (mass * 20).long().clamp(max=19)  # cells of about equal mass; the last ones hold rare tokens only
    cells = torch.zeros(20, dtype=torch.float64).index_add(0, cell_of, probabilities)
    assert int((cell_of == 19).sum()) > 30_000
    drawn = []
    for start in range(0, count, 250):
        keys = torch.tensor([rollout_key(1, 0, i) for i in range(start, start + 250)])
        drawn.append(cell_of[draw(logits, keys=keys, count=250)[0]])
    counts = torch.bincount(torch.cat(drawn), minlength=20)
    full = cells > 0
    assert chi_square(counts[full], count * cells[full]) < CHI_SQUARE_999[19]


@pytest.mark.slow
def test_a_rounding_error_moves_hardly_any_draw(monkeypatch):
    """Logits that differ by 1e-6, as those of another batch do, change a draw only where two are as close: at most one
    draw in 10⁵."""
    monkeypatch.setattr(sample_module, "BLOCK", 256)  # less noise to compute
    rows, vocabulary = 100_000, 5000
    generator = torch.Generator().manual_seed(8)
    logits = 3 * torch.randn(vocabulary, generator=generator)
    different = 0
    for start in range(0, rows, 250):
        keys = torch.tensor([rollout_key(2, 0, i) for i in range(start, start + 250)])
        error = 1e-6 * torch.randn(250, vocabulary, generator=generator)
        arguments = torch.ones(250), keys, torch.full((250,), 7), torch.full((250,), -1)
        exact, _ = sample_torch(logits.expand(250, -1), *arguments)
        rounded, _ = sample_torch(logits + error, *arguments)
        different += int((exact != rounded).sum())
    assert different <= 1


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((1000,), float("-inf"))
    logits[[0, 500, 998]] = torch.tensor([0.0, -3.0, 0.0])
    tokens, logprobs = draw(logits, count=5000)
    assert set(tokens.tolist()) == {0, 500, 998}
    assert logprobs.isfinite().all()


def test_temperature_0_takes_the_most_likely_and_scores_it_at_1():
    logits = torch.randn(200, generator=torch.Generator().manual_seed(2))
    tokens, logprobs = draw(logits, 0.0, count=10)
    assert set(tokens.tolist()) == {int(logits.argmax())}
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).max().expand(10))


def test_forced_tokens_are_scored_not_drawn():
    logits = torch.randn(200, generator=torch.Generator().manual_seed(2))
    for temperature in (0.0, 0.7):
        tokens, logprobs = draw(logits, temperature, forced=17, count=4)
        assert tokens.tolist() == [17] * 4
        expected = torch.log_softmax(logits / (temperature or 1), -1)[17]
        torch.testing.assert_close(logprobs, expected.expand(4))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_most_likely_tokens_of_a_real_vocabulary_have_the_log_probs_that_sampling_gives_them(temperature):
    logits = torch.randn(3, 49152, generator=torch.Generator().manual_seed(3)) * 3
    heat = torch.full((3,), temperature)
    values, ids = top_logprobs(logits, heat, 4)
    exact = torch.log_softmax(logits.double() / (temperature or 1), -1).topk(4)
    assert torch.equal(ids, exact.indices)
    torch.testing.assert_close(values.double(), exact.values, atol=3e-6, rtol=0)
    for place in range(4):
        drawn = sample_torch(logits, heat, torch.zeros(3).long(), torch.zeros(3).long(), ids[:, place])
        assert torch.equal(drawn[1], values[:, place])


# --- top-p, top-k, banned ----------------------------------------------------------------------------------------


def literal_support(logits, temperature, top_p, top_k, banned):
    """Token ids that may be drawn, by sorting Python numbers."""
    values = {i: x / (temperature or 1) for i, x in enumerate(logits.tolist()) if i not in banned}
    order = sorted(values, key=lambda i: (-values[i], i))[: top_k or None]
    total = sum(np.exp(values[i]) for i in order)
    allowed, before = [], 0.0
    for i in order:
        if allowed and before >= top_p:
            break
        allowed.append(i)
        before += np.exp(values[i]) / total
    return set(allowed)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.5])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.5, 0), (0.9, 0), (1e-9, 0), (1.0, 1), (1.0, 7), (0.7, 5)])
def test_the_support_of_top_p_and_top_k(temperature, top_p, top_k):
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(4)) * 2
    banned = [set(), {int(logits[1].argmax())}, {0, 39}]
    padded = torch.tensor([[*b, -1, -1][:2] for b in banned])
    proposal = proposal_logits(
        logits, torch.full((3,), temperature), torch.full((3,), top_p), torch.full((3,), top_k), padded
    )
    for row in range(3):
        allowed = set(proposal[row].isfinite().nonzero()[:, 0].tolist())
        assert allowed == literal_support(logits[row], temperature, top_p, top_k, banned[row])
        assert torch.equal(proposal[row][list(allowed)], logits[row][list(allowed)])


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, 3), (0.95, 20), (0.5, 0), (1.0, 7)])
def test_top_p_counts_what_top_k_leaves_as_in_transformers(top_p, top_k):
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(6))
    expected = TopKLogitsWarper(top_k)(None, logits) if top_k else logits
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
    none = torch.full((8, 1), -1)
    found = proposal_logits(logits, torch.ones(8), torch.full((8,), top_p), torch.full((8,), top_k), none)
    assert torch.equal(found.isfinite(), expected.isfinite())


def test_samples_follow_the_filtered_distribution_but_are_scored_by_the_full_one():
    logits = torch.randn(30, generator=torch.Generator().manual_seed(5))
    proposal = proposal_logits(logits[None], torch.ones(1), torch.ones(1), torch.tensor([10]), torch.full((1, 1), -1))
    tokens, logprobs = draw(logits, proposal=proposal, count=8000)
    allowed = proposal[0].isfinite()
    probabilities = torch.softmax(proposal[0].double(), -1)
    counts = torch.bincount(tokens, minlength=30)
    assert counts[~allowed].sum() == 0
    assert chi_square(counts[allowed], 8000 * probabilities[allowed]) < CHI_SQUARE_999[9]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[tokens], rtol=0, atol=1e-5)


# --- through the engine ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded():
    return oracle.custom_model(1, layers=1)


@pytest.fixture(scope="module")
def engine(loaded):
    return Engine(loaded, page=4, kv_memory="4MiB", max_rows=256, lookahead=3)


def test_first_and_second_tokens_of_rollouts_follow_the_model(engine, loaded):
    """Prefill draws the first token, decoding the second: both from the model's softmax, independently."""
    count = 3000
    rollouts = engine.generate([[5, 6, 7]], Sampling(n=count, max_new_tokens=2, temperature=0.7, ignore_eos=True))
    causal = lambda n: torch.ones(n, n, dtype=torch.bool).tril().expand(1, 2, n, n)  # noqa: E731
    first = torch.softmax(oracle.forward(loaded.model, [5, 6, 7], causal(3)).logits[-1].double() / 0.7, -1)
    counts = torch.bincount(torch.tensor([r.token_ids[0] for r in rollouts]), minlength=96)
    order = first.argsort(descending=True)
    assert first[order[80:]].sum() * count > 5
    pooled = [*counts[order[:80]].tolist(), int(counts[order[80:]].sum())]
    expected = [*(count * first[order[:80]]).tolist(), float(count * first[order[80:]].sum())]
    assert chi_square(pooled, expected) < CHI_SQUARE_999[80]
    # given the most common first token, the second one follows its own conditional
    common = int(order[0])
    seconds = torch.tensor([r.token_ids[1] for r in rollouts if r.token_ids[0] == common])
    assert len(seconds) > 150
    second = torch.softmax(oracle.forward(loaded.model, [5, 6, 7, common], causal(4)).logits[-1].double() / 0.7, -1)
    order = second.argsort(descending=True)
    counts = torch.bincount(seconds, minlength=96)
    cells = [
        order[:3],
        order[3:6],
        order[6:10],
        order[10:14],
        order[14:19],
        order[19:25],
        order[25:33],
        order[33:45],
        order[45:60],
        order[60:],
    ]
    observed = [int(counts[c].sum()) for c in cells]
    assert chi_square(observed, [len(seconds) * float(second[c].sum()) for c in cells]) < CHI_SQUARE_999[9]


def test_the_same_seed_gives_the_same_rollouts_and_another_seed_others(engine):
    prompts = [[5, 6, 7], [8, 9], [5, 6, 7]]
    make = lambda seed: [  # noqa: E731
        r.token_ids
        for r in engine.generate(prompts, Sampling(n=4, max_new_tokens=12, temperature=1.0, seed=seed, ignore_eos=True))
    ]
    first = make(0)
    assert make(0) == first
    assert all(a != b for a, b in zip(make(1), first))
    assert len({tuple(tokens) for tokens in first}) == 12, "no two rollouts are alike, not even of equal prompts"


def test_n_only_adds_rollouts(engine):
    few = engine.generate([[5, 6, 7]], Sampling(n=2, max_new_tokens=12))
    many = engine.generate([[5, 6, 7]], Sampling(n=6, max_new_tokens=12))
    assert [r.token_ids for r in many[:2]] == [r.token_ids for r in few]


def test_top_p_and_top_k_reach_the_engine(engine, loaded):
    prompts = [[5, 6, 7], [8, 9]]
    for sampling in (
        Sampling(n=6, max_new_tokens=10, top_k=3, ignore_eos=True),
        Sampling(n=6, max_new_tokens=10, top_p=0.4, temperature=0.8, ignore_eos=True),
    ):
        drawn = set()
        for rollout in engine.generate(prompts, sampling):
            assert rollout.logprobs is None
            seen = oracle.replay(loaded.model, rollout)
            for i, token in enumerate(rollout.token_ids):
                logits = seen.logits[len(rollout.prompt_ids) - 1 + i]
                allowed = literal_support(logits, sampling.temperature, sampling.top_p + 1e-6, sampling.top_k, ())
                assert token in allowed
                drawn.add(sorted(allowed, key=lambda t: -logits[t]).index(token))
        assert len(drawn) > 2, "not only the most likely token"
    (greedy, first) = (
        engine.generate(prompts, s)[0].token_ids
        for s in (Sampling(max_new_tokens=8, temperature=0), Sampling(max_new_tokens=8, top_k=1))
    )
    assert greedy == first


def test_top_p_and_plain_sampling_in_one_stream(engine):
    """A neighbour that cuts its distribution changes nothing for those who do not."""
    plain, cut = Sampling(n=2, max_new_tokens=10), Sampling(n=2, max_new_tokens=10, top_k=2, min_new_tokens=3)
    alone = engine.generate([[5, 6, 7]], plain)
    requests = [engine.requests([[5, 6, 7]], s)[0] for s in (plain, cut)]
    for rollout in engine.stream(requests):
        if rollout.sampling is plain:
            assert rollout.token_ids == alone[rollout.sample_index].token_ids
            torch.testing.assert_close(rollout.logprobs, alone[rollout.sample_index].logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_new_tokens_holds_stop_tokens_back(engine, temperature):
    stop = tuple(range(2, 60))
    free = engine.generate([[5, 6, 7]], Sampling(n=40, max_new_tokens=12, stop=stop, temperature=temperature))
    held = engine.generate(
        [[5, 6, 7]], Sampling(n=40, max_new_tokens=12, min_new_tokens=6, stop=stop, temperature=temperature)
    )
    ends = {*stop, *engine.inputs.eos_ids}
    assert any(len(r) < 6 for r in free)
    for rollout in held:
        assert not ends & set(rollout.token_ids[:6])
        assert len(rollout) > 6
        assert rollout.finish == ("stop" if rollout.token_ids[-1] in ends else "length")
        assert rollout.logprobs.isfinite().all(), "of the full distribution"
    if temperature:
        assert any(len(r) == 7 for r in held), "from the seventh token on they may come"
