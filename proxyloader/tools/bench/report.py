"""The record of a comparison, and its comparison with an earlier record."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .cases import BY_DEFAULT, OURS, Ranges
from .config import BenchConfig
from .figures import Epoch
from .runner import Outcome
from .sweep import Sweep
from .system_info import machine

SLOWER = 0.9
"""A figure below this share of the earlier one counts as worse. Equal runs differ by up to 10 %."""

BESIDE_SETTINGS = ("date", "benchmark", "command", "machine", "cases", "left_out", "augmentations")
"""Keys in which two records that are compared may differ. Each augmentation is a case of its own."""

Record = dict[str, Any]


def record_of(
    setting: BenchConfig,
    ranges: Ranges,
    outcomes: Mapping[str, Outcome],
    sweeps: Mapping[str, Sweep],
    command: str,
    **more: Any,
) -> Record:
    """Return a record, which is one line of a file of results.

    Args:
        setting: the setting of all cases.
        ranges: the values that were tried.
        outcomes: the outcomes of the cases by name.
        sweeps: the sweeps of the cases that were tuned, by name.
        command: the command line.
        more: further entries about all cases.
    """
    there = {name: outcome for name, outcome in outcomes.items() if not outcome.is_missing}
    return {
        "date": datetime.date.today().isoformat(),
        "benchmark": "bench",
        "command": command,
        "machine": machine(),
        **setting.in_record(),
        **asdict(ranges),
        **more,
        "cases": {name: _summary(outcome) | _trials(sweeps.get(name)) for name, outcome in there.items()},
        "left_out": {name: outcome.failure for name, outcome in outcomes.items() if outcome.is_missing},
    }


def _trials(sweep: Sweep | None) -> dict[str, Any]:
    return {"trials": sweep.in_record()} if sweep and sweep.trials else {}


def _summary(outcome: Outcome) -> dict[str, Any]:
    """Return the medians of the rounds, and the maximum of memory and of the longest wait."""
    rounds = outcome.rounds
    found: dict[str, Any] = {"failure": outcome.failure} if outcome.failure else {}
    found["tuning"] = asdict(outcome.setting.tuning)
    if outcome.start is not None:
        found["first_batch_s"] = round(outcome.start.first_batch_s, 3)
    if outcome.epochs:
        found["epochs"] = [_epoch(same) for same in zip(*outcome.epochs)]
    if not rounds:
        return found
    waits = list(zip(*(each.wait_ms for each in rounds)))
    found |= {
        "images_per_s": _median([each.images_per_s for each in rounds], 1),
        "images_per_s_rounds": [round(each.images_per_s, 1) for each in rounds],
        "cpu_ms_per_image": _median([each.cpu_ms_per_image for each in rounds], 3),
        "wait_ms": {
            "p50": _median(waits[0], 3),
            "p99": _median(waits[1], 3),
            "max": round(max(waits[2]), 3),
        },
        "pause_ms": _median([each.pause_ms for each in rounds], 3),
        "host_mb": round(max(each.host_mb for each in rounds), 1),
    }
    for name in ("gpu_mb", "gpu_percent", "jpeg_percent"):
        values = [getattr(each, name) for each in rounds if getattr(each, name) is not None]
        if values:
            found[name] = round(max(values), 1) if name == "gpu_mb" else _median(values, 1)
    return found


def _epoch(rounds: Sequence[Epoch]) -> dict[str, Any]:
    """Return the medians of the rounds, and the speeds of all rounds."""
    found = {field: _median([getattr(each, field) for each in rounds], 3) for field in asdict(rounds[0])}
    return found | {"images_per_s_rounds": [round(each.images_per_s, 1) for each in rounds]}


def _median(values: Any, digits: int) -> float:
    return round(float(statistics.median(values)), digits)


def append(record: Record, path: Path) -> None:
    """Add a line to a file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def last_of(path: Path) -> Record:
    """Return the last record of a file.

    Raises:
        ValueError: the file has no record.
    """
    lines = path.read_text().splitlines()
    try:
        record: Record = json.loads(lines[-1])
        record["cases"]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: its last line is no record of proxyloader bench") from error
    return record


def check_settings(earlier: Record, record: Record) -> None:
    """Check that an earlier record has the same settings.

    Raises:
        ValueError: a setting differs.
    """
    names = [name for name in record if name not in BESIDE_SETTINGS]
    pairs = {name: (earlier.get(name), record.get(name)) for name in names}
    pairs["gpu"] = earlier["machine"]["gpu"], record["machine"]["gpu"]
    others = [f"{name} {then}, now {now}" for name, (then, now) in pairs.items() if _plain(then) != _plain(now)]
    if others:
        raise ValueError(f"the record to compare with is of other settings: {'; '.join(others)}. Give the same options")


def check_cases(earlier: Record, names: Sequence[str]) -> None:
    """Check that an earlier record has cases to compare.

    Args:
        earlier: the earlier record.
        names: names of the cases that will be measured.

    Raises:
        ValueError: there is nothing to compare.
    """
    measured = [name for name, case in earlier["cases"].items() if "images_per_s" in case]
    if OURS not in measured:
        raise ValueError(f"the record to compare with has no speed of {OURS} (perhaps it was interrupted)")
    if OURS not in names:
        raise ValueError(f"{OURS} is what is compared: name it in --only, too")
    ours = {OURS, OURS + BY_DEFAULT}
    if not {*measured} & {*names} - ours:
        others = " and ".join(", ".join(name for name in of if name not in ours) or "none" for of in (measured, names))
        raise ValueError(
            f"speeds are compared as shares of those of other cases, and the two runs have none in common ({others})"
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def worse_than(earlier: Record, record: Record) -> list[str]:
    """Return a sentence for each figure that is worse than in an earlier record.

    Speeds are compared relative to the other cases of the same run, so that the state of the machine cancels out.
    """
    found = []
    now = record["cases"].get(OURS, {})
    if "images_per_s" not in now:
        return [f"{OURS} failed: {now.get('failure', 'it was not run')}"]
    for name in earlier["cases"]:
        ours = ours_beside(name)
        names = [each["cases"].get(case, {}).get("images_per_s") for each in (earlier, record) for case in (ours, name)]
        if name == ours or None in names:
            continue
        before, after = names[0] / names[1], names[2] / names[3]
        if after < SLOWER * before:
            found.append(f"{ours} is at {after:.2f} of {name}, and was at {before:.2f}")
    return found


def ours_beside(name: str) -> str:
    """Return the name of our case that another case is compared with. Both are tuned, or both use defaults."""
    return OURS + BY_DEFAULT if name.endswith(BY_DEFAULT) else OURS
