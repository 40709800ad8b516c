"""A rank of a pipeline downloads and reads the files that have its layers, and no others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner
from mlx.utils import tree_flatten
from support.architectures import build, settings_of
from support.models import change_json, one_line, save_model, write_tokenizer
from support.ranks import command, write_hosts
from support.shares import sharing
from support.waiting import until

from mlxrunner import cli
from mlxrunner.errors import LaunchError, ModelError
from mlxrunner.models.download import in_turn
from mlxrunner.models.files import ModelShard
from mlxrunner.models.fingerprint import by_files
from mlxrunner.models.load import unread_model
from mlxrunner.models.resolve import resolve
from mlxrunner.ranks.ranks import checked_folder

LAYERS = 5


def save(folder: Path, kind: str = "qwen2") -> None:
    """Write a model with a file for each layer and one for the rest."""
    settings = {**settings_of(kind), "num_hidden_layers": LAYERS, "vocab_size": 300}
    save_model(folder, build(kind, **settings), settings)
    write_tokenizer(folder)
    (file,) = folder.glob("model*.safetensors")
    weights: Any = mx.load(str(file))
    placed = {}
    for name in weights:
        number = name.split("layers.")[1].split(".")[0] if "layers." in name else "rest"
        placed[name] = f"model-{number}.safetensors"
    mx.eval(weights)
    file.unlink()
    for one in {*placed.values()}:
        part = {name: array for name, array in weights.items() if placed[name] == one}
        mx.save_safetensors(str(folder / one), part, {"format": "mlx"})
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model that is whole."""
    save(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def model_hub(hub: Any, source: Path) -> Any:
    """A hub that has it."""
    hub.files = {file.name: file.read_bytes() for file in source.iterdir()}
    return hub


def own_part(rank: int, ranks: int = 3, way: Any = "pipeline") -> Any:
    return sharing(ModelShard(rank, ranks, way))


def parameters_of(folder: Path) -> dict[str, mx.array]:
    found: Any = tree_flatten(unread_model(folder).parameters())
    return dict(found)


def weights_in(names: set[str]) -> set[str]:
    return {name.removeprefix("model-")[:-12] for name in names if name.endswith(".safetensors")}


@pytest.mark.parametrize(
    ("rank", "layers"), [(0, ["3", "4"]), (1, ["1", "2"]), (2, ["0"])], ids=["0", "1", "2"]
)
def test_a_rank_downloads_its_layers(
    rank: int, layers: list[str], model_hub: Any, source: Path
) -> None:
    """Its parameters are those that it takes of the whole model."""
    with own_part(rank):
        folder = resolve("org/name")
        assert weights_in(model_hub.downloaded()) == {"rest", *layers}
        model_hub.seen.clear()
        assert resolve("org/name") == folder
        assert model_hub.seen == []
        assert_same(parameters_of(folder), parameters_of(source))


def assert_same(own: dict[str, mx.array], whole: dict[str, mx.array]) -> None:
    assert own.keys() == whole.keys()
    for name, array in own.items():
        assert mx.array_equal(array, whole[name]), name


def test_what_is_missing_comes_for_who_needs_it(model_hub: Any) -> None:
    """Another rank of this machine, and then a process that has the model alone."""
    for rank, layers in ((2, {"rest", "0"}), (1, {"1", "2"}), (None, {"3", "4"})):
        model_hub.seen.clear()
        with nullcontext() if rank is None else own_part(rank):
            resolve("org/name")
        assert weights_in(model_hub.downloaded()) == layers


def test_names_of_an_index_are_no_patterns(model_hub: Any, source: Path) -> None:
    """It can't make a rank download the code of a model, nor all its weights."""
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"] |= {"one": "*", "other": "model-*.safetensors", "third": "x.py"}
    model_hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
    model_hub.files["modeling.py"] = b"code"
    with own_part(2):
        folder = resolve("org/name")
        with pytest.raises(ModelError, match="missing: 3 of 5 weight files"):
            unread_model(folder)
    assert weights_in(model_hub.downloaded()) == {"rest", "0"}
    assert "modeling.py" not in model_hub.downloaded()


def test_a_rank_says_that_it_waits_for_another_download(
    hub_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes of one machine download a model one after the other."""
    entered = []

    def enter() -> None:
        with in_turn("org/name"):
            entered.append(True)

    with in_turn("org/name"):
        thread = threading.Thread(target=enter)
        thread.start()
        until(lambda: "waiting for another process, which" in capsys.readouterr().err)
        assert not entered
    thread.join()
    assert entered


def test_every_rank_of_tensors_needs_all_files(model_hub: Any) -> None:
    with own_part(1, 2, "tensor-parallel"):
        resolve("org/name")
    assert weights_in(model_hub.downloaded()) == {"rest", "0", "1", "2", "3", "4"}


@pytest.mark.parametrize("way", ["pipeline", "tensor-parallel"])
def test_a_model_that_cannot_be_shared_is_not_downloaded(
    way: Any, hub: Any, tmp_path: Path
) -> None:
    """Its settings say so."""
    save(tmp_path / "source", "gemma3_text")
    hub.files = {file.name: file.read_bytes() for file in (tmp_path / "source").iterdir()}
    with (
        own_part(0, 2, way),
        pytest.raises(ModelError, match="can't share the architecture"),
    ):
        resolve("org/name")
    assert "config.json" in hub.downloaded()
    assert weights_in(hub.downloaded()) == set()


def test_a_layer_that_is_partly_there(source: Path) -> None:
    """A file has the end of another rank's layer, whose beginning is in a file that is not here."""
    weights: Any = mx.load(str(source / "model-2.safetensors"))
    moved = {name: array for name, array in weights.items() if ".layers.2.mlp" in name}
    change(source / "model-rest.safetensors", lambda rest: rest | moved)
    (source / "model-2.safetensors").unlink()
    with own_part(0):
        model = unread_model(source)
    assert [layer is None for layer in model.model.layers] == [True, True, True, False, False]
    mx.eval(model.parameters())


def test_a_missing_file_is_named(source: Path) -> None:
    """One that this rank needs, and no other one."""
    (source / "model-1.safetensors").unlink()
    with own_part(0):
        unread_model(source)
    said = r"model-1\.safetensors: missing: 1 of 3"
    with own_part(1), pytest.raises(ModelError, match=said) as error:
        unread_model(source)
    one_line(error)


def test_a_number_of_a_layer_of_any_length(source: Path) -> None:
    """A weight index may name a layer that is no layer of the model, and no rank has it."""
    index = source / "model.safetensors.index.json"
    placed = json.loads(index.read_text())["weight_map"]
    placed[f"model.layers.{'9' * 5000}.weight"] = "model-9.safetensors"
    index.write_text(json.dumps({"weight_map": placed}))
    for rank in range(3):
        with own_part(rank):
            mx.eval(unread_model(source).parameters())


def test_a_tensor_in_no_file_is_named(source: Path) -> None:
    """A parameter is never left as it was made, at random."""
    change(
        source / "model-4.safetensors",
        lambda found: {name: one for name, one in found.items() if "q_proj.weight" not in name},
    )
    (source / "model-0.safetensors").unlink()
    said = r"Missing 1 parameters: model\.layers\.4\.self_attn\.q_proj\.weight"
    with own_part(0), pytest.raises(ModelError, match=said):
        unread_model(source)


@pytest.mark.parametrize("is_whole", [True, False], ids=["all files", "own files"])
@pytest.mark.parametrize(
    ("name", "shape"), [("input_layernorm", (1,)), ("mlp.gate_proj", (1, 64))], ids=str
)
def test_a_tensor_of_another_shape_is_named(
    is_whole: bool, name: str, shape: tuple[int, ...], source: Path
) -> None:
    """One that MLX would stretch to the right shape, too."""
    file, tensor = source / "model-4.safetensors", f"model.layers.4.{name}.weight"
    change(file, lambda weights: weights | {tensor: mx.ones(shape)})
    if not is_whole:
        (source / "model-0.safetensors").unlink()
    said = f"Expected shape .* for parameter {tensor}"
    with own_part(0), pytest.raises(ModelError, match=said) as error:
        unread_model(source)
    one_line(error)


def test_a_rank_has_its_files_of_a_model_in_the_format_of_awq(source: Path) -> None:
    """Its tensors have other names than the parameters that mlx-lm makes of them."""
    awq_settings = {"quant_method": "awq", "bits": 4, "group_size": 32}
    change_json(source / "config.json", quantization_config=awq_settings)
    for file in source.glob("model-*.safetensors"):
        change(file, awq)
    with own_part(0):
        whole = parameters_of(source)
        (source / "model-0.safetensors").unlink()
        own = parameters_of(source)
    assert any(name.endswith("q_proj.biases") for name in own)
    assert_same(own, whole)


def awq(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the tensors of a file with random ones of AWQ in place of projections."""
    made = {}
    for name, array in weights.items():
        if name.endswith("_proj.weight"):
            rows, columns = array.shape
            packed = mx.random.randint(0, 2**31 - 1, (columns, rows // 8)).astype(mx.int32)
            made[name.replace(".weight", ".qweight")] = packed
            made[name.replace(".weight", ".scales")] = mx.random.uniform(
                shape=(columns // 32, rows)
            )
        else:
            made[name] = array
    return made


def change(file: Path, how: Callable[[dict[str, mx.array]], dict[str, mx.array]]) -> None:
    """Write other tensors into a weight file; the weight index names the file for each."""
    weights: Any = mx.load(str(file))
    mx.eval(weights)
    changed = how(weights)
    mx.eval(changed)
    mx.save_safetensors(str(file), changed, {"format": "mlx"})
    index = file.with_name("model.safetensors.index.json")
    placed = json.loads(index.read_text())["weight_map"]
    others = {name: other for name, other in placed.items() if other != file.name}
    index.write_text(json.dumps({"weight_map": others | dict.fromkeys(changed, file.name)}))


def test_files_that_two_ranks_have_are_compared(source: Path, tmp_path: Path) -> None:
    """One that only one of them has is not."""
    file = "model-1.safetensors"
    shutil.copytree(source, tmp_path / "other")
    (tmp_path / "other" / "model-0.safetensors").unlink()
    expected, part = by_files(source), ModelShard(1, 3, "pipeline")
    with sharing(part):
        assert checked_folder(str(tmp_path / "other"), part, expected) == tmp_path / "other"
        change(
            tmp_path / "other" / file,
            lambda found: {name: array + 1 for name, array in found.items()},
        )
        with pytest.raises(LaunchError, match=r"not the model of rank 0: weights \(model-1.safet"):
            checked_folder(str(tmp_path / "other"), part, expected)


@pytest.mark.parametrize("kind", ["a file", "a link", "a FIFO"])
def test_a_cache_that_ranks_cannot_lock_is_one_line(
    kind: str, model_hub: Any, hub_cache: Path
) -> None:
    """A model that is whole in a read-only cache needs no lock."""
    lock = hub_cache / ".locks" / "models--org--name" / "mlxrunner.lock"
    if kind == "a file":
        hub_cache.mkdir()
        (hub_cache / ".locks").touch()
    else:
        lock.parent.mkdir(parents=True)
        lock.symlink_to("elsewhere") if kind == "a link" else os.mkfifo(lock)
    said = "org/name: can't be downloaded: .*mlxrunner.lock: "
    with own_part(0), pytest.raises(ModelError, match=said) as error:
        resolve("org/name")
    one_line(error)
    assert model_hub.seen == []


@pytest.mark.parametrize("what", ["one file", "another index"])
@pytest.mark.parametrize("way", ["pipeline", "tensor-parallel"])
def test_weights_in_other_files_are_another_model(
    what: str, way: Any, source: Path, tmp_path: Path
) -> None:
    """No file is left out of the comparison because the first rank has none of its name."""
    other = tmp_path / "other"
    shutil.copytree(source, other)
    index = other / "model.safetensors.index.json"
    if what == "one file":
        weights: dict[str, mx.array] = {}
        for file in other.glob("model-*.safetensors"):
            weights |= mx.load(str(file))  # type: ignore[arg-type]
        mx.eval(weights)
        for file in (*other.glob("model-*.safetensors"), index):
            file.unlink()
        changed = {name: array + 1 for name, array in weights.items()}
        mx.save_safetensors(str(other / "model.safetensors"), changed, {"format": "mlx"})
    else:
        (other / "model-0.safetensors").rename(other / "model-zero.safetensors")
        index.write_text(index.read_text().replace("model-0.", "model-zero."))
    expected, part = by_files(source), ModelShard(1, 2, way)
    with sharing(part), pytest.raises(LaunchError, match="division of the weights into files"):
        checked_folder(str(other), part, expected)


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("way", ["--pipeline", "--tensor-parallel"])
def test_launch_downloads_a_model(way: str, model_hub: Any, source: Path, tmp_path: Path) -> None:
    """The ranks of one machine take turns; the answer is that of one process."""
    ask = ["generate", "--raw", "--greedy", "--max-tokens", "5", "-m"]
    env = {**os.environ, "HF_ENDPOINT": model_hub.address, "HF_HOME": str(tmp_path / "hf")}
    line = command(write_hosts(tmp_path, 2), 2, *ask, "org/name", way, "Hello")
    done = subprocess.run(line, env=env, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    whole = CliRunner().invoke(cli.main, [*ask, str(source), "Hello"])
    assert done.stdout == whole.stdout_bytes
    assert weights_in(model_hub.downloaded()) == {"rest", "0", "1", "2", "3", "4"}
