"""The language reward: scripts, guesses, mixtures, what does not count."""

import pytest
from rloo_kit.rewards import Language

TEXTS = {
    "en": "So we need the sum of the first ten odd numbers. Let me think. The answer is a hundred.",
    "de": "Wir brauchen die Summe der ersten zehn ungeraden Zahlen. Lass mich kurz nachdenken.",
    "fr": "Donc il faut la somme des dix premiers nombres impairs. Un plus trois font quatre.",
    "es": "Entonces necesitamos la suma de los diez primeros números impares, que es cien.",
    "ru": "Итак, нужна сумма первых десяти нечётных чисел. Она равна квадрату их количества.",
    "uk": "Отже, потрібна сума перших десяти непарних чисел. Вона дорівнює квадрату кількості.",
    "ar": "حسنا، نحتاج إلى مجموع أول عشرة أعداد فردية. إذن الجواب مئة.",
    "fa": "خب، باید مجموع ده عدد فرد اول را پیدا کنم. پس جواب صد است.",
    "hi": "हमें पहली दस विषम संख्याओं का योग ज्ञात करना है। इसलिए उत्तर सौ है।",
    "zh": "我需要求前十个奇数的和。奇数是一、三、五等等。所以答案是一百。",
    "ja": "では、最初の十個の奇数の和を求めます。答えは百です。",
    "ko": "처음 열 개의 홀수의 합을 구해야 합니다. 답은 백입니다.",
    "el": "Ζητείται το άθροισμα των πρώτων δέκα περιττών αριθμών.",
}
CHINESE = "我们先把两个数加起来然后再检查一遍结果"  # 19 letters


def score(language, text, **parameters):
    return Language(language, part="completion", **parameters)(completions=[text])[0]


@pytest.mark.parametrize("language", TEXTS)
def test_each_language_is_told_from_all_others(language):
    scores = {other: score(language, text) for other, text in TEXTS.items()}
    assert scores == {other: float(other == language) for other in TEXTS}


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("el", "αβγδ εζηθ. abcd", 8 / 12),
        ("zh", CHINESE + ". abc", 19 / 22),
        ("en", CHINESE, 0.0),
        ("ja", "これは四です。" + CHINESE + "。", 6 / 25),
        ("zh", "\uff42\uff43\uff44" + CHINESE, 19 / 22),
    ],
)
def test_letters_are_counted_by_script(language, text, expected):
    assert score(language, text, min_letters=1) == pytest.approx(expected)


@pytest.mark.parametrize("other", ["de", "fr", "es", "zh", "ja", "ru"])
def test_a_foreign_sentence_lowers_the_score_by_its_letters(other):
    english = TEXTS["en"]
    foreign = TEXTS[other]
    own, others = (sum(map(str.isalpha, text)) for text in (english, foreign))
    own -= 1  # "a", a single letter, does not count
    for text in (f"{english} {foreign}", f"{foreign} {english}", f"{english}\n{foreign}"):
        assert score("en", text) == pytest.approx(own / (own + others))


@pytest.mark.parametrize(
    "noise",
    [
        "```python\n변수 = 1\n```",
        "$\\text{변수} x = 4$",
        "\\(\\alpha + \\text{변수}\\)",
        "https://example.org/변수",
        "my_변수 x_1",
        "\u03b1 \u03b2 x \u03c0",
        "<think> </answer>",
        "12 345 67.8 % ?! 😀",
    ],
)
def test_what_is_no_language_does_not_count(noise):
    for language in ("en", "zh"):
        assert score(language, f"{TEXTS[language]}\n{noise}") == 1.0


@pytest.mark.parametrize("text", ["", "4 + 4 = 8", "ok", "x y z", "1" * 1000])
def test_too_few_letters_are_not_judged(text):
    assert score("en", text) is None
    assert score("zh", text) is None


@pytest.mark.parametrize(
    ("part", "prompt", "text", "expected"),
    [
        ("thought", "Q", "<think>EN</think>ZH", 1.0),
        ("thought", "Q<think>", "EN", 1.0),
        ("thought", "Q", "EN", None),
        ("answer", "Q", "<think>ZH</think>EN", 1.0),
        ("answer", "Q<think>", "EN", None),
        ("completion", "Q<think>", "EN", 1.0),
    ],
)
def test_only_the_part_is_judged(part, prompt, text, expected):
    text = text.replace("EN", TEXTS["en"]).replace("ZH", TEXTS["zh"])
    assert Language(part=part)(completions=[text], prompts=[prompt]) == [expected]


@pytest.mark.parametrize(
    "thought",
    [
        "Let me add the two numbers carefully now.\nUnits digit",
        "Okay, so I need to find 17*23. First compute 17*20=340, then 17*3=51. Total 391.",
    ],
)
def test_a_short_last_sentence_is_judged_with_the_one_before(thought):
    assert Language("en")(completions=[f"{thought}</think>391"]) == [1.0]
