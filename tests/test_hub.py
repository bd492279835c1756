"""Tests of checkpoints from a hub, with names like "org/name": downloaded files, and errors."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import llada_config, nemotron_config, write_adapter, write_checkpoint
from click.testing import CliRunner, Result
from hub_server import COMMIT, REPOSITORY, HubServer

from dlm_export.bundle.folder import sha256
from dlm_export.checkpoints.guard import HubError
from dlm_export.checkpoints.hub import HubName
from dlm_export.checkpoints.local import local
from dlm_export.cli import main

pytest.importorskip("huggingface_hub")
NAME = f"hf:{REPOSITORY}"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small LLaDA checkpoint.

    The checkpoint contains a Python file and a file of pickled weights. Neither may be
    downloaded.
    """
    folder = write_checkpoint(tmp_path_factory.mktemp("hub") / "tiny", llada_config(), seed=3)
    (folder / "modeling_llada.py").write_text("raise SystemExit('executed')")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    return folder


@pytest.fixture
def hub(repository: Path, tmp_path: Path) -> Iterator[HubServer]:
    folder = Path(shutil.copytree(repository, tmp_path / "repository"))
    with HubServer(folder) as server:
        yield server


@pytest.fixture(autouse=True)
def _at_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use the test's server as hub, with an empty cache."""
    point_to(hub, monkeypatch, tmp_path)


