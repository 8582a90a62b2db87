"""The report's page in a real Chromium: what it loads, shows, and lets a person do."""

import json
import re

import pytest
from PIL import Image
from selenium.webdriver import ActionChains, Keys

from rloo_kit.data.images import save_thumbnails
from rloo_kit.report.page import write_report

pytestmark = pytest.mark.browser

STEPS = 20
GROUPS = 4
SIZE = 4


def rows_of(folder, name="completions"):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


# --- what it loads --------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["single", "compared"])
def test_page_requests_nothing_and_logs_no_error(page, which, request):
    path = request.getfixturevalue(which)
    page.open(path)
    for details in page.all("details"):
        page.run("arguments[0].open = true", details)
    assert page.all("#more-charts .uplot")
    assert page.logged() == []
    assert set(page.requested()) == {path.as_uri()}


def test_content_policy_forbids_loading(page, single):
    page.open(single)
    page.run("new Image().src = 'http://127.0.0.1:9/'")
    page.run(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'hit = 1'}))"
    )
    assert page.run("return window.hit") is None
    messages = page.logged()
    assert any("img-src" in message and message.startswith("SEVERE") for message in messages)
    assert any("script-src" in message for message in messages)


def test_images_of_a_prompt_are_shown_beside_its_text(page, make_run, tmp_path):
    picture = Image.new("RGB", (300, 200), "red")
    names = [
        save_thumbnails(picture, tmp_path),
        "images/0123456789abcdef.jpg",
        "images/../run.yaml",
    ]

    def change(row):
        parts = [{"type": "image", "image": name} for name in names]
        content = [*parts, {"type": "text", "text": "what colour?"}]
        return {**row, "prompt": [{"role": "user", "content": content}]}

    folder = make_run("pictures", change)
    save_thumbnails(picture, folder)
    path = write_report(folder)
    page.open(path)
    (image,) = page.all("#group .prompt img")
    assert page.run("return [arguments[0].naturalWidth, arguments[0].naturalHeight]", image) == [
        128,
        85,
    ]
    assert page.all("#group .prompt")[0].text == "[image] [image] what colour?"
    assert page.logged() == []
    assert [name for name in page.requested() if not name.startswith("data:")] == [path.as_uri()]


HOSTILE = {
    0: "<script>window.hit = 1</script><img src=x onerror='window.hit = 2'>",
    1: "</script><!-- \u202eturned\u202c \x00\x1b[31m half \ud83d",
    2: "w" * 100_000,
    3: None,
}


def test_hostile_completions_are_shown_as_text(page, make_run):
    places = iter(range(10**6))

    def change(row):
        text = HOSTILE[next(places) % SIZE]
        return {**row, "completion": text, "prompt": text, "answer_at": None}

    page.open(write_report(make_run("hostile", change)))
    assert page.run("return window.hit") is None
    assert page.logged() == []
    texts = [card.text for card in page.all("#group .card")]
    assert HOSTILE[0] in texts[0]
    assert "</script><!-- \\u202eturned\\u202c \\u0000\\u001b[31m half ?" in texts[1]
    assert "94,000 characters left out" in page.text("#completion-3")
    assert "nothing" in texts[3]
    assert page.all("#completion-2 .escape")
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")


# --- what it says ---------------------------------------------------------------------------------


def test_verdict_and_end_come_first(page, single):
    page.open(single)
    assert page.text("h1") == "first"
    assert page.text(".said").startswith("It learned: accuracy on 24 held-out prompts rose")
    ending = page.text(".ending")
    assert ending.startswith("Stopped after 20 steps: no signal in ten batches, 1 min 1 s")


def test_held_out_scores_are_shown_before_and_after(page, single):
    page.open(single)
    cells = page.run(
        "return [...document.querySelectorAll('#held-out-table tbody tr:first-child > *')]"
        ".map((cell) => cell.textContent)"
    )
    assert cells[:3] == ["accuracy", "0.250", "0.750"]
    assert cells[3].startswith("+0.500 \u00b1 0.")
    assert cells[5] == "more than chance"
    assert len(page.all("#samples .pair")) == 6
    page.find("#all-samples").click()
    assert len(page.all("#samples .pair")) == 24
    first = page.find("#samples .pair .two").text
    assert "before\naccuracy 0" in first
    assert "after\naccuracy 1" in first


