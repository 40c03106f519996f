"""ExchangeSettings from outside of the code: files, which one wins, and what is refused."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lightning_dist
from lightning_dist.frameworks.lightning.ddp import SyncDDPStrategy
from lightning_dist.settings import CODE, OPTIONS, SIDECAR, Resolved, read, resolve, write
from lightning_dist.settings.declared import settings_of
from lightning_dist.settings.exchange import ExchangeSettings, ShardedSettings
from lightning_dist.settings.local_updates import LocalUpdateSettings
from lightning_dist.settings.options import require_only
from lightning_dist.settings.resolve import accelerate_default

COUNTS = st.integers(0, 10**12)
SWITCH = st.one_of(st.booleans(), st.just("auto"))
SOME_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "codec": st.sampled_from(["none", "int8", "topk:ratio=0.01,values=int8"])
        | st.just({"intra": "bf16", "inter": "int4:hadamard=true"}),
        "error_feedback": SWITCH,
        "hierarchical": SWITCH | st.just("leader"),
        "ranks_per_node": st.none() | st.integers(1, 99),
        "rank_groups": st.none() | st.just([[0, 1], [2, 3]]),
        "min_compress_numel": st.none() | COUNTS,
        "start_step": COUNTS,
        "compile_kernels": SWITCH,
    },
)


@given(options=SOME_OPTIONS)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("x") / "new" / "lightning_dist.yaml"
    write(path, options)
    assert read(path) == options
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", "# only a comment\n", "{}"])
def test_nothing_is_set_by_a_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert read(path) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "- int8",
            "must be a YAML mapping, lines of key: value such as 'codec: int8'; it is a lis",
        ),
        ("int8", "must be a YAML mapping"),
        ("codec: [", "is not valid YAML"),
        ("codec: int8\n---\ncodec: int4", "is not valid YAML"),
        ("codec: int8\ncodec: int4", r"'codec' is given twice; keep one .*, line 2,"),
        ("start_step: 0\n\ncodec: int8: 4", r"mapping values are not allowed here .*, line 3,"),
        (
            "start_step: 0\ncodec: 'int8\n",
            r"while scanning a quoted scalar .*, line 2, .*, line 3,",
        ),
        ("start_step: 0\ncodec: \x01", r"special characters are not allowed"),
        ("codec: 2026-13-01", r"is not valid YAML \(key: value\): month must be in 1\.\.12"),
        ("!!python/object:os.system {}", "is not valid YAML"),
        ("codek: int8", r"did you mean 'codec'\?"),
        ("num_processes: 2", "Unknown setting 'num_processes' in "),
        ("1: 2", "Unknown setting '1'"),
        ("codec:", "got None in "),
        ("start_step: 1e3", "got '1e3'"),
        ("codec: {intra: bf16, inter: 4}", "codec must be"),
        ("rank_groups: [[0, 1], [a]]", "rank_groups must be"),
        (b"start_step: 0\ncodec: \xff", "is not valid YAML .*#x00ff: invalid start byte"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=r".") as error:
        read(path)
    assert re.search(said, str(error.value))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert "<unicode string>" not in str(error.value)


def test_what_is_wrong_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    write(path, {"codec": "int4"})
    with pytest.raises(ValueError, match="start_step must be"):
        write(path, {"start_step": -1})
    assert read(path) == {"codec": "int4"}


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Variables of somebody whose Accelerate folder is empty."""
    (tmp_path / "hf/accelerate").mkdir(parents=True)
    return {"HF_HOME": str(tmp_path / "hf")}


def sidecar(home: dict[str, str], text: str) -> Path:
    path = Path(home["HF_HOME"]) / "accelerate" / SIDECAR
    path.write_text(text)
    return path


def named(home: dict[str, str], text: str) -> Path:
    path = Path(home["HF_HOME"]) / "named.yaml"
    path.write_text(text)
    home["LIGHTNING_DIST_CONFIG"] = str(path)
    return path


def test_code_wins_over_variables_over_the_named_file_over_the_sidecar(
    home: dict[str, str],
) -> None:
    beside = sidecar(home, "codec: sign\nstart_step: 1\nmin_compress_numel: 1\nerror_feedback: no")
    file = named(home, "codec: int4\nstart_step: 2\nmin_compress_numel: 2")
    home |= {"LIGHTNING_DIST_CODEC": "topk:ratio=0.05", "LIGHTNING_DIST_START_STEP": "3"}
    found = resolve({"codec": "fp16"}, environ=home)
    assert found.options == {
        "codec": "fp16",
        "error_feedback": False,
        "min_compress_numel": 2,
        "start_step": 3,
    }
    assert found.origins == {
        "codec": CODE,
        "error_feedback": str(beside),
        "min_compress_numel": str(file),
        "start_step": "LIGHTNING_DIST_START_STEP",
    }
    assert found.files == (str(file), str(beside))
    assert resolve(environ=home).options["codec"] == "topk:ratio=0.05"


