"""A model for a dry run: its sizes, and its tokenizer where its files are here."""

from dataclasses import dataclass
from pathlib import Path

from blend_core.errors import ConfigurationError
from blend_core.model_store import ModelStore, folder_at
from blend_core.specs import ModelSpec, load_model_spec, model_spec_preset, model_spec_preset_names
from blend_core.tokenizing import Tokenizer
from flows.settings import Settings


def find_model(settings: Settings, name: str, *, with_tokenizer: bool) -> tuple[ModelSpec, Tokenizer | None]:
    """Returns the sizes of a model of the store, a Hugging Face folder or a preset, and its tokenizer.

    A preset has no tokenizer, and neither has a folder without `tokenizer.json`: a dry run needs no more of a
    folder than its `config.json`.

    Args:
        settings: where the store is, and in which element type the engine serves.
        name: of the model, or its folder.
        with_tokenizer: load the tokenizer, which takes seconds.

    Raises:
        ConfigurationError: there is no such model, or the formulas do not cover it.
    """
    folder = model_folder(settings, name)
    if folder is None:
        return model_spec_preset(name), None
    is_known = folder != folder_at(name)
    dtype = "bfloat16" if settings.engine.dtype == "auto" else settings.engine.dtype
    has_tokenizer = with_tokenizer and (folder / "tokenizer.json").is_file()
    spec = load_model_spec(folder, dtype, name if is_known else None)
    return spec, Tokenizer(folder) if has_tokenizer else None


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


def find_tokenizer(settings: Settings, name: str) -> ModelTokenizer | None:
    """Returns what tells whether prompts fit a model of the store or a folder; None where it is not here.

    Any name is a model's: jobs may run it elsewhere, so that not to have it is no error.

    Raises:
        ConfigurationError: the model is here, and the formulas do not cover it or its files are incomplete.
    """
    known = {entry.name for entry in ModelStore(settings.home / "models").list()}
    if name not in known and folder_at(name) is None:
        return None
    spec, tokenizer = find_model(settings, name, with_tokenizer=True)
    return None if tokenizer is None else ModelTokenizer(tokenizer, spec.max_model_len)
