"""The command line. Commands parse and print; the work is in functions that a test or a notebook can call.

Results go to stdout, progress and warnings to stderr. Exit 0 done, 1 could not, 2 wrong usage, 3 parity failed.
torch, onnx and the rest of the export extra are imported inside the commands that need them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlm_runtime.errors import DlmError, RequestError

if TYPE_CHECKING:
    from dlm_export.build import BuildReport
    from dlm_export.denoiser import Capabilities
    from dlm_export.families.base import Overrides
    from dlm_export.verify import Parity

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
CHECKPOINT = click.Path(path_type=Path)


def _failure(error: DlmError) -> click.ClickException:
    failure = click.ClickException(" ".join(str(error).split()))
    failure.exit_code = error.exit_code  # type: ignore[misc]
    return failure


class _Group(click.Group):
    """Turns our errors into one line and an exit code; everything else is a defect and keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DlmError as err:
            raise _failure(err) from err
        except ModuleNotFoundError as err:
            if err.name is None or err.name.split(".")[0].startswith("dlm_"):
                raise
            raise click.ClickException(
                f"{err.name} is not installed; this command needs the export extra: pip install 'dlm-export[export]'"
            ) from err


@click.group(cls=_Group, context_settings=CONTEXT)
@click.version_option(package_name="dlm-export")
def main() -> None:
    """Diffusion language models: from PyTorch checkpoints to bundles that run natively, with proof of parity."""


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, ensure_ascii=False))


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def _table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        is_number = i > 0 and all(row[i][:1].isdigit() for row in rows)
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Piped output keeps whole lines: a log is wider than a terminal.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


