"""The one composition root: parts are put together here and nowhere else."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from blend_core.engines.process import EngineProcess
from blend_core.engines.torch.factory import make_torch_engine
from blend_core.engines.torch.options import TorchEngineOptions
from blend_core.engines.vllm.factory import make_vllm_engine
from blend_core.engines.vllm.options import VllmEngineOptions
from blend_core.errors import ConfigurationError
from blend_core.model_store import ModelStore
from blend_core.policies.base import EngineLimits
from blend_core.specs import DeviceProfile, ModelSpec, load_device_profile
from flows.ingest.parse import ParseOptions
from flows.job_spec import BatchJobSpec
from flows.rank_devices import rank_devices, threads_of_rank
from flows.serving import Serving
from flows.settings import Settings
from storage.database import Database
from storage.object_client import ObjectStoreOptions
from storage.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the services are, whoever runs them.

    Attributes:
        database_url: Postgres of the platform's tables.
        read_only_database_url: the same through the read-only role, where there is one.
        s3_endpoint_url: None for AWS itself.
        s3_bucket: the bucket of the platform's own objects.
        s3_access_key: None leaves credentials to boto3's own chain.
        s3_secret_key: goes with `s3_access_key`.
        s3_region: region of the endpoint.
        prefect_api_url: ends in `/api`; None where there is no Prefect.
    """

    database_url: str = field(repr=False)
    read_only_database_url: str | None = field(default=None, repr=False)
    s3_endpoint_url: str | None = None
    s3_bucket: str = "blend"
    s3_access_key: str | None = field(default=None, repr=False)
    s3_secret_key: str | None = field(default=None, repr=False)
    s3_region: str = "us-east-1"
    prefect_api_url: str | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> "Endpoints":
        """The services that the environment names: what a process started by `blend up` is given.

        Raises:
            ConfigurationError: there is no database URL.
        """
        if settings.database.url is None:
            raise ConfigurationError(
                "No database is named; start the local services with `blend up`, or set BLEND_DATABASE__URL."
            )
        read_only, store = settings.database.read_only_url, settings.object_store
        return cls(
            database_url=settings.database.url.get_secret_value(),
            read_only_database_url=None if read_only is None else read_only.get_secret_value(),
            s3_endpoint_url=store.endpoint_url,
            s3_bucket=store.bucket,
            s3_access_key=None if store.access_key is None else store.access_key.get_secret_value(),
            s3_secret_key=None if store.secret_key is None else store.secret_key.get_secret_value(),
            s3_region=store.region,
            prefect_api_url=settings.prefect_api_url,
        )


