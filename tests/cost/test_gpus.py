"""Data sheets: those that ship with msplit, and one of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from msplit.cli.options import GPUS
from msplit.cost.gpus import data_sheet, gpu_names
from msplit.errors import MsplitError
from tests.cli.runner import SAMPLES, fine, msplit

MODEL = SAMPLES / "mmoe_small.pb"
SHEET = {
    "sms": 128,
    "memory_gb": 24,
    "bandwidth_gbs": 1008,
    "l2_mb": 72,
    "clock_mhz": 2520,
    "tflops": {"float32": 82.6, "tf32": 82.6},
    "launch_us": 1.5,
    "wait_us": 1.5,
}


def own(folder: Path, **changed) -> Path:
    sheet = {key: value for key, value in {**SHEET, **changed}.items() if value is not None}
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"rtx4090": sheet}))
    return path


def test_the_command_line_knows_the_names() -> None:
    assert gpu_names() == GPUS
    for command in ("analyze", "assign", "bench", "check", "diff", "report"):
        text = " ".join(fine(command, "--help", columns=200).out.split())
        assert f"{', '.join(GPUS)}, or a YAML file of your own" in text


def test_a_sheet_of_ones_own_prices_the_nodes_of_every_command(tmp_path: Path) -> None:
    path = own(tmp_path)
    fast = fine("analyze", MODEL, "--costs", f"gpu={path}", "--format", "json").json
    assert f"on a rtx4090 ({path}), from its data sheet" in " ".join(
        fine("analyze", MODEL, "--costs", f"gpu={path}", columns=300).out.split()
    )
    path = own(tmp_path, launch_us=15.0)
    assert fine("analyze", MODEL, "--costs", f"gpu={path}", "--format", "json").json != fast
    for command in (("assign", MODEL, "--dry-run", "--rules", "auto"), ("check", MODEL), ("diff", MODEL, MODEL)):
        assert msplit(*command, "--costs", f"gpu={path}").code == 0, command
    (tmp_path / "msplit.yaml").write_text("gpu: mine.yaml\n")
    assert msplit("check", MODEL, "--config", tmp_path / "msplit.yaml").code == 0


def test_what_joins_two_gpus_may_be_left_out_and_decides_whether_a_split_pays(tmp_path: Path) -> None:
    plain = data_sheet(str(own(tmp_path)))
    assert (plain.link_gbs, plain.link_us, plain.other_gpu_us) == (25.0, 18.0, 28.0)

    def gain(**links: float) -> float:
        given = ("--batch", 2048, "--gpus", 2, "--costs", f"gpu={own(tmp_path, **links)}", "--format", "json")
        return float(fine("analyze", MODEL, *given).json["split"]["gain"])

    assert gain(link_gbs=1e6, link_us=0.1, other_gpu_us=0.1) > gain() > gain(link_gbs=0.1)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sms": None}, "`rtx4090` lacks the key 'sms'"),
        ({"sms": 1.5}, "`rtx4090.sms` is not a whole number of 1 or more"),
        ({"sms": True}, "`rtx4090.sms` is not a whole number of 1 or more"),
        ({"l2_mb": 0}, "`rtx4090.l2_mb` is 0, not between 1e-09 and 1e+12"),
        ({"link_gbs": 0}, "`rtx4090.link_gbs` is 0, not between"),
        ({"l2_mb": float("nan")}, "`rtx4090.l2_mb` is not a number"),
        ({"wait_us": float("inf")}, "`rtx4090.wait_us` is not a number"),
        ({"tflops": {"float16": 1}}, "`rtx4090.tflops` lacks the key 'float32'"),
        ({"tflops": {"float32": "fast"}}, "`rtx4090.tflops.float32` is not a number"),
        ({"tflops": {"float32": 1, "float33": 1}}, "`rtx4090.tflops` has no key 'float33' (did you mean float32?)"),
        ({"clock_mhz": None, "clock_mzh": 5}, "`rtx4090` has no key 'clock_mzh' (did you mean clock_mhz?)"),
    ],
)
def test_what_is_wrong_with_a_sheet_is_named(tmp_path: Path, changed: dict, said: str) -> None:
    path = own(tmp_path, **changed)
    with pytest.raises(MsplitError) as caught:
        data_sheet(str(path))
    assert caught.value.what.startswith(said)
    assert caught.value.where == str(path)
    (tmp_path / "msplit.yaml").write_text("gpu: mine.yaml\n")
    done = msplit("check", MODEL, "--config", tmp_path / "msplit.yaml")
    assert done.code == 2
    assert said in done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the data sheet is not an object"),
        ("[" * 30_000, "this is not valid YAML"),
        ("a: {}\nb: {}\n", "it has 2 data sheets; one is wanted"),
        ("a: &a [*a]", "`a` is not an object"),
        ("!!python/object/apply:os.system [true]", "this is not valid YAML"),
        ("x" * 70_000, "the data sheet is longer than 65,536 bytes"),
    ],
)
def test_what_is_no_sheet_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.yml"
    path.write_text(text)
    with pytest.raises(MsplitError) as caught:
        data_sheet(str(path))
    assert caught.value.what == said


def test_a_name_that_is_none_names_the_way_to_a_file() -> None:
    done = msplit("analyze", MODEL, "--costs", "gpu=h20")
    assert done.code == 2
    assert "did you mean h200?" in done.err
    assert "(.yaml)" in done.err
    assert "can not be read" in msplit("analyze", MODEL, "--costs", "gpu=gone.yaml").err
