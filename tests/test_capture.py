"""Compares this project's torch denoiser with classes of transformers, and with code that a
checkpoint contains.

When a build compares a bundle with the torch denoiser, the bundle and the denoiser rely on the same
reader of config.json. An error of this reader therefore stays hidden. In these tests, the torch
denoiser is compared with code that is not from this project.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import (
    a2d_qwen3_config,
    dream_config,
    illada_config,
    llada_config,
    sdar_config,
    write_checkpoint,
)
from click.testing import CliRunner, Result
from denoisers import load

from dlm_export.checkpoints import folder
from dlm_export.cli import main
from dlm_export.judging.parity import golden
from dlm_export.judging.parity.capture import CaptureOptions, capture
from dlm_export.judging.parity.golden import Golden

transformers = pytest.importorskip("transformers", reason="transformers is not installed here")

RELEASED_CODE = Path(__file__).parent / "released_code"
DEMO = Path(__file__).parent.parent / "examples" / "demo-denoiser"
AUTO_MAP = {
    "AutoConfig": "configuration_llada.LLaDAConfig",
    "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
    "AutoModel": "modeling_llada.LLaDAModelLM",
}
# Small networks with grouped heads, biases, a tied head, or a theta (base of rotary embeddings)
# that is not the default. If this project misreads one of these settings, a test fails.
LAYOUTS = {
    "llada": llada_config(n_kv_heads=2, include_qkv_bias=True, auto_map=AUTO_MAP),
    "illada": illada_config(auto_map=AUTO_MAP),
    "dream": dream_config(),
    "a2d-qwen3": a2d_qwen3_config(),
    "sdar": sdar_config(),
}
KINDS = {
    "llada": golden.RELEASED,
    "illada": golden.RELEASED,
    "dream": golden.TRUNK,
    "a2d-qwen3": golden.TRUNK,
    "sdar": golden.TRUNK,
}
SIGHT = {
    "dream": "every position visible",
    "a2d-qwen3": "every position visible",
    "sdar": "blocks of 4, each visible to itself",
}


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Before it runs the code of a checkpoint, transformers copies this code to a cache.

    This fixture moves transformers' cache of code away from the user's folder.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "transformers.dynamic_module_utils.HF_MODULES_CACHE",
            str(tmp_path_factory.mktemp("modules")),
        )
        yield


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def bring_code(checkpoint: Path, change: Callable[[str], str] = lambda text: text) -> Path:
    """Put the released code into the checkpoint's folder.

    ``change`` may edit the source of the model class.
    """
    for file in RELEASED_CODE.glob("*.py"):
        text = file.read_text()
        (checkpoint / file.name).write_text(
            change(text) if file.name.startswith("modeling") else text
        )
    return checkpoint


@pytest.fixture(scope="module")
def captured(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, Path, dict[str, Any]]]:
    """A function that makes, for a name in ``LAYOUTS``, the checkpoint, the golden file with
    captured logits, and the output of ``capture --json``.

    For each name, the three results are made only once.
    """
    made: dict[str, tuple[Path, Path, dict[str, Any]]] = {}

    def make(name: str) -> tuple[Path, Path, dict[str, Any]]:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            checkpoint = bring_code(write_checkpoint(path / name, LAYOUTS[name], seed=3))
            result = run(
                "capture",
                checkpoint,
                "-o",
                path / "golden.npz",
                "--trust-remote-code",
                "--count",
                2,
                "--json",
            )
            assert result.exit_code == 0, result.output
            made[name] = checkpoint, path / "golden.npz", json.loads(result.stdout)
        return made[name]

    return make


Captured = Callable[[str], tuple[Path, Path, dict[str, Any]]]


def check_logits(checkpoint: Path, found: Golden) -> None:
    """Compare the logits of this project's torch denoiser with captured logits.

    No bundle is needed.
    """
    denoiser = load(checkpoint)
    for canvas, theirs in zip(found.canvases, found.logits, strict=True):
        with torch.no_grad():
            ours = denoiser(torch.from_numpy(canvas.tokens)[None])[0].numpy()[canvas.rows]
        # Both implementations add some hundred fp32 numbers, but in different orders. ``verify``
        # allows the same difference.
        relative = float(np.abs(ours - theirs).max() / (theirs.max() - theirs.min()))
        assert relative <= 2e-4


# ---- Parity with the released code ----


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_torch_denoiser_equals_the_code_from_outside(captured: Captured, name: str) -> None:
    checkpoint, file, told = captured(name)
    assert (told["golden"]["kind"], told["rows"], told["canvases"]) == (KINDS[name], 320, 20)
    found = golden.load(file)
    assert SIGHT.get(name, "released code's") in found.provenance.reference
    check_logits(checkpoint, found)


def test_a_bundle_equals_the_code_from_outside(
    dream_checkpoint: Path, dream_bundle: Path, tmp_path: Path
) -> None:
    file = tmp_path / "golden.npz"
    result = run("capture", dream_checkpoint, "-o", file, "--count", 1)
    assert result.exit_code == 0, result.output
    result = run("verify", dream_bundle, "--golden", file)
    assert result.exit_code == 0, result.output
    assert SIGHT["dream"] in result.stdout


def test_a_misread_config_passes_our_own_parity_and_fails_that_with_the_released_code(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test imitates an error that happened once: config.json stored theta under a key that this
    project did not read, so the default of 10,000 was used.
    """
    checkpoint, file, _ = captured("dream")
    real = folder.read_json

    def misread(path: Path, *hint: str) -> dict[str, Any]:
        return real(path, *hint) | ({"rope_theta": 10000.0} if path.name == "config.json" else {})

    monkeypatch.setattr(folder, "read_json", misread)
    bundle = tmp_path / "bundle"
    result = run("build", checkpoint, "-o", bundle)
    assert result.exit_code == 0, result.output
    assert "Parity with our torch denoiser holds" in result.stdout
    parity = json.loads((bundle / "accuracy.json").read_text())["parity"]
    assert parity["reference"] == "our torch denoiser"
    result = run("verify", bundle, "--golden", file)
    assert result.exit_code == 3, result.output
    assert "FAILS at fp32" in result.stdout
    assert "mask ratio 0.05: logits differ by" in result.stderr


