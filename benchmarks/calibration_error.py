# SPDX-License-Identifier: Apache-2.0
"""How far a calibration is off cells that it was not made of.

    python benchmarks/calibration_error.py benchmarks/results/calibration-h200.json \
        benchmarks/results/frontier-h200-again-*.json

The first file has a calibration, as those of `replay.py --calibrate` have, the others are of `frontier.py`, on the same
GPU and shape. Prints, for decode and prefill, alone and beside each other, and for fused steps: the median, the 95th
percentile and the largest relative error.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from device_profile import samples

from vllm_pdmux.calibration.fit import errors
from vllm_pdmux.calibration.samples import Samples
from vllm_pdmux.simulator import DeviceProfile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("calibration", type=Path)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--total-sms", type=int, default=132)
    args = parser.parse_args()
    profile = DeviceProfile.model_validate(json.loads(args.calibration.read_text())["calibration"]["profile"])
    results = [json.loads(file.read_text()) for file in args.files]
    measured = numbered(samples(results, profile.kv_tokens, args.total_sms), profile)
    print(json.dumps({kind: asdict(error) for kind, error in errors(profile, measured).items()}, indent=1))


def numbered(measured: Samples, profile: DeviceProfile) -> Samples:
    """The samples with the profile's numbers of the groups."""
    known = {(group.sharing, group.prefill_sms): number for number, group in enumerate(profile.groups, start=1)}
    numbers = {i: known[one.sharing, one.prefill_sms] for i, one in enumerate(measured.divisions, start=1)}
    return replace(measured, beside=tuple(replace(one, group=numbers[one.group]) for one in measured.beside))


if __name__ == "__main__":
    main()
