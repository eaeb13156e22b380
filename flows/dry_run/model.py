"""A model for a dry run: its sizes, and its tokenizer where its files are here."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blend_core.errors import ConfigurationError
from blend_core.model_store import ModelStore, folder_at
from blend_core.specs import ModelSpec, load_model_spec, model_spec_preset, model_spec_preset_names
from blend_core.tokenizing import Tokenizer
from flows.settings import Settings


def find_model(settings: Settings, name: str) -> ModelSpec:
    """Returns the sizes of a model of the store, a Hugging Face folder or a preset.

    Args:
        settings: where the store is, and in which element type the engine serves.
        name: of the model, or its folder.

    Raises:
        ConfigurationError: there is no such model, or the formulas do not cover it.
    """
    folder = model_folder(settings, name)
    if folder is None:
        return model_spec_preset(name)
    is_known = folder != folder_at(name)
    dtype = "bfloat16" if settings.engine.dtype == "auto" else settings.engine.dtype
    return load_model_spec(folder, dtype, name if is_known else None)


def load_tokenizer(settings: Settings, name: str, tell: Callable[[str], None]) -> Tokenizer | None:
    """Returns the tokenizer of a model of the store or of a folder; takes seconds, which `tell` hears before.

    A preset has none, and neither has a folder without `tokenizer.json`: a dry run needs no more of a folder
    than its `config.json`.

    Raises:
        ConfigurationError: there is no such model, or its tokenizer cannot be loaded.
    """
    folder = model_folder(settings, name)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    tell(f"loading the tokenizer of {name} …")
    return Tokenizer(folder)


def model_folder(settings: Settings, name: str) -> Path | None:
    """Returns the folder of a model of the store, or the folder of that name; None for a preset.

    Raises:
        ConfigurationError: there is no such model.
    """
    store = ModelStore(settings.home / "models")
    known = [entry.name for entry in store.list()]
    presets = model_spec_preset_names()
    if name in known:
        return store.resolve(name)
    folder = folder_at(name)
    if folder is not None or name in presets:
        return folder
    raise ConfigurationError(
        f"There is no model {name!r}; name a preset, which needs no files "
        f"({', '.join(presets)}), a Hugging Face folder, or one that `blend model add` made known "
        f"({', '.join(known) or 'none yet'})."
    )


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """What tells whether a prompt fits a model.

    Attributes:
        tokenizer: the model's own.
        max_model_len: longest prompt plus answer, in tokens.
    """

    tokenizer: Tokenizer
    max_model_len: int


def find_tokenizer(settings: Settings, name: str, tell: Callable[[str], None]) -> ModelTokenizer | None:
    """Returns what tells whether prompts fit a model of the store or a folder; None where it is not here.

    Any name is a model's: jobs may run it elsewhere, so that not to have it is no error. `tell` hears of what
    takes seconds.

    Raises:
        ConfigurationError: the model is here, and the formulas do not cover it or its files are incomplete.
    """
    known = {entry.name for entry in ModelStore(settings.home / "models").list()}
    if name not in known and folder_at(name) is None:
        return None
    spec = find_model(settings, name)
    tokenizer = load_tokenizer(settings, name, tell)
    return None if tokenizer is None else ModelTokenizer(tokenizer, spec.max_model_len)
