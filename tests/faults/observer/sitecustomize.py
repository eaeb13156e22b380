"""Every Python process of the stack under test loads this: it writes down which requests engines are given.

Python imports a module of this name at its start from wherever PYTHONPATH leads. One line of JSON per fetch
goes to the file that BLENDSERVE_ADMISSIONS names; a line is one write, so that a kill tears none apart.
"""

import importlib.util
import json
import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

OBSERVED_MODULE = "storage.request_shards"


class Observer(MetaPathFinder):
    """Wraps `RequestShards.fetch`, by which engines get their requests, once its module is loaded."""

    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        if name != OBSERVED_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_wrap(module) -> None:
            load(module)
            module.RequestShards.fetch = observed(module.RequestShards.fetch)

        spec.loader.exec_module = load_and_wrap
        return spec


def observed(fetch):
    def wrapped(shards, seqs):
        line = {"at_s": time.time(), "job_id": shards._job_id, "seqs": [int(seq) for seq in seqs]}
        descriptor = os.open(
            os.environ["BLENDSERVE_ADMISSIONS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)
        return fetch(shards, seqs)

    return wrapped


sys.meta_path.insert(0, Observer())
