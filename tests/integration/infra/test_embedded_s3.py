"""The embedded S3 server of a stack: keys, objects, kills."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from infra.state import StackState
from infra.supervisor import LocalStack, ServiceState

pytestmark = pytest.mark.s3


def ignore(line: str) -> None:
    pass


@contextmanager
def client_of(state: StackState, secret_key: str | None = None) -> Iterator[Any]:
    client = boto3.client(
        "s3",
        endpoint_url=state.s3_endpoint_url,
        region_name=state.s3_region,
        aws_access_key_id=state.s3_access_key,
        aws_secret_access_key=secret_key or state.s3_secret_key,
        config=Config(retries={"total_max_attempts": 1}),
    )
    try:
        yield client
    finally:
        client.close()


def put(state: StackState, key: str, body: bytes) -> None:
    with client_of(state) as client:
        client.put_object(Bucket=state.s3_bucket, Key=key, Body=body)


def get(state: StackState, key: str) -> bytes:
    with client_of(state) as client, client.get_object(Bucket=state.s3_bucket, Key=key)["Body"] as body:
        content: bytes = body.read()
    return content


def keys_of(state: StackState) -> list[str]:
    with client_of(state) as client:
        listing = client.list_objects_v2(Bucket=state.s3_bucket)
    return [entry["Key"] for entry in listing.get("Contents", [])]


def test_objects_survive_down_and_up(s3_stack: LocalStack) -> None:
    state = s3_stack.up(ignore, serve=False)
    put(state, "in/one.jsonl", b"{}\n")

    s3_stack.down(ignore)

    assert s3_stack.status()[1].state is ServiceState.STOPPED
    assert s3_stack.up(ignore, serve=False) == state
    assert get(state, "in/one.jsonl") == b"{}\n"


def test_a_kill_leaves_whole_objects_only(
    s3_stack: LocalStack, kill_service: Callable[[LocalStack, str], None]
) -> None:
    state = s3_stack.up(ignore, serve=False)
    put(state, "in/one.jsonl", b"{}\n")
    kill_service(s3_stack, "s3")
    # What the server leaves when it is killed in the middle of an upload, beside a key that only looks alike.
    folder = s3_stack.home / "s3" / state.s3_bucket / "in"
    (folder / f".tmp.{'0af3' * 8}").write_bytes(b"half an obj")
    (folder / ".tmp.mine").write_bytes(b"whole")

    assert s3_stack.up(ignore, serve=False) == state

    assert get(state, "in/one.jsonl") == b"{}\n"
    assert keys_of(state) == ["in/.tmp.mine", "in/one.jsonl"]


def test_wrong_secret_key_is_refused(s3_stack: LocalStack) -> None:
    state = s3_stack.up(ignore, serve=False)
    with (
        client_of(state, secret_key="guess") as client,
        pytest.raises(ClientError, match="SignatureDoesNotMatch"),
    ):
        client.list_buckets()


def test_a_stranger_with_a_recorded_pid_is_left_alone(s3_stack: LocalStack) -> None:
    s3_stack.up(ignore, serve=False)
    s3_stack.down(ignore)
    # The record of an earlier boot, whose pid now belongs to this very process.
    record = s3_stack.home / "processes" / "s3.json"
    command = ["python", "-m", "nanio", "serve"]
    record.write_text(
        json.dumps({"pid": os.getpid(), "started_at_s": 1.0, "command": command, "fingerprint": ""})
    )

    assert s3_stack.status()[1].state is ServiceState.STOPPED
    s3_stack.down(ignore)
