"""The text of a new recipe: what it writes, `run` accepts, whatever was given."""

import json
import shutil
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sse_convert import api
from sse_convert.checkpoints.config_only import open_for_planning
from sse_convert.checkpoints.load_model import stored_tokenizer
from sse_convert.data.packing import IGNORED
from sse_convert.data.rows import RowReader, stack
from sse_convert.errors import DataError
from sse_convert.evaluation.tasks import check_texts
from sse_convert.recipe import load_recipe
from sse_convert.recipe.checks import check_run
from sse_convert.recipe.schema import Source
from sse_convert.surgery import new_recipe as module
from sse_convert.surgery.job import Job
from sse_convert.surgery.recipe_text import HUB_CHATS, MOST_PASSES
from tests.fake_hub import FakeHub

TEACHER = Path(__file__).parents[2] / "demo" / "teacher"
NEW = Path("new.yaml")
APPENDS = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REWRITES = (
    "{% for m in messages %}{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}{% endfor %}"
)
SENTENCE = "The river ran past the mill, and nobody in the town remembered when it had last been dry. "
TALK = [{"role": "user", "content": SENTENCE}, {"role": "assistant", "content": "Indeed. " + SENTENCE * 3}]
RECORDS = {
    "text": {"text": SENTENCE * 4},
    "other": {"id": 7, "story": SENTENCE * 4},
    "chat": {"messages": TALK, "source": "mine"},
    "chat of many": {"messages": [*TALK, *TALK], "text": "ignored"},
}


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "machine_here", lambda: None)
    monkeypatch.setattr(module, "cpu_of", lambda *_: None)
    monkeypatch.chdir(tmp_path)


def teacher(template=None):
    """The demo's model by its config and tokenizer, with a chat template or without."""
    shutil.copytree(TEACHER, "model", ignore=shutil.ignore_patterns("*.safetensors"))
    if template:
        Path("model/chat_template.jinja").write_text(template)
    return Path("model")


def tokenizer_of(model):
    return stored_tokenizer(open_for_planning(model).files)


