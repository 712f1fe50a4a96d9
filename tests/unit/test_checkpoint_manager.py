"""``CheckpointManager`` in a process of its own: no MPI, no other ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mpift.checkpoint import CheckpointManager
from mpift.errors import CheckpointError, StaleVersionError

Make = Callable[..., CheckpointManager]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def make(directory: Path) -> Iterator[Make]:
    """Managers of the directory, closed in the end whatever has become of them."""
    made: list[CheckpointManager] = []

    def manager(**options: Any) -> CheckpointManager:
        made.append(CheckpointManager(directory, **options))
        return made[-1]

    yield manager
    for each in made:
        with contextlib.suppress(ProcessLookupError):
            if pid := each._scribe.pid:
                os.kill(pid, signal.SIGCONT)
        with each:  # an error of the test's is told by the test
            each._news.failure = ""


class Training:
    """A small model that a plain optimizer trains."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 6)).square().sum().backward()
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [value.clone() for value in (*self.model.state_dict().values(), *moments)]


def alike(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def hold(manager: CheckpointManager) -> None:
    """Nothing is written until ``go_on``."""
    os.kill(manager._scribe.pid, signal.SIGSTOP)


def go_on(manager: CheckpointManager) -> None:
    os.kill(manager._scribe.pid, signal.SIGCONT)


def break_storage(directory: Path) -> Callable[[], None]:
    """Block files can't be made until what this returns is called."""
    blocks, aside = directory / "blocks", directory / "blocks-aside"
    blocks.rename(aside)
    blocks.touch()

    def repair() -> None:
        blocks.unlink()
        aside.rename(blocks)

    return repair


# -- saving ----------------------------------------------------------------------------------------


def test_what_was_saved_is_restored_bit_for_bit_into_other_objects(make: Make) -> None:
    training, other = Training(), Training(seed=1)
    manager = make()
    training.step()
    assert manager.restore(state=other.state) is None
    assert manager.save(1, training.state, wait=True)
    assert manager.committed_step == 1
    wanted = training.tensors()
    training.step()
    other.step()
    restored = manager.restore(state=other.state)
    assert restored is not None
    assert (restored.step, restored.source, restored.world_size) == (1, "storage", 1)
    assert alike(other.tensors(), wanted)


def test_training_goes_on_while_a_save_is_written_and_what_was_then_is_saved(make: Make) -> None:
    training = Training()
    manager = make()
    training.step()
    wanted = training.tensors()
    hold(manager)
    assert manager.save(1, training.state)
    training.step()
    assert not manager.wait(0.01)
    assert manager.steps() == []
    go_on(manager)
    assert manager.wait()
    assert manager.committed_step == 1
    manager.restore(state=training.state)
    assert alike(training.tensors(), wanted)


def test_a_save_is_skipped_while_the_one_before_is_written_and_that_is_no_failure(
    make: Make,
) -> None:
    manager = make()
    hold(manager)
    assert manager.save(1, {"x": torch.ones(3)})
    assert not manager.save(2, {"x": torch.ones(3)})
    go_on(manager)
    manager.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert manager.save(3, {"x": torch.ones(3)}, wait=True)
        manager.close()
    assert manager.steps() == [1, 3]


def test_when_busy_may_mean_that_a_save_waits_for_the_one_before(make: Make) -> None:
    manager = make(when_busy="wait")
    hold(manager)
    assert manager.save(1, {"x": torch.ones(3)})
    begun: list[bool] = []
    second = threading.Thread(target=lambda: begun.append(manager.save(2, {"x": torch.ones(3)})))
    second.start()
    go_on(manager)
    second.join(60)
    assert begun == [True]
    manager.wait()
    assert manager.steps() == [1, 2]


def test_steps_grow_except_after_a_restore_of_an_older_one(make: Make) -> None:
    training = Training()
    manager = make(keep=10)
    for step in (2, 4):
        training.step()
        manager.save(step, training.state, wait=True)
    for step in (4, 3):
        with pytest.raises(StaleVersionError, match=f"step {step} can't be saved: step 4"):
            manager.save(step, training.state)
    manager.restore(2, training.state)
    assert manager.save(3, training.state, wait=True)
    assert manager.save(4, training.state, wait=True)  # another one than before
    assert manager.steps() == [2, 4, 3, 4]
    newest = manager.restore()
    assert newest is not None
    assert newest.step == 4


def test_a_state_that_cannot_be_saved_is_refused_and_costs_nothing(make: Make) -> None:
    manager = make()
    with pytest.raises(CheckpointError):
        manager.save(1, {"x": object()})
    assert manager.wait(10)
    assert manager.save(2, {"x": 1.5}, wait=True)


def test_plain_values_come_back_to_the_caller(make: Make) -> None:
    manager = make()
    state = {"epoch": 3, "names": ["a", "b"], "rate": 0.25}
    manager.save(1, state, wait=True)
    restored = manager.restore(state={"epoch": 0, "names": [], "rate": 0.0})
    assert restored is not None
    assert restored.values == state
    whole = manager.restore()
    assert whole is not None
    assert whole.values == state


def test_due_steps_are_the_multiples_of_every(make: Make) -> None:
    manager = make(every=3)
    assert [step for step in range(1, 10) if manager.due(step)] == [3, 6, 9]


def test_the_directory_and_the_steps_between_saves_may_come_from_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpift.checkpoint.group._solo", None)
    monkeypatch.setenv("MPIFT_CHECKPOINT_DIRECTORY", str(tmp_path / "set"))
    monkeypatch.setenv("MPIFT_CHECKPOINT_EVERY", "7")
    with CheckpointManager() as manager:
        assert manager.directory == tmp_path / "set"
        assert manager.every == 7


# -- which checkpoints stay ------------------------------------------------------------------------


def test_the_newest_and_every_so_many_steps_are_kept(make: Make) -> None:
    manager = make(keep=2, keep_every=4)
    for step in range(1, 8):
        manager.save(step, {"x": torch.full((3,), float(step))}, wait=True)
    manager.close()  # what was to be cleared away is
    assert manager.steps() == [4, 6, 7]


def test_a_pinned_checkpoint_stays_until_its_name_goes_to_another(make: Make) -> None:
    manager = make(keep=1)
    manager.save(1, {"x": torch.zeros(3)}, wait=True)
    manager.pin(1, "best")
    for step in (2, 3):
        manager.save(step, {"x": torch.full((3,), float(step))}, wait=True)
    manager.pin(3, "best")
    manager.pin(3, "final")
    for step in (4, 5, 6):
        manager.save(step, {"x": torch.full((3,), float(step))}, wait=True)
    manager.close()
    assert manager.steps() == [3, 6]


def test_what_can_be_pinned_is_a_checkpoint_under_a_plain_name(make: Make) -> None:
    manager = make()
    with pytest.raises(CheckpointError, match="no checkpoint of step 5"):
        manager.pin(5)
    manager.save(1, {"x": 1}, wait=True)
    with pytest.raises(ValueError, match=r"not '\.\./x'"):
        manager.pin(1, "../x")


# -- following an optimizer ------------------------------------------------------------------------


def test_a_followed_plain_optimizer_is_saved_by_itself_and_goes_on_counting_after_a_restore(
    make: Make,
) -> None:
    training = Training()
    manager = make(every=3, keep=10, when_busy="wait")
    manager.follow(training.optimizer, training.state)
    states = []
    for _ in range(7):
        training.step()
        states.append(training.tensors())
    manager.wait()
    assert manager.steps() == [3, 6]
    manager.restore(3, training.state)
    assert alike(training.tensors(), states[2])
    for _ in range(3):
        training.step()
    manager.wait()
    assert manager.steps() == [3, 6, 6]  # once more, of another generation
    manager.close()
    resumed = Training(seed=5)
    second = make(every=3, keep=10, when_busy="wait")
    restored = second.restore(state=resumed.state)
    assert restored is not None
    assert restored.step == 6
    second.follow(resumed.optimizer, resumed.state)
    for _ in range(3):
        resumed.step()
    second.wait()
    assert second.steps() == [3, 6, 6, 9]


# -- what fails ------------------------------------------------------------------------------------


def test_a_failed_save_is_told_at_the_next_one_and_later_ones_work_again(
    make: Make, directory: Path
) -> None:
    manager = make()
    manager.save(1, {"x": torch.zeros(3)}, wait=True)
    repair = break_storage(directory)
    assert manager.save(2, {"x": torch.ones(3)})
    manager.wait()
    repair()
    with pytest.warns(UserWarning, match=r"checkpoint in .*: step 2 was not saved: .*blocks"):
        manager.save(3, {"x": torch.ones(3)})
    manager.wait()
    assert manager.steps() == [1, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.close()


def test_whoever_waits_for_a_save_gets_its_failure_as_an_error(make: Make, directory: Path) -> None:
    manager = make()
    repair = break_storage(directory)
    with pytest.raises(CheckpointError, match=r"step 1 was not saved: .*blocks"):
        manager.save(1, {"x": torch.ones(3)}, wait=True)
    repair()
    assert manager.save(2, {"x": torch.ones(3)}, wait=True)


def test_closing_after_a_failed_save_is_an_error_but_hides_none_of_the_script(
    make: Make, directory: Path
) -> None:
    def failed() -> CheckpointManager:
        manager = make()
        repair = break_storage(directory)
        manager.save(1, {"x": torch.ones(3)})
        manager.wait()
        repair()
        return manager

    manager = failed()
    with pytest.warns(UserWarning, match="step 1"), pytest.raises(CheckpointError, match="failed"):
        manager.close()
    manager.close()  # it is closed
    second = failed()
    with pytest.warns(UserWarning, match="step 1"), pytest.raises(KeyError, match="script"), second:
        raise KeyError("script")


def test_a_directory_has_one_manager_at_a_time(make: Make, directory: Path, tmp_path: Path) -> None:
    manager = make()
    (tmp_path / "link").symlink_to(directory)
    for name in (directory, tmp_path / "link"):
        with pytest.raises(CheckpointError, match="an open CheckpointManager in this process"):
            CheckpointManager(name)
    assert manager.save(1, {"x": torch.ones(3)}, wait=True)
    manager.close()
    assert make().steps() == [1]


def test_a_writer_that_is_killed_in_the_middle_fails_that_save_alone(make: Make) -> None:
    manager = make()
    hold(manager)
    manager.save(1, {"x": torch.ones(3)})
    os.kill(manager._scribe.pid, signal.SIGKILL)
    manager.wait()
    with pytest.warns(UserWarning, match=r"step 1 was not saved: .*SIGKILL"):
        manager.save(2, {"x": torch.ones(3)}, wait=True)
    assert manager.steps() == [2]


def test_a_stopped_writer_keeps_no_caller_however_much_there_is_to_say(make: Make) -> None:
    """What is to be written goes to another process; the training must not wait for it to read."""
    manager = make()
    hold(manager)

    def ask() -> None:
        for _ in range(4):
            manager._scribe.request("check", lambda *_: None, part=bytes(1 << 20))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(5)
    stuck = asking.is_alive()
    os.kill(manager._scribe.pid, signal.SIGKILL)
    assert not stuck


def test_a_directory_that_cannot_be_written_to_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"can't be written to .*/file.*choose another"):
        CheckpointManager(tmp_path / "file" / "checkpoints")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"keep": 0}, "keep must be at least 1"),
        ({"every": 0}, "every must be at least 1"),
        ({"full_every": 0}, "full_every must be at least 1"),
        ({"when_busy": "later"}, "when_busy must be"),
        ({"encode": "zip"}, "encode must be"),
        ({"layout": "rows"}, "layout must be"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(
    options: dict[str, Any], named: str, directory: Path
) -> None:
    with pytest.raises(ValueError, match=named):
        CheckpointManager(directory, **options)
    assert not directory.exists()


def test_a_step_that_is_not_there_is_refused_with_those_that_are(make: Make) -> None:
    manager = make()
    manager.save(3, {"x": 1}, wait=True)
    with pytest.raises(CheckpointError, match="no checkpoint of step 4; the newest ones are: 3"):
        manager.restore(4)
