"""What surgery needs of the Hugging Face hub: a listing, the small files, shard headers, or everything.

Access tokens are the library's business: they are neither read nor printed here.
"""

import contextlib
import dataclasses as dc
import fnmatch
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from sse_convert.checkpoints.safetensors_io import TensorInfo, checked_tensors
from sse_convert.errors import CheckpointError, HubError, SSEConvertError
from sse_convert.process_memory import lacks_memory

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_PART = r"(?!.*(?:--|\.\.))[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"{_PART}(?:/{_PART})?(?<!\.git)", re.ASCII)
ANSWER_SECONDS = 10.0
"""to wait for an answer of the hub"""
MOST_OF_AN_ID = 96
"""characters"""
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
SMALL_PATTERNS = (
    "*.json",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
"""files of a checkpoint beside its weights"""
WEIGHT_PATTERNS = ("model*.safetensors",)
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth")
_NOT_IN_SUBFOLDERS = [f"*/{pattern}" for pattern in ("*.safetensors", *PICKLE_PATTERNS)]
SHA256_DIGITS = 64
"""of a SHA-256 in hexadecimal, which is what the cache calls large files by"""
T = TypeVar("T")


@dc.dataclass(frozen=True, slots=True)
class Listing:
    """Files of a hub repository at one commit."""

    repo_id: str
    revision: str | None
    """as asked for; downloading by it lets the cache remember which commit it was"""
    commit: str
    sizes: dict[str, int | None]
    """file name -> bytes, where the hub says"""

    @property
    def has_safetensors(self) -> bool:
        """Whether there is a `model.safetensors`, whole or in shards."""
        return any(_WEIGHTS.fullmatch(name) for name in self.sizes)

    def pickles(self) -> list[str]:
        """Pickle files at the top level."""
        return [name for name in self.sizes if any(fnmatch.fnmatch(name, pattern) for pattern in PICKLE_PATTERNS)]


def looks_like_id(text: str) -> bool:
    """Whether `text` can be a hub id: `name` or `owner/name`."""
    return len(text) <= MOST_OF_AN_ID and _ID.fullmatch(text) is not None


def listing(repo_id: str, revision: str | None) -> Listing:
    """The files of a repository; needs the network.

    Raises:
        HubError: no such repository or revision, no access, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    def request() -> Any:
        return HfApi().model_info(repo_id, revision=revision, files_metadata=True, timeout=ANSWER_SECONDS)

    info = _asking(repo_id, revision, request)
    return Listing(repo_id, revision, str(info.sha), {file.rfilename: file.size for file in info.siblings or []})


def cached(repo_id: str, revision: str | None) -> Path | None:
    """The snapshot folder in the local cache, None where there is none or files are missing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [*SMALL_PATTERNS, *WEIGHT_PATTERNS]
    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                local_files_only=True,
                allow_patterns=patterns,
                ignore_patterns=_NOT_IN_SUBFOLDERS,
            )
        )
    except LocalEntryNotFoundError:
        return None


def cached_blob(path: Path) -> Path | None:
    """Where the hub's cache keeps a file of a snapshot, named by its SHA-256 (large files) or its id in git.

    None for a file that is not the cache's.
    """
    if not path.is_symlink():
        return None
    blob = Path(os.path.abspath(path.parent / path.readlink()))
    in_cache = blob.parent.name == "blobs" and blob.parent.parent.name.startswith("models--")
    return blob if in_cache else None


def download_small(files: Listing) -> Path:
    """Download everything but the weights; the snapshot folder.

    Raises:
        HubError: see `listing`.
    """
    return _download(files.repo_id, files.revision, SMALL_PATTERNS)


def download_snapshot(repo_id: str, revision: str | None) -> Path:
    """Download the weights (`model*.safetensors`) and the small files; the snapshot folder.

    Raises:
        HubError: see `listing`.
    """
    return _download(repo_id, revision, (*SMALL_PATTERNS, *WEIGHT_PATTERNS))


