"""The reader against files that wandb wrote and that a small writer here wrote: cut, flipped, damaged, killed."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from wandb.proto import wandb_internal_pb2 as messages

from reports.wandb_file import DamagedFile, read_records, read_run
from suite.tracking import Tracker
from suite.wandb_log import has_ended

BLOCK = 32768
ROOT = Path(__file__).resolve().parents[2]


def reference(data: bytes) -> list[tuple[int, bytes]]:
    """(offset behind it, payload) of every record of an undamaged file; checks nothing."""
    at, parts, found = 7, b"", []
    while at < len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append((at, parts))
            parts = b""
    return found


def write_log(payloads: list[bytes]) -> bytes:
    """The file that LevelDB's writer makes of the payloads, with wandb's header and checksum."""
    out = bytearray(b":W&B\xe1\xbe\x00")
    for payload in payloads:
        first = True
        while True:
            left = BLOCK - len(out) % BLOCK
            if left < 7:
                out += bytes(left)
                continue
            part, payload = payload[: left - 7], payload[left - 7 :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[first, not payload]
            body = bytes([kind]) + part
            out += struct.pack("<IH", zlib.crc32(body), len(part)) + body
            first = False
            if not payload:
                break
    return bytes(out)


def read_all(path: Path) -> tuple[list[bytes], bool, bool]:
    """(serialised records, truncated, damaged)"""
    reader, records = read_records(path), []
    try:
        for record in reader:
            records.append(record.SerializeToString(deterministic=True))  # noqa: PERF401 what came before the damage
    except DamagedFile:
        return records, reader.truncated, True
    return records, reader.truncated, False


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of wandb's own with a record of over 64 KiB (configuration) and one of over 32 KiB (a wide row)."""
    folder = tmp_path_factory.mktemp("real")
    config = {"arm": "a", "seed": 1, "run": {"notes": "x" * 70_000}}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_MODE", raising=False)
        with Tracker(folder, project="p", group="a", name="a-1", config=config) as tracker:
            for step in range(60):
                tracker.log(step, {"reward/mean": step / 7, "loss/kl": float("nan")})
            tracker.log(60, {f"eval/{'b' * 300}{i}/accuracy": i / 7 for i in range(110)})
            tracker.log_table(60, "eval/test/problems", (["uid", "reward"], [["a", float("nan")]]))
    (path,) = folder.rglob("run-*.wandb")
    return path


def test_the_real_file_holds_what_the_tests_need(real: Path) -> None:
    data = real.read_bytes()
    sizes = [len(payload) for _, payload in reference(data)]
    assert max(sizes) > 2 * BLOCK
    assert len([size for size in sizes if BLOCK < size < 2 * BLOCK]) >= 1
    records, truncated, damaged = read_all(real)
    assert (len(records), truncated, damaged) == (len(sizes), False, False)
    assert records == [
        messages.Record.FromString(payload).SerializeToString(deterministic=True) for _, payload in reference(data)
    ]
    assert has_ended(real)


