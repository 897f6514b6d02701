"""`vllm serve` finds the plugin by itself and answers an OpenAI client on the loopback address."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from tests.serving.vllm.engine import NEW, Checkpoint, checkpoint, prompts

TEACHER = Path(__file__).resolve().parents[3] / "demo" / "teacher"
PROMPTS = (
    "Once upon a time there was",
    "The little dog was very happy, because it found a red ball in the garden. Then",
)
READY = "Application startup complete"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A converted model with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    layers = ["sse+sliding", "large", "full"]
    made = checkpoint(folder, layers, vocab_size=2048, max_position_embeddings=8192)
    for file in TEACHER.glob("tokenizer*"):
        shutil.copy(file, folder)
    return made


@pytest.fixture(scope="module")
def client(served: Checkpoint) -> Iterator[OpenAI]:
    """A client of a server that has said it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        Path(sys.executable).parent / "vllm", "serve", served.path, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enable-prefix-caching", "--served-model-name", "hybrid",
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    said = []
    for line in server.stdout:
        said.append(line)
        if READY in line:
            break
    else:
        pytest.fail("".join(said[-40:]))
    yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    server.terminate()
    server.communicate()


def test_completions(served: Checkpoint, client: OpenAI) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    found = client.completions.create(
        model="hybrid", prompt=list(PROMPTS), temperature=0, max_tokens=NEW,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    assert [choice.token_ids for choice in found.choices] == [served.follows(given) for given in ids]
    assert found.choices[0].text == tokenizer.decode(found.choices[0].token_ids)
    assert found.usage is not None
    assert found.usage.completion_tokens == NEW * len(PROMPTS)


def test_a_stream_is_the_same(client: OpenAI) -> None:
    options = {"model": "hybrid", "prompt": PROMPTS[0], "temperature": 0, "max_tokens": NEW}
    whole = client.completions.create(**options, extra_body={"ignore_eos": True}).choices[0].text
    pieces = client.completions.create(**options, extra_body={"ignore_eos": True}, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == whole


def test_prompts_are_the_same_again(served: Checkpoint, client: OpenAI) -> None:
    """Longer and shorter than a chunk, eight at once and again: each answer is as of a prompt read from its start."""
    given = prompts(100, 700, 1300, 2100, 2500, 3000, 4500, 6000)

    def answers() -> tuple[list[list[int]], list[list[float]]]:
        choices = client.completions.create(
            model="hybrid", prompt=given, temperature=0, max_tokens=NEW, logprobs=1,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        ).choices  # fmt: skip
        return [choice.token_ids for choice in choices], [choice.logprobs.token_logprobs for choice in choices]

    found, expected = answers(), [served.follows(ids) for ids in given]
    again = answers()
    assert found[0] == again[0] == expected
    for one, other in zip(found[1], again[1], strict=True):
        assert one == pytest.approx(other, abs=1e-3)
