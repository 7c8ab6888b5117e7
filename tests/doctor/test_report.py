"""Reports of a diagnosis: text, JSON and the page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
import torch.distributed as dist
from doctor.planted import SCRIPTS, SOUND
from doctor.recorded import record_script

from shardwise.doctor.diagnosis import diagnose
from shardwise.doctor.findings import MOST_ROUNDING
from shardwise.doctor.report import as_json, as_text, write_page

_VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that tags match, and collects anchors and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        if tag not in _VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src"):
                self.links.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def check_page(path) -> Page:
    text = path.read_text()
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert "//" not in text
    assert len(set(page.ids)) == len(page.ids)
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    return page


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_reports(group, tmp_path):
    (sound, *_), (wrong, *_) = SOUND, SCRIPTS
    for script, folder in ((sound, tmp_path / "sound"), (wrong, tmp_path / "wrong")):
        record_script(script, group, folder, is_planted=script is wrong)
    dist.barrier(group)
    if group.rank() == 0:
        diagnosis = diagnose(*(tmp_path / "wrong" / name for name in ("one", "parallel", "rounding")))
        text = as_text(diagnosis)
        assert f"first fault: forward: {wrong.modules[0]}, output, step 0, micro-batch 0: never summed" in text
        assert "times the expected rounding" in text
        facts = json.loads(json.dumps(as_json(diagnosis), allow_nan=False))
        assert facts["findings"][0]["module"] == wrong.modules[0]
        assert len(facts["tensors"]) == len(diagnosis.judged)
        write_page(diagnosis, tmp_path / "wrong.html", title="A & B <c>")
        page = check_page(tmp_path / "wrong.html")
        assert page.links
        assert any("never summed" in each for each in page.texts)
        for each in diagnosis.judged:
            each.is_excused = each.is_wrong
        largest = re.search("largest difference is (.+) times", as_text(diagnosis))
        assert largest is not None
        assert 0 < float(largest[1]) <= MOST_ROUNDING
        diagnosis = diagnose(*(tmp_path / "sound" / name for name in ("one", "parallel", "rounding")))
        assert as_text(diagnosis).endswith("sound: all differences are rounding")
        write_page(diagnosis, tmp_path / "sound.html", title="sound")
        assert not check_page(tmp_path / "sound.html").links
    dist.barrier(group)