def test_a_file_that_is_named_and_the_sidecar_is_read_once(home: dict[str, str]) -> None:
    home["LIGHTNING_DIST_CONFIG"] = str(sidecar(home, "codec: int4"))
    assert resolve(environ=home).files == (home["LIGHTNING_DIST_CONFIG"],)


def test_null_takes_back_what_a_lower_source_says(home: dict[str, str]) -> None:
    sidecar(home, "ranks_per_node: 4")
    home["LIGHTNING_DIST_RANKS_PER_NODE"] = "null"
    home["LIGHTNING_DIST_HIERARCHICAL"] = "false"
    assert resolve(environ=home).options == {"hierarchical": False, "ranks_per_node": None}


def test_none_is_a_value_of_the_code_and_left_out_is_not(home: dict[str, str]) -> None:
    beside = sidecar(home, "ranks_per_node: 4\nmin_compress_numel: 4")
    found = resolve({"ranks_per_node": None}, environ=home)
    assert found.options == {"ranks_per_node": None, "min_compress_numel": 4}
    assert found.outside == {"min_compress_numel": str(beside)}


def test_an_empty_variable_is_not_set(home: dict[str, str]) -> None:
    sidecar(home, "codec: int4")
    for blank in ("", " "):
        found = resolve(environ={**home, "LIGHTNING_DIST_CODEC": blank})
        assert found.options == {"codec": "int4"}
    assert resolve(environ={**home, "LIGHTNING_DIST_CONFIG": " "}).options == {"codec": "int4"}


def test_a_path_is_relative_to_the_current_folder(
    home: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("codec: {intra: bf16, inter: int4}")
    monkeypatch.chdir(tmp_path)
    found = resolve(environ={**home, "LIGHTNING_DIST_CONFIG": "mine.yaml"})
    assert found.options == {"codec": {"intra": "bf16", "inter": "int4"}}
    assert found.files == (str(tmp_path / "mine.yaml"),)
    monkeypatch.setenv("HOME", str(tmp_path))
    again = resolve(environ={**home, "LIGHTNING_DIST_CONFIG": "~/mine.yaml"})
    assert again.files == found.files


def test_other_variables_of_ours_are_no_settings(home: dict[str, str]) -> None:
    others = {"HOSTNAME": "a", "RECOVERY_STORE": "a:1", "WORKER": "0.0.0", "BEAT_TIMEOUT": "5"}
    given = {f"LIGHTNING_DIST_{name}": value for name, value in others.items()}
    found = resolve(environ={**home, **given})
    assert (found.options, found.origins, found.files) == ({}, {}, ())


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"CODCE": "int8"}, ["'LIGHTNING_DIST_CODCE'", "did you mean 'LIGHTNING_DIST_CODEC'?"]),
        ({"QQQ": "1"}, ["'LIGHTNING_DIST_QQQ'", "valid names: LIGHTNING_DIST_CODEC"]),
        ({"CODEC": "8"}, ["codec must be a codec", "got 8 in LIGHTNING_DIST_CODEC"]),
        ({"CODEC": "' '"}, ["codec must be a codec", "got ' '"]),
        ({"START_STEP": "-1"}, ["0 or more", "got -1 in LIGHTNING_DIST_START_STEP"]),
        ({"START_STEP": "true"}, ["start_step must be", "got True"]),
        ({"START_STEP": "1.5"}, ["got 1.5"]),
        ({"ERROR_FEEDBACK": "maybe"}, ["true, false or auto", "'maybe'"]),
        ({"HIERARCHICAL": "1"}, ["auto, true, false or leader; got 1"]),
        ({"RANKS_PER_NODE": "0"}, ["1 or more ranks", "got 0"]),
        ({"RANK_GROUPS": "[0, 1]"}, ["rank_groups must be", "[0, 1]"]),
        ({"CODEC": "{inter: int4}"}, ["{intra: CODEC, inter: CODEC}"]),
        ({"CODEC": "{by_sise: {codec: int4}}"}, ["a policy such as {by_size: {codec: int4}}"]),
        ({"CODEC": "'int8"}, ["LIGHTNING_DIST_CODEC", "is not a valid YAML value; quote it"]),
        ({"CODEC": "2026-13-01"}, ["LIGHTNING_DIST_CODEC", "is not a valid YAML value; quote it"]),
        ({"CONFIG": "/no/such.yaml"}, ["LIGHTNING_DIST_CONFIG names /no/such.yaml", "unset it"]),
    ],
)
def test_wrong_variables(home: dict[str, str], variables: dict[str, str], said: list[str]) -> None:
    environ = home | {f"LIGHTNING_DIST_{name}": value for name, value in variables.items()}
    with pytest.raises(ValueError, match="LIGHTNING_DIST_") as error:
        resolve(environ=environ)
    assert [part for part in said if part not in str(error.value)] == []


