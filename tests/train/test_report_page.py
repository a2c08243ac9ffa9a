"""The comparison page: self-contained, and right about what differs."""

import re
import shutil

import pytest

from lrmoe import cli
from lrmoe.report_page import write_page


@pytest.mark.dist
@pytest.mark.slow
def test_page_compares_two_runs_without_a_network(exact_run, recalibrated_run, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert cli.main(["report", str(exact_run), str(recalibrated_run), "--out", str(page)]) == 0
    text = page.read_text()
    assert not re.search(r"(src|href)=['\"](?!data:)", text)
    assert "<script" not in text
    differences = text.split("What differs in the settings")[1].split("</table>")[0]
    assert re.search(r"<td>recalibration\.rate</td><td>0\.0</td><td>0\.5</td>", differences)
    assert "training.max_steps" not in differences
    assert text.count("data:image/png;base64,") >= 4
    for name in ("exact", "recalibrated", "validation perplexity"):
        assert name in text


@pytest.mark.dist
@pytest.mark.slow
def test_an_unfinished_run_is_shown(exact_run, tmp_path):
    shutil.copytree(exact_run, tmp_path / "run", symlinks=True)
    (tmp_path / "run/summary.json").unlink()
    (tmp_path / "run/eval.jsonl").unlink()
    assert "training loss" in write_page([tmp_path / "run"], tmp_path / "p.html").read_text()


def test_other_directories_are_refused(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == cli.EXIT_USAGE
    assert "is not a run directory, config.yaml is missing" in capsys.readouterr().err
