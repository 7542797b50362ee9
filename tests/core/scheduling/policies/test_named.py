import pytest

from ductile.core.scheduling.policies.model import Model
from ductile.core.scheduling.policies.named import policy
from ductile.core.scheduling.policies.names import NAMES
from ductile.core.scheduling.policies.rules import Rules


def test_policies_by_the_names_of_configurations():
    assert policy("rules", pre_process=True) == Rules(True, False)
    assert policy("model") == Model()
    assert all(policy(name) for name in NAMES)


def test_another_name_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="there is no policy modle: there are static, rules, model"):
        policy("modle")
