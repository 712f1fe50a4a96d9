"""Train a small CNN on scikit-learn's handwritten digits, on as many ranks as there are.

    mpift run -np 4 python examples/digits.py
    mpift run -np 4 --chaos kill:2@50 python examples/digits.py
    mpift run -np 4 --chaos slow:1@20-60:0.3 python examples/digits.py --patience adaptive
    mpift run -np 4 --chaos flip:2@40 python examples/digits.py --verify-every 10
    mpift run -np 4 python examples/digits.py --checkpoints out/digits
    mpift run -np 4 python examples/digits.py --device npu

The one with checkpoints goes on where it was when it is started again, with any number of ranks.

Ranks may die, be late or lose a bit on the way: the loop below has no code for that. A step is a
function, so that it can be made again if the device fails.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import mpift.torch as hvd


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1437 images to train on, 360 held out; 8 x 8 pixels, values 0 to 1."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    device = next(model.parameters()).device
    images, labels = (tensor.to(device) for tensor in data.tensors)
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return right


def first_checkpoint_is_identical(checkpoints: hvd.CheckpointManager) -> bool:
    """Whether the oldest checkpoint, however many ranks have saved it, gives every rank the
    parameters that training held at that step."""
    checkpoints.wait()
    model = build_model()
    oldest = checkpoints.steps()[0]
    restored = checkpoints.load(
        oldest,
        {"model": model, "digest": ""},
        only=lambda name: name.startswith(("model", "digest")),
    )
    identical = hvd.digest(model.state_dict()) == restored.values["digest"]
    if hvd.rank() == 0:
        print(
            f"step {oldest}, saved by {restored.world_size} ranks, restored by {hvd.size()}:"
            f" digests are {'equal' if identical else 'DIFFERENT'}"
        )
    return all(hvd.allgather_object(identical))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="samples a rank and step")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of SGD with momentum")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quorum", help='majority, all, a number of ranks, or a fraction as "0.6"')
    parser.add_argument("--patience", help="seconds to wait for late ranks, or adaptive")
    parser.add_argument("--late", choices=("carry", "drop"), help="what becomes of late gradients")
    parser.add_argument("--verify-every", type=int, help="rounds between comparisons of replicas")
    parser.add_argument("--device", choices=("npu", "cuda", "cpu"), help="default: the best here")
    parser.add_argument("--checkpoints", help="directory to save to, and to go on from")
    parser.add_argument("--save-every", type=int, default=40, help="steps between checkpoints")
    arguments = parser.parse_args()

    hvd.init()
    device = hvd.device(arguments.device)
    torch.manual_seed(arguments.seed + hvd.rank())
    train, test = load_data()
    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        quorum=arguments.quorum,
        patience=arguments.patience,
        late=arguments.late,
        verify_every=arguments.verify_every,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sampler = hvd.ElasticSampler(train, seed=arguments.seed)
    loader = DataLoader(train, batch_size=arguments.batch_size, sampler=sampler)

    state = {
        "model": model,
        "optimizer": optimizer,
        "sampler": sampler,
        "digest": lambda: hvd.digest(model.state_dict()),
    }
    checkpoints = None
    if arguments.checkpoints:
        checkpoints = hvd.CheckpointManager(
            arguments.checkpoints, every=arguments.save_every, keep=20
        )
        checkpoints.restore(state=state)
        checkpoints.follow(optimizer, state)

    @hvd.retry_on_device_fault(optimizer)
    def step(images: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        return loss.item()

    for epoch in range(sampler.epoch, arguments.epochs):
        sampler.set_epoch(epoch)
        for images, labels in hvd.rounds(loader):
            hvd.report(loss=round(step(images, labels), 4))

    if checkpoints is not None:
        hvd.report(checkpoint_identical=first_checkpoint_is_identical(checkpoints))
        checkpoints.close()

    digests = hvd.allgather_object(hvd.digest(model.state_dict()))
    if hvd.rank() == 0:
        reached = accuracy(model, test)
        identical = len(set(digests)) == 1
        hvd.report(accuracy=round(reached, 4), parameters_identical=identical)
        print(f"accuracy on held-out images: {reached:.4f}; parameters identical: {identical}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
