"""Checkpoints as files of torch and of safetensors, and from files of torch."""

from __future__ import annotations

import collections
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpift.checkpoint.adopt import load
from mpift.checkpoint.exchange import export_pt, export_safetensors, import_pt
from mpift.checkpoint.manifest import Manifest
from mpift.checkpoint.reading import Reader
from mpift.errors import CheckpointDamagedError, CheckpointError
from tests.unit.saved_states import contents, put_back, saved
from tests.unit.test_checkpoint_state import same
from tests.unit.trainings import OPTIMIZERS, begun, one_thread, train

__all__ = ["one_thread"]  # a fixture for these tests too


@pytest.fixture
def trained() -> dict[str, Any]:
    state = begun(OPTIMIZERS["amsgrad"], 1)
    train(state, 2)
    return state


def exported(root: Path, manifest: Manifest, name: str = "out.pt") -> Path:
    path = root / name
    with Reader(root) as reader:
        (export_pt if name.endswith(".pt") else export_safetensors)(manifest, reader, path)
    assert sorted(p.name for p in root.iterdir()) == ["blocks", name]
    return path


def test_any_script_loads_an_exported_file(trained: dict[str, Any], tmp_path: Path) -> None:
    path = exported(tmp_path, saved(tmp_path, trained, rng=True))
    found = torch.load(path, weights_only=True)
    assert found.keys() == trained.keys()
    second = begun(OPTIMIZERS["amsgrad"], 2)
    for name in ("model", "optimizer", "scheduler"):
        second[name].load_state_dict(found[name])
    assert same(contents({**second, "losses": found["losses"]}), contents(trained))
    assert found["model"]["out.weight"].data_ptr() == found["model"]["table.weight"].data_ptr()


def test_values_that_torch_does_not_load_are_exported_as_ones_that_it_does(tmp_path: Path) -> None:
    notes = {
        "curve": np.arange(3.0),
        "words": np.array(["a", "bc"]),
        "last": collections.deque([1, np.float32(0.5)], 4),
        "seen": frozenset({1, 2}),
        "sets": {frozenset({1})},
        ("a", 1): collections.Counter("aab"),
        "plain": [1 + 2j, b"x", bytearray(b"y"), None, torch.Size([2]), torch.int8, {3}],
        "real": np.float64(0.25),
        "device": torch.device("cpu"),
    }
    found = torch.load(exported(tmp_path, saved(tmp_path, {"notes": notes})), weights_only=True)
    expected = {
        **notes,
        "curve": torch.arange(3.0, dtype=torch.float64),
        "words": ["a", "bc"],
        "last": [1, 0.5],
        "seen": {1, 2},
        "sets": {(1,)},
        "real": 0.25,
    }
    assert same(found["notes"], expected)


def test_an_exported_file_can_be_imported_saved_and_put_back(
    trained: dict[str, Any], tmp_path: Path
) -> None:
    path = exported(tmp_path, saved(tmp_path, trained))
    manifest = saved(tmp_path, import_pt(path))
    second = begun(OPTIMIZERS["amsgrad"], 2)
    second.update(put_back(tmp_path, manifest, second, rank=3).values)
    assert same(contents(second), contents(trained))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_bare_state_dict_is_imported_as_model(zipped: bool, tmp_path: Path) -> None:
    model = nn.BatchNorm1d(3)
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=zipped)
    assert same(import_pt(path), {"model": dict(model.state_dict())})


class Code:
    def __reduce__(self) -> Any:
        return os.system, ("touch /nowhere",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"x": Code()}, "could run code: .*"),
        (nn.Linear(1, 1), "could run code"),
        ([1, 2], "holds a list"),
        ({1: 2}, "holds a dict"),
    ],
)
def test_what_could_run_code_or_has_no_names_is_not_imported(
    content: Any, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.pt"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=rf"bad\.pt .*{words}"):
        import_pt(path)


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\5\6" + bytes(18)])
def test_a_file_of_another_kind_is_not_imported(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"bad\.pt can't be read"):
        import_pt(path)


def test_all_tensors_are_exported_to_safetensors_by_flat_names(
    trained: dict[str, Any], tmp_path: Path
) -> None:
    safetensors = pytest.importorskip("safetensors")
    manifest = saved(tmp_path, {**trained, "best": [torch.ones(2, dtype=torch.bfloat16)]})
    path = exported(tmp_path, manifest, "out.safetensors")
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "7", "mpift": "1.0"}
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = {f"model/{key}": value for key, value in trained["model"].state_dict().items()}
    assert same({key: found[key] for key in model}, model)
    assert found["best/0"].dtype == torch.bfloat16
    others = found.keys() - model.keys() - {"best/0"}
    assert others == {
        f"optimizer/state/{index}/{key}"
        for index in range(5)
        for key in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    }


def test_a_dtype_that_safetensors_has_not_is_named(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    manifest = saved(tmp_path, {"x": torch.ones(2, dtype=torch.complex128)})
    with Reader(tmp_path) as reader, pytest.raises(CheckpointError, match=r"safetensors.*\.pt"):
        export_safetensors(manifest, reader, tmp_path / "out.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["blocks"]


def test_without_safetensors_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    manifest = saved(tmp_path, {"x": 1})
    with Reader(tmp_path) as reader, pytest.raises(CheckpointError, match=r"mpift\[safetensors\]"):
        export_safetensors(manifest, reader, tmp_path / "out.safetensors")


def test_a_damaged_checkpoint_is_not_exported_over_an_older_file(
    trained: dict[str, Any], tmp_path: Path
) -> None:
    manifest = saved(tmp_path, trained)
    path = tmp_path / "out.pt"
    path.write_bytes(b"older")
    next((tmp_path / "blocks").iterdir()).unlink()
    with Reader(tmp_path) as reader, pytest.raises(CheckpointDamagedError, match="model/"):
        export_pt(manifest, reader, path)
    assert path.read_bytes() == b"older"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["blocks", "out.pt"]


def test_an_empty_state_is_a_checkpoint_too(tmp_path: Path) -> None:
    with Reader(tmp_path) as reader:
        assert load(saved(tmp_path, {}), reader) == {}
    assert torch.load(exported(tmp_path, saved(tmp_path, {})), weights_only=True) == {}