def point_to(server: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    template = f"{server.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    (tmp_path / "temporary").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for name, value in {
        "ENDPOINT": server.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(constants, name, value)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def download(server: HubServer, name: str) -> set[str]:
    """Download a checkpoint as a build does. Return the names of the files that the server sent."""
    server.sent.clear()
    with local(HubName.parse(name)) as found:
        for file in ("config.json", "model.safetensors"):
            assert sha256(Path(found.path) / file) == sha256(server.folder / file)
    return {file for file in server.sent if file}


def refused(done: Result, code: int, sentence: str) -> None:
    assert done.exit_code == code, done.output
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert sentence in lines[0]
    assert done.stdout == ""


@pytest.mark.parametrize("command", [["inspect"], ["plan", "--targets", "cpu"]])
def test_headers_are_read_without_the_weights(
    hub: HubServer, tmp_path: Path, command: list[str]
) -> None:
    done = run(*command, f"{NAME}@v1", "--json")
    assert done.exit_code == 0, done.stderr
    weights = hub.folder / "model.safetensors"
    header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    assert hub.sent["model.safetensors"] == header < weights.stat().st_size / 2
    assert list((tmp_path / "temporary").iterdir()) == []
    if command == ["inspect"]:
        told = json.loads(done.stdout)
        same_folder = run("inspect", str(hub.folder), "--json")
        same = json.loads(same_folder.stdout)
        assert (told["checkpoint"], told["revision"]) == (f"{NAME}@v1", COMMIT)
        assert (same["checkpoint"], same["revision"]) == (str(hub.folder), None)
        for each in (told, same):
            del each["checkpoint"], each["revision"]
        assert told == same


def test_adapters_are_fetched_and_other_files_of_folders_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = nemotron_config()
    folder = write_checkpoint(tmp_path / "adapted", config)
    write_adapter(folder, config)
    shutil.copytree(folder / "linear_spec_lora", folder / "other_lora")
    (folder / "other_lora" / "notes.json").write_text("{}")
    options = ("--adapter", "other_lora", "--json")
    with HubServer(folder) as server:
        point_to(server, monkeypatch, tmp_path)
        refused(run("inspect", NAME), 2, "Pass --adapter other_lora to merge it")
        done = run("inspect", NAME, *options)
        assert done.exit_code == 0, done.stderr
        told = json.loads(done.stdout)
        by_path = json.loads(run("inspect", str(folder), *options).stdout)
        assert told["network"] == by_path["network"]
        assert told["stored_bytes"] == by_path["stored_bytes"]
        assert told["network"]["layers"][0]["draft_updates"][0]["rank"] == 4
        assert "other_lora/notes.json" not in server.sent
        weights = folder / "linear_spec_lora" / "adapter_model.safetensors"
        header = 2 * (8 + int.from_bytes(weights.read_bytes()[:8], "little"))  # two commands
        assert server.sent["linear_spec_lora/adapter_model.safetensors"] == header


def test_a_build_fetches_data_only_and_records_where_it_came_from(
    hub: HubServer, tmp_path: Path
) -> None:
    done = run("build", NAME, "-o", "bundle", "--no-verify")
    assert done.exit_code == 0, done.stderr
    fetched = {name for name in hub.sent if name}
    kept = {path.name for path in hub.folder.iterdir()} - {"modeling_llada.py", "pytorch_model.bin"}
    assert fetched == kept
    assert not any("modeling_llada" in request or ".bin" in request for request in hub.requests)
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert manifest["source"]["hub"] == {
        "repository": REPOSITORY,
        "revision": COMMIT,
        "files": {name: sha256(hub.folder / name) for name in sorted(kept)},
    }
    assert download(hub, f"{NAME}@{COMMIT}") == set(), "the cache has the files"


def test_an_interrupted_download_leaves_no_bundle_and_is_continued(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.cut.add("model.safetensors")
    build = ("build", NAME, "-o", "bundle", "--no-verify")
    refused(run(*build), 1, f"{NAME}: model.safetensors: the download failed")
    assert not (tmp_path / "bundle").exists()
    hub.cut.clear()
    assert download(hub, NAME) == {"model.safetensors"}


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_with_a_wrong_hash_is_rejected_and_removed(
    hub: HubServer, tmp_path: Path, file: str
) -> None:
    hub.forged.add(file)
    build = ("build", NAME, "-o", "bundle", "--no-verify")
    refused(run(*build), 1, f"{NAME}: {file} does not have the hash")
    assert not (tmp_path / "bundle").exists()
    assert not list((tmp_path / "cache").rglob(file))
    hub.forged.clear()
    assert file in download(hub, NAME)


def test_a_gated_repository_says_how_to_get_access(hub: HubServer, tmp_path: Path) -> None:
    hub.is_gated = True
    for command in (("inspect", NAME), ("build", NAME, "-o", "bundle")):
        refused(run(*command), 2, "the repository is gated: accept its terms")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("hf:org/absent", "no such repository, or a private one"),
        (f"{NAME}@v9", "the repository has no such revision"),
        ("hf:tiny", "is no name on the hub: write hf:ORG/NAME[@REVISION]"),
        ("hf:org/../etc", "is no name on the hub"),
    ],
)
def test_a_wrong_name_is_one_sentence(
    hub: HubServer, tmp_path: Path, name: str, sentence: str
) -> None:
    done = run("inspect", name)
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_missing_files_are_named(hub: HubServer, tmp_path: Path) -> None:
    hub.hidden.add("config.json")
    refused(run("inspect", NAME), 2, f"{NAME}: config.json: the file is missing")
    (hub.folder / "model.safetensors").unlink()
    refused(run("inspect", NAME), 2, "the repository has no *.safetensors")


def test_a_server_without_ranges_never_sends_the_weights(hub: HubServer, tmp_path: Path) -> None:
    hub.has_ranges = False
    refused(run("inspect", NAME), 1, "does not send parts of files")
    assert list((tmp_path / "temporary").iterdir()) == []


OUTSIDE = "../../../../../outside"