class Wiring:
    """The parts of one process, made once.

    Attributes:
        settings: what the environment says.
        endpoints: where the services are.
        database: the platform's tables.
        objects: the platform's bucket and the users' objects.
        models: models by name.
    """

    __slots__ = ("database", "endpoints", "models", "objects", "settings")

    def __init__(
        self, settings: Settings, endpoints: Endpoints, database: Database, objects: ObjectStore
    ) -> None:
        self.settings = settings
        self.endpoints = endpoints
        self.database = database
        self.objects = objects
        self.models = ModelStore(settings.home / "models")

    @classmethod
    def from_settings(cls, settings: Settings, endpoints: Endpoints) -> "Wiring":
        """Puts the parts together. Connects to nothing yet."""
        options = ObjectStoreOptions(
            bucket=endpoints.s3_bucket,
            endpoint_url=endpoints.s3_endpoint_url,
            access_key=endpoints.s3_access_key,
            secret_key=endpoints.s3_secret_key,
            region=endpoints.s3_region,
        )
        return cls(settings, endpoints, Database(endpoints.database_url), ObjectStore(options))

    def source_urls(self) -> dict[str, str]:
        """Postgres URLs by the names that SQL sources use, in lower and in upper case.

        A user's query on the platform's own database logs in as its reader where there is one: a query of the
        owner could end the platform's own sessions, even in a read-only transaction.
        """
        endpoints = self.endpoints
        urls = {"platform": endpoints.read_only_database_url or endpoints.database_url}
        for name, url in self.settings.sources.items():
            urls[name.lower()] = urls[name.upper()] = url.get_secret_value()
        return urls

    def target_urls(self) -> dict[str, str]:
        """Postgres URLs by the names that `write_back` uses, in lower and in upper case."""
        urls = {}
        for name, url in self.settings.targets.items():
            urls[name.lower()] = urls[name.upper()] = url.get_secret_value()
        return urls

    def serving(self, spec: BatchJobSpec) -> Serving:
        """Which engine serves a job, and how.

        Raises:
            ConfigurationError: the engine that is asked for cannot serve here.
        """
        return Serving.of(self.settings.engine, spec.options)

    def parse_options(self, spec: BatchJobSpec) -> ParseOptions:
        """How the requests of a job are parsed here.

        Raises:
            ConfigurationError: the engine that is asked for cannot serve here.
        """
        serving = self.serving(spec)
        return ParseOptions(
            model=spec.model,
            strict_model=spec.options.strict_model,
            default_max_tokens=spec.options.default_max_tokens,
            chat_template_kwargs=spec.options.chat_template_kwargs,
            keeps_schemas=serving.is_vllm,
            lora_adapters=frozenset(serving.lora_adapters),
        )

    def engine_name(self, spec: BatchJobSpec) -> str:
        """The engine that serves a job here; where none can, the one that it asks for."""
        try:
            return self.serving(spec).engine.value
        except ConfigurationError:
            return spec.options.engine.value

    def model_spec(self, spec: BatchJobSpec) -> ModelSpec:
        """Sizes of a job's model in the element type that the engine will serve it in.

        Raises:
            ConfigurationError: the model is not known, or the formulas do not cover it.
        """
        return self.serving(spec).model_spec(self.models.resolve(spec.model), spec.model)

    def device_profile(self) -> DeviceProfile:
        """The device that is planned for and that windows are reckoned with.

        Raises:
            ConfigurationError: there is no such profile.
        """
        return load_device_profile(self.settings.engine.device_profile)

    def engine_limits(self, spec: BatchJobSpec, model: ModelSpec) -> EngineLimits:
        """What the engine of a job will be opened with in this process.

        Raises:
            ConfigurationError: its KV cache has no room for a single block.
        """
        return self.serving(spec).limits(model, self.device_profile())

    def rank_devices(self, spec: BatchJobSpec) -> tuple[str, ...]:
        """The device of each rank of a job.

        Raises:
            ConfigurationError: the job asks for more ranks than there are devices.
        """
        num_devices = self.serving(spec).num_devices
        return rank_devices(self.settings.engine.device, spec.options.ranks, num_devices)

    def engine(
        self, spec: BatchJobSpec, rank: int, devices: Sequence[str], held_files: Sequence[int] = ()
    ) -> EngineProcess:
        """The engine of one rank of a job, in a process of its own that is not started yet.

        Args:
            spec: the job.
            rank: the rank, from 0.
            devices: the devices of all its ranks; those on one device share its cores.
            held_files: open file descriptors that the process keeps open until it ends.

        Raises:
            ConfigurationError: the model is not known, or an option makes no sense.
        """
        engine, serving = self.settings.engine, self.serving(spec)
        common: dict[str, Any] = {
            "model_folder": str(self.models.resolve(spec.model)),
            "policy": spec.options.policy.value,
            "device_profile": self.device_profile(),
            "dtype": engine.dtype,
            "device": devices[rank],
            "block_size": serving.block_size,
            "kv_capacity_bytes": serving.kv_capacity_bytes,
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "num_threads": engine.num_threads or threads_of_rank(devices[rank], devices),
            "seed": spec.options.seed + rank,
            "request_timeout_s": spec.options.request_timeout_s,
        }
        if serving.is_vllm:
            vllm_options = VllmEngineOptions(**common, passed=serving.vllm_options)
            return EngineProcess(partial(make_vllm_engine, vllm_options), held_files)
        return EngineProcess(partial(make_torch_engine, TorchEngineOptions(**common)), held_files)

    def close(self) -> None:
        """Closes connections. Idempotent."""
        self.database.dispose()
