"""Coverage-guided fuzzing of every parser: `python tests/fuzz.py --seconds 60`.

Needs atheris (`pip install -e ".[test,fuzz]"`). Each target runs in a process of its
own, from a corpus made of a real small store, and stops at its first finding. Inputs
that crashed, hung or took too much memory are kept in the folder that is printed; a
finding is looked at again with `--target NAME --again FILE`. Exits with 1 on a finding.
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("manifest", "part", "pack", "record", "codec", "mark", "store")
_INPUT_SECONDS = 20
_MEMORY_MB = 4096
_LOG_LINES = 40


def main() -> int:
    """Fuzz what is asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60, help="time for each target")
    parser.add_argument("--target", choices=(*NAMES, "all"), default="all")
    parser.add_argument("--folder", type=Path, help="keep corpus and findings here")
    parser.add_argument("--again", type=Path, help="run the target once, on this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    if asked.again:
        importlib.import_module("fuzz_targets").TARGETS[asked.target](
            asked.again.read_bytes()
        )
        return 0
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="orbax-delta-fuzz-"))
    if asked.child:
        _fuzz_forever(asked.target, folder, asked.seconds)
    names = NAMES if asked.target == "all" else (asked.target,)
    found = [name for name in names if not _fuzz(name, folder, asked.seconds)]
    print(f"findings: {', '.join(found) or 'none'}; corpus and findings in {folder}")
    return 1 if found else 0


def _fuzz(name: str, folder: Path, seconds: int) -> bool:
    """Run one target in a process of its own; whether nothing was found."""
    log = folder / f"{name}.log"
    folder.mkdir(exist_ok=True, parents=True)
    with log.open("wb") as out:
        done = subprocess.run(
            [
                *(sys.executable, __file__, "--child", "--target", name),
                *("--folder", str(folder), "--seconds", str(seconds)),
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        )
    text = log.read_text(errors="replace")
    counts = re.findall(r"(?:number_of_executed_units: |^#)(\d+)", text, re.MULTILINE)
    kept = [path.name for path in (folder / name / "findings").glob("*")]
    good = done.returncode == 0 and not kept
    print(f"{name}: {counts[-1] if counts else 0} inputs, ", end="")
    print("nothing found" if good else f"FOUND {kept} (exit {done.returncode})")
    if not good:
        print("\n".join(text.splitlines()[-_LOG_LINES:]))
    return good


def _fuzz_forever(name: str, folder: Path, seconds: int) -> None:
    """The child: instrument the package, then never return."""
    import atheris

    with atheris.instrument_imports(include=["orbax_delta"]):
        targets = importlib.import_module("fuzz_targets")
    inputs, findings = folder / name / "corpus", folder / name / "findings"
    for path in (inputs, findings):
        path.mkdir(exist_ok=True, parents=True)
    for number, data in enumerate(targets.corpus()[name]):
        (inputs / f"seed-{number}").write_bytes(data)
    options = {
        "max_total_time": seconds,
        "timeout": _INPUT_SECONDS,
        "rss_limit_mb": _MEMORY_MB,
        "max_len": 4096,
        "print_final_stats": 1,
        "artifact_prefix": f"{findings}/",
    }
    flags = [f"-{key}={value}" for key, value in options.items()]
    atheris.Setup([sys.argv[0], *flags, str(inputs)], targets.TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