def write(name, kind="text", count=200):
    """A file of a kind of records, or of running text."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([RECORDS[kind]] * count), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n" + f"{json.dumps(RECORDS[kind])}\n" * count)
    else:
        path.write_text((SENTENCE * 4 + "\n") * count)
    return path


KINDS = {
    "text": [("a.txt", "")],
    "markdown": [("a.md", "")],
    "no suffix": [("LICENSE", "")],
    "jsonl": [("a.jsonl", "text")],
    "another column": [("a.jsonl", "other")],
    "parquet": [("a.parquet", "text")],
    "another column of parquet": [("a.parquet", "other")],
    "chats": [("a.jsonl", "chat")],
    "chats of many turns": [("a.jsonl", "chat of many")],
    "chats in parquet": [("a.parquet", "chat")],
    "a folder": [("a/1.txt", ""), ("a/2.txt", "")],
    "a folder of code": [("a/1.py", ""), ("a/b/2.java", ""), ("a/README.md", "")],
    "a folder of chats": [("a/1.jsonl", "chat"), ("a/b/2.jsonl", "chat of many")],
    "a folder of all": [("a/1.jsonl", "chat"), ("a/2.txt", ""), ("a/3.parquet", "text"), ("a/4.jsonl", "other")],
}


CPU = module.Cpu(24 << 30)
"""half an hour of it holds the rule's tokens for the demo's teacher"""
MACHINES = ((False, None, None), (True, None, None), (True, CPU, None), (False, CPU, 0.2))
"""held-out text, a CPU, hours"""


@pytest.mark.parametrize(
    ("kind", "held_out", "cpu", "hours"),
    [
        *((kind, *MACHINES[0]) for kind in KINDS),
        *((kind, *machine) for kind in ("text", "chats", "a folder") for machine in MACHINES[1:]),
    ],
)
def test_run_accepts_what_is_written(monkeypatch, kind, held_out, cpu, hours):
    """Every stage reads rows of it with a token to predict, and evaluation its own."""
    monkeypatch.setattr(module, "cpu_of", lambda *_: cpu)
    for name in ("choice_cost", "plan"):
        monkeypatch.setattr(f"sse_convert.surgery.{name}.forward_flops_per_second", lambda dtype: 1e11)
    model = teacher(APPENDS)
    files = [write(name, of) for name, of in KINDS[kind]]
    given = "a" if "/" in KINDS[kind][0][0] else files[0]
    measured = [write("held/out.jsonl", "chat", 40)] if held_out else []
    api.recipes_new(model, NEW, text=[given], held_out=measured, hours=hours)
    recipe = load_recipe(NEW)
    assert not list(check_run(recipe))
    assert not [note for note in api.plan(NEW).notes if "refuses" in note]
    check_texts(Job.of(recipe, open_for_planning))
    chats = any(source.kind == "chat" for source in recipe.data.train)
    assert chats == any("chat" in of for _, of in KINDS[kind])
    for stage in recipe.stages:
        assert stage.loss_mask == ("assistant" if chats else "all")
        reader = RowReader(recipe.data.train, tokenizer_of(model), stage.seq_len, 0, loss_mask=stage.loss_mask)
        labels = stack(list(islice(reader.rows(), 2)))["labels"]
        assert (labels != IGNORED).any(dim=1).all()


def test_a_model_that_chats_gets_public_chats_beside_web_pages_and_is_measured_on_both():
    api.recipes_new(teacher(APPENDS), NEW)
    recipe = load_recipe(NEW)
    assert [source.kind for source in recipe.data.train] == ["text", "text", "chat"]
    assert recipe.data.train[-1].path == HUB_CHATS["path"]
    assert sum(source.weight for source in recipe.data.train) == pytest.approx(1)
    assert [(source.kind, source.split) for source in recipe.data.valid] == [("text", "validation"), ("chat", "test")]
    assert {stage.loss_mask for stage in recipe.stages} == {"assistant"}


def test_the_turns_of_the_user_do_not_count():
    model = teacher(APPENDS)
    api.recipes_new(model, NEW, text=[write("a.jsonl", "chat")])
    recipe = load_recipe(NEW)
    stage, tokenizer = recipe.stages[0], tokenizer_of(model)
    row = next(RowReader(recipe.data.train, tokenizer, stage.seq_len, 0, loss_mask=stage.loss_mask).rows())
    counted = tokenizer.decode(row.labels[row.labels != IGNORED])
    assert "Indeed." in counted
    assert "<user>" in tokenizer.decode(row.input_ids)
    assert "<user>" not in counted


@pytest.mark.parametrize(("template", "told"), [(None, ""), (REWRITES, "rewrites earlier turns")])
def test_a_model_that_does_not_chat_gets_none(template, told):
    written = api.recipes_new(teacher(template), NEW)
    recipe = load_recipe(NEW)
    assert {source.kind for source in (*recipe.data.train, *recipe.data.valid)} == {"text"}
    assert {stage.loss_mask for stage in recipe.stages} == {"all"}
    assert told in "\n".join(written.lines())


@pytest.mark.parametrize(
    ("template", "kind", "match"),
    [
        (None, "chat", "holds conversations .column messages., and the model has no chat template"),
        (REWRITES, "chat of many", "rewrites earlier turns"),
        (None, None, "has no column text or messages, but question, answer"),
    ],
)
def test_text_that_run_would_refuse_is_refused_at_once(monkeypatch, template, kind, match):
    monkeypatch.setitem(RECORDS, None, {"question": "a", "answer": "b"})
    with pytest.raises(DataError, match=match):
        api.recipes_new(teacher(template), NEW, text=[write("a.jsonl", kind)])
    assert not NEW.exists()


@pytest.mark.parametrize("text", ["{", "[1]", "7\n"])
def test_records_that_are_none_are_named(text):
    Path("a.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"a\.jsonl, first record: "):
        api.recipes_new(teacher(), NEW, text=["a.jsonl"])


def test_a_model_that_chats_says_where_chats_are_missing():
    assert "this text has no conversations" in "\n".join(
        api.recipes_new(teacher(APPENDS), NEW, text=[write("a.txt")]).lines()
    )


def test_files_of_a_folder_that_are_not_read_are_told():
    write("code/main.py")
    write("code/scan.csv")
    assert "not read of code: 1 .csv" in api.recipes_new(teacher(), NEW, text=["code"]).lines()


@pytest.mark.parametrize(("name", "kind"), [("a.txt", ""), ("a.jsonl", "text"), ("a.parquet", "text")])
def test_a_short_text_bounds_the_budget(name, kind):
    """Counted within a tenth, read four times; what the rule would read is told."""
    model = teacher()
    written = api.recipes_new(model, NEW, text=[write(name, kind, 500)])
    tokens = 500 * len(tokenizer_of(model)(SENTENCE * 4)["input_ids"])
    told = next(line for line in written.lines() if line.startswith("text: about"))
    counted = 1e3 * float(told.split()[2].removesuffix("K"))
    assert counted == pytest.approx(tokens, rel=0.1)
    assert sum(stage.tokens for stage in load_recipe(NEW).stages) == pytest.approx(MOST_PASSES * counted, rel=0.1)
    assert "read 4 times" in told
    assert "rule's" in told
    assert f"Text{told[4:]}" in NEW.read_text()


def test_weights_follow_the_tokens():
    api.recipes_new(teacher(), NEW, text=[write("a.txt", count=300), write("b.jsonl", "text", 100)])
    weights = [source.weight for source in load_recipe(NEW).data.train]
    assert weights == [pytest.approx(0.75, abs=0.03), pytest.approx(0.25, abs=0.03)]


def test_held_out_text_that_fills_no_long_row_is_read_in_short_ones():
    api.recipes_new(teacher(), NEW, text=[write("a.txt")], held_out=[write("b.txt", count=10)])
    recipe = load_recipe(NEW)
    assert recipe.eval.lengths == recipe.eval.needle.lengths == [512]


@pytest.fixture
def hub(monkeypatch):
    """A hub that has one dataset; the library reads what it holds from a folder here."""
    folder, library = Path("hub"), datasets.load_dataset
    folder.mkdir()
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda path: NAMES[path])
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path, name: ["train_sft", "test"])
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda path, name, *, split, streaming: library(
            "json", data_files={split: str(folder / f"{split}.jsonl")}, split=split, streaming=streaming
        ),
    )
    with FakeHub() as hub:
        hub.datasets |= set(NAMES)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.endpoint)
        yield folder


NAMES = {"owner/plain": ["default"], "owner/some": ["a", "all"], "owner/parts": ["b", "c"]}


@pytest.mark.parametrize(
    ("path", "kind", "keys"),
    [
        ("owner/plain", "chat", {"kind": "chat"}),
        ("owner/some", "chat of many", {"kind": "chat", "name": "all"}),
        ("owner/parts", "other", {"field": "story", "name": "b"}),
        ("owner/plain", "text", {}),
    ],
)
def test_run_accepts_what_is_written_of_a_dataset(hub, path, kind, keys):
    """Its conversations and its column of text are found, and the configuration and the split that it must name."""
    for split in ("train_sft", "test"):
        write(hub / f"{split}.jsonl", kind)
    model = teacher(APPENDS)
    api.recipes_new(model, NEW, text=[path], held_out=[path])
    recipe = load_recipe(NEW)
    assert recipe.data.train == [Source(path=path, streaming=True, split="train_sft", **keys)]
    assert recipe.data.valid == [Source(path=path, streaming=True, split="test", **keys)]
    assert not list(check_run(recipe))
    check_texts(Job.of(recipe, open_for_planning))
    stage = recipe.stages[0]
    assert stage.loss_mask == ("assistant" if "chat" in kind else "all")
    row = next(RowReader(recipe.data.train, tokenizer_of(model), stage.seq_len, 0, loss_mask=stage.loss_mask).rows())
    assert (row.labels != IGNORED).any()


def test_a_dataset_that_the_hub_does_not_have_is_refused(hub):
    with pytest.raises(DataError, match="owner/none is neither a file, a folder nor a dataset"):
        api.recipes_new(teacher(), NEW, text=["owner/none"])


@pytest.fixture
def no_hub(monkeypatch):
    """A hub that does not answer; its library asks again without a pause."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.utils._http, "time", SimpleNamespace(sleep=lambda seconds: None))


@pytest.mark.parametrize("path", ["owner/plain", "plain"])
def test_a_hub_that_does_not_answer_is_told(no_hub, path):
    written = api.recipes_new(teacher(), NEW, text=[path])
    assert f"{path} is taken for text in a column text, since the hub cannot be reached" in "\n".join(written.lines())
    assert load_recipe(NEW).data.train == [Source(path=path, streaming=True)]


def test_a_mistyped_file_of_a_folder_is_no_dataset(no_hub):
    write("texts/a.txt")
    with pytest.raises(DataError, match=r"texts/a\.tx does not exist"):
        api.recipes_new(teacher(), NEW, text=["texts/a.tx"])
    assert not NEW.exists()
