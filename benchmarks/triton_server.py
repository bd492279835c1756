"""Compare requests per second and latencies of Triton and of ``dlm-export serve``.

    python benchmarks/triton_server.py BUNDLE --data FILE.jsonl [--connections 1,16] [--seconds 4]
        [--rounds 3] [--json FILE]

Each line of the file has a `prompt`. wrk and nvidia-pytriton must be installed (see
tests/triton_process.py). The contestants take turns:

- "dlm-export serve": wrk sends requests to ``/v1/completions``.
- "Triton": wrk sends requests to ``/v2/models/NAME/generate`` of tritonserver.

All contestants run the bundle's default loop with the same limits. The clients and the servers run
on the same machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from serve import SCRIPT, wrk
from shapes import machine
from tables import table

from dlm_export.triton.repository import Model, write


def prepare(folder: Path, path: str, bodies: list[dict[str, Any]]) -> Path:
    """Write the files that wrk reads into ``folder``."""
    folder.mkdir()
    (folder / "bodies").write_text("".join(json.dumps(body) + "\n" for body in bodies))
    (folder / "post.lua").write_text(SCRIPT.replace("/v1/completions", path))
    return folder


def main() -> None:
    # The import of shapes adds the tests' folder to the path.
    from serving_process import serving
    from triton_process import missing, triton

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--connections", default="1,16")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if (why := missing()) is not None:
        raise SystemExit(why)
    prompts = [json.loads(line)["prompt"] for line in arguments.data.read_text().splitlines()]
    new_tokens = arguments.max_new_tokens
    rows: dict[tuple[int, str], list[dict[str, float]]] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        fields = {"model": arguments.bundle.resolve().name, "max_tokens": new_tokens}
        files = {
            "dlm-export serve": prepare(
                folder / "serve",
                "/v1/completions",
                [{"prompt": each, **fields} for each in prompts],
            )
        }
        bodies = [{"TEXT": each, "max_new_tokens": new_tokens} for each in prompts]
        model = Model(name=fields["model"], links=True)
        write(arguments.bundle, folder / "repository", model, force=False)
        files["Triton"] = prepare(folder / "triton", f"/v2/models/{model.name}/generate", bodies)
        with (
            serving(arguments.bundle, "--no-log") as served,
            triton(folder / "repository", folder, model.name) as server,
        ):
            ports = dict.fromkeys(files, int(server.http.split(":")[1]))
            ports["dlm-export serve"] = served.port
            for round_number in range(arguments.rounds + 1):  # the first round only warms up
                for count in map(int, arguments.connections.split(",")):
                    for who, where in files.items():
                        seconds = arguments.seconds if round_number else 1
                        row = wrk(SimpleNamespace(port=ports[who]), where, count, seconds)
                        if round_number:
                            rows.setdefault((count, who), []).append(row)
    result: dict[str, Any] = {"machine": machine()}
    lines = []
    for (count, who), found in rows.items():
        row = {key: statistics.median(each[key] for each in found) for key in found[0]}
        rates = [round(each["per_s"], 1) for each in found]
        result[f"{count} connections, {who}"] = row | {"per_s_all": rates}
        rate = f"{row['per_s']:.0f} ({min(rates):.0f} .. {max(rates):.0f})"
        times = " / ".join(f"{row[key]:.3g}" for key in ("p50_ms", "p95_ms", "p99_ms"))
        lines.append([str(count), who, rate, times, f"{row['failed'] + row['refused']:.0f}"])
    print(table(["connections", "server", "requests/s", "p50 / p95 / p99, ms", "failed"], lines))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
