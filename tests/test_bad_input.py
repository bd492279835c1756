"""For wrong input, the command line prints one sentence that names the input, and exits with the
right exit code.

Commands that fail leave no files behind.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from dlm_export import graph, memory, outputs
from dlm_export.bundle import folder as bundle_folder
from dlm_export.checkpoints.folder import CONFIG_LIMIT_BYTES
from dlm_export.cli import main
from dlm_export.graph import trace, write
from dlm_export.judging.accuracy import run
from dlm_export.judging.parity import against_torch, verdict
from dlm_runtime import Bundle
from dlm_runtime.errors import BundleError

Change = Callable[[Path], None]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
QUERY = "model.transformer.blocks.1.q_proj.weight"


def _fails(*args: object, code: int = 2, says: tuple[str, ...] = ()) -> str:
    """Run a command that must fail. Returns its only ``Error:`` line."""
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(
            f"a traceback instead of a sentence: {result.exception!r}"
        ) from result.exception
    # On a slow machine, commands also print their progress.
    lines = [line for line in result.output.strip().splitlines() if not line.endswith("in memory")]
    assert result.exit_code == code, result.output
    assert sum(line.startswith("Error: ") for line in lines) == 1
    # If an option is used wrongly, click prints the usage before the error. Any other error must be
    # a single line.
    assert len(lines) == 1 or lines[0].startswith("Usage: "), result.output
    assert len(lines[-1]) < 1500, "a sentence, not the input"
    for fragment in says:
        assert fragment in lines[-1]
    return lines[-1]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The path to which builds write. Its parent folder contains nothing else."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "bundle"


def _build_fails(
    checkpoint: Path, out: Path, *options: object, code: int = 2, says: tuple[str, ...] = ()
) -> str:
    sentence = _fails("build", checkpoint, "-o", out, *options, code=code, says=says)
    assert os.listdir(out.parent) == [], "something was left behind"
    return sentence


@pytest.fixture
def checkpoint(llada_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny LLaDA, which tests may damage."""
    return Path(shutil.copytree(llada_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def sharded(dream_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Dream in three shards, which tests may damage."""
    return Path(shutil.copytree(dream_checkpoint, tmp_path / "sharded"))


def _retensor(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(checkpoint / WEIGHTS)
    change(tensors)
    save_file(tensors, checkpoint / WEIGHTS)


def _reindex(checkpoint: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((checkpoint / INDEX).read_text())
    change(index["weight_map"])
    (checkpoint / INDEX).write_text(json.dumps(index))


def _tokenizer(checkpoint: Path, size: int) -> None:
    import tokenizers

    words = {f"w{i}": i for i in range(size)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(
        str(checkpoint / "tokenizer.json")
    )


def _snapshot(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# ---- The checkpoint's files ----


def _pickled(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")


def _pipe(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    os.mkfifo(checkpoint / "config.json")


def _offsets(checkpoint: Path) -> None:
    header = json.dumps(
        {QUERY: {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}
    ).encode()
    (checkpoint / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))


FILES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "no config.json": (lambda c: (c / "config.json").unlink(), ("config.json: no such file",)),
    "config.json is not JSON": (
        lambda c: c.joinpath("config.json").write_text("{"),
        ("config.json: not readable as JSON",),
    ),
    "config.json is nested": (
        lambda c: c.joinpath("config.json").write_text("[" * 10**6),
        ("config.json: not readable",),
    ),
    "config.json is a list": (
        lambda c: c.joinpath("config.json").write_text("[]"),
        ("expected a JSON object, found list",),
    ),
    "config.json is huge": (
        lambda c: os.truncate(c / "config.json", CONFIG_LIMIT_BYTES + 1),
        ("config.json: 12582913 bytes is too large",),
    ),
    "config.json is a pipe": (_pipe, ("config.json: not a plain file",)),
    "no weights": (lambda c: (c / WEIGHTS).unlink(), (f"has neither {WEIGHTS} nor {INDEX}",)),
    "pickled weights only": (_pickled, ("pytorch_model.bin", "pickled weights can run code")),
    "weights are truncated": (
        lambda c: os.truncate(c / WEIGHTS, (c / WEIGHTS).stat().st_size - 1000),
        (f"{WEIGHTS}: damaged or truncated",),
    ),
    "tensor of 1 TB": (_offsets, (f"{WEIGHTS}: damaged or truncated",)),
    "weights are quantised": (
        lambda c: _retensor(c, lambda t: t.update({QUERY: t[QUERY].to(torch.int8)})),
        (QUERY, "stored as I8", "BF16, F16, F32"),
    ),
    "a tensor is missing": (
        lambda c: _retensor(c, lambda t: t.pop(QUERY)),
        (f"1 tensors missing: {QUERY}",),
    ),
    "a tensor too many": (
        lambda c: _retensor(c, lambda t: t.update({"adapter.weight": torch.zeros(2)})),
        ("1 tensors not known: adapter.weight",),
    ),
    "a tensor is transposed": (
        lambda c: _retensor(c, lambda t: t.update({QUERY: t[QUERY].reshape(32, 128)})),
        (f"{QUERY} is [32, 128], expected [64, 64]",),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_what_is_wrong(
    checkpoint: Path, out: Path, name: str
) -> None:
    change, says = FILES[name]
    change(checkpoint)
    _build_fails(checkpoint, out, says=says)
    _fails("inspect", checkpoint, says=says)


SHARDS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "a shard is missing": (
        lambda c: (c / "model-00002-of-00003.safetensors").unlink(),
        ("model-00002-of-00003.safetensors: shard is missing", "3 are listed"),
    ),
    "a shard is missing from the index": (
        lambda c: _reindex(
            c, lambda m: [m.pop(k) for k in list(m) if m[k].startswith("model-00003")]
        ),
        ("9 tensors missing", "model.norm.weight and 1 more"),
    ),
    "a shard's name leads out": (
        lambda c: _reindex(c, lambda m: m.update({"lm_head.weight": "../model.safetensors"})),
        (INDEX, "'../model.safetensors' is not a file in the checkpoint's folder"),
    ),
    "a tensor is not where the index says": (
        lambda c: _reindex(
            c, lambda m: m.update({"lm_head.weight": m["model.embed_tokens.weight"]})
        ),
        ("lm_head.weight is not in this shard",),
    ),
    "a tensor is in two shards": (
        lambda c: save_file(
            {"model.norm.weight": torch.ones(64)}, c / "model-00001-of-00003.safetensors"
        ),
        ("model.norm.weight is in model-00001-of-00003.safetensors as well",),
    ),
    "the index has no weight_map": (
        lambda c: c.joinpath(INDEX).write_text("{}"),
        (INDEX, "weight_map must map"),
    ),
}


@pytest.mark.parametrize("name", SHARDS)
def test_damaged_shards_are_refused_by_the_name_of_what_is_wrong(
    sharded: Path, out: Path, name: str
) -> None:
    change, says = SHARDS[name]
    change(sharded)
    _build_fails(sharded, out, says=says)


def test_a_checkpoint_that_is_no_folder_is_refused(
    llada_checkpoint: Path, tmp_path: Path, out: Path
) -> None:
    _build_fails(tmp_path / "nowhere", out, says=("nowhere' does not exist",))
    _build_fails(llada_checkpoint / WEIGHTS, out, says=(f"{WEIGHTS}' is a file",))


def test_a_weight_that_is_not_finite_is_refused_by_its_tensor(checkpoint: Path, out: Path) -> None:
    _retensor(checkpoint, lambda t: t[QUERY].view(-1)[77:79].fill_(float("nan")))
    _build_fails(
        checkpoint,
        out,
        "--no-verify",
        says=(f"{WEIGHTS}: {QUERY} contains 2 NaN or infinite weights",),
    )


@pytest.mark.parametrize(
    ("tensor", "change", "says"),
    [
        ("ln_f.weight", torch.Tensor.zero_, "is 0 everywhere"),
        ("ff_out.weight", lambda t: t.copy_(t[:1].clone()), "is equal for all tokens"),
        ("wte.weight", lambda t: t.copy_(t[:1].clone()), "is equal for all tokens"),
    ],
)
def test_a_network_that_predicts_the_same_everywhere_is_refused_by_its_tensor(
    checkpoint: Path, out: Path, tensor: str, change: Callable[[torch.Tensor], object], says: str
) -> None:
    name = f"model.transformer.{tensor}"
    _retensor(checkpoint, lambda tensors: change(tensors[name]))
    _build_fails(checkpoint, out, "--no-verify", says=(f"{WEIGHTS}: {name} {says}",))


def test_a_weight_that_fp16_cannot_hold_is_refused_by_its_tensor(
    checkpoint: Path, out: Path
) -> None:
    _retensor(checkpoint, lambda t: t[QUERY].view(-1)[5].fill_(65520.0))
    options = ("--precision", "fp16", "--no-verify")
    _build_fails(
        checkpoint, out, *options, says=(QUERY, "6.55e+04 do not fit float16", "--precision fp32")
    )


@pytest.mark.parametrize("location", ["../outside.data", "link.data", "denoiser.onnx.data.old"])
def test_weights_outside_a_bundle_are_not_read(
    llada_bundle: Path, tmp_path: Path, out: Path, location: str
) -> None:
    """A hostile graph may name any file for its weights, and a bundle's link may lead anywhere."""
    bundle = Path(shutil.copytree(llada_bundle, tmp_path / "crafted"))
    shutil.copy(bundle / graph.DATA_FILE, tmp_path / "outside.data")
    (bundle / "link.data").symlink_to(tmp_path / "outside.data")
    model = onnx.load(bundle / graph.GRAPH_FILE, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = location if entry.key == "location" else entry.value
    data = model.SerializeToString()
    (bundle / graph.GRAPH_FILE).write_bytes(data)
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"][graph.GRAPH_FILE] = {
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    says = (f"{graph.GRAPH_FILE}: ", f"is stored in '{location}', not in a file of the bundle")
    _fails("quantize", bundle, "-o", out, "--precision", "int8", says=says)
    assert os.listdir(out.parent) == []


@pytest.mark.parametrize("name", ["[/x]", "\x1b[2J\u202e", "x" * 10**5])
def test_a_name_in_a_bundle_does_not_steer_the_terminal(
    llada_bundle: Path, tmp_path: Path, name: str
) -> None:
    bundle = Path(shutil.copytree(llada_bundle, tmp_path / "crafted"))
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["network"]["architecture"] = manifest["precision"]["name"] = manifest["targets"][0] = (
        name
    )
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    result = CliRunner().invoke(main, ["inspect", str(bundle)])
    assert (result.exit_code, result.exception) == (0, None)
    assert all(line.isprintable() for line in result.output.splitlines())
    assert (name in result.output) == (name.isprintable() and len(name) < 100)


def test_a_key_of_a_config_does_not_steer_the_terminal(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    keys = {"\x1b[2J": 1, "x" * 10**5: 2, **{f"key{i}": i for i in range(10**4)}}
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    result = CliRunner().invoke(main, ["inspect", str(checkpoint)])
    assert result.exit_code == 0
    assert all(line.isprintable() for line in result.output.splitlines())
    assert "config.json has keys that dlm-export does not know" in result.stderr
    assert len(result.stderr) < 6000
    refused = CliRunner().invoke(main, ["build", str(checkpoint), "-o", str(checkpoint / "out")])
    assert refused.exit_code == 2
    assert all(line.isprintable() for line in refused.output.splitlines())
    assert len(refused.output) < 3000


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"judgement": {}}',
        '{"judgement": {"layers": [{"layer": "x", "format": "int8", "kl": 0.1}]}}',
        '{"judgement": {"layers": [{"layer": "x", "format": 7, "kl": 0.1, "frontier_kl": null}]}}',
    ],
)
def test_a_record_of_accuracy_that_no_build_wrote_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "accuracy.json").write_text(text)
    with pytest.raises(BundleError, match=r"accuracy\.json: "):
        run._known_layers(tmp_path)


# ---- What config.json and the tokenizer say ----


def test_a_mask_token_from_the_command_line_is_checked_too(checkpoint: Path, out: Path) -> None:
    says = ("mask_token_id 160 is outside the vocabulary (0..159)",)
    _build_fails(checkpoint, out, "--mask-token-id", 160, says=says)
    _build_fails(checkpoint, out, "--mask-token-id", -1, code=2, says=("--mask-token-id",))


TOKENIZERS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "smaller, without the end token": (
        lambda c: _tokenizer(c, 151),
        ("151 ids, but eos_token_id 151 is not one of them",),
    ),
    "larger": (
        lambda c: _tokenizer(c, 161),
        ("the tokenizer has 161 ids, but the denoiser's vocabulary has only 160",),
    ),
    "not a tokenizer": (
        lambda c: c.joinpath("tokenizer.json").write_text("{}"),
        ("tokenizer.json: not a tokenizer",),
    ),
    "vocab.json is damaged": (
        lambda c: [
            (c / "tokenizer.json").unlink(),
            *(c.joinpath(name).write_text("[]") for name in ("vocab.json", "merges.txt")),
        ],
        ("vocab.json: expected a JSON object, found list",),
    ),
    "a template that is too large": (
        lambda c: c.joinpath("chat_template.jinja").write_text("x" * ((1 << 20) + 1)),
        ("chat_template.jinja: 1048577 bytes is too large",),
    ),
    "a template that is a number": (
        lambda c: c.joinpath("tokenizer_config.json").write_text('{"chat_template": 7}'),
        ("chat_template is not text",),
    ),
    "a template with half a character": (
        lambda c: c.joinpath("tokenizer_config.json").write_text('{"chat_template": "\\ud800"}'),
        ("tokenizer_config.json: not readable as JSON (an escape for half of a surrogate pair",),
    ),
    "tokenizer_config.json is no JSON": (
        lambda c: c.joinpath("tokenizer_config.json").write_text("{"),
        ("tokenizer_config.json: not readable as JSON",),
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_or_template_that_does_not_fit_is_refused(
    checkpoint: Path, out: Path, name: str
) -> None:
    change, says = TOKENIZERS[name]
    _tokenizer(checkpoint, 160)
    change(checkpoint)
    _build_fails(checkpoint, out, says=says)


# ---- Where a build writes ----


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--precision", "int3"), ("target cpu does not run 'int3'", "fp32, fp16, int8")),
        (("--precision", "int8", "--solver", "magic"), ("solver is 'magic'", "nearest, awq, gptq")),
        (("--precision", "missing.toml"), ("missing.toml: no such file",)),
        (
            ("--precision", "auto", "--auto-formats", "int9"),
            ("'int9' is not supported by target cpu", "int4-g32"),
        ),
        (("--max-canvas-length", "0"), ("--max-canvas-length",)),
    ],
)
def test_unknown_choices_are_wrong_usage_and_list_what_there_is(
    llada_checkpoint: Path, out: Path, options: tuple[str, ...], says: tuple[str, ...]
) -> None:
    _build_fails(llada_checkpoint, out, *options, code=2, says=says)