def test_an_unknown_setting_of_the_code(home: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"'codek' in the code: did you mean 'codec'\?"):
        resolve({"codek": "int8"}, environ=home)


@pytest.mark.parametrize(
    ("variable", "value", "file", "both"),
    [
        ("HIERARCHICAL", "false", "ranks_per_node: 2", ["hierarchical=False", "ranks_per_node=2"]),
        ("RANKS_PER_NODE", "2", "hierarchical: false", ["hierarchical=False", "ranks_per_node=2"]),
        ("HIERARCHICAL", "false", "rank_groups: [[0, 1], [2]]", ["rank_groups=[[0, 1], [2]]"]),
        ("HIERARCHICAL", "no", "codec: {intra: bf16, inter: int4}", ["codec={'intra'"]),
        ("RANKS_PER_NODE", "2", "rank_groups: [[0, 1], [2]]", ["ranks_per_node=2", "rank_groups="]),
    ],
)
def test_two_sources_that_contradict_each_other_are_both_named(
    home: dict[str, str], variable: str, value: str, file: str, both: list[str]
) -> None:
    path = sidecar(home, file)
    with pytest.raises(ValueError, match="contradict each other") as error:
        resolve(environ={**home, f"LIGHTNING_DIST_{variable}": value})
    expected = [*both, f"(LIGHTNING_DIST_{variable})", f"({path})", "set both in one place"]
    assert [part for part in expected if part not in str(error.value)] == []


def test_one_source_may_say_both(home: dict[str, str]) -> None:
    sidecar(home, "hierarchical: false\nranks_per_node: 2")  # then traffic is counted by node
    assert resolve(environ=home).options == {"hierarchical": False, "ranks_per_node": 2}


def test_errors_of_the_settings_say_where_they_come_from(home: dict[str, str]) -> None:
    sidecar(home, "codec: int4")
    found = resolve({"start_step": 3}, environ={**home, "LIGHTNING_DIST_ERROR_FEEDBACK": "true"})
    with pytest.raises(ValueError, match="no good") as error, found.named_in_errors():
        raise ValueError("no good")
    assert "codec from /" in str(error.value)
    assert "error_feedback from LIGHTNING_DIST_ERROR_FEEDBACK" in str(error.value)
    assert "start_step" not in str(error.value)
    with (
        pytest.raises(ValueError, match=r"^no good$"),
        resolve(environ={"HF_HOME": "/none"}).named_in_errors(),
    ):
        raise ValueError("no good")


def test_settings_that_are_not_defaults_are_listed_with_their_source(
    home: dict[str, str],
) -> None:
    beside = sidecar(home, "codec: int4\nhierarchical: auto\nmin_compress_numel: 0")
    found = resolve({"start_step": 3}, environ={**home, "LIGHTNING_DIST_ERROR_FEEDBACK": "true"})
    assert found.outside_text() == (
        f"codec='int4' min_compress_numel=0 ({beside}), error_feedback=True "
        "(LIGHTNING_DIST_ERROR_FEEDBACK)"
    )
    assert resolve({"codec": "int8"}, environ={"HF_HOME": "/none"}).outside_text() == ""
    assert Resolved({}, {}, ()).value("codec") == "int8"


@pytest.mark.parametrize(
    ("function", "others", "family"),
    [
        (lightning_dist.compress_ddp, {"model", "grad_scaler", "groups"}, ExchangeSettings),
        (
            SyncDDPStrategy.__init__,
            {"self", "recovery", "mirror_residuals", "kwargs"},
            ExchangeSettings,
        ),
        (lightning_dist.compress_fsdp, {"model", "mesh", "grad_scaler"}, ShardedSettings),
        (lightning_dist.local_updates, {"model", "optimizer", "groups"}, LocalUpdateSettings),
    ],
    ids=["compress_ddp", "the strategies", "compress_fsdp", "local_updates"],
)
def test_every_signature_has_the_settings_of_its_family(
    function: Any, others: set[str], family: type
) -> None:
    parameters = inspect.signature(function).parameters
    shown = {name: p.default for name, p in parameters.items() if name not in others}
    assert shown == {name: each.default for name, each in settings_of(family).items()}
    text = " ".join((inspect.getdoc(function) or "").split())
    for name, each in settings_of(family).items():
        assert f"{name}: {each.meaning}" in text


