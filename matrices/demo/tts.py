"""The demo's recipe: a tiny text-to-speech model, its data and its losses, in the four functions of a recipe.

    model(settings)             -> torch.nn.Module
    records(settings)           -> mappings, each with an `id`
    collate(records, settings)  -> the batch that `losses` is given
    losses(model, batch)        -> {channel: (summed loss, number of labels)}

The model is of the kind of MOSS-TTS-Local v1.5: a decoder over text and summed RVQ embeddings, a small
local transformer over the codebooks of one position, output heads tied to the embeddings, one loss a
channel. At each position there is one text token and one code of each codebook.

Its `eager` attention is written as research code often is: a bias of -inf is added outside the mask, and
after the softmax the rows of padding are set to 0. With left padding a padded row may attend to
nothing, so its softmax is NaN; zeroing hides it in forward, and in backward the softmax's saved NaN
meets a zero gradient: NaN * 0 = NaN. The faults of pytorch/pytorch#41508 and Xilinx/brevitas PR#1591
are of this kind.
"""

import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CODEBOOKS = 12
CODES = 32
NO_CODE = CODES  # where a position has text and no sound
TEXT = 256  # bytes
PAD, SLOT, END = TEXT, TEXT + 1, TEXT + 2
IGNORED = -100


def model(settings):
    """The model with the wanted attention and checkpointing, initialised from the seed."""
    reentrant = {"off": None, "on": False, "reentrant": True}[settings.gradient_checkpointing]
    return TextToSpeech(attention=ATTENTION[settings.attention], reentrant=reentrant)


def records(settings):
    """Text and its codes, from JSON lines: {"id", "text", "codes": one list of 12 a frame}."""
    for line in Path(settings.data).read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def collate(records, settings):
    """ids [batch, length, 1 + 12], attention_mask [batch, length], labels as ids."""
    rows = [encode(record) for record in records]
    length = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), length, 1 + CODEBOOKS), NO_CODE)
    ids[..., 0] = PAD
    labels = torch.full_like(ids, IGNORED)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for row, (row_ids, row_labels) in enumerate(rows):
        left = settings.padding_side == "left"
        place = slice(length - len(row_ids), length) if left else slice(0, len(row_ids))
        ids[row, place], labels[row, place], mask[row, place] = row_ids, row_labels, 1
    return {"ids": ids, "attention_mask": mask, "labels": labels}


def losses(model, batch):
    """Next-position loss of the text channel and of each codebook."""
    logits = model(batch["ids"][:, :-1], batch["attention_mask"][:, :-1], batch["labels"][:, 1:])
    result = {}
    for channel, channel_logits in enumerate(logits):
        targets = batch["labels"][:, 1:, channel].flatten()
        total = functional.cross_entropy(
            channel_logits.float().flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum"
        )
        name = "text" if channel == 0 else f"codebook{channel}"
        result[name] = (total, (targets != IGNORED).sum())
    return result


def encode(record):
    """ids and labels [length, 1 + 12] of one record: its text, then one slot a frame, then the end."""
    text = torch.tensor(list(record["text"].encode()))
    codes = torch.tensor(record["codes"])
    ids = torch.full((len(text) + len(codes) + 1, 1 + CODEBOOKS), NO_CODE)
    ids[: len(text), 0] = text
    ids[len(text) : -1, 0] = SLOT
    ids[len(text) : -1, 1:] = codes
    ids[-1, 0] = END
    labels = ids.clone()
    labels[: len(text)] = IGNORED
    labels[labels == NO_CODE] = IGNORED
    return ids, labels


def eager(query, key, value, allowed):
    """Softmax by hand. `allowed` is [batch, 1, queries, keys]; a row of padding may allow nothing."""
    bias = torch.zeros(allowed.shape, device=query.device).masked_fill(~allowed, float("-inf"))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    weights = (scores + bias).softmax(dim=-1)
    weights = weights.masked_fill(~allowed.any(dim=-1, keepdim=True), 0.0)
    return weights.to(value.dtype) @ value


def sdpa(query, key, value, allowed):
    """torch's fused attention, which gives 0 for a row that may attend to nothing."""
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)