def test_an_existing_bundle_is_kept_without_force(
    llada_bundle: Path, llada_checkpoint: Path
) -> None:
    before = _snapshot(llada_bundle)
    siblings = os.listdir(llada_bundle.parent)
    _fails(
        "build", llada_checkpoint, "-o", llada_bundle, says=(f"{llada_bundle} exists", "--force")
    )
    assert _snapshot(llada_bundle) == before
    assert os.listdir(llada_bundle.parent) == siblings


def test_force_replaces_nothing_but_a_bundle(
    llada_checkpoint: Path, llada_bundle: Path, out: Path
) -> None:
    def refuse() -> None:
        _fails("build", llada_checkpoint, "-o", out, "--force", says=(f"{out} is not a bundle",))

    out.write_text("notes")
    refuse()
    assert out.read_text() == "notes"
    out.unlink()
    out.symlink_to(llada_bundle)
    refuse()
    assert out.is_symlink()
    out.unlink()
    out.mkdir()
    for name, content in (("thesis.tex", "years"), ("manifest.json", '{"name": "app"}')):
        (out / name).write_text(content)
        before = _snapshot(out)
        refuse()
        assert _snapshot(out) == before
    assert os.listdir(out.parent) == ["bundle"]


def test_force_replaces_a_bundle_of_an_older_schema(out: Path) -> None:
    out.mkdir()
    (out / "manifest.json").write_text(
        '{"schema_version": 2, "denoiser": {}, "tokens": {}, "files": {}}'
    )
    with bundle_folder.staged(out, force=True, needed_bytes=0) as staging:
        (staging / "new").touch()
    assert os.listdir(out) == ["new"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts a tmpfs of a given size."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = []

    def mount(size: str) -> Path:
        try:
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
                capture_output=True,
                text=True,
            )
        except OSError as err:
            pytest.skip(f"cannot mount a tmpfs: {err}")
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


