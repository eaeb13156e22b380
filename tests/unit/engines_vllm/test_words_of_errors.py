"""What of vLLM's own errors is told in ours: which option or part of a schema is wrong, in one line."""

import pydantic
import pytest

from blend_core.engines.vllm.error_words import MOST_CHARACTERS, start_error, words_of


class CacheConfig(pydantic.BaseModel):
    gpu_memory_utilization: float = pydantic.Field(0.9, le=1)


def test_a_wrong_value_is_told_by_the_name_of_its_option() -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        CacheConfig(gpu_memory_utilization=3)
    words = words_of(caught.value)
    assert words == "ValidationError: gpu_memory_utilization: Input should be less than or equal to 1"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("CUDA out of memory\nmore"), "RuntimeError: CUDA out of memory"),
        (RuntimeError(), "RuntimeError"),
        (
            ValueError('No grammar: [15:43:21] /project/cpp/schema.cc:4944: Unsupported type "nonsense"\n'),
            'ValueError: No grammar: Unsupported type "nonsense"',
        ),
        (
            ValueError("Grammar error: regex parse error:\n    (ab\n    ^\nerror: unclosed group\n"),
            "ValueError: Grammar error: regex parse error: (ab ^ error: unclosed group",
        ),
        (
            ValueError("Of these:\n" + "y " * 1000),
            f"ValueError: {('Of these: ' + 'y ' * 1000)[:MOST_CHARACTERS]}…",
        ),
        (ValueError("x" * 1000), f"ValueError: {'x' * MOST_CHARACTERS}…"),
    ],
)
def test_of_another_error_its_first_line_is_told_or_all_where_that_ends_in_a_colon(
    error: Exception, words: str
) -> None:
    assert words_of(error) == words


def test_what_is_cut_in_the_error_is_on_standard_error_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    allowed = ", ".join(f"'kind_{number}'" for number in range(60))
    refused = ValueError(f"quantization: Input should be {allowed}\nand a second line")
    told = str(start_error(refused))
    assert told.startswith("vLLM did not start (ValueError: quantization: Input should be 'kind_0', 'kind_1'")
    assert told.endswith("…); the log on standard error has the details.")
    assert f"ValueError: {refused}\n" in capsys.readouterr().err
