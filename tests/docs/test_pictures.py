"""The committed pictures are what their script draws, by their texts. 4 seconds."""

import re

import draw_pictures
import pytest


@pytest.mark.parametrize("name", draw_pictures.DRAWINGS)
def test_pictures_are_current(name):
    drawn, committed = draw_pictures.draw(name), (draw_pictures.PICTURES / f"{name}.svg").read_bytes()
    texts = [re.findall(rb"<!-- (.*?) -->", svg) for svg in (drawn, committed)]
    assert texts[0] == texts[1]  # matplotlib writes each text as a comment; outlines depend on its version