def test_a_build_that_will_not_fit_is_refused_before_it_starts(
    llada_checkpoint: Path, small_disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "trace_pass", lambda *_: pytest.fail("the build started"))
    out = small_disk("8m") / "bundle"
    _build_fails(llada_checkpoint, out, code=1, says=(f"{out}: needs ", "only 8,388,608 are free"))


# The build writes a claim file, which reserves the output path (4 KiB), weights (392 KiB), a graph
# (15 KiB) and a manifest (3 KiB). With each disk size below, a different file is the first one that
# does not fit.
@pytest.mark.parametrize("size", ["64k", "400k", "412k"])
def test_a_disk_that_fills_up_mid_write_leaves_nothing_behind(
    llada_checkpoint: Path,
    small_disk: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    size: str,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 50))
    out = small_disk(size) / "bundle"
    _build_fails(
        llada_checkpoint,
        out,
        "--no-verify",
        code=1,
        says=(f"{out}: the disk is full", "Nothing was left behind"),
    )


def test_an_error_of_the_disk_leaves_nothing_behind(
    llada_checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object, __: object, folder: Path, *___: object) -> None:
        (folder / graph.DATA_FILE).write_bytes(bytes(1000))
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(write, "write_graph", fail)
    _build_fails(llada_checkpoint, out, code=1, says=(f"{out}: ", "cannot write"))


