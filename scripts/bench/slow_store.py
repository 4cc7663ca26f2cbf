"""An object store on this machine that answers as slowly as one far away: S3's requests to read and to list, over HTTP.

Every answer takes a fixed time and, by its size, the time of a fixed rate, each request by itself: so requests that
wait for each other add up, and requests at the same time do not. All of the time passes before the first byte, since
who reads waits for the last one. It runs in a process of its own and takes CPU time that a store elsewhere would not
take, so what is measured with it is rather too slow than too quick.
"""

import asyncio
import contextlib
import json
import multiprocessing
import re
import urllib.parse
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

BUCKET = "shelf"
KINDS = ("get", "head", "list", "bytes")


class SlowStore:
    """What is counted of a store: requests by kind, and the bytes of answers."""

    def __init__(self, counts: Any) -> None:
        self._counts = counts

    def counts(self) -> dict[str, int]:
        """Of everything since it started."""
        return dict(zip(KINDS, self._counts, strict=True))


def _listing(root: Path, query: dict[str, list[str]]) -> bytes:
    prefix = query.get("prefix", [""])[0]
    keys = sorted(str(file.relative_to(root)) for file in root.rglob("*") if file.is_file())
    found = [key for key in keys if key.startswith(prefix)]
    entries = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{(root / key).stat().st_size}</Size>"
        f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;{key}&quot;</ETag></Contents>"
        for key in found
    )
    body = f"<ListBucketResult><IsTruncated>false</IsTruncated><KeyCount>{len(found)}</KeyCount>{entries}"
    return f'<?xml version="1.0"?>{body}</ListBucketResult>'.encode()


async def _answer(
    root: Path, reader: Any, writer: asyncio.StreamWriter, counts: Any, latency: float, rate: float
) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, target, _ = head.split("\r\n", 1)[0].split(" ")
            url = urllib.parse.urlsplit(target)
            key = urllib.parse.unquote(url.path).removeprefix(f"/{BUCKET}").lstrip("/")
            await asyncio.sleep(latency)
            if not key:
                counts[2] += 1
                body = _listing(root, urllib.parse.parse_qs(url.query))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                continue
            counts[0 if method == "GET" else 1] += 1
            file = root / key
            if not file.is_file():
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                continue
            size = file.stat().st_size
            span = re.search(r"(?im)^range: *bytes=(\d+)-(\d+)", head)
            begin, end = (int(span[1]), min(int(span[2]) + 1, size)) if span else (0, size)
            status = "206 Partial Content" if span else "200 OK"
            changed = formatdate(file.stat().st_mtime, usegmt=True)
            more = f"Content-Range: bytes {begin}-{end - 1}/{size}\r\n" if span else ""
            writer.write(
                f'HTTP/1.1 {status}\r\nContent-Length: {end - begin}\r\n{more}ETag: "{size}"\r\n'
                f"Last-Modified: {changed}\r\nAccept-Ranges: bytes\r\n\r\n".encode()
            )
            if method == "GET":
                counts[3] += end - begin
                await asyncio.sleep((end - begin) / rate)
                with file.open("rb") as content:
                    await asyncio.get_running_loop().sendfile(writer.transport, content, begin, end - begin)
    writer.close()


def _serve(root: Path, counts: Any, port: Any, latency: float, rate: float) -> None:
    async def run() -> None:
        async def each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _answer(root, reader, writer, counts, latency, rate)

        server = await asyncio.start_server(each, "127.0.0.1", 0, backlog=1024)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


@contextlib.contextmanager
def slow_store(root: Path, config: Path, *, latency: float, rate: float) -> Iterator[tuple[SlowStore, str]]:
    """Serves the files of a directory, and writes the configuration of multistorageclient for it to `config`.

    Args:
        latency: seconds before each answer.
        rate: bytes per second of each answer.

    Yields:
        The store, and the address of the directory.
    """
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", len(KINDS), lock=False)
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(root, counts, theirs, latency, rate), daemon=True)
    process.start()
    profile = f"slow-{process.pid}"
    options = {"base_path": BUCKET, "endpoint_url": f"http://127.0.0.1:{mine.recv()}", "region_name": "us-east-1"}
    keys = {"type": "S3Credentials", "options": {"access_key": "k", "secret_key": "s"}}
    described = {"storage_provider": {"type": "s3", "options": options}, "credentials_provider": keys}
    config.write_text(json.dumps({"profiles": {profile: described}}))
    try:
        yield SlowStore(counts), f"msc://{profile}"
    finally:
        process.terminate()
        process.join()
