"""A model for a dry run: its sizes, and its tokenizer where its files are here."""

from pathlib import Path

from blend_core.model_store import ModelStore
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
    store = ModelStore(settings.home / "models")
    recorded_name: str | None = name
    if name in {entry.name for entry in store.list()}:
        folder = store.resolve(name)
    elif Path(name).expanduser().is_dir():
        folder, recorded_name = Path(name).expanduser(), None
    elif name in model_spec_preset_names():
        return model_spec_preset(name), None
    else:
        folder = store.resolve(name)
    dtype = "bfloat16" if settings.engine.dtype == "auto" else settings.engine.dtype
    has_tokenizer = with_tokenizer and (folder / "tokenizer.json").is_file()
    spec = load_model_spec(folder, dtype, recorded_name)
    return spec, Tokenizer(folder) if has_tokenizer else None
