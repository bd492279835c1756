"""Prints how much processor time each test file takes, as a table below pytest's own durations.

A duration in seconds says little while other tests run on the same cores. The processor time counts
the test process and the programs that a test has started and waited for.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator

import pytest

SHOWN = 40
PROPERTY = "processor_s"


def processor_s() -> float:
    """Return the user and system time of this process and of its ended children, in seconds."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[BEGAN] = processor_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    now = processor_s()
    report.user_properties.append((PROPERTY, now - item.stash[BEGAN]))
    item.stash[BEGAN] = now
    return report


BEGAN = pytest.StashKey[float]()


class Totals:
    """Adds up the processor time of all reports, in the process that prints the summary."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        spent = [value for name, value in report.user_properties if name == PROPERTY]
        self.seconds[report.nodeid.partition("::")[0]] += float(spent[-1]) if spent else 0.0

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if terminalreporter.config.option.durations is None:
            return
        rows = sorted(self.seconds.items(), key=lambda row: -row[1])
        terminalreporter.section(f"processor time: {sum(self.seconds.values()):.0f} s in all")
        for name, seconds in rows[:SHOWN]:
            terminalreporter.write_line(f"{seconds:7.1f} s  {name}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Totals(), "processor-time-totals")
