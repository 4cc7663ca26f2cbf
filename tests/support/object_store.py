"""A local object store (moto) whose answers can fail as those of a busy one do."""

import itertools
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUCKET = "shelf"
READ_SECONDS = 1.0
"""After which the client gives up waiting for an answer."""
_numbers = itertools.count()


class ObjectStore:
    """Serves the files of a directory as objects. ``fault`` is how it answers to each request: None as it should,
    ``503``, ``500``, ``hang`` (no answer in time), ``cut`` (half of the content), or ``less`` (a range that is shorter
    than asked for, as HTTP allows); ``asked`` counts the requests. `fail_at_random` gives each request one of these."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self.fault: str | None = None
        self.asked = 0
        self.given: Counter[str] = Counter()
        self._random: tuple[random.Random, dict[str, float]] | None = None
        self.before: Callable[[], None] = lambda: None
        self._app = app

    def fail_at_random(self, seed: int, **shares: float) -> None:
        """From now on, such shares of all requests have these faults."""
        self._random, self.given = (random.Random(seed), shares), Counter()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        self.asked += 1
        self.before()
        fault = self.fault
        if self._random is not None:
            drawn = self._random[0].random()
            for fault, share in self._random[1].items():  # noqa: B007
                if (drawn := drawn - share) < 0:
                    break
            else:
                fault = None
        if fault == "less" and not environ.get("HTTP_RANGE"):
            fault = None
        self.given[fault or "none"] += 1
        if fault == "hang":
            time.sleep(2 * READ_SECONDS)
        if fault == "less":
            first, last = map(int, environ["HTTP_RANGE"].removeprefix("bytes=").split("-"))
            environ["HTTP_RANGE"] = f"bytes={first}-{(first + last) // 2}"
        if fault == "cut" and environ["REQUEST_METHOD"] == "GET":
            body = b"".join(self._app(environ, start))
            return [body[: len(body) // 2]]  # the header says more
        if fault in (None, "cut", "less"):
            return self._app(environ, start)
        status, code = ("500 Oops", "InternalError") if fault == "500" else ("503 Slow Down", "SlowDown")
        start(status, [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>later</Message></Error>".encode()]


@contextmanager
def object_store(files: Path, folder: Path) -> Iterator[tuple[ObjectStore, str, Path]]:
    """Runs a store with the files of a directory; its configuration for multistorageclient is written to ``folder``.

    Returns:
        The store, the address of the directory, and the configuration.
    """
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    store = ObjectStore(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, store, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s"}
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
    client.create_bucket(Bucket=BUCKET)
    for file in files.rglob("*"):
        if file.is_file():
            client.put_object(Bucket=BUCKET, Key=str(file.relative_to(files.parent)), Body=file.read_bytes())
    profile = f"store-{os.getpid()}-{next(_numbers)}"  # clients and copies on disk are remembered by a profile
    options = {
        "base_path": BUCKET,
        "endpoint_url": endpoint,
        "region_name": "us-east-1",
        "read_timeout": READ_SECONDS,
        "connect_timeout": READ_SECONDS,
        "retries": {"total_max_attempts": 1},
    }
    credentials = {"type": "S3Credentials", "options": {"access_key": "k", "secret_key": "s"}}
    described = {
        "storage_provider": {"type": "s3", "options": options},
        "credentials_provider": credentials,
        "retry": {"attempts": 1, "delay": 0.01},
    }
    config = folder / "msc.json"
    config.write_text(json.dumps({"profiles": {profile: described}}))
    try:
        yield store, f"msc://{profile}/{files.name}", config
    finally:
        server.shutdown()
        server.server_close()
