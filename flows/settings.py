"""The one reader of the environment and of `blend.env`. Everybody else gets these values handed in.

The file lies in the state folder and has the same variables, so that they do not depend on the shell; what is
in the environment wins. Variables start with `BLEND_`; a nested value is reached with two underscores
(`BLEND_DATABASE__URL`).
Those of others keep their names: `PREFECT_API_URL`, which Prefect's own clients read too, and
`CUDA_VISIBLE_DEVICES` and `VLLM_ALLOW_LONG_MAX_MODEL_LEN`, which CUDA and vLLM read in the environment.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from blend_core.engines.vllm.passed_options import (
    check_closed_options,
    check_passed_options,
    options_of_texts,
)
from blend_core.errors import ConfigurationError
from flows.settings_file import SettingsLine, read_settings_file

SETTINGS_FILE = "blend.env"


class _Group(BaseModel):
    # A mistyped variable must not pass as one that says nothing.
    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any, info: ValidationInfo) -> Any:
        may_be_none = info.field_name is not None and cls.model_fields[info.field_name].default is None
        return None if value == "" and may_be_none else value


class DatabaseSettings(_Group):
    """Where results are recorded. Without a URL the embedded Postgres of `blend up` is used."""

    url: SecretStr | None = Field(None, description="Postgres URL of the platform's own tables")
    read_only_url: SecretStr | None = Field(None, description="URL printed by `blend db url --read-only`")


class ObjectStoreSettings(_Group):
    """Where request files, plans and outputs lie. Without a URL the embedded S3 server is used."""

    endpoint_url: str | None = Field(None, description="S3 endpoint; empty uses the embedded server")
    bucket: str = Field("blend", description="bucket of the platform's own objects")
    access_key: SecretStr | None = Field(None, description="S3 access key")
    secret_key: SecretStr | None = Field(None, description="S3 secret key")
    region: str = Field("us-east-1", description="S3 region")


class EngineSettings(_Group):
    """How engines use this machine."""

    name: Literal["auto", "torch", "vllm"] = Field(
        "auto",
        description="`vllm`, `torch`, or `auto`: vLLM where it is there for the device, else torch",
    )
    device: str = Field("cpu", description="device: `cpu`, `cuda`, `cuda:1`")
    device_profile: str = Field("cpu", description="device profile by name or path of a TOML file")
    dtype: Literal["auto", "bfloat16", "float32"] = Field("auto", description="weights and KV")
    kv_gib: Annotated[float, Field(gt=0, le=1_048_576)] = Field(
        1.0,
        description="memory of the KV cache in GiB; vLLM on a GPU goes by `gpu_memory_utilization`",
    )
    block_size: Annotated[int, Field(ge=1, le=512)] = Field(
        16, description="tokens of a KV block; vLLM on a CPU takes the next multiple of 32"
    )
    max_num_seqs: Annotated[int, Field(ge=1)] = Field(64, description="requests in flight at most")
    max_num_batched_tokens: Annotated[int, Field(ge=16)] = Field(512, description="tokens of a step at most")
    num_threads: Annotated[int, Field(ge=0)] = Field(0, description="CPU threads; 0 takes every core")
    stall_limit_s: Annotated[float, Field(gt=0)] = Field(
        300.0, description="seconds without a word from a running engine after which it counts as hung"
    )
    start_limit_s: Annotated[float, Field(gt=0)] = Field(
        1800.0, description="seconds that an engine may take to load its model"
    )
    max_restarts: Annotated[int, Field(ge=0)] = Field(
        5, description="deaths of an engine in a row, without an answer in between, that are restarted"
    )
    restart_delay_s: Annotated[float, Field(ge=0)] = Field(
        1.0, description="pause before the first restart; doubles with every further one, up to a minute"
    )
    vllm: dict[str, Any] = Field(
        default_factory=dict,
        description="options of vLLM's own by its names, as BLEND_ENGINE__VLLM__TENSOR_PARALLEL_SIZE "
        "([docs/vllm.md](docs/vllm.md))",
    )

    @field_validator("vllm")
    @classmethod
    def _known_options(cls, value: dict[str, Any]) -> dict[str, Any]:
        options = options_of_texts(value)
        for name, given in options.items():
            try:
                check_passed_options({name: given})
                check_closed_options({name: given})
            except ConfigurationError as error:
                context = {"message": str(error).rstrip("."), "option": name}
                raise PydanticCustomError("vllm_option", "{message}", context) from None
        return options


class NightlySettings(_Group):
    """The schedule of the `nightly` deployment."""

    job: Path | None = Field(None, description="job file (YAML) that runs every night")
    cron: str = Field("0 2 * * *", description="when, in `timezone`")
    timezone: str = Field("UTC", description="time zone of `cron` and of logical dates")


class Settings(BaseSettings):
    """Every setting of the platform, from the environment."""

    model_config = SettingsConfigDict(env_prefix="BLEND_", env_nested_delimiter="__", extra="forbid")

    home: Path = Field(Path(".blend"), description="state of the embedded services, models, logs")
    traces: Path = Field(Path("../shared/traces"), description="folder of traces for demo data and studies")
    database: DatabaseSettings = DatabaseSettings()
    object_store: ObjectStoreSettings = ObjectStoreSettings()
    engine: EngineSettings = EngineSettings()
    nightly: NightlySettings = NightlySettings()
    sources: dict[str, SecretStr] = Field(
        default_factory=dict, description="Postgres URLs that SQL sources may name, as BLEND_SOURCES__NAME"
    )
    targets: dict[str, SecretStr] = Field(
        default_factory=dict,
        description="Postgres URLs that `write_back` may name, as BLEND_TARGETS__NAME",
    )
    visible_gpus: str = Field(
        "", validation_alias="CUDA_VISIBLE_DEVICES", description="GPUs of this process, which runs lock by it"
    )
    allow_long_max_model_len: str = Field(
        "",
        validation_alias="VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        description="`1` lets vLLM's `max_model_len` be more than the model's context",
    )
    prefect_api_url: str | None = Field(
        None, validation_alias="PREFECT_API_URL", description="Prefect server; empty uses the embedded one"
    )

    @property
    def is_any_context_length_taken(self) -> bool:
        """Whether vLLM takes contexts that are longer than the model's, as vLLM itself reads its variable."""
        return self.allow_long_max_model_len.strip().lower() in ("1", "true")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What is given in code, then the environment, then the file."""
        assert isinstance(dotenv_settings, DotEnvSettingsSource)
        if dotenv_settings.env_file is None:
            return init_settings, env_settings
        # The library's own reader passes over lines that it cannot read, and replaces `${…}` in values.
        file_settings = EnvSettingsSource(settings_cls)
        lines = read_settings_file(Path(str(dotenv_settings.env_file)))
        file_settings.env_vars = {line.name.lower(): line.value for line in lines}
        return init_settings, env_settings, file_settings


def _structured(group: type[BaseModel], prefix: str) -> Iterator[str]:
    """Variables that hold JSON, or parts with names of their own behind two underscores."""
    for name, field in group.model_fields.items():
        variable, kind = f"{prefix}{name.upper()}", field.annotation
        if get_origin(kind) is dict:
            yield variable
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            yield variable
            yield from _structured(kind, f"{variable}__")


_STRUCTURED = tuple(_structured(Settings, "BLEND_"))
_PARTS = tuple(f"{name}__" for name in _STRUCTURED)
_NAMES = {
    str(field.validation_alias or f"BLEND_{name.upper()}") for name, field in Settings.model_fields.items()
}
_READERS: Final = {"CUDA_VISIBLE_DEVICES": "CUDA", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "vLLM"}
"""Who reads variables that a file cannot set, since they read the environment themselves."""


class _Given(NamedTuple):
    """A variable, of the environment first, and where it stands."""

    name: str
    value: str
    place: str


def settings_file(home: Path) -> Path:
    """Where the settings of a state folder lie; the file need not be there."""
    return home / SETTINGS_FILE


def load_settings() -> Settings:
    """Reads the environment and, below it, the settings file of the state folder.

    Raises:
        ConfigurationError: a variable has no meaning or a wrong value, or the file cannot be read; names the
            variable and its place, the environment or the file.
    """
    home = Path(os.environ.get("BLEND_HOME") or Settings.model_fields["home"].default).expanduser()
    file = settings_file(home)
    lines = read_settings_file(file)
    for line in lines:
        _check_line(line, file)
    given = [
        _Given(name.upper(), value, f"Environment variable {name}") for name, value in os.environ.items()
    ]
    given += [_Given(line.name, line.value, f"{line.name} in line {line.number} of {file}") for line in lines]
    try:
        settings = Settings(home=home, _env_file=file)
    except ValidationError as error:
        raise _wrong_setting(error, given) from None
    except SettingsError:
        raise _no_json(given) from None
    job = settings.nightly.job
    if job is not None and not job.is_absolute() and "BLEND_NIGHTLY__JOB" not in os.environ:
        raise ConfigurationError(
            f"BLEND_NIGHTLY__JOB in {file} is {str(job)!r}; give an absolute path, since commands run in any "
            "folder."
        )
    return settings


def _check_line(line: SettingsLine, file: Path) -> None:
    if line.name == "BLEND_HOME":
        raise ConfigurationError(
            f"Line {line.number} of {file} sets BLEND_HOME, which says where this file lies; set it in the "
            "environment."
        )
    if line.name in _READERS:
        raise ConfigurationError(
            f"Line {line.number} of {file} sets {line.name}, which {_READERS[line.name]} reads from the "
            "environment alone; set it there."
        )
    if line.name not in _NAMES and not line.name.startswith(_PARTS):
        raise ConfigurationError(
            f"{line.name} in line {line.number} of {file} is no setting; correct its name or remove the line."
        )


def _wrong_setting(error: ValidationError, given: Sequence[_Given]) -> ConfigurationError:
    first = error.errors(include_input=False, include_url=False)[0]
    # The options of vLLM are one field, and each has a variable.
    parts = [*first["loc"], *([first["ctx"]["option"]] if first["type"] == "vllm_option" else [])]
    name = "BLEND_" + "__".join(str(part).upper() for part in parts)
    exact = [each.place for each in given if each.name == name]
    # A value may come out of a variable with JSON above it, or be made of variables for its parts.
    around = [
        each.place for each in given if name.startswith(f"{each.name}__") or each.name.startswith(f"{name}__")
    ]
    place = [*exact, *around, name][0]
    if first["type"] == "extra_forbidden":
        return ConfigurationError(f"{place} is no setting; correct its name or unset it.")
    return ConfigurationError(f"{place}: {first['msg']}.")


def _no_json(given: Sequence[_Given]) -> ConfigurationError:
    place, name = next((each.place, each.name) for each in given if _lacks_json(each))
    return ConfigurationError(
        f"{place} is no JSON; set its parts one by one, as {name}__NAME, or write a JSON object."
    )


def _lacks_json(given: _Given) -> bool:
    if given.name not in _STRUCTURED:
        return False
    try:
        json.loads(given.value)
    except ValueError:
        return True
    return False
