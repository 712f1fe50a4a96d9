"""Train the CNN of ``digits.py`` through a parameter server: no rank waits for another.

    mpift run -np 4 python examples/parameter_server.py
    mpift run -np 4 --chaos kill:1@30 python examples/parameter_server.py
    mpift run -np 4 --chaos slow:1@20-60:0.3 python examples/parameter_server.py

Each parameter lives on two ranks. One of them may die: the other one goes on with all that was ever
acknowledged. Exits with 1 if parameters were lost or the accuracy is too low.
"""

from __future__ import annotations

import argparse
import sys

import torch
from digits import accuracy, build_model, load_data
from torch.nn import functional
from torch.utils.data import DataLoader

import mpift.torch as hvd


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="samples a rank and step")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of SGD with momentum")
    parser.add_argument("--staleness", type=int, help="versions that a gradient may be behind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-least", type=float, default=0.93, help="accuracy to reach")
    parser.add_argument("--device", choices=("npu", "cuda", "cpu"), help="default: the best here")
    arguments = parser.parse_args()

    hvd.init()
    device = hvd.device(arguments.device)
    torch.manual_seed(arguments.seed + hvd.rank())
    train, test = load_data()
    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, arguments.epochs * 2 // 3 or 1, 0.3)
    optimizer = hvd.AsyncDistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), staleness=arguments.staleness
    )
    # Every rank draws from all samples, in an order of its own: what a dead rank leaves behind the
    # others come by as well. An epoch is as many samples as there are, over all ranks.
    loader = DataLoader(train, batch_size=arguments.batch_size, shuffle=True, drop_last=True)
    steps = len(train) // (arguments.batch_size * hvd.size())

    for _ in range(arguments.epochs):
        for _, (images, labels) in zip(range(steps), loader, strict=False):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            hvd.report(loss=round(loss.item(), 4))
        scheduler.step()

    hvd.barrier()  # all have made their last push
    code = 0
    if hvd.rank() == 0:
        lost = take_all(optimizer)
        reached = accuracy(model, test)
        hvd.report(accuracy=round(reached, 4), keys=len(optimizer.versions))
        print(
            f"accuracy on held-out images: {reached:.4f}; keys: {len(optimizer.versions)}, lost:"
            f" {', '.join(lost) or 'none'}; stale gradients of this rank:"
            f" {optimizer.stale_gradients}"
        )
        code = int(bool(lost) or reached < arguments.at_least)
    code = hvd.broadcast_object(code)  # one rank that fails would be survived by the others
    hvd.shutdown()
    return code


def take_all(optimizer: torch.optim.Optimizer) -> list[str]:
    """Pull all parameters; the names of those that are lost."""
    try:
        optimizer.pull()
    except hvd.KeyLostError as error:
        return list(error.keys)
    return []


if __name__ == "__main__":
    sys.exit(main())