def test_settings_may_be_given_as_one_object() -> None:
    settings = ExchangeSettings("int4", start_step=3)
    assert lightning_dist.CompressedDDPStrategy(settings)._settings is settings
    with pytest.raises(ValueError, match="settings as one object, and delay beside it"):
        lightning_dist.CompressedDDPStrategy(settings, delay=1)


def test_an_object_is_of_the_family_and_none_is_a_value() -> None:
    local, shards = LocalUpdateSettings(), ShardedSettings("int4")
    for wrong in (local, shards):
        with pytest.raises(ValueError, match=r"settings of ExchangeSettings, got \w+, of which"):
            lightning_dist.CompressedDDPStrategy(wrong)
    assert lightning_dist.LocalUpdateStrategy(local)._settings is local
    with pytest.raises(ValueError, match="Unknown setting 'settings'"):
        lightning_dist.CompressedDDPStrategy(settings=ExchangeSettings())
    for name in ("codec", "error_feedback", "start_step"):
        wrong_type: dict[str, Any] = {name: None}
        with pytest.raises(ValueError, match=f"^{name} must be"):
            ExchangeSettings(**wrong_type)


def test_a_level_inside_nodes_may_be_left_out() -> None:
    settings = ExchangeSettings({"intra": "none", "inter": "int8"})
    assert settings.flat() == ExchangeSettings(settings.inter, hierarchical=False)


def test_defaults_of_other_families_may_be_given_and_values_may_not() -> None:
    given = {"delay": 0, "state_update": "auto", "compile_kernels": False}
    strategy = lightning_dist.LocalUpdateStrategy("streaming", **given)
    assert strategy._settings.compile_kernels is False, "no kernels are compiled for local steps"
    assert strategy._settings.fragments == 4
    with pytest.raises(ValueError, match=r"state_update is a setting of DDP .* no step to undo"):
        lightning_dist.LocalUpdateStrategy(state_update="deferred")
    with pytest.raises(
        ValueError, match=r"method is a setting of local updates .* give method= to"
    ):
        lightning_dist.CompressedDDPStrategy(method="diloco")


def test_defaults_are_values_of_files() -> None:
    for name, option in OPTIONS.items():
        assert option.outside_rule.fits(option.outside_default), name


def test_options_that_the_training_has_not_are_refused() -> None:
    with pytest.raises(
        ValueError, match="setting of local updates and cannot take effect under DDP"
    ):
        require_only({"codec": "int4", "sync_every": 8}, ExchangeSettings)
    with pytest.raises(ValueError, match="parameters is a setting of FSDP2 and cannot take effect"):
        require_only({"parameters": "int8"}, ExchangeSettings)
    with pytest.raises(ValueError, match="got 3; ddp_steps are steps"):
        require_only({"start_step": 3}, LocalUpdateSettings)
    assert require_only({"codec": "int4", "delay": 0}, LocalUpdateSettings) == {"codec": "int4"}


@pytest.mark.parametrize(
    "variables",
    [{}, {"HF_HOME": "/a"}, {"XDG_CACHE_HOME": "/b"}, {"HF_HOME": "~/c", "XDG_CACHE_HOME": "/b"}],
    ids=str,
)
def test_the_folder_is_that_of_accelerate(
    variables: dict[str, str], quick_python: list[str]
) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("HF_HOME", "XDG_CACHE_HOME")}
    module = "accelerate.commands.config.config_args"  # which reads them when it is imported
    code = f"import sys; sys.modules.pop({module!r}, None)\n"
    code += f"from {module} import default_config_file as f; print(f)"
    environ: dict[str, Any] = {**kept, **variables}
    done = subprocess.run(
        [*quick_python, "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )
    assert str(accelerate_default(environ)) == done.stdout.strip(), done.stderr


def test_it_needs_the_standard_library_and_yaml_only() -> None:
    code = (
        "import sys, lightning_dist\n"
        "before = set(sys.modules)\n"
        "import lightning_dist.settings\n"
        "names = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(names - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert {"lightning_dist", "yaml"} <= set(done.stdout.split()), done.stderr
    allowed = {"lightning_dist", "yaml", "cython_runtime"}  # the last is of yaml's own C
    assert {name for name in done.stdout.split() if name[0] != "_"} <= allowed
