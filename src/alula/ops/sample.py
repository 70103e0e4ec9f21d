"""Samples the next token of every row, with its log-prob, from a counter-based random number.

The number is Philox4x32-10 of (the rollout's key, the token's position), so that results are independent of batch
composition. The token is found by inverting the softmax's cumulative sum at that number: one random number per token,
and a log-prob from the same fp32 logits.
"""

import torch
from torch import Tensor

from alula.ops.dispatch import tl, triton, use_triton

PHILOX_M = (0xD2511F53, 0xCD9E8D57)
PHILOX_W = (0x9E3779B9, 0xBB67AE85)
LOW32 = 0xFFFFFFFF


def philox_uniform(key: Tensor, counter: Tensor) -> Tensor:
    """float64 in (0, 1): the first word of Philox4x32-10 with a 64-bit key and counter (counter, 0, 0, 0)."""
    k0, k1 = key & LOW32, (key >> 32) & LOW32
    c0, c1, c2, c3 = (
        counter & LOW32,
        torch.zeros_like(counter),
        torch.zeros_like(counter),
        torch.zeros_like(counter),
    )
    for _ in range(10):
        high0, low0 = _multiply(PHILOX_M[0], c0)
        high1, low1 = _multiply(PHILOX_M[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + PHILOX_W[0]) & LOW32, (k1 + PHILOX_W[1]) & LOW32
    return (c0.double() + 0.5) / 2**32


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 × 32-bit product, without leaving int64's range."""
    a_high, a_low = a >> 16, a & 0xFFFF
    low = a_low * b
    high = a_high * b + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def sample(
    logits: Tensor,
    temperature: Tensor,
    key: Tensor,
    counter: Tensor,
    forced: Tensor,
    proposal: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """fp32 logits [B, V] -> (token int64 [B], log-prob fp32 [B] of it under softmax(logits / temperature)).

    Temperature 0 takes the most likely token and scores it at temperature 1. `forced` >= 0 gives the token instead of
    sampling it. If `proposal` [B, V] is given, tokens are sampled from it instead of `logits` (top-p, top-k, suppressed
    stop tokens); the log-prob always refers to the full distribution.
    """
    if use_triton(logits):
        return sample_triton(logits, temperature, key, counter, forced, proposal)
    return sample_torch(logits, temperature, key, counter, forced, proposal)


def sample_torch(
    logits: Tensor,
    temperature: Tensor,
    key: Tensor,
    counter: Tensor,
    forced: Tensor,
    proposal: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature)[:, None]
    scaled = logits / scale
    source = scaled if proposal is None else proposal / scale
    mass = torch.softmax(source, -1).cumsum(-1, dtype=torch.float64)
    point = philox_uniform(key, counter)[:, None] * mass[:, -1:]
    drawn = torch.searchsorted(mass, point, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    token = torch.where(greedy, source.argmax(-1), drawn)
    token = torch.where(forced >= 0, forced.long(), token)
    logprob = scaled.gather(-1, token[:, None]).squeeze(-1) - scaled.logsumexp(-1)
    return token, logprob


def sample_triton(
    logits: Tensor,
    temperature: Tensor,
    key: Tensor,
    counter: Tensor,
    forced: Tensor,
    proposal: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    batch, vocabulary = logits.shape
    block = 4096 if vocabulary > 4096 else triton.next_power_of_2(vocabulary)
    pieces = triton.cdiv(vocabulary, block)
    source = logits if proposal is None else proposal
    token = torch.empty(batch, dtype=torch.int64, device=logits.device)
    logprob = torch.empty(batch, dtype=torch.float32, device=logits.device)
    # per piece: the maximum, its index, Σ exp(x − maximum); of the full and of the proposal distribution
    stats = torch.empty(2, 3, batch, pieces, dtype=torch.float32, device=logits.device)
    for kind, tensor in enumerate((logits,) if proposal is None else (logits, proposal)):
        _piece_stats[(batch, pieces)](
            tensor,
            temperature,
            stats[kind],
            tensor.stride(0),
            vocabulary,
            batch * pieces,
            BLOCK=block,
            num_warps=8,
        )
    _draw[(batch,)](
        logits,
        source,
        temperature,
        key,
        counter,
        forced,
        stats,
        stats if proposal is None else stats[1],
        token,
        logprob,
        logits.stride(0),
        source.stride(0),
        vocabulary,
        pieces,
        batch * pieces,
        BLOCK=block,
        PIECES=triton.next_power_of_2(pieces),
        num_warps=8,
    )
    return token, logprob


@triton.jit
def _piece_stats(logits, temperature, stats, row_stride, vocabulary, plane, BLOCK: tl.constexpr):
    row, piece = tl.program_id(0), tl.program_id(1)
    warm = tl.load(temperature + row)
    scale = tl.where(warm == 0.0, 1.0, warm)
    i = piece * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + i, mask=i < vocabulary, other=float("-inf")) / scale
    top = tl.max(x, 0)
    where = tl.argmax(x, 0) + piece * BLOCK
    total = tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - top)), 0)
    line = stats + row * tl.num_programs(1) + piece
    tl.store(line, top)
    tl.store(line + plane, where.to(tl.float32))  # exact: a vocabulary is far below 2^24
    tl.store(line + 2 * plane, total)


