"""Creates the doctor's report about a machine, and about a bundle and targets if requested."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dlm_export.bundle.manifest import read_manifest
from dlm_export.doctor.bundled import examine_bundle, examine_target
from dlm_export.doctor.checks import examine as examine_machine
from dlm_export.doctor.findings import Finding, Report, needed
from dlm_export.doctor.machine import Machine, look
from dlm_export.doctor.system import System
from dlm_export.targets import Target


def examine(system: System, bundle: Path | None = None, targets: Sequence[Target] = ()) -> Report:
    """Collect facts about a machine, and report what works and what is missing.

    Raises BundleError if ``bundle`` is damaged.
    """
    return judge(look(system, bundle or Path()), bundle, targets)


def judge(machine: Machine, bundle: Path | None = None, targets: Sequence[Target] = ()) -> Report:
    """Like ``examine``, but uses facts that were collected earlier."""
    findings: list[Finding] = examine_machine(machine)
    for target in targets:
        findings += examine_target(machine, target)
    if bundle is not None and machine.native.failure is None:
        # Do not check the hashes of files, because checking the hashes takes a second per gigabyte.
        # The runtime checks the hashes when it opens the bundle.
        findings += examine_bundle(machine, bundle, read_manifest(bundle, check_hashes=False))
    elif bundle is not None:
        lacking = [("cannot be read without the native library", "see above")]
        findings.append(needed("bundle", "what it is", lacking, ""))
    return Report(tuple(findings))
