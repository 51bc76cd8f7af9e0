"""Models and initialisers at the Hugging Face Hub, pinned to one commit, in huggingface_hub's own cache."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id

from weightscope._version import __version__
from weightscope.checkpoint.files import CANDIDATES, CONFIG, Folder, open_folder
from weightscope.checkpoint.tensors import Store
from weightscope.errors import DataError, UsageError

USER_AGENT = {"weightscope": __version__}
ARTIFACT_FILE = "initialiser.safetensors"  # of a repository that holds an initialiser
_ADVICE = {
    401: "it is private, gated, or does not exist: check the name, or set HF_TOKEN to a token that may read it",
    403: "it is gated: ask for access on its page, then set HF_TOKEN to a token that has it",
    404: "no such model, revision or file: check the name",
    429: "too many requests: wait, or set HF_TOKEN",
}
_WRITE_ADVICE = {
    401: "the token is not valid; run `hf auth login`, or set HF_TOKEN",
    403: "the token may not write there; make one with write access, or name a repository of your own",
    409: "it exists; name another one, or add --update to add a commit to it",
}

log = logging.getLogger(__name__)


class _Unreachable(DataError):
    """No answer: the endpoint is down, there is no network, or HF_HUB_OFFLINE is set."""


def open_hub(address: str, key: str | None = None) -> Store:
    """The tensors of a model at the hub: `hf://org/name[@revision]`, where a revision is a branch, tag or commit."""
    return open_folder(HubFolder(address), key)


def artifact_file(address: str) -> Path:
    """The cached file of the initialiser at `hf://org/name[@revision]`, downloaded if it is not there."""
    folder = HubFolder(address)
    if ARTIFACT_FILE not in folder.names():
        there = ", ".join(folder.names()[:6]) or "no files"
        raise DataError(f"{address}: expected {ARTIFACT_FILE}, which `weightscope publish` writes, found {there}")
    return folder.download(ARTIFACT_FILE)


def upload(address: str, files: Mapping[str, bytes], *, private: bool = False, update: bool = False) -> str:
    """Create the model repository `hf://org/name` with some files, as one commit; returns the address.

    With `update`, the commit may be one to a repository that exists. UsageError without a token, or if the repository
    exists; DataError if the hub refuses or cannot be reached.
    """
    repository, _ = _parsed(address)
    if "@" in address or "/" not in repository:
        raise UsageError(f"expected hf://org/name, found {address}")
    if get_token() is None:
        raise UsageError(f"{address}: no token; run `hf auth login`, or set HF_TOKEN to one that may write")
    api, there = HfApi(constants.ENDPOINT, user_agent=USER_AGENT), ""
    changes = [CommitOperationAdd(name, content) for name, content in files.items()]
    try:
        with _errors_of(address, _WRITE_ADVICE):
            api.create_repo(repository, private=private, exist_ok=update)
            there = "" if update else "; the repository is there now, so that the next try needs --update"
            api.create_commit(repository, changes, commit_message=f"weightscope {__version__}")
    except DataError as error:
        raise DataError(f"{error}{there}") from error
    return address


def _parsed(address: str) -> tuple[str, str]:
    """Repository and revision of `hf://org/name[@revision]`."""
    repository, _, revision = address.removeprefix("hf://").partition("@")
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UsageError(f"expected hf://org/name or hf://org/name@revision, found {address}: {error}") from error
    return repository, revision or "main"


class HubFolder(Folder):
    """A model's files at one commit; each is downloaded when it is opened, unless it is in the cache."""

    def __init__(self, address: str) -> None:
        repository, revision = _parsed(address)
        super().__init__(Path())
        self.where, self._repository, self._revision = f"hf://{repository}", repository, revision
        self.commit, self._names = self._resolved()

    def names(self) -> list[str]:
        return self._names

    def file(self, name: str) -> tuple[Path, str]:
        self.opened.append(self.download(name))
        return self.opened[-1], f"{self.where}: {name}"

    def download(self, name: str) -> Path:
        """The file in huggingface_hub's cache."""
        with _errors_of(f"{self.where}: {name}"):
            return Path(hf_hub_download(self._repository, name, revision=self._revision, user_agent=USER_AGENT))

    def _resolved(self) -> tuple[str, list[str]]:
        """The commit, and the names of the files at its top; subfolders hold other models."""
        revision = self._revision
        try:
            with _errors_of(self.where if revision == "main" else f"{self.where}@{revision}"):
                api = HfApi(constants.ENDPOINT, user_agent=USER_AGENT)
                info = api.model_info(self._repository, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except _Unreachable as error:
            for name in (*CANDIDATES, ARTIFACT_FILE, CONFIG):
                path = try_to_load_from_cache(self._repository, name, revision=revision)
                if isinstance(path, str):
                    folder = Path(path).parent
                    log.warning("%s; using commit %s from the cache", error, folder.name[:12])
                    return folder.name, sorted(file.name for file in folder.iterdir() if file.is_file())
            raise
        return str(info.sha), [file.rfilename for file in info.siblings or () if "/" not in file.rfilename]


@contextmanager
def _errors_of(what: str, advice: Mapping[int, str] = _ADVICE) -> Iterator[None]:
    """One line for what huggingface_hub raises; it has tried again already where that may help."""
    try:
        yield
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, HTTPError, ConnectionError) as error:
        if isinstance(error, HfHubHTTPError):
            raise _refused(what, error, advice) from error
        why = "HF_HUB_OFFLINE forbids downloads" if constants.HF_HUB_OFFLINE else " ".join(str(error).split())[:150]
        raise _Unreachable(f"{what}: no answer from the hub ({why}); check the network, or HF_ENDPOINT") from error


def _refused(what: str, error: HfHubHTTPError, advice: Mapping[int, str]) -> DataError:
    status = error.response.status_code
    gated = error.response.headers.get("X-Error-Code") == "GatedRepo"
    step = advice.get(403 if gated else status, "it was refused; try again later")
    return DataError(f"{what}: the hub answered {status}{' (gated)' if gated else ''}: {step}")