@triton.jit
def _draw(
    logits,
    source,
    temperature,
    key,
    counter,
    forced,
    stats,
    source_stats,
    token,
    logprob,
    logits_row,
    source_row,
    vocabulary,
    pieces,
    plane,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
):
    row = tl.program_id(0)
    warm = tl.load(temperature + row)
    scale = tl.where(warm == 0.0, 1.0, warm)
    p = tl.arange(0, PIECES)
    inside = p < pieces
    # log-sum-exp of the full distribution
    line = stats + row * pieces + p
    top = tl.load(line, mask=inside, other=float("-inf"))
    peak = tl.max(top, 0)
    mass = tl.load(line + 2 * plane, mask=inside, other=0.0) * tl.where(top == float("-inf"), 0.0, tl.exp(top - peak))
    lse = peak + tl.log(tl.sum(mass, 0))
    # the piece, then the token in it, where the proposal's running sum passes the random number
    line = source_stats + row * pieces + p
    source_top = tl.load(line, mask=inside, other=float("-inf"))
    source_peak = tl.max(source_top, 0)
    weight = tl.where(source_top == float("-inf"), 0.0, tl.exp(source_top - source_peak))
    source_mass = (tl.load(line + 2 * plane, mask=inside, other=0.0) * weight).to(tl.float64)
    best = tl.load(source_stats + plane + row * pieces + tl.argmax(source_top, 0)).to(tl.int64)
    seed = tl.load(key + row)
    offset = tl.load(counter + row).to(tl.int32)
    word, _, _, _ = tl.randint4x(seed, offset)
    uniform = (word.to(tl.uint32, bitcast=True).to(tl.float64) + 0.5) / 4294967296.0
    running = tl.cumsum(source_mass, 0)
    point = uniform * tl.max(running, 0)
    before = tl.sum((running <= point).to(tl.int32), 0)
    piece = tl.minimum(before, pieces - 1)
    i = piece * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + row.to(tl.int64) * source_row + i, mask=i < vocabulary, other=float("-inf")) / scale
    mass_here = tl.where(x == float("-inf"), 0.0, tl.exp(x - source_peak)).to(tl.float64)
    base = tl.sum(tl.where(p < piece, source_mass, 0.0), 0)
    here = base + tl.cumsum(mass_here, 0)
    # rounding may leave the point just past the piece's own sum: then its last possible token is taken
    last = tl.max(tl.where(mass_here > 0, tl.arange(0, BLOCK), 0), 0)
    inner = tl.minimum(tl.sum((here <= point).to(tl.int32), 0), last)
    drawn = (piece * BLOCK + inner).to(tl.int64)
    choice = tl.where(warm == 0.0, best, drawn)
    given = tl.load(forced + row).to(tl.int64)
    choice = tl.where(given >= 0, given, choice)
    choice = tl.minimum(tl.maximum(choice, 0), vocabulary - 1)
    value = tl.load(logits + row.to(tl.int64) * logits_row + choice) / scale
    tl.store(token + row, choice)
    tl.store(logprob + row, value - lse)


def proposal_logits(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, banned: Tensor) -> Tensor:
    """Logits with everything outside top-k and top-p at -inf, and `banned` token ids (int64 [B, S], -1 = none)."""
    vocabulary = logits.shape[-1]
    padded = torch.nn.functional.pad(logits, (0, 1))  # an extra column takes the -1 entries
    padded = padded.scatter(-1, torch.where(banned < 0, vocabulary, banned), float("-inf"))
    logits = padded[:, :vocabulary]
    scale = torch.where(temperature == 0, 1.0, temperature)[:, None]
    ordered, index = torch.sort(logits / scale, dim=-1, descending=True, stable=True)
    probs = torch.softmax(ordered, -1)
    rank = torch.arange(vocabulary, device=logits.device)
    limit = torch.where(top_k > 0, top_k, vocabulary)[:, None]
    outside = (rank >= limit) | ((probs.cumsum(-1) - probs) >= top_p[:, None])
    outside[:, 0] = False
    return logits.masked_fill(torch.zeros_like(outside).scatter(-1, index, outside), float("-inf"))
