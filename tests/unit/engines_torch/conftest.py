from pathlib import Path

import pytest

from tests.tiny_llama import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with its tokenizer."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny_llama")