class _Bars:
    """Progress as one rich bar a stage, on stderr; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description:16}"),
            BarColumn(),
            TextColumn("{task.percentage:>4.0f}%"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._task: Any = None

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, stage: str, total: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=self._progress.tasks[self._task].total)
        self._task = self._progress.add_task(stage, total=total)

    def advance(self, units: int = 1) -> None:
        self._progress.advance(self._task, units)


def _overrides(mask_token_id: int | None, max_canvas_length: int | None) -> Overrides:
    from dlm_export.families.base import Overrides

    return Overrides(mask_token_id, max_canvas_length)


_mask_option = click.option(
    "--mask-token-id", type=click.IntRange(0), help="Id of the mask token, where the checkpoint does not say it."
)
_canvas_option = click.option(
    "--max-canvas-length",
    type=click.IntRange(1, 1 << 20),
    help="Longest canvas in tokens, prompt included.  [default: the checkpoint's]",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout.")
_threads_option = click.option("--threads", type=click.IntRange(0, 4096), default=0, help="Engine threads; 0: all cores.")


@main.command(context_settings=CONTEXT)
@click.argument("checkpoint", type=CHECKPOINT)
@_mask_option
@_canvas_option
@_json_option
def inspect(checkpoint: Path, mask_token_id: int | None, max_canvas_length: int | None, as_json: bool) -> None:
    """Show what a checkpoint is: family, parameters, capabilities, memory a precision.

    Example: dlm-export inspect examples/demo-denoiser
    """
    from dlm_export import families, tokenizer
    from dlm_export.checkpoint import Checkpoint
    from dlm_export.graph import PRECISIONS

    opened = Checkpoint(checkpoint)
    capabilities = families.read_capabilities(opened, _overrides(mask_token_id, max_canvas_length))
    families.Weights(opened, capabilities)  # names what is missing, extra or wrongly shaped
    text = tokenizer.read(opened, capabilities)
    kinds = {"tokenizer": text.tokenizer is not None, "chat_template": text.chat_template is not None}
    memory = {name: _memory(capabilities, dtype.itemsize) for name, dtype in PRECISIONS.items()}
    if as_json:
        _print_json(
            {
                "checkpoint": str(checkpoint),
                "parameters": capabilities.parameter_count(),
                "stored_bytes": opened.weight_bytes,
                "capabilities": capabilities.as_dict(),
                "memory": memory,
                **kinds,
            }
        )
        return
    dtypes = ", ".join(sorted({info.dtype for info in opened.tensors.values()}))
    click.echo(f"{checkpoint}: {capabilities.family} ({families.FAMILIES[capabilities.family].description})")
    click.echo(f"{capabilities.parameter_count():,} parameters in {len(opened.tensors)} tensors of {dtypes}")
    click.echo(", ".join(f"{name.replace('_', ' ')}: {'yes' if there else 'no'}" for name, there in kinds.items()))
    _table("Capabilities", ["", ""], [[name, str(value)] for name, value in capabilities.as_dict().items()])
    rows = [
        [n, _bytes(m["weights_bytes"]), _bytes(m["cache_bytes_per_token"]), _bytes(m["cache_bytes"])] for n, m in memory.items()
    ]
    _table("Memory", ["precision", "weights", "keys and values a token", "for the longest canvas"], rows)


def _memory(c: Capabilities, element_bytes: int) -> dict[str, int]:
    per_token = 2 * c.layers * c.kv_heads * c.head_size * element_bytes
    return {
        "weights_bytes": c.parameter_count() * element_bytes,
        "cache_bytes_per_token": per_token,
        "cache_bytes": per_token * c.max_canvas_length,
    }


@main.command(context_settings=CONTEXT)
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("-o", "--output", required=True, type=CHECKPOINT, help="Folder of the bundle to write.")
@click.option("--target", default="cpu", show_default=True, help="Device to build for; `dlm-export targets` lists them.")
@click.option("--precision", default="fp32", show_default=True, help="Of weights and activations: fp32 or fp16.")
@click.option("--force", is_flag=True, help="Replace the bundle that is there.")
@click.option("--no-verify", is_flag=True, help="Skip the parity check, which holds the denoiser in fp32.")
@_mask_option
@_canvas_option
@_json_option
def build(
    checkpoint: Path,
    output: Path,
    target: str,
    precision: str,
    force: bool,
    no_verify: bool,
    mask_token_id: int | None,
    max_canvas_length: int | None,
    as_json: bool,
) -> None:
    """Build a bundle from a checkpoint folder, and check it against PyTorch.

    Example: dlm-export build examples/demo-denoiser --target cpu --precision fp32 -o build/demo
    """
    from dlm_export import targets

    targets.find(target, precision)  # before torch is imported
    from dlm_export import build as builder

    with _Bars() as bars:
        report = builder.build(
            checkpoint,
            output,
            target=target,
            precision=precision,
            force=force,
            overrides=_overrides(mask_token_id, max_canvas_length),
            check_parity=not no_verify,
            progress=bars,
        )
    if as_json:
        _print_json(report.as_dict())
        return
    _print_build(report)


def _print_build(report: BuildReport) -> None:
    _table("Stages", ["", "seconds"], [[name, f"{seconds:.2f}"] for name, seconds in report.stages_s.items()])
    _table(f"Wrote {report.output}", ["", "size"], [[name, _bytes(size)] for name, size in report.files_bytes.items()])
    if report.parity is None:
        click.echo("Parity was not checked (--no-verify): run `dlm-export verify`.", err=True)
    else:
        worst = max(row.relative for row in report.parity.graph)
        equal = sum(row.canvases_equal for row in report.parity.loop)
        total = sum(row.canvases for row in report.parity.loop)
        click.echo(f"Parity with PyTorch: logits within {worst:.1e} of their range, {equal} of {total} canvases equal")


@main.command(context_settings=CONTEXT)
@click.argument("bundle", type=CHECKPOINT)
@click.option("--checkpoint", required=True, type=CHECKPOINT, help="Folder of the checkpoint that the bundle was built from.")
@click.option("--prompts", type=CHECKPOINT, help="Text file, a prompt a line, instead of random token ids.")
@click.option("--count", type=click.IntRange(1, 1000), default=4, show_default=True, help="Prompts to compare.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=32, show_default=True, help="Mask tokens a canvas.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of random prompts and masks.")
@_threads_option
@_json_option
def verify(
    bundle: Path,
    checkpoint: Path,
    prompts: Path | None,
    count: int,
    max_new_tokens: int,
    seed: int,
    threads: int,
    as_json: bool,
) -> None:
    """Compare a bundle with its checkpoint in PyTorch: logits a mask-ratio bucket, whole canvases token by token.

    Exit 3 when they differ by more than the precision's tolerance.

    Example: dlm-export verify build/demo --checkpoint examples/demo-denoiser
    """
    import dlm_runtime
    from dlm_export import build as builder
    from dlm_export import families
    from dlm_export.checkpoint import Checkpoint
    from dlm_export.verify import random_prompts

    read = Checkpoint(checkpoint)
    with dlm_runtime.open(bundle) as opened:
        manifest = opened.manifest
        presets = {name: opened.policy(name) for name in manifest["presets"]}
        capabilities = families.read_capabilities(read, _overrides(opened.mask_token_id, opened.max_canvas_length))
        builder.check_same_denoiser(bundle, manifest, capabilities)
        chosen = random_prompts(capabilities, count, seed) if prompts is None else _read_prompts(prompts, opened, count)
    with _Bars() as bars:
        bars.start("check parity", 2 * builder.check_units(presets, len(chosen)))
        parity = builder.check(
            bundle,
            read,
            capabilities,
            presets,
            manifest["precision"]["name"],
            prompts=chosen,
            max_new_tokens=max_new_tokens,
            seed=seed,
            threads=threads,
            progress=bars,
        )
    if as_json:
        _print_json(parity.as_dict())
    else:
        _print_parity(parity)
    if parity.misses:
        raise builder.ParityError(f"{bundle}: {parity.summary}")


def _read_prompts(path: Path, bundle: Any, count: int) -> list[list[int]]:
    if bundle.tokenizer is None:
        raise RequestError(f"{path}: the bundle has no tokenizer for text; leave --prompts out")
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as err:
        raise RequestError(f"{path}: not readable as UTF-8 text ({err})") from err
    if not lines:
        raise RequestError(f"{path}: holds no prompt")
    return [bundle.tokenizer.encode(line) for line in lines[:count]]


def _print_parity(parity: Parity) -> None:
    rows = [
        [
            f"{row.mask_ratio:.2f}",
            f"{row.worst_difference:.2e}",
            f"{row.relative:.1e}",
            f"{row.argmax_equal}/{row.rows}",
            str(row.argmax_ties),
        ]
        for row in parity.graph
    ]
    _table("Graph against PyTorch", ["mask ratio", "worst logit difference", "of range", "argmax equal", "ties"], rows)
    rows = [
        [row.name, f"{row.canvases_equal}/{row.canvases}", str(row.nfe), "yes" if row.nfe_equal else "no"]
        for row in parity.loop
    ]
    _table("Loop against the reference", ["preset", "canvases equal", "NFE", "NFE equal"], rows)
    limit = parity.tolerance.relative
    share = f"{parity.tolerance.agreement:.0%} of canvases equal"
    verdict = "FAILS" if parity.misses else "Holds"
    click.echo(f"{verdict} at {parity.precision} (allowed: logits within {limit:.0e} of their range, {share})")


@main.command(context_settings=CONTEXT)
@click.argument("bundle", type=CHECKPOINT)
@click.option("--prompt", help="Text in front of the canvas; - reads stdin.")
@click.option("--chat", help="A user's message, put through the bundle's chat template.")
@click.option("--tokens", help="Token ids, with commas; mask tokens among them are filled as well.")
@click.option("--max-new-tokens", type=click.IntRange(0), default=128, show_default=True, help="Mask tokens to fill.")
@click.option("--preset", help="Loop of the bundle's manifest.  [default: the bundle's]")
@click.option("--steps", type=click.IntRange(0), default=0, help="Passes planned for the whole generation; 0: the preset's.")
@click.option("--block-length", type=click.IntRange(0), help="Tokens decided before the next block; 0: all in one.")
@click.option("--threshold", type=click.FloatRange(0, 1), help="Score from which a token commits.")
@click.option("--score", help="confidence, margin, entropy or random.")
@click.option("--commit", help="static, threshold, dynamic, factor, entropy_bound, timestep or sequential.")
@click.option("--cache", help="none, prefix or dual.")
@click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Any other field of the policy; repeatable.")
@click.option("--watch", is_flag=True, help="Show the canvas denoising in the terminal.")
@click.option("--delay", type=click.FloatRange(0, 10), default=0.15, show_default=True, help="Seconds a step with --watch.")
@_threads_option
@_json_option
def run(
    bundle: Path,
    prompt: str | None,
    chat: str | None,
    tokens: str | None,
    max_new_tokens: int,
    preset: str | None,
    steps: int,
    changes: tuple[str, ...],
    watch: bool,
    delay: float,
    threads: int,
    as_json: bool,
    **fields: Any,
) -> None:
    """Generate from a bundle.

    Example: dlm-export run build/demo --prompt "remind me to call the garage at seven tomorrow" --preset fast-dllm --watch
    """
    import dlm_runtime

    if sum(value is not None for value in (prompt, chat, tokens)) != 1:
        raise click.UsageError("give one of --prompt, --chat and --tokens")
    request: dict[str, Any] = {"max_new_tokens": max_new_tokens, "preset": preset, "steps": steps}
    policy = {name: value for name, value in fields.items() if value is not None}
    policy |= dict(_assignment(change) for change in changes)
    dlm_runtime.Policy().with_fields(policy)  # --set must not reach the other arguments of generate
    request |= policy
    if prompt is not None:
        request["prompt"] = sys.stdin.read() if prompt == "-" else prompt
    elif chat is not None:
        request["chat"] = [{"role": "user", "content": chat}]
    else:
        request["tokens"] = _token_list(tokens or "")
    with dlm_runtime.open(bundle, threads=threads) as opened:
        if watch:
            from dlm_export.watch import watch as show

            result = show(opened, request, delay)
        else:
            result = opened.generate(**request)
    if as_json:
        _print_json(
            {
                "text": result.text,
                "tokens": result.tokens,
                "nfe": result.nfe,
                "timings_s": result.timings,
                "cache_bytes": result.cache_bytes,
            }
        )
        return
    click.echo(" ".join(map(str, result.tokens)) if result.text is None else result.text)
    passes = f"{result.nfe} pass{'es' if result.nfe != 1 else ''}"
    click.echo(f"[{passes}, {result.timings['total'] * 1e3:.1f} ms, {opened.engine}]", err=True)


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"--set {text}: write FIELD=VALUE, such as seed=7")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _token_list(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as err:
        raise click.UsageError(f"--tokens: {text!r} is not a list of integers") from err


@main.command(context_settings=CONTEXT)
@_json_option
def targets(as_json: bool) -> None:
    """List the devices that bundles can be built for.

    Example: dlm-export targets --json
    """
    from dlm_export.targets import TARGETS, this_machine

    machine = this_machine()
    if as_json:
        _print_json({"targets": [target.as_dict() for target in TARGETS.values()], "this_machine": machine})
        return
    rows = [[t.name, t.description, t.engine, ", ".join(t.precisions), t.note] for t in TARGETS.values()]
    _table("Targets", ["target", "device", "engine", "precisions", "note"], rows)
    engine = (
        f"onnxruntime {machine['onnxruntime']} ({machine['onnxruntime_library']})"
        if machine["onnxruntime"]
        else "onnxruntime is not installed"
    )
    click.echo(f"This machine: {machine['processor']}, {machine['cores']} cores, {_bytes(machine['memory_bytes'])}, {engine}")


if __name__ == "__main__":
    main()
