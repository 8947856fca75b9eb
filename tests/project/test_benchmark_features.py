"""The benchmark of features: each equals what is done without it, on numpy and on the fake CuPy."""

import functools

import numpy as np
import pytest
from command_line import run as run_command

from benchmarks import device, features, tables
from benchmarks.__main__ import main

run = functools.partial(run_command, main=main)


def test_features(tmp_path):
    """Every feature equals what is done without it."""
    done = run(f"features {tmp_path / 'x.csv'} --cpu")
    rows = tables.read(str(tmp_path / "x.csv"))
    assert done.status == 0, done.err
    assert {row["feature"] for row in rows} == set(features.FEATURES)
    assert all(float(row["difference"]) < 0.003 for row in rows if row["without"] != "only the backward pass")
    assert all(float(row[name]) > 0 for row in rows for name in row if name.endswith(("_ms", "_us", "_bytes")))


@pytest.mark.parametrize("name", features.FEATURES)
def test_features_on_cudnn(name, fake):
    """The calls, and what is done without the feature, are valid for CuPy arrays, and their results agree."""
    for case in features.FEATURES[name](features.Machine(fake), small=True):
        expected = [x.get() for x in case.ours.call()]
        for way in case.without:
            results = [x.get() for x in way.call()]
            assert device.largest_difference(results, expected) < 0.003 or not way.equal, (case.name, way.name)


@pytest.mark.parametrize("factor", [1.1, np.nan])
def test_a_feature_with_another_result_is_reported(factor):
    """The row of a way whose result differs, or is NaN, is wrong."""
    x = np.ones((2, 2))
    case = features.Case("a", "b", features.Way("ours", lambda: [x]), [features.Way("other", lambda: [factor * x])])
    (row,) = features.case_rows(features.Machine(np), case)
    assert features.is_wrong(row)