def _download(repo_id: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    def request() -> str:
        return snapshot_download(
            repo_id, revision=revision, allow_patterns=list(patterns), ignore_patterns=_NOT_IN_SUBFOLDERS
        )

    return Path(_asking(repo_id, revision, request))


def headers(files: Listing, shards: list[str]) -> dict[str, TensorInfo]:
    """The tensors of the given shards, from ranged requests for their headers.

    Raises:
        CheckpointError: a shard is missing, or its header is damaged.
        HubError: see `listing`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import SafetensorsParsingError

    api = HfApi()
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        where = f"shard {shard} of {files.repo_id}"
        if shard not in files.sizes:
            raise CheckpointError(
                f"{where} is missing", expected="every shard the index names", fix="use another revision"
            )

        def request(shard: str = shard, where: str = where) -> Any:
            try:
                return api.parse_safetensors_file_metadata(files.repo_id, shard, revision=files.commit)
            except SafetensorsParsingError as error:
                raise CheckpointError(
                    f"{where} is not a valid safetensors file: {error}", fix="use another revision"
                ) from error

        header = _asking(files.repo_id, files.commit, request)
        entries = {
            name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": list(tensor.data_offsets)}
            for name, tensor in header.tensors.items()
        }
        end = max((tensor.data_offsets[1] for tensor in header.tensors.values()), default=0)
        tensors |= checked_tensors(Path(shard), entries, 0, end)
    return tensors


def _asking(repo_id: str, revision: str | None, request: Callable[[], T]) -> T:
    """Run a request and turn what the hub libraries raise into errors a user can act on."""
    from huggingface_hub import errors

    where = f"{repo_id}" + (f" at revision {revision}" if revision else "")
    with hub_errors(where), _answering_soon():
        try:
            return request()
        except errors.GatedRepoError as error:
            raise HubError(
                f"{where} is gated{_source(error)}",
                expected="access granted to your account",
                fix="accept its terms on the hub, then `hf auth login`",
            ) from error
        except errors.RevisionNotFoundError as error:
            raise HubError(
                f"{repo_id} has no revision {revision or 'main'}{_source(error)}",
                expected="a branch, tag or commit",
                fix="correct revision:",
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise HubError(
                f"{repo_id} is neither a local folder nor a model on the hub{_source(error)}",
                expected="a folder with config.json, or a hub id such as Qwen/Qwen3-0.6B",
                fix="correct the name; for a private model, `hf auth login` first",
            ) from error
        except errors.HFValidationError as error:
            raise HubError(
                f"{repo_id} is not a valid hub id: {error}", expected="owner/name", fix="correct model:"
            ) from error


@contextlib.contextmanager
def _answering_soon() -> Iterator[None]:
    """Let no request of the hub's library that names no time wait for ever, as those for lists and headers do."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    session = get_session()
    before, session.timeout = session.timeout, ANSWER_SECONDS
    try:
        yield
    finally:
        session.timeout = before


@contextlib.contextmanager
def hub_errors(what: str, doing: Literal["read", "write to"] = "read") -> Iterator[None]:
    """Turn whatever the hub's library raises into errors a user can act on. The server's own text is not repeated.

    A server may answer anything, so all is taken but what the machine lacks and errors of ours.

    Args:
        what: repository that is asked for.
        doing: what is done with it.

    Raises:
        HubError: the hub refused, cannot be reached, or does not answer as a hub does.
    """
    from huggingface_hub import constants, errors

    try:
        yield
    except SSEConvertError:
        raise
    except errors.LocalTokenNotFoundError as error:
        raise HubError("not logged in to the hub", expected="a token with write access", fix=LOG_IN) from error
    except UnicodeEncodeError as error:
        raise HubError(
            "the hub's token has other characters than ASCII", expected="a valid token", fix=LOG_IN
        ) from error
    except (network_error(), errors.LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        if (answer := _answer(error)) is not None:
            raise _refusal(what, answer, doing) from error
        raise HubError(
            f"the hub cannot be reached for {what} at {constants.ENDPOINT} ({type(error).__name__})",
            expected="a network connection" + (", or what is asked for in the local cache" if doing == "read" else ""),
            fix="check the connection, HF_ENDPOINT and HF_HUB_OFFLINE, then run the same command again"
            + ("; if a folder is meant, there is none of that name here" if doing == "read" else ""),
        ) from error
    except Exception as error:
        if lacks_memory(error) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise HubError(
            f"what {constants.ENDPOINT} answers for {what} is none of the hub's ({type(error).__name__})",
            expected="the Hugging Face hub, or what answers as it does",
            fix="check HF_ENDPOINT, and proxies between here and there",
        ) from error


def _answer(error: BaseException | None) -> "HfHubHTTPError | None":
    """What the hub answered, if it is what an error came of."""
    from huggingface_hub.errors import HfHubHTTPError

    while error is not None and not (isinstance(error, HfHubHTTPError) and error.response is not None):
        error = error.__cause__
    return error


def _source(error: "HfHubHTTPError") -> str:
    """Status and address of an answer, without what an address may hold of a token."""
    return f" ({error.response.status_code} from {str(error.response.url).partition('?')[0]})"


def _refusal(what: str, error: "HfHubHTTPError", doing: str) -> HubError:
    """The error for an answer of the hub that is none of success."""
    source = _source(error)
    match error.response.status_code:
        case 401:
            return HubError(f"the hub does not accept the token{source}", expected="a valid token", fix=LOG_IN)
        case 403:
            return HubError(
                f"the token may not {doing} {what}{source}",
                expected="a token with access to that namespace",
                fix="choose your own namespace, or log in with another token",
            )
        case 404:
            return HubError(f"{what} or the revision was not found{source}", fix="check the name, and who may see it")
        case 409 if doing != "read":
            return HubError(f"{what} exists already{source}", expected="a new name", fix="choose another name")
        case 429:
            return HubError(f"the hub asks to slow down{source}", fix="wait, then run the same command again")
        case _:
            return HubError(
                f"the hub failed{source}",
                fix="wait, then run the same command again; if it stays so, check HF_ENDPOINT and proxies",
            )


def network_error() -> type[Exception]:
    """The base of what the hub's HTTP library raises; which library that is depends on huggingface_hub's version."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__bases__ if base is not OSError and issubclass(base, Exception))