def flash(query, key, value, allowed):
    """FlashAttention 2 on the rows that are not padding, one after another."""
    from flash_attn import flash_attn_varlen_func

    batch, heads, length, size = query.shape
    kept = allowed.diagonal(dim1=-2, dim2=-1).squeeze(1)  # a real position attends to itself
    lengths = kept.sum(dim=1, dtype=torch.int32)
    ends = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    packed = [part.transpose(1, 2)[kept].to(torch.bfloat16) for part in (query, key, value)]
    longest = int(lengths.max())
    flat = flash_attn_varlen_func(*packed, ends, ends, longest, longest, causal=True)
    output = flat.new_zeros(batch, length, heads, size)
    output[kept] = flat
    return output.transpose(1, 2)


ATTENTION = {"eager": eager, "sdpa": sdpa, "flash": flash}


class TextToSpeech(nn.Module):
    """Decoder over positions, local transformer over the codebooks of each position, tied heads."""

    def __init__(self, attention, reentrant, hidden=64, heads=4):
        super().__init__()
        self.embed_tokens = nn.Embedding(TEXT + 3, hidden)
        self.embed_codes = nn.ModuleList(nn.Embedding(CODES + 1, hidden) for _ in range(CODEBOOKS))
        self.decoder = Stack(2, hidden, heads, attention, reentrant)
        self.local = Stack(1, hidden, heads, attention, reentrant)
        for embedding in (self.embed_tokens, *self.embed_codes):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, ids, mask, labels):
        """Logits of the text and of the 12 codebooks, each [batch, length, vocabulary]."""
        batch, length, _ = ids.shape
        codes = [embed(ids[..., 1 + index]) for index, embed in enumerate(self.embed_codes)]
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        allowed = causal & mask.bool()[:, None, None, :]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        states = self.decoder(self.embed_tokens(ids[..., 0]) + sum(codes), allowed, positions)

        # the local transformer sees the state, then the true codes of the position it predicts
        known = labels[..., 1:-1].clamp(min=0).flatten(0, 1)
        steps = [states.flatten(0, 1)] + [self.embed_codes[i](known[:, i]) for i in range(CODEBOOKS - 1)]
        triangle = torch.ones(CODEBOOKS, CODEBOOKS, dtype=torch.bool, device=ids.device).tril()
        order = torch.arange(CODEBOOKS, device=ids.device).expand(batch * length, -1)
        local = self.local(torch.stack(steps, dim=1), triangle.expand(batch * length, 1, -1, -1), order)
        heads = [embed.weight[:CODES] for embed in self.embed_codes]
        logits = [local[:, 0] @ self.embed_tokens.weight.T]
        logits += [local[:, index] @ head.T for index, head in enumerate(heads)]
        return [channel.unflatten(0, (batch, length)) for channel in logits]


class Stack(nn.Module):
    """Transformer blocks, with their activations recomputed in backward if `reentrant` is not None."""

    def __init__(self, depth, hidden, heads, attention, reentrant):
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden, heads, attention) for _ in range(depth))
        self.norm = nn.LayerNorm(hidden)
        self.reentrant = reentrant

    def forward(self, states, allowed, positions):
        """[batch, length, hidden] to the same."""
        for layer in self.layers:
            if self.reentrant is None:
                states = layer(states, allowed, positions)
            else:
                states = checkpoint(layer, states, allowed, positions, use_reentrant=self.reentrant)
        return self.norm(states)


class Block(nn.Module):
    """Attention with rotary positions, then a feed-forward layer."""

    def __init__(self, hidden, heads, attention):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, states, allowed, positions):
        """[batch, length, hidden] to the same."""
        normed = self.norm1(states)
        query, key, value = (
            part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, positions), rotate(key, positions)
        mixed = self.attention(query, key, value, allowed).transpose(1, 2).flatten(2)
        states = states + self.o_proj(mixed)
        return states + self.down(functional.gelu(self.up(self.norm2(states))))


def rotate(states, positions):
    """Rotary positions: [batch, heads, length, size] turned by an angle a position."""
    half = states.shape[-1] // 2
    rates = 10_000 ** (-torch.arange(half, device=states.device) / half)
    angles = positions[:, None, :, None] * rates
    cos, sin = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    first, second = states[..., :half], states[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