def test_cut_anywhere_it_reads_the_prefix(real: Path, tmp_path: Path) -> None:
    data = real.read_bytes()
    ends = [end for end, _ in reference(data)]
    full, _, _ = read_all(real)
    rng = random.Random(5)
    borders = [b + d for b in range(BLOCK, len(data), BLOCK) for d in (-7, -1, 0, 1, 6, 7, 8)]
    near_ends = [end + d for end in ends[:: len(ends) // 8] for d in (-1, 0, 1, 6, 7, 8)]
    cuts = [*range(16), *borders, *near_ends, *(rng.randrange(len(data)) for _ in range(200))]
    path = tmp_path / "run-cut.wandb"
    for cut in cuts:
        path.write_bytes(data[:cut])
        records, truncated, damaged = read_all(path)
        whole = sum(end <= cut for end in ends)
        assert records == full[:whole], cut
        assert not damaged, cut
        assert truncated == (cut not in (7, *ends)), cut
        assert not has_ended(path) or cut == len(data)
        run = read_run(path)
        assert run.truncated == truncated
        assert run.exit_code is None or cut == len(data)


def test_no_flipped_byte_goes_unnoticed(real: Path, tmp_path: Path) -> None:
    data = real.read_bytes()
    full, _, _ = read_all(real)
    rng = random.Random(6)
    heads = [end + d for end, _ in reference(data)[:20] for d in range(7)]
    path = tmp_path / "run-flip.wandb"
    for at in [*range(7), *heads, *(rng.randrange(len(data)) for _ in range(200))]:
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        records, truncated, damaged = read_all(path)
        assert truncated or damaged, at
        assert records == full[: len(records)], at
        assert len(records) < len(full), at
        run = read_run(path)  # never raises
        assert bool(run.damage) == damaged


def payload(size: int) -> bytes:
    """A record whose bytes are `size` long (0, or at least 2)."""
    fill = max(size - 2, 0)
    while size and len(messages.Record(uuid="u" * fill).SerializeToString()) > size:
        fill -= 1
    return messages.Record(uuid="u" * fill).SerializeToString() if size else b""


@pytest.mark.parametrize("gap", [0, 1, 5, 6, 7, 8, 9, 20])
def test_records_at_the_end_of_a_block(gap: int, tmp_path: Path) -> None:
    """A first record that leaves `gap` bytes of its block, then one over two blocks, then small ones."""
    payloads = [payload(BLOCK - 7 - 7 - gap), payload(70_001), payload(2), payload(0), payload(33_000), payload(5)]
    assert len(payloads[0]) == BLOCK - 7 - 7 - gap
    path = tmp_path / "run-x.wandb"
    path.write_bytes(write_log(payloads))
    records, truncated, damaged = read_all(path)
    assert records == payloads
    assert not truncated
    assert not damaged
    if 0 < gap < 7:  # the bytes of the gap must be zero
        spoiled = bytearray(path.read_bytes())
        spoiled[BLOCK - 1] = 1
        path.write_bytes(spoiled)
        assert read_all(path) == (payloads[:1], False, True)


def chunk(kind: int, body: bytes, length: int | None = None) -> bytes:
    return (
        struct.pack("<IH", zlib.crc32(bytes([kind]) + body), len(body) if length is None else length)
        + bytes([kind])
        + body
    )


def test_what_wandb_cannot_have_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run-x.wandb"
    start, good = b":W&B\xe1\xbe\x00", payload(30)
    for data, message in (
        (b":W&B\xe1\xbe\x01" + chunk(1, good), "not a W&B file of a known version"),
        (b"PK\x03\x04 no such file", "not a W&B file of a known version"),
        (start + chunk(3, good), "byte 7: a chunk of type 3 cannot stand here"),
        (start + chunk(2, good) + chunk(1, good), "byte 44: a chunk of type 1 cannot stand here"),
        (start + chunk(9, good), "byte 7: unknown type of chunk 9"),
        (start + chunk(1, good, 32762), "byte 7: a chunk of 32762 bytes does not fit its block"),
        (start + chunk(1, b"\xff\xff\xff"), "byte 7: not a record of this wandb"),
    ):
        path.write_bytes(data)
        with pytest.raises(DamagedFile, match=message):
            list(read_records(path))
        assert f"{path}" in read_run(path).damage
        assert message in read_run(path).damage


def test_zeros_at_the_end_are_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "run-x.wandb"
    path.write_bytes(write_log([payload(30)]) + bytes(5_000))
    assert read_all(path) == ([payload(30)], True, False)


CHILD = """
import os, signal, sys, time
from pathlib import Path
from suite.tracking import Tracker
tracker = Tracker(Path(sys.argv[1]), project="p", group="a", name="a-1", config={"seed": 1}, run_id="k")
for step in range(400):
    tracker.log(step, {"reward/mean": step})
path, = Path(sys.argv[1]).rglob("run-k.wandb")
while path.stat().st_size < 100:  # until wandb has written something of it
    time.sleep(0.05)
os._exit(7) if sys.argv[2] == "_exit" else os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("how", "status"), [("_exit", 7), ("kill", -signal.SIGKILL)])
def test_a_killed_writer(how: str, status: int, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), how], env=environment, check=False, timeout=120)
    assert done.returncode == status
    (path,) = tmp_path.rglob("run-k.wandb")
    run = read_run(path)
    assert (run.run_id, run.damage, run.exit_code) == ("k", "", None)
    assert 0 < len(run.history) <= 400
    assert [row["reward/mean"] for row in run.history] == list(range(len(run.history)))


def test_records_come_one_by_one(real: Path) -> None:
    reader = read_records(real)
    assert isinstance(reader, Iterator)
    kinds = [next(reader).WhichOneof("record_type"), next(reader).WhichOneof("record_type")]
    assert kinds == ["header", "run"]
    assert [record.WhichOneof("record_type") for record in reader][-1] == "exit"
