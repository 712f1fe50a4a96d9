"""``TorchState`` in a world of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mpift.torch as hvd
from mpift import NotInitializedError


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


class Counter:
    """Something with a state of its own, which may refuse another one."""

    def __init__(self) -> None:
        self.count = 0
        self.refuses = False

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            self.refuses = False
            raise ValueError("not this one")
        self.count = state["count"]


def test_all_that_a_state_holds_goes_back_together() -> None:
    model, counter = nn.Linear(2, 2), Counter()
    state = hvd.elastic.TorchState(model, counter=counter, epoch=3, names=["a"])
    assert state.commit(wait=True) == 1
    kept = hvd.digest(model.state_dict())
    with torch.no_grad():
        model.weight.add_(1)
    counter.count, state.epoch = 5, 4
    state.names.append("b")
    state.restore()
    assert hvd.digest(model.state_dict()) == kept
    assert (counter.count, state.epoch, state.names, state.version) == (0, 3, ["a"], 1)


def test_a_part_that_cannot_go_back_leaves_the_others_as_they_were() -> None:
    model, counter = nn.Linear(2, 2), Counter()
    state = hvd.elastic.TorchState(model, counter=counter)
    with torch.no_grad():
        model.weight.add_(1)
    counter.count, counter.refuses = 5, True
    now = hvd.digest(model.state_dict())
    with pytest.raises(ValueError, match="not this one"):
        state.restore()
    assert hvd.digest(model.state_dict()) == now
    assert counter.count == 5


def test_numbers_given_by_hand_must_grow() -> None:
    state = hvd.elastic.TorchState(nn.Linear(2, 2))
    assert state.commit(version=7, wait=True) == 7
    with pytest.raises(hvd.StaleVersionError, match=r"version 7 .* refused: version 7"):
        state.commit(version=7)
    assert state.commit(wait=True) == state.version == 8


def test_a_state_that_cannot_be_hashed_is_no_version() -> None:
    model = nn.Module()
    model.register_parameter("sparse", nn.Parameter(torch.eye(2).to_sparse()))
    state = hvd.elastic.TorchState(model)
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        state.commit(wait=True)
    assert state.version == 0


def test_commits_beyond_two_undecided_ones_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    state = hvd.elastic.TorchState(nn.Linear(2, 2))
    held: list[int] = []
    monkeypatch.setattr(
        state._runtime.agreements, "hold", lambda _number, version, _content: held.append(version)
    )
    assert [state.commit(), state.commit()] == [1, 2]
    while len(held) < 2:
        pass
    assert state.commit() is None
    assert not state.wait(timeout=0.01)


def test_what_a_state_cannot_have_or_do_is_told() -> None:
    with pytest.raises(ValueError, match="'commit'"):
        hvd.elastic.TorchState(commit=1)
    with pytest.raises(AttributeError, match="call the function itself"):
        hvd.elastic.run  # noqa: B018
    state = hvd.elastic.TorchState(nn.Linear(2, 2))
    hvd.shutdown()
    with pytest.raises(NotInitializedError):
        state.commit()
    with pytest.raises(NotInitializedError):
        state.wait()
    hvd.init()
