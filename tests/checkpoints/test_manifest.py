import hashlib

import pytest

from sse_convert.checkpoints.manifest import (
    FILE,
    FileRecord,
    add_to_manifest,
    added_files,
    changed_files,
    inherited_records,
    read_manifest,
    write_manifest,
)
from sse_convert.errors import CheckpointError

CONTENT = {"config.json": b"{}", "a.safetensors": b"12345678", "assets/x.png": b"", "README.md": b"card"}


@pytest.fixture
def folder(tmp_path):
    """A folder with a manifest; its card is not in it."""
    for name, content in CONTENT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x").write_text("what a download leaves")
    write_manifest(tmp_path)
    return tmp_path


def wrong(folder):
    return list(changed_files(folder, read_manifest(folder), {}))


def test_records(folder):
    records = read_manifest(folder)
    assert records == {
        name: FileRecord(len(content), hashlib.sha256(content).hexdigest())
        for name, content in CONTENT.items()
        if name != "README.md"
    }
    assert (wrong(folder), added_files(folder, records)) == ([], [])


def test_no_manifest(tmp_path):
    assert read_manifest(tmp_path) is None
    assert inherited_records(tmp_path, ["config.json"]) == {}
    (tmp_path / "stage.json").write_text("{}")
    add_to_manifest(tmp_path, "stage.json")
    assert read_manifest(tmp_path).keys() == {"stage.json"}


def test_every_kind_of_change_is_named(folder):
    (folder / "config.json").write_bytes(b"[]")
    (folder / "a.safetensors").write_bytes(b"123")
    (folder / "assets" / "x.png").rename(folder / "assets" / "y.png")
    (folder / "README.md").unlink()
    assert wrong(folder) == [
        "a.safetensors has 3 bytes, 8 were written",
        "assets/x.png is missing",
        "config.json is not what was written (another SHA-256)",
    ]
    assert added_files(folder, read_manifest(folder)) == ["assets/y.png"]


def test_digests_that_are_known_are_not_computed_again(folder):
    known = dict.fromkeys(CONTENT, "0" * 64)
    assert len(list(changed_files(folder, read_manifest(folder), known))) == 3


def test_any_changed_byte_of_the_manifest_shows(folder):
    path = folder / FILE
    written = path.read_bytes()
    for at in range(len(written)):
        path.write_bytes(written[:at] + bytes([written[at] ^ (1 if at % 2 else 32)]) + written[at + 1 :])
        with pytest.raises(CheckpointError, match=r"manifest\.json is not as it was written"):
            read_manifest(folder)


def test_files_that_come_later(folder):
    (folder / "stage.json").write_text("{}")
    add_to_manifest(folder, "stage.json")
    assert read_manifest(folder)["stage.json"].bytes == 2
    assert wrong(folder) == []


def test_records_of_files_that_are_taken_over(folder):
    write_manifest(folder, {"a.safetensors": FileRecord(8, None, "deferred")})
    assert inherited_records(folder, ["a.safetensors", "config.json", "new"]).keys() == {"config.json"}
    (folder / "a.safetensors").write_bytes(b"other 8 ")
    assert wrong(folder) == []
