"""Train a small character-level GPT on the text of Python's own standard library.

    mpift run -np 2 python examples/chargpt.py
    mpift run -np 4 --chaos kill:0@100 python examples/chargpt.py

Shows what a larger training loop needs beside ``step``: a learning rate schedule, and gradients
that are clipped after they were averaged. Ranks may die on the way: the loop has no code for that.
Takes a minute with 2 ranks on two idle cores; --steps 100 is enough to see it work.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import mpift.torch as hvd

CONTEXT = 64  # characters that a prediction may look back on
WIDTH = 128
LAYERS = 2
HEADS = 4
CHARACTERS = 128  # ASCII: the same on every rank, whatever the text
TEXT_BYTES_MAX = 3_000_000
HELD_OUT = 0.05
WARM_UP_STEPS = 20
GRADIENT_NORM_MAX = 1.0


class Block(nn.Module):
    """One transformer layer, with its norms ahead of attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        combined = self.queries_keys_values(self.attention_norm(hidden))
        heads = combined.view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return hidden + self.mlp(hidden)


class CharGpt(nn.Module):
    """Predicts each character from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, CHARACTERS)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """int64[batch, length <= CONTEXT] to logits float32[batch, length, CHARACTERS]."""
        hidden = self.characters(text) + self.positions.weight[: text.shape[1]]
        return self.output(self.norm(self.blocks(hidden)))


def read_library() -> torch.Tensor:
    """The modules of Python's standard library one after another, as uint8; others become "?"."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_text(encoding="utf-8").encode("ascii", errors="replace")
    return torch.frombuffer(text[:TEXT_BYTES_MAX], dtype=torch.uint8)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Pieces of CONTEXT characters with the one that follows; the text's end is held out."""
    # All ranks take rank 0's, should Python differ from node to node.
    text = hvd.broadcast_object(read_library()).long()
    pieces = text.unfold(0, CONTEXT + 1, CONTEXT)
    held_out = int(len(pieces) * HELD_OUT)
    return TensorDataset(pieces[:-held_out]), TensorDataset(pieces[-held_out:])


def loss_of(model: nn.Module, pieces: torch.Tensor) -> torch.Tensor:
    logits = model(pieces[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())


@torch.no_grad()
def bits_per_character(model: nn.Module, data: TensorDataset) -> float:
    device = next(model.parameters()).device
    batches = data.tensors[0].split(64)
    total = sum(len(batch) * loss_of(model, batch.to(device)).item() for batch in batches)
    return total / len(data) / math.log(2)


@torch.no_grad()
def continue_text(model: nn.Module, start: str, length: int, temperature: float = 0.8) -> str:
    text = torch.tensor([list(start.encode())], device=next(model.parameters()).device)
    for _ in range(length):
        logits = model(text[:, -CONTEXT:])[:, -1]
        following = torch.multinomial((logits / temperature).softmax(1), 1)
        text = torch.cat([text, following], dim=1)
    return bytes(text[0].tolist()).decode()


def make_schedule(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """A linear warm-up, then half a cosine down to a tenth."""

    def factor(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        return min(1.0, (step + 1) / WARM_UP_STEPS) * (0.1 + 0.9 * cosine)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: TensorDataset,
    options: argparse.Namespace,
) -> None:
    device = next(model.parameters()).device
    schedule = make_schedule(optimizer, options.steps)
    sampler = hvd.ElasticSampler(data, seed=options.seed)
    loader = DataLoader(data, batch_size=options.batch_size, sampler=sampler)
    step = epoch = 0
    while step < options.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for (pieces,) in loader:
            optimizer.zero_grad()
            loss = loss_of(model, pieces.to(device))
            loss.backward()
            # Before it, the gradients are still this rank's own, and would be averaged unclipped.
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
            optimizer.step()
            schedule.step()
            step += 1
            hvd.report(loss=round(loss.item(), 4))
            if step == options.steps:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32, help="samples a rank and step")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verify-every", type=int, help="rounds between comparisons of replicas")
    parser.add_argument("--device", choices=("npu", "cuda", "cpu"), help="default: the best here")
    options = parser.parse_args()

    hvd.init()
    device = hvd.device(options.device)
    torch.manual_seed(options.seed + hvd.rank())
    training_data, held_out = load_data()
    model = CharGpt().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        verify_every=options.verify_every,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, optimizer, training_data, options)

    digests = hvd.allgather_object(hvd.digest(model.state_dict()))
    if hvd.rank() == 0:
        bits = bits_per_character(model, held_out)
        identical = len(set(digests)) == 1
        hvd.report(bits_per_character=round(bits, 4), parameters_identical=identical)
        print(f"bits a character on held-out text: {bits:.3f}; parameters identical: {identical}")
        print(f"in its own words:\n{continue_text(model, 'def ', 300)}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
