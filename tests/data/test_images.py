"""Images of prompts: from files, tables and messages to what TRL takes."""

import json

import datasets
import pytest
from PIL import Image

from rloo_kit.data.images import check_images, has_images, save_thumbnails
from rloo_kit.data.prompts import load_prompts
from rloo_kit.errors import DataError

RED = (255, 0, 0)


@pytest.fixture
def picture(tmp_path):
    (tmp_path / "pictures").mkdir()
    path = tmp_path / "pictures" / "red.png"
    Image.new("RGB", (6, 4), RED).save(path)
    return path


@pytest.fixture
def load(tmp_path, picture):
    """Return a function that writes rows to a file, and loads the file as prompts."""

    def load_rows(*rows, **how):
        path = tmp_path / "p.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_prompts(path, **how)

    return load_rows


def is_red(image):
    return image.size == (6, 4) and image.convert("RGB").getpixel((0, 0)) == RED


def of_user(*parts):
    return [{"role": "user", "content": list(parts)}]


TEXT = {"type": "text", "text": "what?"}


def test_a_path_starts_from_the_file_and_is_decoded_when_read(load, picture):
    dataset = load({"prompt": "what?", "image": "pictures/red.png", "answer": "red"})
    assert dataset.features["image"] == datasets.Image()
    assert dataset.data.column("image").to_pylist() == [{"bytes": None, "path": str(picture)}]
    assert is_red(dataset[0]["image"])
    assert dataset[0]["prompt"] == [{"role": "user", "content": "what?"}]


def test_csv_and_parquet_have_images_too(tmp_path, picture):
    (tmp_path / "p.csv").write_text("question,photo\nwhat?,pictures/red.png\n")
    columns = {"prompt": "question", "image": "photo"}
    assert is_red(load_prompts(tmp_path / "p.csv", columns=columns)[0]["image"])
    # with the feature of images, and without
    for image in (Image.open(picture).copy(), picture.read_bytes()):
        rows = datasets.Dataset.from_dict({"prompt": ["what?"], "image": [image]})
        rows.to_parquet(tmp_path / "p.parquet")
        assert is_red(load_prompts(tmp_path / "p.parquet")[0]["image"])


def test_rows_with_none_or_several_share_a_column_of_lists(load):
    one = "pictures/red.png"
    rows = [{"prompt": "what?", "images": images} for images in ([one, one], [], [one])]
    assert [len(row["images"]) for row in load(*rows)] == [2, 0, 1]
    first, second = load(*({"prompt": "what?", "image": image} for image in (one, None)))
    assert is_red(first["images"][0])
    assert second["images"] == []
    assert "image" not in first


@pytest.mark.parametrize("key", ["image", "path", "url"])
def test_image_parts_become_a_column(load, key):
    part = {"type": "image", key: "pictures/red.png"}
    prompt = [{"role": "system", "content": "Look."}, *of_user(part, TEXT)]
    (loaded,) = load({"prompt": prompt, "answer": "red"})
    assert is_red(loaded["images"][0])
    system, user = loaded["prompt"]
    assert system["content"][0]["text"] == "Look."
    assert [(one["type"], one["text"]) for one in user["content"]] == [
        ("image", None),
        ("text", "what?"),
    ]
    assert "image" not in user["content"][0]  # TRL fills parts without the key alone


def test_bare_parts_keep_the_column_they_stand_for(load):
    row = {"prompt": of_user({"type": "image"}, TEXT), "images": ["pictures/red.png"]}
    assert is_red(load(row)[0]["images"][0])
    row["prompt"] = of_user({"type": "image", "image": "pictures/red.png"}, TEXT)
    with pytest.raises(DataError, match="in messages and in a column: keep one"):
        load(row)


def test_image_parts_of_a_saved_dataset_become_a_column(tmp_path, picture):
    text = datasets.Value("string")
    parts = datasets.List({"type": text, "text": text, "image": datasets.Image()})
    features = datasets.Features({"prompt": datasets.List({"role": text, "content": parts})})
    rows = [{"prompt": of_user({"type": "image", "image": str(picture)}, TEXT)}]
    dataset = datasets.Dataset.from_list(rows, features=features)
    assert has_images(dataset)
    dataset.to_parquet(tmp_path / "p.parquet")
    loaded = load_prompts(tmp_path / "p.parquet", system="Look.")
    assert is_red(loaded[0]["images"][0])
    assert loaded.features["images"] == datasets.List(datasets.Image())
    assert [m["content"][0].get("text") for m in loaded[0]["prompt"]] == ["Look.", None]


@pytest.mark.parametrize(
    ("image", "says"),
    [
        ("pictures/none.png", r"row 2: the image .*none\.png.* cannot be read \(.*give a PNG"),
        ("p.jsonl", r"row 2: the image .*p\.jsonl.* cannot be read"),
        ("https://example.com/a.png", "row 2: .* cannot be read .*on this machine .images are not"),
        ("pictures", "row 2: the image .* cannot be read"),
        (7, "row 2|cannot be stored"),
    ],
    ids=range(5),
)
def test_a_bad_image_is_refused_with_its_row(load, image, says):
    rows = [{"prompt": "what?", "image": one} for one in ("pictures/red.png", image)]
    with pytest.raises(DataError, match=says):
        load(*rows)


def test_plain_text_prompts_take_no_images(load):
    with pytest.raises(DataError, match=r"leave data\.chat true"):
        load({"prompt": "what?", "image": "pictures/red.png"}, chat=False)


# --- which data sets have some -------------------------------------------------------------------


def test_has_images_looks_at_features_or_the_first_row(tmp_path, picture):
    part = {"type": "image", "image": Image.open(picture)}
    assert has_images([{"prompt": of_user(part, TEXT)}])
    assert has_images([{"prompt": "what?", "images": []}])
    assert not has_images([{"prompt": of_user(TEXT)}])
    assert not has_images([])
    rows = datasets.Dataset.from_list([{"prompt": of_user(TEXT)}])
    assert not has_images(rows)
    assert not has_images(load_prompts("arithmetic", num_prompts=4))
    assert has_images(rows.to_iterable_dataset().map(lambda row: {**row, "image": None}))


def test_images_need_a_processor_and_a_column():
    rows = [{"prompt": of_user({"type": "image", "image": None}, TEXT)}]
    with pytest.raises(DataError, match="images=True"):
        check_images(rows, object())
    processor = type("Processor", (), {"image_processor": None})()
    with pytest.raises(DataError, match="put them into the column images"):
        check_images(rows, processor)
    check_images([{"prompt": "what?", "image": None}], processor)


# --- thumbnails ----------------------------------------------------------------------------------


def test_each_distinct_thumbnail_is_written_once(tmp_path):
    large = Image.new("RGBA", (900, 300), RED)
    record = {"prompt": of_user({"type": "image", "image": large}), "images": (large, large)}
    record["images"] += (Image.new("L", (8, 8)),)
    kept = save_thumbnails({**record, "score": 1.0}, tmp_path)
    assert kept["prompt"][0]["content"][0]["image"] == kept["images"][0] == kept["images"][1]
    assert kept["score"] == 1.0
    json.dumps(kept)
    assert len(list(tmp_path.glob("images/*"))) == 2
    with Image.open(tmp_path / kept["images"][0]) as small:
        assert small.size == (128, 43)
    assert (tmp_path / kept["images"][0]).stat().st_size < 5000