def test_the_trained_demo_equals_an_implementation_of_its_own_on_text(tmp_path: Path) -> None:
    checkpoint = tmp_path / "demo"
    shutil.copytree(DEMO, checkpoint)
    config = json.loads((checkpoint / "config.json").read_text()) | {"auto_map": AUTO_MAP}
    (checkpoint / "config.json").write_text(json.dumps(config))
    bring_code(checkpoint)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(
        "remind me to call the garage at seven\n\nset a timer for ten minutes\nplay jazz\n"
    )
    found = capture(checkpoint, CaptureOptions(trust_remote_code=True, prompts=prompts, count=2))
    assert (len(found.canvases), found.provenance.prompts) == (20, "prompts.txt")
    assert len({len(canvas.tokens) for canvas in found.canvases}) == 2
    check_logits(checkpoint, found)


def test_a_capture_says_what_ran_and_repeats(captured: Captured) -> None:
    checkpoint, file, told = captured("llada")
    found = told["golden"]
    assert (found["class_name"], found["module"], found["checkpoint"]) == (
        "LLaDAModelLM",
        "modeling_llada.py",
        "llada",
    )
    assert set(found["code"]) == {"modeling_llada.py", "configuration_llada.py"}
    assert set(found["weights"]) == {"model.safetensors"}
    assert found["versions"]["transformers"] == transformers.__version__
    assert {"python", "torch", "numpy", "dlm-export"} < set(found["versions"])
    again = capture(checkpoint, CaptureOptions(trust_remote_code=True, count=2))
    kept = golden.load(file)
    assert again.provenance == kept.provenance
    np.testing.assert_array_equal(np.concatenate(again.logits), np.concatenate(kept.logits))


def test_a_trunk_runs_no_code_of_the_checkpoint(tmp_path: Path) -> None:
    config = dream_config(auto_map={"AutoModel": "modeling_dream.DreamModel"})
    checkpoint = write_checkpoint(tmp_path / "dream", config)
    (checkpoint / "modeling_dream.py").write_text("raise SystemExit('ran')\n")
    refused = run("capture", checkpoint, "-o", tmp_path / "a.npz")
    assert (
        "pass --trust-remote-code to run it, or pass --trunk to use transformers' Qwen2ForCausalLM"
        in refused.output
    )
    result = run("capture", checkpoint, "-o", tmp_path / "a.npz", "--count", 1, "--trunk")
    assert result.exit_code == 0, result.output
    assert "transformers' trunk with every position visible (Qwen2ForCausalLM" in result.stdout


