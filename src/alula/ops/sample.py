"""Sampler: the next token of every row by the Gumbel-max trick, and its log-prob.

    block b = argmax_b  log Σ_{j in b} e^{x_j} + g(b)        x = logits / T, blocks of 4,096 token ids
    token j = argmax_{j in b}  x_j + g(j)                    g = −log(−log1p(−u)),  u = (word + ½) / 2³²

The first line draws a block with its probability, the second a token within it, so that noise is computed for one block
only. `word` is a word of Philox4x32-10 under the rollout's key; its counter holds the position of the drawn token and
the id of the token or the block. A draw is therefore independent of batch composition: a rounding error of 1e-6 changes
it only where two perturbed values are that close. (Inverting the running sum of the softmax moves every boundary at
once.) Small u gives the large noise that decides draws, and float32 resolves u down to 2⁻³³, so the noise reaches 22.9;
a u near 1 would cap it at 16.6.

The log-prob is x_j − logsumexp(x) over the full vocabulary, from the same fp32 logits.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from alula.ops.dispatch import tl, triton, use_triton

PHILOX_M = (0xD2511F53, 0xCD9E8D57)
PHILOX_W = (0x9E3779B9, 0xBB67AE85)
LOW32 = 0xFFFFFFFF

BLOCK = 4096
"""Token ids of a block; a smaller vocabulary is one block."""
BLOCKS_FROM = 1 << 31
"""Counters of the noise of blocks begin here, those of token ids at 0."""
LARGEST_U = 1 - 2**-24
"""float32 rounds a word near 2³² to u = 1, whose noise is −inf."""


def block_size(vocabulary: int) -> int:
    return BLOCK if vocabulary > BLOCK else max(4, 1 << (vocabulary - 1).bit_length())


def philox(key: Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four int64 words in [0, 2³²): Philox4x32-10 (Salmon et al., 2011), 64-bit key, counter (c0, c1, 0, 0)."""
    k0, k1 = key & LOW32, (key >> 32) & LOW32
    c0, c1 = torch.broadcast_tensors(c0 & LOW32, c1 & LOW32)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        high0, low0 = _multiply(PHILOX_M[0], c0)
        high1, low1 = _multiply(PHILOX_M[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + PHILOX_W[0]) & LOW32, (k1 + PHILOX_W[1]) & LOW32
    return c0, c1, c2, c3


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 × 32-bit product; int64 wraps, which leaves the bits of the unsigned product."""
    product = a * b
    return (product >> 32) & LOW32, product & LOW32


def block_noise(key: Tensor, position: Tensor, blocks: int) -> Tensor:
    """fp32 [B, blocks], for keys [B] and positions [B]."""
    counter = BLOCKS_FROM + torch.arange(blocks, device=key.device)
    return gumbel(philox(key[:, None], position[:, None], counter)[0])


def token_noise(key: Tensor, position: Tensor, block: Tensor, size: int) -> Tensor:
    """fp32 [B, size]: the noise of the token ids of one block [B] per row.

    One Philox call gives four words: those of the ids i, i + size/4, i + 2 size/4 and i + 3 size/4 of the block, so
    that a kernel reads its logits in four contiguous pieces.
    """
    counter = block[:, None] * (size // 4) + torch.arange(size // 4, device=key.device)
    return gumbel(torch.cat(philox(key[:, None], position[:, None], counter), -1))


def gumbel(word: Tensor) -> Tensor:
    """−log(−log1p(−u)) of int64 words in [0, 2³²)."""
    u = ((word.float() + 0.5) * 2.0**-32).clamp(max=LARGEST_U)
    return -torch.log(-torch.log1p(-u))


def sample(
    logits: Tensor,
    temperature: Tensor,
    key: Tensor,
    position: Tensor,
    forced: Tensor,
    proposal: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """fp32 logits [B, V] -> (token int64 [B], log-prob fp32 [B] of it under softmax(logits / temperature)).

    Temperature 0 takes the most likely token and scores it at temperature 1. `forced` >= 0 gives the token instead of
    sampling it. If `proposal` [B, V] is given, tokens are sampled from it instead of `logits` (top-p, top-k, suppressed
    stop tokens); the log-prob always refers to the full distribution.
    """
    if use_triton(logits):
        return sample_triton(logits, temperature, key, position, forced, proposal)
    return sample_torch(logits, temperature, key, position, forced, proposal)


def sample_torch(
    logits: Tensor,
    temperature: Tensor,
    key: Tensor,
    position: Tensor,
    forced: Tensor,
    proposal: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature)[:, None]
    scaled = logits / scale
    source = scaled if proposal is None else proposal / scale
    vocabulary = logits.shape[-1]
    size = block_size(vocabulary)
    blocks = pad(source, (0, -vocabulary % size), value=-torch.inf).unflatten(-1, (-1, size))
    block = (blocks.logsumexp(-1) + block_noise(key, position, blocks.shape[1])).argmax(-1)
    inside = blocks[torch.arange(len(block), device=block.device), block]
    drawn = block * size + (inside + token_noise(key, position, block, size)).argmax(-1)
    token = torch.where(greedy, source.argmax(-1), drawn.clamp(max=vocabulary - 1))
    token = torch.where(forced >= 0, forced.long(), token)
    logprob = scaled.gather(-1, token[:, None]).squeeze(-1) - scaled.logsumexp(-1)
    return token, logprob


def sample_triton(
    logits: Tensor,
    temperature: Tensor,
    key: Tensor,
    position: Tensor,
    forced: Tensor,
    proposal: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    batch, vocabulary = logits.shape
    block = block_size(vocabulary)
    pieces = triton.cdiv(vocabulary, block)
    source = logits if proposal is None else proposal
    token = torch.empty(batch, dtype=torch.int64, device=logits.device)
    logprob = torch.empty(batch, dtype=torch.float32, device=logits.device)
    # per block: the maximum, its index, Σ exp(x − maximum); of the full and of the proposal distribution
    stats = torch.empty(2, 3, batch, pieces, dtype=torch.float32, device=logits.device)
    for kind, tensor in enumerate((logits,) if proposal is None else (logits, proposal)):
        _block_stats[(batch, pieces)](
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
        position,
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
        QUARTER=block // 4,
        PIECES=triton.next_power_of_2(pieces),
        BLOCKS_FROM=BLOCKS_FROM,
        LARGEST_U=LARGEST_U,
        num_warps=8,
    )
    return token, logprob


@triton.jit
def _gumbel(word, LARGEST_U: tl.constexpr):
    """−log(−log1p(−u)). Below 1/16 log1p is its series, whose first omitted term is u⁸/8."""
    u = tl.minimum((word.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10, LARGEST_U)
    series = u * (1 + u * (0.5 + u * (1 / 3 + u * (0.25 + u * (0.2 + u * (1 / 6 + u / 7))))))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(1 - u)))


@triton.jit
def _block_stats(logits, temperature, stats, row_stride, vocabulary, plane, BLOCK: tl.constexpr):
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
    position,
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
    QUARTER: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCKS_FROM: tl.constexpr,
    LARGEST_U: tl.constexpr,
):
    row = tl.program_id(0)
    warm = tl.load(temperature + row)
    scale = tl.where(warm == 0.0, 1.0, warm)
    p = tl.arange(0, PIECES)
    inside = p < pieces
    low = float("-inf")
    # log-sum-exp of the full distribution
    line = stats + row * pieces + p
    top = tl.load(line, mask=inside, other=low)
    peak = tl.max(top, 0)
    mass = tl.load(line + 2 * plane, mask=inside, other=0.0) * tl.where(top == low, 0.0, tl.exp(top - peak))
    lse = peak + tl.log(tl.sum(mass, 0))
    # the block: its log-sum-exp under the proposal, perturbed
    seed = tl.load(key + row)
    here = tl.load(position + row).to(tl.int32)
    line = source_stats + row * pieces + p
    source_top = tl.load(line, mask=inside, other=low)
    source_mass = tl.load(line + 2 * plane, mask=inside, other=1.0)
    best = tl.load(source_stats + plane + row * pieces + tl.argmax(source_top, 0)).to(tl.int64)
    c1 = (p.to(tl.int64) + BLOCKS_FROM).to(tl.uint32)
    zero = c1 * 0
    word, _, _, _ = tl.philox(seed, zero + here.to(tl.uint32, bitcast=True), c1, zero, zero)
    score = tl.where(source_top == low, low, source_top + tl.log(source_mass) + _gumbel(word, LARGEST_U))
    piece = tl.minimum(tl.argmax(score, 0), pieces - 1)
    # the token: its logit under the proposal, perturbed
    lane = tl.arange(0, QUARTER)
    first = piece * 4 * QUARTER + lane
    line = source + row.to(tl.int64) * source_row
    x0 = tl.load(line + first, mask=first < vocabulary, other=low) / scale
    x1 = tl.load(line + first + QUARTER, mask=first + QUARTER < vocabulary, other=low) / scale
    x2 = tl.load(line + first + 2 * QUARTER, mask=first + 2 * QUARTER < vocabulary, other=low) / scale
    x3 = tl.load(line + first + 3 * QUARTER, mask=first + 3 * QUARTER < vocabulary, other=low) / scale
    c1 = (piece * QUARTER + lane).to(tl.uint32, bitcast=True)
    zero = c1 * 0
    w0, w1, w2, w3 = tl.philox(seed, zero + here.to(tl.uint32, bitcast=True), c1, zero, zero)
    x0 += _gumbel(w0, LARGEST_U)
    x1 += _gumbel(w1, LARGEST_U)
    x2 += _gumbel(w2, LARGEST_U)
    x3 += _gumbel(w3, LARGEST_U)
    largest = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
    quarter = tl.where(x0 == largest, 0, tl.where(x1 == largest, 1, tl.where(x2 == largest, 2, 3)))
    drawn = tl.min(tl.where(largest == tl.max(largest, 0), first + quarter * QUARTER, 2147483647), 0).to(tl.int64)
    choice = tl.where(warm == 0.0, best, drawn)
    given = tl.load(forced + row).to(tl.int64)
    choice = tl.where(given >= 0, given, choice)
    choice = tl.minimum(tl.maximum(choice, 0), vocabulary - 1)
    value = tl.load(logits + row.to(tl.int64) * logits_row + choice) / scale
    tl.store(token + row, choice)
    tl.store(logprob + row, value - lse)


def top_logprobs(logits: Tensor, temperature: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """fp32 logits [B, V] -> (log-probs fp32, token ids int64) [B, count] of the most likely tokens, scored as by
    `sample`. (On a CPU `torch.log_softmax` is off by 1e-5 over a vocabulary of 49,152.)"""
    scaled = logits / torch.where(temperature == 0, 1.0, temperature)[:, None]
    top = scaled.topk(count)
    return top.values - scaled.logsumexp(-1, keepdim=True), top.indices


def proposal_logits(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, banned: Tensor) -> Tensor:
    """Logits with everything outside top-k, and outside top-p of what top-k leaves, at -inf; and `banned` token ids
    (int64 [B, S], -1 = none)."""
    vocabulary = logits.shape[-1]
    padded = pad(logits, (0, 1))  # an extra column takes the -1 entries
    padded = padded.scatter(-1, torch.where(banned < 0, vocabulary, banned), float("-inf"))
    logits = padded[:, :vocabulary]
    scale = torch.where(temperature == 0, 1.0, temperature)[:, None]
    ordered, index = torch.sort(logits / scale, dim=-1, descending=True, stable=True)
    rank = torch.arange(vocabulary, device=logits.device)
    behind = rank >= torch.where(top_k > 0, top_k, vocabulary)[:, None]
    probs = torch.softmax(ordered.masked_fill(behind, float("-inf")), -1)
    outside = behind | ((probs.cumsum(-1) - probs) >= top_p[:, None])
    outside[:, 0] = False
    return logits.masked_fill(torch.zeros_like(outside).scatter(-1, index, outside), float("-inf"))