def test_a_build_that_needs_more_memory_than_there_is_says_so(
    llada_checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1000)
    _build_fails(
        llada_checkpoint,
        out,
        code=1,
        says=("361,728 bytes, and 1,000 are available", "--no-verify"),
    )


# ---- Builds that end early ----


STAGES = [
    (trace, "trace_pass", True),
    (write, "write_graph", False),
    (bundle_folder, "finish", True),
    (against_torch, "check_parity", False),
    (outputs, "_place", True),
    (outputs, "_place", False),
]


@pytest.mark.parametrize(("module", "function", "over_a_bundle"), STAGES)
def test_ctrl_c_leaves_nothing_behind_and_an_old_bundle_as_it_was(
    llada_checkpoint: Path,
    llada_bundle: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    function: str,
    over_a_bundle: bool,
) -> None:
    if over_a_bundle:
        shutil.copytree(llada_bundle, out)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    before = _snapshot(out)
    monkeypatch.setattr(module, function, interrupt)
    if function == "_place":
        monkeypatch.setattr(
            against_torch,
            "check_parity",
            lambda *_, **__: verdict.Parity("fp32", verdict.TOLERANCES["fp32"], [], []),
        )
    result = CliRunner().invoke(main, ["build", str(llada_checkpoint), "-o", str(out), "--force"])
    assert result.exit_code == 1, result.output
    assert result.output.strip() == "Aborted!"
    assert _snapshot(out) == before
    assert os.listdir(out.parent) == (["bundle"] if over_a_bundle else [])