def test_a_class_of_transformers_runs_as_it_is(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers contains no class for the denoisers that this project supports, so the test
    registers a class of its own in transformers.
    """
    from released_code.modeling_llada import LLaDAModelLM

    monkeypatch.setattr("transformers.LLaDAModelLM", LLaDAModelLM, raising=False)
    config = {key: value for key, value in LAYOUTS["llada"].items() if key != "auto_map"}
    found = capture(write_checkpoint(tmp_path / "llada", config, seed=3), CaptureOptions(count=2))
    assert (found.provenance.kind, found.provenance.code) == (golden.OWN, {})
    np.testing.assert_array_equal(
        np.concatenate(found.logits), np.concatenate(golden.load(captured("llada")[1]).logits)
    )


# ---- Code that must not be used for a comparison ----


def _replace(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert text.count(old) == 1
        return text.replace(old, new)

    return change


LOGITS = "logits=self.model(input_ids)"
SOFTMAX = "weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1)"
CAUSAL = "weights = torch.softmax((q @ k.transpose(-1, -2)).tril() + torch.full((q.shape[2],) * 2, -1e9).triu(1), -1)"
OF_NO_USE: dict[str, tuple[Callable[[str], str], str]] = {
    "attention that is causal": (
        _replace(SOFTMAX, CAUSAL),
        "attends causally with transformers .*: position 0 does not see",
    ),
    "more weights than there are": (
        _replace(
            "def forward(self, ids):",
            "    self.extra = nn.Linear(8, 8)\n\n    def forward(self, ids):",
        ),
        "expects model.extra.bias, model.extra.weight: it does not match these weights",
    ),
    "a class that does not run": (
        _replace("assert not use_cache", "raise OSError('no')"),
        r"does not run with .*OSError: no.*was written by transformers 4\.46\.2: try that version",
    ),
    "no logits": (_replace("(logits=", "(scores="), "does not run with .*no attribute 'logits'"),
    "NaN": (_replace(LOGITS, f"{LOGITS} / 0 * 0"), "returns NaN or infinite logits"),
}


def test_code_that_sees_behind_its_blocks_is_refused(tmp_path: Path) -> None:
    """If a class needs an attention mask for its blocks and does not get it, every position sees
    all positions.
    """
    config = sdar_config(auto_map={"AutoModel": "modeling_sdar.SDARForCausalLM"})
    checkpoint = write_checkpoint(tmp_path / "sdar", config)
    (checkpoint / "modeling_sdar.py").write_text(
        "import torch\nfrom transformers import Qwen3Config, Qwen3ForCausalLM\n\n\n"
        "class SDARForCausalLM(Qwen3ForCausalLM):\n    config_class = Qwen3Config\n\n"
        "    def forward(self, input_ids, use_cache=None):\n        length = input_ids.shape[1]\n"
        "        return super().forward(input_ids, attention_mask=torch.zeros(1, 1, length, length), use_cache=False)\n"
    )
    result = run(
        "capture", checkpoint, "-o", tmp_path / "a.npz", "--count", 1, "--trust-remote-code"
    )
    assert result.exit_code == 1, result.output
    assert "position 0 sees position 4, after its block. Pass --trunk" in result.stderr


@pytest.mark.parametrize("name", OF_NO_USE)
def test_code_that_proves_nothing_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    change, says = OF_NO_USE[name]
    config = LAYOUTS["llada"] | {"transformers_version": "4.46.2"}
    checkpoint = bring_code(write_checkpoint(tmp_path / "llada", config), change)
    result = run("capture", checkpoint, "-o", tmp_path / "a.npz", "--trust-remote-code")
    assert result.exit_code == 1, result.output
    error = result.stderr.strip().splitlines()[-1]
    assert error.startswith(f"Error: {checkpoint}: LLaDAModelLM ")
    assert re.search(says, error), error
    assert not (tmp_path / "a.npz").exists()


# ---- Configurations as transformers itself writes them ----


def saved_config(name: str, path: Path, rope: dict[str, Any] | None = None) -> dict[str, Any]:
    """Let transformers write the config.json for a name in ``LAYOUTS``, with the class that has the
    same layers.

    The architecture and the ids are changed to the released values.
    """
    layout = LAYOUTS[name]
    trunk = {"dream": transformers.Qwen2Config, "a2d-qwen3": transformers.Qwen3Config}[name]
    values = {
        key: value for key, value in layout.items() if key not in ("architectures", "model_type")
    }
    if rope is not None:
        values["rope_scaling"] = rope
    trunk.from_dict(values).save_pretrained(path)
    saved = json.loads((path / "config.json").read_text())
    return saved | {
        key: layout[key]
        for key in ("architectures", "model_type", "mask_token_id", "eos_token_id", "pad_token_id")
    }


@pytest.mark.parametrize("name", ["dream", "a2d-qwen3"])
def test_transformers_spelling_of_rope_is_read_as_transformers_reads_it(
    name: str, tmp_path: Path
) -> None:
    config = saved_config(name, tmp_path / "saved")
    if "rope_theta" in config or "rope_parameters" not in config:
        pytest.skip(
            f"transformers {transformers.__version__} writes rope_theta: 5 or later is needed"
        )
    checkpoint = write_checkpoint(tmp_path / "checkpoint", config, seed=4)
    check_logits(checkpoint, capture(checkpoint, CaptureOptions(count=1)))


ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_a_scaled_rope_is_read_as_transformers_reads_it(rope: str, tmp_path: Path) -> None:
    config = saved_config("dream", tmp_path / "saved", ROPES[rope])
    checkpoint = write_checkpoint(tmp_path / "checkpoint", config, seed=4)
    check_logits(checkpoint, capture(checkpoint, CaptureOptions(count=1)))
