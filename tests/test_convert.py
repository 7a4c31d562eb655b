"""Converting .bin checkpoints: equal tensors, one mapping at a time, no code run, nothing half."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import tiny_models
import torch
from safetensors.torch import load_file

from dakrun.cli import main
from dakrun.config import SamplingParams
from dakrun.errors import CannotRun, DakrunError, UsageError
from dakrun.llm import LLM
from dakrun.models.files import read_json_object
from dakrun.weights import Checkpoint, convert_checkpoint
from dakrun.weights.bins import read_tensors

WEIGHTS, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
TIED, UNTIED = "llama-gqa3-tied", "llama-gqa4-rope3"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def state(name: str) -> dict[str, torch.Tensor]:
    return dict(tiny_models.reference(name).state_dict())


def save_bin(name: str, folder: Path, shards: int = 1, **options: bool) -> Path:
    """The tiny model `name` in torch.save's files, as older releases of transformers wrote it."""
    folder.mkdir(exist_ok=True)
    tiny_models.CONFIGS[name].save_pretrained(folder)
    tensors, weight_map = state(name), {}
    names = list(tensors)
    if shards == 1:
        torch.save(tensors, folder / WEIGHTS, **options)
        return folder
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        part = {n: tensors[n].clone() for n in names[number::shards]}
        torch.save(part, folder / file, **options)
        weight_map |= dict.fromkeys(part, file)
    (folder / BIN_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def assert_same(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_all(folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name


def tokens(folder: Path) -> list[tuple[int, ...]]:
    llm = LLM(folder, device="cpu", batch_size=2)
    params = SamplingParams(max_tokens=12)
    return [tuple(c.token_ids) for c in llm.generate([[5, 6, 7], [9, 10, 11, 12]], params)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_bin(UNTIED, tmp_path / "src")


def only_source(tmp_path: Path) -> bool:
    return [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", [UNTIED, TIED, "opt-like-350m", "opt-no-bias"])
def test_the_result_is_the_same_model(name: str, shards: int, tmp_path: Path) -> None:
    result = convert_checkpoint(save_bin(name, tmp_path / "src", shards), tmp_path / "dst")
    expected = state(name)
    one_memory = name in (TIED, "opt-like-350m") and shards == 1  # shards were cloned apart
    if one_memory:
        del expected[HEAD]
    assert result.tied == ((HEAD,) if one_memory else ())
    assert_same(tmp_path / "dst", expected)
    assert (result.files, result.tensors) == (shards, len(expected))
    assert result.nbytes == sum(t.nbytes for t in expected.values())
    if shards == 1:
        assert (tmp_path / "dst/model.safetensors").is_file()
    assert tokens(tmp_path / "dst") == tokens(tiny_models.save(name, tmp_path / "original"))


def test_shards_have_at_most_the_given_size(source: Path, tmp_path: Path) -> None:
    limit = 1 << 20
    result = convert_checkpoint(source, tmp_path / "dst", shard_bytes=limit)
    files = sorted(tmp_path.glob("dst/*.safetensors"))
    names = [f"model-{i + 1:05d}-of-{result.files:05d}.safetensors" for i in range(result.files)]
    assert [path.name for path in files] == names
    for path in files:
        held = load_file(path)
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= limit
    assert_same(tmp_path / "dst", state(UNTIED))
    index = json.loads((tmp_path / "dst/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == result.nbytes
    assert index["weight_map"].keys() == state(UNTIED).keys()
    assert tokens(tmp_path / "dst") == tokens(tiny_models.save(UNTIED, tmp_path / "original"))


def test_configuration_and_tokenizer_come_along(source: Path, tmp_path: Path) -> None:
    kept = ["tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"]
    for name in [*kept, "tf_model.h5.index.json", "training_args.bin", "README.md"]:
        (source / name).write_text("{}")
    convert_checkpoint(source, tmp_path / "dst")
    names = {path.name for path in (tmp_path / "dst").iterdir()}
    assert names == {*kept, "config.json", "model.safetensors"} | (
        {"generation_config.json"} & {path.name for path in source.iterdir()}
    )
    assert (tmp_path / "dst/config.json").read_text() == (source / "config.json").read_text()


def test_one_source_file_is_mapped_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bin(UNTIED, tmp_path / "src", shards=4)

    def mapped() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[-1] for line in lines if line.endswith(".bin")}

    def watched(function: Callable[..., object], expected: int) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            seen.append(len(mapped()) == expected)
            return function(*args, **options)

        return call

    seen: list[bool] = []
    monkeypatch.setattr(torch, "load", watched(torch.load, 0))
    monkeypatch.setattr(safetensors.torch, "save_file", watched(safetensors.torch.save_file, 1))
    convert_checkpoint(tmp_path / "src", tmp_path / "dst")
    assert seen == [True] * 8


def test_views_and_shared_memory_become_tensors_of_their_own(source: Path, tmp_path: Path) -> None:
    big = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "transposed": big.t(),
        "corner": big[1:3, 2:4],
        "twin": big,
        "part": torch.arange(100.0)[10:20],
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "also empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
    }
    torch.save(tensors, source / WEIGHTS)
    convert_checkpoint(source, tmp_path / "dst")
    assert_same(tmp_path / "dst", tensors)
    assert (tmp_path / "dst/model.safetensors").stat().st_size < 2048


def test_an_untied_head_in_the_embeddings_memory_is_kept(source: Path, tmp_path: Path) -> None:
    tensors = state(UNTIED)
    tensors[HEAD] = tensors[EMBEDDING]
    torch.save(tensors, source / WEIGHTS)
    assert convert_checkpoint(source, tmp_path / "dst").tied == ()
    assert_same(tmp_path / "dst", tensors)


def test_old_files_are_read(tmp_path: Path) -> None:
    folder = save_bin(UNTIED, tmp_path / "src", _use_new_zipfile_serialization=False)
    convert_checkpoint(folder, tmp_path / "dst")
    assert_same(tmp_path / "dst", state(UNTIED))


def test_entries_that_are_no_tensors_are_named(source: Path, tmp_path: Path) -> None:
    torch.save(state(UNTIED) | {"epoch": 3, "\x1b[31m": "red", 7: 8}, source / WEIGHTS)
    result = convert_checkpoint(source, tmp_path / "dst")
    assert_same(tmp_path / "dst", state(UNTIED))
    assert result.summary().endswith(r"not tensors: 'epoch', '\x1b[31m', 7")


class Exploit:
    """Unpickled without care, it makes the file that it was given."""

    def __init__(self, path: Path) -> None:
        self.command = f"touch {path}"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_code_in_a_pickle_is_refused_and_not_run(
    form: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "src" / "it-ran"
    payload = state(UNTIED) | {"extra": Exploit(trace)}
    if form == "pickle":
        (source / WEIGHTS).write_bytes(pickle.dumps(payload["extra"], protocol=2))
    else:
        torch.save(payload, source / WEIGHTS, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(SystemExit) as exit:
        main(["convert", str(source), str(tmp_path / "dst")])
    out, err = capsys.readouterr()
    assert exit.value.code == 3
    assert not trace.exists() and only_source(tmp_path) and not out
    error, hint = err.splitlines()
    assert error.startswith("error: ") and "no code of it was run" in error and "system" in error
    assert hint.startswith("hint: ") and "trust" in hint
    if form != "pickle":  # the file is as dangerous as it should be
        torch.load(source / WEIGHTS, weights_only=False)
        assert trace.exists()


def truncate(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def spoil_index(source: Path, **weight_map: str) -> None:
    (source / WEIGHTS).rename(source / "pytorch_model-1.bin")
    names = dict.fromkeys(state(UNTIED), "pytorch_model-1.bin") | weight_map
    (source / BIN_INDEX).write_text(json.dumps({"weight_map": names}))


def spoil_tar(source: Path) -> None:
    with tarfile.open(source / WEIGHTS, "w") as tar:
        tar.add(source / "config.json", "storages")


def spoil_script(source: Path) -> None:
    module = torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2))
    torch.jit.save(module, str(source / WEIGHTS))


def spoil_twice(source: Path) -> None:
    (source / WEIGHTS).rename(source / "pytorch_model-1.bin")
    shutil.copy(source / "pytorch_model-1.bin", source / "pytorch_model-2.bin")


def saved(entries: Callable[[], object]) -> Callable[[Path], None]:
    return lambda source: torch.save(entries(), source / WEIGHTS)


CASES = {
    "no folder": (shutil.rmtree, UsageError, "no such folder", r"pytorch_model\*"),
    "no .bin": (lambda d: (d / WEIGHTS).unlink(), UsageError, "no .bin files", "folder"),
    "safetensors": (
        lambda d: (d / WEIGHTS).rename(d / "model.safetensors"), UsageError, "no .bin", "already",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), UsageError, "no such file", "model"),
    "truncated": (lambda d: truncate(d / WEIGHTS, 0.9), CannotRun, "damaged", "again"),
    "first bytes": (lambda d: truncate(d / WEIGHTS, 1e-5), CannotRun, "damaged", "again"),
    "empty file": (lambda d: truncate(d / WEIGHTS, 0), CannotRun, "damaged", "again"),
    "git lfs": (
        lambda d: (d / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"),
        CannotRun, "not weights saved by torch.save", "git lfs pull",
    ),
    "plain pickle": (
        lambda d: (d / WEIGHTS).write_bytes(pickle.dumps({"a": Exploit(d / "it-ran")})),
        CannotRun, "not weights saved by torch.save", "plain pickle",
    ),
    "tar": (spoil_tar, CannotRun, "tar file", "state_dict"),
    "TorchScript": (spoil_script, CannotRun, "TorchScript", "state_dict"),
    "a list": (saved(lambda: [torch.ones(1)]), CannotRun, "named tensors", "state_dict"),
    "nested": (
        saved(lambda: {"model": {"a": torch.ones(1)}}), CannotRun, "named tensors", "state_dict",
    ),
    "sparse": (
        saved(lambda: {"a": torch.eye(3).to_sparse()}), CannotRun, "'a' is not a plain", "sparse",
    ),
    "meta": (
        saved(lambda: {"a": torch.ones(3, device="meta")}), CannotRun, "not a plain", "sparse",
    ),
    "expanded": (
        saved(lambda: {"a": torch.ones(1).expand(1 << 40)}), CannotRun, "'a' takes 4.00 TiB",
        "contiguous",
    ),
    "reserved name": (
        saved(lambda: {"__metadata__": torch.ones(3)}), CannotRun, "reserved", "another name",
    ),
    "missing shard": (
        lambda d: spoil_index(d, x="pytorch_model-2.bin"), CannotRun,
        f"pytorch_model-2.bin: no such file, but {BIN_INDEX}", "missing shard",
    ),
    "index leaves the folder": (
        lambda d: spoil_index(d, x="../pytorch_model-2.bin"), UsageError, "not a file beside", "",
    ),
    "missing tensor": (
        lambda d: spoil_index(d, x="pytorch_model-1.bin"), CannotRun, "'x' is in none",
        "different checkpoints",
    ),
    "index is no JSON": (
        lambda d: (spoil_index(d), truncate(d / BIN_INDEX, 0.5)), UsageError, "read", "copy",
    ),
    "index without a map": (
        lambda d: (spoil_index(d), (d / BIN_INDEX).write_text("{}")), UsageError, "no weight_map",
        "again",
    ),
    "twice the same": (spoil_twice, CannotRun, "in another file, too", "one checkpoint"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_a_bad_source_is_refused_in_one_line(case: str, source: Path, tmp_path: Path) -> None:
    spoil, kind, message, hint = CASES[case]
    spoil(source)
    with pytest.raises(DakrunError, match=message) as caught:
        convert_checkpoint(source, tmp_path / "dst")
    assert type(caught.value) is kind
    assert hint.replace("\\", "") in caught.value.hint
    assert "\n" not in str(caught.value) + caught.value.hint
    assert only_source(tmp_path) or case == "no folder"
    assert not (source / "it-ran").exists()


def test_a_zip_that_inflates_is_refused_before_it_does(source: Path, tmp_path: Path) -> None:
    size = 600 << 20
    with (
        zipfile.ZipFile(source / WEIGHTS, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as entries,
        entries.open("archive/data.pkl", "w") as pickled,
    ):
        pickled.write(b"\x80\x02X" + size.to_bytes(4, "little"))
        for _ in range(size >> 20):
            pickled.write(bytes(1 << 20))
        pickled.write(b".")
    assert (source / WEIGHTS).stat().st_size < 8 << 20
    code = (
        "import pathlib, re, sys; import dakrun.weights; from dakrun.cli import main\n"
        "kib = lambda key: int(re.search(key + r':\\s+(\\d+)', "
        "pathlib.Path('/proc/self/status').read_text())[1])\n"
        "before = kib('VmRSS')\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(kib('VmHWM') - before)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "convert", str(source), str(tmp_path / "dst")],
        capture_output=True, text=True,
    )  # fmt: skip
    error, hint = run.stderr.splitlines()
    assert run.returncode == 3 and only_source(tmp_path)
    assert "unpack to 600.00 MiB, more than the 2.00 MiB" in error and "source that" in hint
    assert int(run.stdout) < 256 << 10


@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_weights_and_configurations_are_files(kind: str, tmp_path: Path) -> None:
    def put(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        if kind == "FIFO":
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to("/dev/zero")
        return folder

    with pytest.raises(CannotRun, match=f"a {kind}, not a file"):
        Checkpoint(put("model.safetensors"))
    with pytest.raises(UsageError, match=f"a {kind}, not a file"):
        read_json_object(put("config.json") / "config.json")
    folder = put("pytorch_model.bin")
    with pytest.raises(CannotRun, match=f"a {kind}, not a file"):
        read_tensors(folder / "pytorch_model.bin")


def test_the_target_has_to_be_new_or_empty(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    convert_checkpoint(source, tmp_path / "empty")
    for target in (tmp_path / "empty", source, source / "config.json"):
        with pytest.raises(UsageError, match="not an empty folder") as caught:
            convert_checkpoint(source, target)
        assert "does not exist yet" in caught.value.hint
    with pytest.raises(UsageError, match="no such folder"):
        convert_checkpoint(source, tmp_path / "a/b")
    assert (tmp_path / "empty").stat().st_mode == source.stat().st_mode
    modes = {path.stat().st_mode for path in (tmp_path / "empty").iterdir()}
    assert modes == {(source / WEIGHTS).stat().st_mode}


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_nothing_is_left_behind_midway(
    problem: BaseException, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = safetensors.torch.save_file, []

    def failing(*args: object, **options: object) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise problem
        real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(safetensors.torch, "save_file", failing)
    with pytest.raises((KeyboardInterrupt, CannotRun)) as caught:
        convert_checkpoint(source, tmp_path / "dst", shard_bytes=1 << 20)
    assert len(calls) == 3 and only_source(tmp_path)
    if isinstance(caught.value, CannotRun):
        assert "No space left" in str(caught.value) and "disk space" in caught.value.hint


def test_a_full_disk_is_noticed_while_writing(tmp_path: Path, source: Path) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # Python ignores its signal
    try:
        with pytest.raises(CannotRun, match="cannot be written as safetensors") as caught:
            convert_checkpoint(source, tmp_path / "dst")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "free disk space" in caught.value.hint and only_source(tmp_path)


def test_a_disk_that_is_too_small_is_noticed_before(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))(10 << 20, 9 << 20, 1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CannotRun, match=r"1\.00 MiB are free"):
        convert_checkpoint(source, tmp_path / "dst")
    assert only_source(tmp_path)


def test_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["convert", str(source), str(tmp_path / "dst"), "--shard-size", "1MiB"])
    out, err = capsys.readouterr()
    assert not exit.value.code and out == ""
    assert err.count("\n") == 1 and "safetensors files" in err
    with pytest.raises(SystemExit) as exit:
        main(["convert", str(source), str(tmp_path / "dst")])
    assert exit.value.code == 2
    assert "not an empty folder" in capsys.readouterr().err


def test_summary_of_one_file(tmp_path: Path) -> None:
    done = convert_checkpoint(save_bin(TIED, tmp_path / "src"), tmp_path / "dst")
    summary = done.summary()
    assert summary.startswith(f"{tmp_path / 'dst'}: {done.tensors} tensors, ")
    assert "in 1 safetensors file;" in summary and f"{HEAD} left out" in summary