# --- curves ---------------------------------------------------------------------------------------


def chart(page, title):
    """The plot of the chart with that title."""
    return page.run(
        "return [...document.querySelectorAll('.chart')].find((one) =>"
        "one.querySelector('h3').textContent === arguments[0]).querySelector('.plot')", title
    )  # fmt: skip


def value(page, title):
    """What stands beside the first line of the chart."""
    return page.run(
        "return arguments[0].parentNode.querySelector('output').value", chart(page, title)
    )


def test_hovering_shows_one_step_in_all_charts(page, single, first_run):
    page.open(single)
    over = chart(page, "Reward").find_element("css selector", ".u-over")
    page.run("arguments[0].scrollIntoView({block: 'center'})", over)
    ActionChains(page.driver).move_to_element_with_offset(over, 40, 0).perform()
    step = int(re.fullmatch(r"step (\d+)", page.text("#at-step"))[1])
    rows = rows_of(first_run, "metrics")
    row = rows[step - 1]
    assert 10 < step < 15
    assert float(value(page, "Reward")) == pytest.approx(row["reward"], abs=1e-3)
    assert float(value(page, "KL of a completion")) == pytest.approx(row["kl/sequence"], abs=1e-3)
    ActionChains(page.driver).move_to_element(page.find("h1")).perform()
    assert float(value(page, "Reward")) == pytest.approx(rows[-1]["reward"], abs=1e-3)


def test_arrow_keys_announce_the_values(page, single, first_run):
    page.open(single)
    page.run("arguments[0].focus()", chart(page, "KL of a completion"))
    page.keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    kl = rows_of(first_run, "metrics")[2]["kl/sequence"]
    assert page.text("#live") == f"KL of a completion, step 3: KL {kl:.2f}"
    page.keys(Keys.END)
    assert "step 20: KL 0.60" in page.text("#live")
    focused = chart(page, "KL of a completion")
    assert focused.get_attribute("aria-valuenow") == "20"
    assert value(page, "Entropy") == "0.30"


# --- groups ---------------------------------------------------------------------------------------


def test_group_shows_baseline_and_advantage(page, single, first_run):
    page.open(single, hash="#group=12-3")
    rows = [row for row in rows_of(first_run) if (row["step"], row["group"]) == (12, 3)]
    assert page.text("#group-title") == "Step 12, prompt 3"
    for place, (card, row) in enumerate(zip(page.all("#group .card"), rows, strict=True)):
        sign = "+" if row["advantage"] > 0 else "\u2212"
        advantage = f"{sign}{abs(row['advantage']):.2f}"
        assert card.find_element("css selector", ".advantage").text == advantage
        side = "up-card" if sign == "+" else "down-card"
        assert side in card.get_attribute("class")
        formula = card.find_element("css selector", ".card-sum").text
        assert formula.endswith(f"mean of the 3 others {row['baseline']:.2f} = {advantage}")
        assert formula.startswith(f"score {row['score']:.2f} \u2212 ")
        assert ("KL" in formula) == (place > 0)
        parts = [part.text for part in card.find_elements("css selector", ".text > div")]
        assert parts[0].startswith("thought")
        assert parts[1].startswith("answer")
        assert "</think>" not in card.text


def groups_where(folder, wanted):
    found = {}
    for row in rows_of(folder):
        found.setdefault((row["step"], row["group"]), []).append(row)
    return [key for key, rows in found.items() if wanted(rows)]


FILTERS = {
    "steps": ({"from": "5", "to": "6"}, lambda rows: rows[0]["step"] in (5, 6)),
    "signal": ({"signal": "yes"}, lambda rows: len({row["score"] for row in rows}) > 1),
    "cut off": ({"truncated": "yes"}, lambda rows: any(row["truncated"] for row in rows)),
    "reward": ({"reward": "accuracy", "least": "1"},
               lambda rows: any(row["rewards"]["accuracy"] >= 1 for row in rows)),
    "completion": ({"text": "TRY 7.2.1"},
                   lambda rows: (rows[0]["step"], rows[0]["group"]) == (7, 2)),
}  # fmt: skip