def test_a_build_that_differs_from_torch_exits_3_and_writes_no_bundle(
    llada_checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(against_torch, "PROMPT_COUNT", 1)
    monkeypatch.setattr(against_torch, "NEW_TOKENS", 2)
    strict = dataclasses.replace(verdict.TOLERANCES["fp32"], relative=0.0)
    monkeypatch.setitem(verdict.TOLERANCES, "fp32", strict)
    says = (f"{out}: not written, it differs from PyTorch", "logits differ by")
    _build_fails(llada_checkpoint, out, code=3, says=says)


def test_verify_exits_3_for_a_checkpoint_with_other_weights(
    llada_bundle: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _retensor(checkpoint, lambda t: t["model.transformer.ff_out.weight"].neg_())
    options = ("--count", 1, "--new-tokens", 2, "--json")
    generated: list[str] = []
    request = Bundle._request

    def counted(bundle: Bundle, method: str, *given: Any) -> Any:
        generated.append(method)
        return request(bundle, method, *given)

    monkeypatch.setattr(Bundle, "_request", counted)
    result = CliRunner().invoke(
        main, ["verify", str(llada_bundle), "--checkpoint", str(checkpoint), *map(str, options)]
    )
    assert result.exit_code == 3, result.output
    assert f"Error: {llada_bundle}: mask ratio" in result.output
    loop = json.loads(result.stdout)["loop"]
    assert sum(row["canvases"] for row in loop) == len(generated)
    assert any(row["canvases_tied"] + row["canvases"] - row["canvases_equal"] for row in loop)


# ---- Requests ----


REQUESTS: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "prompt longer than the canvas": (
        ("--tokens", ",".join(["7"] * 250), "--new-tokens", 7),
        ("canvas of 257 tokens (250 given and 7 new) is longer than the denoiser's 256",),
    ),
    "id outside the vocabulary": (
        ("--tokens", "3,160"),
        ("token id 160 at position 1 is outside the vocabulary (0..159)",),
    ),
    "id that would wrap to a valid one": (
        ("--tokens", f"3,{2**32 + 5}"),
        (f"token id {2**32 + 5}", "outside the vocabulary"),
    ),
    "ids that are no numbers": (("--tokens", "3,x"), ("'3,x' is not a list of integers",)),
    "empty canvas": (("--tokens", "", "--max-new-tokens", 0), ("the canvas is empty",)),
    "text without a tokenizer": (("--prompt", "hello"), ("this bundle has no tokenizer",)),
    "nothing to start from": (
        (),
        ("give one of --prompt, --chat, --messages and --tokens, or --infill",),
    ),
    "unknown field": (
        ("--tokens", "1", "--set", "sparkle=1"),
        ("unknown policy field 'sparkle'", "block_length"),
    ),
    "field without a value": (("--tokens", "1", "--set", "seed"), ("write FIELD=VALUE",)),
    "field of another type": (
        ("--tokens", "1", "--set", "threshold=high"),
        ("threshold = 'high' is not of the right type",),
    ),
    # Values that the command line accepts, but that the command's code may fail to convert.
    "number beyond doubles": (("--tokens", "1", "--set", "threshold=" + "9" * 400), ("threshold",)),
    "score is a list": (("--tokens", "1", "--set", "score=[1]"), ("score",)),
    "preset is half a character": (("--tokens", "1", "--preset", "\udcff"), ("preset",)),
    "field that is an argument": (("--tokens", "1", "--set", "self=1"), ("self",)),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_the_bundle_does_not_take_is_wrong_usage(
    llada_bundle: Path, name: str
) -> None:
    options, says = REQUESTS[name]
    _fails("run", llada_bundle, "--threads", 1, *options, code=2, says=says)


def test_a_process_of_its_own_prints_one_line_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dlm_export.cli", "run", str(tmp_path), "--tokens", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert (
        done.stderr
        == f"Error: {tmp_path}: not a bundle: it has no manifest.json. `dlm-export build` writes bundles.\n"
    )
