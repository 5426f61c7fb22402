"""Stages of other packages: their records are accounted for, and errors in their declarations give one line."""

import pytest
from support.project import Project, add_distribution, raises

from sharmill.engine.executor import Listener
from sharmill.errors import ConfigError
from sharmill.pipeline import run_dataset

TALLY = '''
from dataclasses import dataclass

from sharmill.config import StageSection
from sharmill.engine.stage import Processor, Stage
from sharmill.engine.unit import add_up
from sharmill.engine.unit import Output, make_unit
from sharmill.manifest import Reject


@dataclass(frozen=True, kw_only=True)
class TallyConfig(StageSection):
    name: str = ""


class Tally(Stage):
    """Counts the records of a stage, and rejects one of them."""

    kind = "tally"
    section = TallyConfig
    after = ("write",)

    def identity(self, run):
        return {}

    def plan(self, run):
        yield make_unit(0, cost=1.0, size=3, params={})

    def open(self, run, device):
        return TallyProcessor()

    def finalize(self, run):
        return add_up(run.commits)


class TallyProcessor(Processor):
    def process(self, unit, staging, advance):
        staging.path("parts/000000.txt").write_text("2")
        return Output(files=["parts/000000.txt"], num_out=2, rejects=[Reject("tally", "too_short", "short", "{}")])
'''


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Return a function: replaced text of the package, and its section -> configuration of three recordings."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    project = Project(tmp_path).add_voices([0.4] * 3)

    def configure(old="", new="", section=None, module="tally_stage"):
        add_distribution(tmp_path / "site", "tally", "1.0", f"[sharmill.stages]\ntally = {module}:Tally\n")
        assert old in TALLY
        (tmp_path / f"site/{module}.py").write_text(TALLY.replace(old, new))
        return project.configure(match=None, encode={"codecs": []}, executor={"workers": 1}, tally=section or {})

    return configure


@pytest.mark.parametrize("after", ["prepare", "write"])
def test_a_stage_may_reject_records_that_others_keep(configure, after):
    config = configure('after = ("write",)', f"after = ({after!r},)", module=f"tally_after_{after}")
    result = run_dataset(config, Listener())
    assert result.num_errors == 0
    assert {stage.kind: totals.totals.num_out for stage, totals in result.stages}["tally"] == 2


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ('kind = "tally"', 'kind = "other"', ["has the kind 'other'"]),
        ('    kind = "tally"\n', "", ["has the kind None"]),
        ('after = ("write",)', 'after = ("wriet",)', ["wriet"]),
        ("    section =", '    resource = "gpux"\n    section =', ["'gpux'", "cpu or gpu"]),
        ("def identity(", "def identify(", ["does not define identity"]),
        ("    section = TallyConfig", "    section = int", ["must be a dataclass derived from StageSection"]),
        ("class Tally(Stage):", "class Tally:", ["must be a class derived from sharmill.engine.stage.Stage"]),
        ("from dataclasses", "import", ["cannot be imported: SyntaxError"]),
    ],
)
def test_a_bad_declaration_of_a_stage_gives_one_line(configure, old, new, names):
    with raises(ConfigError, "bad_plugin", "'tally'", *names):
        run_dataset(configure(old, new, module=f"tally_{len(old)}_{len(new)}"), Listener())


@pytest.mark.parametrize("name", ["../write", "a/b", "."])
def test_the_name_of_a_section_is_the_name_of_a_folder(configure, name):
    with raises(ConfigError, "bad_config_value", "tally", repr(name)):
        configure(section={"name": name}, module="tally_named")
