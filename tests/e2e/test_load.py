"""Hundreds of samples at once: all resolve, and nobody's heartbeat waits for them.

Server, storm and heartbeats are three processes, so that what is measured is the server.
"""

import asyncio
import json
import subprocess
import sys

import httpx
import pytest

from .kit import KEY, MODEL

SAMPLES = 600

HEARTBEATS = """
import json, sys, time, httpx
url, key, session = sys.argv[1:]
client = httpx.Client(headers={"X-API-Key": key}, timeout=30)
beats = []
def beat():
    started = time.monotonic()
    answer = client.post(url + "/api/v1/session_heartbeat", json={"session_id": session})
    assert answer.status_code == 200
    beats.append(time.monotonic() - started)
beat()
print("ready", flush=True)
import select
while not select.select([sys.stdin], [], [], 0.05)[0]:
    beat()
print(json.dumps(sorted(beats)))
"""


@pytest.mark.nightly
def test_six_hundred_samples_leave_heartbeats_alone(model_folder, tmp_path):
    serve = [sys.executable, "-m", "trimtab.cli", "serve", "--model", f"{MODEL}={model_folder}"]
    server = subprocess.Popen(
        [*serve, "--port", "0", "--data-dir", str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        lines = [server.stdout.readline() for _ in range(3)]
        url = lines[1].strip().removeprefix("export TINKER_BASE_URL=")
        found, beats = asyncio.run(storm(url))
    finally:
        server.terminate()
        server.communicate()
    assert len(found) == SAMPLES and all(found)
    p99 = beats[int(0.99 * (len(beats) - 1))]
    print(f"{len(beats)} heartbeats, p50 {beats[len(beats) // 2]:.3f} s, p99 {p99:.3f} s")
    assert p99 < 0.2


async def storm(url):
    headers = {"X-API-Key": KEY}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=f"{url}/api/v1", headers=headers, timeout=60, limits=limits
    ) as client:

        async def post(route, **body):
            return await client.post(f"/{route}", json=body)

        session = (await post("create_session")).json()["session_id"]
        made = await post(
            "create_sampling_session",
            session_id=session, sampling_session_seq_id=0, base_model=MODEL,
        )  # fmt: skip
        sampler = made.json()["sampling_session_id"]

        async def sample(seq_id):
            promise = await post(
                "asample", sampling_session_id=sampler, seq_id=seq_id,
                prompt={"chunks": [{"tokens": [5, 6]}]}, sampling_params={"max_tokens": 1},
            )  # fmt: skip
            request_id = promise.json()["request_id"]
            while (r := await post("retrieve_future", request_id=request_id)).status_code == 408:
                pass
            return r.headers["content-type"] == "application/x-protobuf"

        command = [sys.executable, "-c", HEARTBEATS, url, KEY, session]
        pipe = asyncio.subprocess.PIPE
        beating = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        await beating.stdout.readline()
        found = await asyncio.gather(*(sample(seq_id) for seq_id in range(SAMPLES)))
        told, _ = await beating.communicate(b"done\n")
        return found, json.loads(told)