@pytest.mark.parametrize(
    ("headers", "hidden", "sentence"),
    [
        ({"ETag": f'"{OUTSIDE}"'}, "", "it sent a malformed ETag"),
        ({"X-Linked-Etag": OUTSIDE}, "", "it sent a malformed ETag"),
        ({"ETag": f'"{"e" * 5000}"'}, "", "it sent a malformed ETag"),
        ({"X-Repo-Commit": OUTSIDE}, "", "it sent a file of another commit"),
        ({"X-Repo-Commit": OUTSIDE}, "config.json", "it sent a file of another commit"),
        ({"Content-Encoding": "gzip"}, "", "it sent compressed data"),
        ({"Location": "file:///etc/passwd"}, "", "config.json"),
        ({"X-Error-Message": "\x1b[2Jgone"}, "config.json", "the file is missing on the hub"),
    ],
)
def test_headers_of_a_hostile_hub_change_no_file_outside_the_cache(
    hub: HubServer,
    tmp_path: Path,
    headers: dict[str, str],
    hidden: str,
    sentence: str,
) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    hub.headers, hub.hidden = headers, {hidden}
    with pytest.raises(HubError) as raised, local(HubName.parse(NAME)):
        pytest.fail("the files were accepted")
    assert sentence in str(raised.value)
    assert str(raised.value).isprintable()
    assert outside.read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} <= {
        *("outside", "cache", "repository", "temporary")
    }


@pytest.mark.parametrize("headers_only", [True, False])
def test_an_answer_without_end_is_given_up(hub: HubServer, headers_only: bool) -> None:
    file = "model.safetensors" if headers_only else "config.json"
    hub.endless.add(file)
    with (
        pytest.raises(HubError, match=f"{file}: the hub's answer is malformed: it sent more bytes"),
        local(HubName.parse(NAME), headers_only=headers_only),
    ):
        pytest.fail("the file was accepted")
    assert hub.sent[file] < 1 << 24


def _listed(**changes: Any) -> dict[str, Any]:
    """Return a listing whose last file is changed."""
    files = [
        {"rfilename": n, "size": 2, "blobId": 40 * "0"} for n in ("config.json", "a.safetensors")
    ]
    return {"id": REPOSITORY, "sha": COMMIT, "siblings": [*files, files[1] | changes]}


LISTINGS: dict[str, Any] = {
    "no JSON": b"<html>",
    "no commit": {"id": REPOSITORY, "sha": None},
    "a path as commit": _listed() | {"sha": OUTSIDE},
    "files in an object": _listed() | {"siblings": {"a": "b"}},
    "a number as name": _listed(rfilename=7),
    "a name with NUL": _listed(rfilename="a\0.safetensors"),
    "a name with an escape": _listed(rfilename="\x1b[2J.safetensors"),
    "a file as folder": _listed(rfilename="config.json/adapter_config.json"),
    "a long name": _listed(rfilename=f"{'x' * 300}.safetensors"),
    "no size": _listed(size=None),
    "a huge size": _listed(size=2**80),
    "lfs without a hash": _listed(lfs={"size": 1}),
    "a date that is none": _listed() | {"lastModified": "yesterday"},
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("what", LISTINGS)
def test_a_malformed_listing_is_one_sentence(hub: HubServer, tmp_path: Path, what: str) -> None:
    listed = LISTINGS[what]
    hub.listed = listed if isinstance(listed, bytes) else json.dumps(listed).encode()
    with pytest.raises(HubError, match=f"^{NAME}: [ -~]+$"), local(HubName.parse(NAME)):
        pytest.fail("the files were accepted")
    assert not (tmp_path / "cache").exists()


def test_without_the_prefix_nothing_is_fetched(hub: HubServer, tmp_path: Path) -> None:
    done = run("inspect", REPOSITORY)
    assert done.exit_code == 2
    assert "does not exist" in done.stderr
    assert run("inspect", str(hub.folder)).exit_code == 0
    assert hub.requests == []


def test_names_are_parsed() -> None:
    assert HubName.parse("hf:a/b") == HubName("a/b")
    assert HubName.parse("hf:a/b@refs/pr/1") == HubName("a/b", "refs/pr/1")
    assert str(HubName.parse("hf:a/b.c-1@v1")) == "hf:a/b.c-1@v1"
    for wrong in ("hf:", "hf:a", "hf:a/b/c", "hf:a/b@", "hf:/b", "hf:a/b@../x", "hf:.a/b"):
        with pytest.raises(ValueError, match="no name on the hub"):
            HubName.parse(wrong)
