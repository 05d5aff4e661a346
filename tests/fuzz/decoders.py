"""Coverage-guided fuzzing of the decoders: bytes in, a request or a user error out, nothing else.

    python -m tests.fuzz.decoders --runs 200000

Needs atheris (`pip install '.[fuzz]'`, Linux), which the package does not: where it is missing this
says so and ends well. The first byte of each input picks the decoder.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from random import Random

LIMIT = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=int, default=200_000)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("decoders: not fuzzed, atheris is not installed (pip install '.[fuzz]')")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        explore(Path(folder), options.runs, options.seconds, options.seed)
    return 0


def explore(folder: Path, runs: int, seconds: int, seed: int) -> None:
    """Ends the process: with status 0 after `runs` inputs, else with the input that broke it."""
    import atheris

    with atheris.instrument_imports(include=["trimtab.wire"]):
        from trimtab.wire import codec, decode, fields, tensors  # noqa: F401
    for name, body in seeds():
        (folder / name).write_bytes(body)
    flags = [f"-runs={runs}", f"-max_total_time={seconds}", f"-seed={seed}", "-max_len=4096"]
    flags += ["-timeout=10", "-rss_limit_mb=2048", "-artifact_prefix=fuzz-"]
    atheris.Setup([sys.argv[0], *flags, str(folder)], one)
    atheris.Fuzz()


def one(data: bytes) -> None:
    """Any error but a user's reaches atheris, which keeps the input."""
    from trimtab.errors import UserError
    from trimtab.wire.codec import KEYS, WireCodec, inflate, place
    from trimtab.wire.decode import DECODERS

    if not data:
        return
    kinds = sorted(DECODERS)
    kind, body = kinds[data[0] % len(kinds)], data[1:]
    if data[0] >= 128:
        body, error = inflate(body, "zstd", LIMIT)
        assert len(body) <= LIMIT or error is not None
    found = place(kind, body)
    assert found is None or (kind in KEYS and 0 <= found[1] < 2**63)
    try:
        WireCodec(LIMIT).decode(kind, body)
    except UserError as error:
        assert error.message and len(error.message) < 4096


def seeds() -> list[tuple[str, bytes]]:
    """Valid bodies to begin from, one of each kind, and one compressed."""
    import zstandard

    from trimtab.wire.app import ROUTES
    from trimtab.wire.decode import DECODERS

    from .bodies import PROTO_BODIES, World
    from .mutate import whole

    session = "0b8fd3f2-0000-4000-8000-000000000000"
    world = World(
        session, session, f"{session}:train:0", f"{session}:sample:0",
        f"tinker://{session}:train:0/weights/a", f"{session}:sample:0:0:0", [5, 6, 7],
    )  # fmt: skip
    kinds, found = sorted(DECODERS), []
    paths = {"/asample": "sample"} | {f"/{kind}": kind for kind in kinds}
    for route in ROUTES:
        if (kind := paths.get(route.path)) is not None:
            body = whole(route, world, Random(0)).body
            found.append((kind, bytes([kinds.index(kind)]) + body))
    proto = kinds.index("forward_backward")
    for make in PROTO_BODIES:
        found.append((make.__name__, bytes([proto]) + make(world).SerializeToString()))
    packed = zstandard.ZstdCompressor().compress(found[-1][1][1:])
    first = next(n for n in range(128, 256) if n % len(kinds) == proto)
    return [*found, ("packed", bytes([first]) + packed)]


if __name__ == "__main__":
    sys.exit(main())