def test_filters_keep_matching_groups(page, single, first_run):
    page.open(single)
    assert len(page.listed()) == STEPS * GROUPS
    for case, (filters, wanted) in FILTERS.items():
        for name, entry in filters.items():
            page.fill(name, entry)
        expected = groups_where(first_run, wanted)
        assert 0 < len(expected) < STEPS * GROUPS, case
        assert page.listed() == expected, case
        assert page.text("#kept").startswith(f"{len(expected)} group")
        page.find("#clear").click()
        assert len(page.listed()) == STEPS * GROUPS, case


def test_keys_move_between_groups(page, single):
    page.open(single, hash="#group=3-1")
    page.run("document.querySelector('#group-list [aria-current]').focus()")
    page.keys("n")
    assert page.text("#group-title") == "Step 3, prompt 2"
    assert page.run("return location.hash") == "#group=3-2"
    page.keys("p", "p")
    assert page.text("#group-title") == "Step 3, prompt 0"
    page.keys(Keys.ARROW_DOWN)
    assert page.text("#group-title") == "Step 3, prompt 1"
    assert page.run("return document.activeElement.getAttribute('aria-current')") == "true"
    page.find(".moves button:last-child").click()
    assert page.text("#group-title") == "Step 3, prompt 2"
    assert page.run("return document.activeElement.textContent") == "Next"


# --- for everybody --------------------------------------------------------------------------------


def background(page):
    colour = page.run("return getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def test_dark_colours_follow_system_and_button(page, single):
    page.open(single, scheme="dark")
    assert background(page) < 60
    assert page.text("#theme") == "Light colours"
    page.find("#theme").click()
    assert background(page) > 200
    assert page.text("#theme") == "Dark colours"
    page.open(single, scheme="light")
    assert background(page) > 200


@pytest.mark.parametrize(
    ("which", "scheme"), [("single", "light"), ("single", "dark"), ("compared", "light")]
)
def test_axe_finds_nothing_serious(page, which, scheme, request):
    page.open(request.getfixturevalue(which), scheme=scheme)
    for details in page.all("details:not(#more-charts)"):
        page.run("arguments[0].open = true", details)
    page.fill("from", "19")  # axe looks at every item of a list
    assert page.violations(*(["color-contrast"] if scheme == "dark" else [])) == []


@pytest.mark.parametrize(
    ("which", "width"), [("single", 360), ("single", 1920), ("compared", 360), ("compared", 1024)]
)
def test_no_width_needs_horizontal_scrolling(page, which, width, request):
    page.open(request.getfixturevalue(which), width=width)
    assert page.run("return innerWidth") == width
    assert page.run("return document.documentElement.scrollWidth") <= width
    narrow = page.run("return Math.min(...charts.map(({plot}) => plot.clientWidth))")
    assert narrow > 250
    cells = page.run(
        "return [...document.querySelectorAll('.settings-table td')]"
        ".filter((cell) => cell.offsetParent).map((cell) => cell.clientHeight)"
    )
    assert max(cells) < 150, "a value must not stand one letter above the other"


def test_before_and_after_fit_on_a_phone(page, single):
    page.open(single, width=390)
    inner, outer = page.run(
        "const box = document.querySelector('#held-out-table .scroll');"
        "return [box.scrollWidth, box.clientWidth]"
    )
    assert inner <= outer
    assert page.text("#held-out-table tbody td:last-child") == "more than chance"
    shades = page.run("return getComputedStyle(document.querySelector('.scroll')).background")
    assert shades.count("local") == 2, "an edge is shaded where a table is wider"


# --- several runs ---------------------------------------------------------------------------------


def test_comparison_shows_both_runs_in_every_part(page, compared):
    page.open(compared)
    assert page.text("h1") == "2 runs compared"
    assert len(page.all(".verdict .said")) == 2
    assert page.run("return charts[0].lines.map((line) => line.label)") == ["first", "second"]
    differing = page.text("#setting-differences tbody")
    assert differing == "trainer.learning_rate0.0010.0005"
    assert "0.250 \u2192 0.750" in page.text("#held-out-table tbody td:last-child")
    looks = page.run("return charts[0].u.series.filter((one) => one.role === 'main').map((one) =>"
                     "[one._stroke, String(one.dash)])")  # fmt: skip
    assert looks[0][0] != looks[1][0]
    assert looks[0][1] != looks[1][1]
